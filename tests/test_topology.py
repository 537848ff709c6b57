"""Where devices hang, from trees of sysfs and /proc written here; the expected facts are worked out by hand."""

import socket
import sys
from pathlib import Path

import pytest
from machine_trees import GIB, write, write_device, write_host, write_link, write_nested, write_pairs

from titan_offload.machine_files import parse_cpu_list
from titan_offload.topology import (
    Device,
    Host,
    PciLink,
    read_device,
    read_host,
    switch_groups,
)

TWO_NODES = {0: (GIB, GIB, "0-31,64-95"), 1: (GIB, GIB, "32-63,96-127")}
GEN4, GEN5 = ("16.0 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16)
BOOT_ID = "/proc/sys/kernel/random/boot_id"
DEVICES, STATUS = "/sys/bus/pci/devices", "/proc/self/status"
ADDRESS = "0000:1b:00.0"


@pytest.fixture
def root(tmp_path):
    """A host of two NUMA nodes with 64 CPUs each, whose process is bound to nothing."""
    write_host(tmp_path, mem_available=GIB, total=2 * GIB, numa=TWO_NODES)
    return tmp_path


def read_all(root: Path, addresses: list[str]) -> list[Device]:
    devices = [read_device(address, root) for address in addresses]
    assert [device.problems for device in devices] == [()] * len(devices)
    return devices


# The host


def test_host(root):
    assert read_host(root) == Host("node1", "11111111-2222-3333-4444-555555555555", BOOT_ID)


@pytest.mark.parametrize(("text", "why"), [(None, "cannot be read"), ("two words", "is malformed"), ("", "cannot")])
def test_host_without_boot_id_is_its_hostname_and_says_so(root, text, why):
    (root / BOOT_ID[1:]).unlink()
    if text is not None:
        write(root, BOOT_ID, text)
    host = read_host(root)
    assert (host.name, host.identity) == ("node1", "node1")
    assert host.source.startswith(f"hostname, as {BOOT_ID} {why}")


def test_host_without_files(tmp_path):
    host = read_host(tmp_path)
    assert host.name == host.identity == socket.gethostname()


def test_this_host():
    host = read_host()
    assert host.name == socket.gethostname()
    assert host.identity == Path(BOOT_ID).read_text().strip()


# Bridges and groups


def test_eight_devices_in_pairs_behind_four_switches(root):
    """The DGX kind: two devices share a switch, and so its link to the root port; nodes 0, 0, 0, 0, 1, 1, 1, 1."""
    devices = read_all(root, write_pairs(root))
    third = devices[2]
    assert third.pci_address == "0000:33:00.0"
    assert third.bridges == ("0000:30:01.0", "0000:31:00.0", "0000:32:00.0")
    assert (third.root_port, third.switch) == ("0000:30:01.0", "0000:31:00.0")
    assert [device.switch for device in devices] == [
        *["0000:11:00.0"] * 2,
        *["0000:31:00.0"] * 2,
        *["0000:91:00.0"] * 2,
        *["0000:b1:00.0"] * 2,
    ]
    assert switch_groups(devices) == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    assert [device.numa_node for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_one_device_per_root_port(root):
    addresses = ["0000:1b:00.0", "0000:43:00.0"]
    for address, port in zip(addresses, ("0000:1a:01.0", "0000:42:01.0"), strict=True):
        write_device(root, address, bridges=(port,), numa_node=0)
    devices = read_all(root, addresses)
    assert [(device.root_port, device.switch) for device in devices] == [
        ("0000:1a:01.0", None),
        ("0000:42:01.0", None),
    ]
    assert switch_groups(devices) == [(0,), (1,)]


def test_nested_switches_share_the_root_port(root):
    """Each pair has a nearest switch of its own, and all four share the link above the outer one."""
    devices = read_all(root, write_nested(root))
    assert [len(device.bridges) for device in devices] == [5] * 4
    assert [device.switch for device in devices] == ["0000:53:00.0"] * 2 + ["0000:5b:00.0"] * 2
    assert switch_groups(devices) == [(0, 1, 2, 3)] * 4


def test_virtual_machine_shows_neither_bridges_nor_links_nor_numa_nodes(root):
    addresses = ["0000:00:05.0", "0001:00:00.0"]
    for address in addresses:
        write_device(root, address, link=None, numa_node=-1)
    devices = read_all(root, addresses)
    assert devices[0] == Device(pci_address="0000:00:05.0")
    assert switch_groups(devices) == [(0,), (1,)]


def test_ranks_without_a_device_are_alone_and_ranks_on_one_device_are_not(root):
    write_device(root, "0000:00:05.0", link=None)
    devices = [read_device(address, root) for address in (None, "0000:00:05.0", None, "0000:00:05.0")]
    assert switch_groups(devices) == [(0,), (1, 3), (2,), (1, 3)]


def test_only_bridges_below_the_last_host_bridge_count(root):
    """A volume management device has a PCI domain of its own below it."""
    host_bridge = "pci0000:5d/0000:5d:00.5/pci10000:00"
    write_device(root, "10000:01:00.0", bridges=("10000:00:02.0",), numa_node=0, host_bridge=host_bridge)
    assert read_device("10000:01:00.0", root).bridges == ("10000:00:02.0",)


@pytest.mark.parametrize("text", ["0000:1b:00.0", "00000000:1B:00.0", "0000:1B:00.0", "1b:00.0", " 0000:1b:00.0\n"])
def test_address_in_any_form(root, text):
    """NVML writes eight digits and capitals."""
    write_device(root, ADDRESS, bridges=("0000:1a:01.0",), numa_node=1)
    device = read_device(text, root)
    assert (device.pci_address, device.root_port, device.problems) == (ADDRESS, "0000:1a:01.0", ())


# Links


def test_links_of_a_device_that_idles(root):
    """Now 2.5 GT/s to save power; the slowest link at most is the switch's, which is of generation 4."""
    bridges = ("0000:1a:01.0", "0000:18:00.0", "0000:19:00.0")
    write_device(root, ADDRESS, bridges=bridges, numa_node=0, link=(*GEN5, *GEN5))
    write_link(root, ADDRESS, "2.5 GT/s PCIe", 16, *GEN5)
    write_link(root, "0000:18:00.0", *GEN4, *GEN4)
    device = read_device(ADDRESS, root)
    assert device.link == PciLink(1, 16, 5, 16)
    assert device.uplink == PciLink(4, 16, 4, 16)
    assert device.sources["link"] == f"{DEVICES}/{ADDRESS}"


@pytest.mark.parametrize(
    ("port", "device", "expected"),
    [
        (("32.0 GT/s PCIe", 8), ("16.0 GT/s PCIe", 16), PciLink(4, 8, 4, 8)),  # a link does what both ends can
        (("8 GT/s", 16), ("5.0 GT/s PCIe", 4), PciLink(2, 4, 2, 4)),
        (("64.0 GT/s PCIe", 16), ("128.0 GT/s PCIe", 16), PciLink(6, 16, 6, 16)),
        (("Unknown", 0), ("16.0 GT/s PCIe", 16), PciLink(4, 16, 4, 16)),
        (("Unknown speed", 255), ("Unknown", 0), PciLink()),
    ],
)
def test_uplink_is_what_both_ends_can_do(root, port, device, expected):
    write_device(root, ADDRESS, bridges=("0000:1a:01.0",), numa_node=0, link=(*device, *device))
    write_link(root, "0000:1a:01.0", *port, *port)
    found = read_device(ADDRESS, root)
    assert (found.uplink, found.problems) == (expected, ())


def test_slowest_link_is_that_of_the_lowest_rate_not_of_the_lowest_product(root):
    """Generation 3 with 16 lanes (16 GB/s) is slower than generation 5 with 8 (32 GB/s), though 3 x 16 > 5 x 8."""
    bridges = ("0000:16:01.0", "0000:17:00.0", "0000:18:00.0")
    gen3x16, gen5x8 = ("8.0 GT/s PCIe", 16), ("32.0 GT/s PCIe", 8)
    write_device(root, ADDRESS, bridges=bridges, numa_node=0, link=(*gen5x8, *gen5x8))
    for bridge in bridges[:2]:
        write_link(root, bridge, *gen3x16, *gen3x16)
    assert read_device(ADDRESS, root).uplink == PciLink(3, 16, 3, 16)


def test_link_that_is_unknown_is_left_out(root):
    """Of the switch's link to the root port nothing is known, of the device's all."""
    bridges = ("0000:16:01.0", "0000:17:00.0", "0000:18:00.0")
    write_device(root, ADDRESS, bridges=bridges, numa_node=0, link=(*GEN4, *GEN4))
    for bridge in bridges[:2]:
        write_link(root, bridge, "Unknown", 0, "Unknown", 0)
    assert read_device(ADDRESS, root).uplink == PciLink(4, 16, 4, 16)


def test_links_of_emulated_ports_are_left_out(root):
    """QEMU's root port says 2.5 GT/s x1, which is no link at all."""
    write_device(root, ADDRESS, bridges=("0000:00:02.0",), numa_node=0, link=(*GEN5, *GEN5))
    write_link(root, "0000:00:02.0", "2.5 GT/s PCIe", 1, "2.5 GT/s PCIe", 1)
    assert read_device(ADDRESS, root).uplink == PciLink(1, 1, 1, 1)
    write(root, f"{DEVICES}/0000:00:02.0/vendor", "0x1b36")
    assert read_device(ADDRESS, root).uplink == PciLink(5, 16, 5, 16)


# NUMA


@pytest.mark.parametrize(
    ("node", "cpus_allowed", "mems_allowed", "cpus", "memory"),
    [
        (0, "0-31", "0-1", "local", "local"),
        (0, "64-95,3", "0", "local", "local"),
        (0, "0-127", "0-1", "partly", "local"),
        (1, "0-31", "0", "remote", "remote"),
        (1, "32-63,96-4095", "1", "local", "local"),  # names CPUs that the machine could have and has not
        (-1, "0-31", "0-1", "unknown", "unknown"),
    ],
)
def test_affinity(root, node, cpus_allowed, mems_allowed, cpus, memory):
    write_host(
        root,
        mem_available=GIB,
        total=2 * GIB,
        numa=TWO_NODES,
        cpus_allowed=cpus_allowed,
        mems_allowed=mems_allowed,
    )
    write_device(root, ADDRESS, numa_node=node)
    device = read_device(ADDRESS, root)
    assert (device.numa_node, device.cpu_affinity, device.memory_affinity) == (node, cpus, memory)
    assert device.problems == ()
    assert device.sources.get("cpu_affinity") == (STATUS if node >= 0 else None)


def test_node_that_is_the_device_s_own_memory_is_none(tmp_path):
    """Grace."""
    write_host(tmp_path, mem_available=GIB, total=2 * GIB, numa={0: (GIB, GIB, "0-71"), 1: (GIB, GIB, "")})
    write_device(tmp_path, ADDRESS, numa_node=1)
    device = read_device(ADDRESS, tmp_path)
    assert (device.numa_node, device.cpu_affinity, device.memory_affinity) == (-1, "unknown", "unknown")
    assert "numa_node" not in device.sources
    cpulist = "/sys/devices/system/node/node1/cpulist"
    assert device.problems == (f"{cpulist}: no CPUs; taken instead: NUMA node unknown",)


# NVML


class FakeNvml:
    """What is asked of the module ``pynvml``: a device with a generation 5 link, nearest to NUMA node 1."""

    NVML_AFFINITY_SCOPE_NODE = 0

    def __init__(self, *, words: tuple[int, ...] = (0b10,), fails: str = "") -> None:
        self.words, self.fails, self.calls = words, fails, []

    def __getattr__(self, name: str):
        answers = {
            "nvmlDeviceGetHandleByPciBusId": lambda address: f"handle of {address}",
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 1,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
            "nvmlDeviceGetMemoryAffinity": lambda handle, size, scope: [*self.words, *[0] * (size - len(self.words))],
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
        }

        def call(*args):
            self.calls.append((name, *args))
            if name == self.fails:
                raise RuntimeError("not supported")
            return answers[name](*args)

        return call


def test_nvml_fills_what_sysfs_does_not_know(root):
    write_device(root, ADDRESS, link=None, numa_node=-1)
    nvml = FakeNvml()
    device = read_device(ADDRESS, root, nvml)
    assert device.link == device.uplink == PciLink(1, 8, 5, 16)
    assert (device.numa_node, device.cpu_affinity) == (1, "partly")
    assert device.sources == {"link": "NVML", "numa_node": "NVML", "cpu_affinity": STATUS, "memory_affinity": STATUS}
    assert device.problems == ()
    assert nvml.calls[1] == ("nvmlDeviceGetHandleByPciBusId", ADDRESS)
    assert (nvml.calls[0], nvml.calls[-1]) == (("nvmlInit",), ("nvmlShutdown",))


@pytest.mark.parametrize(
    ("numa_node", "link", "expected_node", "expected_link"),
    [(0, (*GEN4, *GEN4), 0, 4), (0, None, 0, 5), (-1, (*GEN4, *GEN4), 1, 4)],
)
def test_sysfs_goes_before_nvml(root, numa_node, link, expected_node, expected_link):
    write_device(root, ADDRESS, link=link, numa_node=numa_node)
    nvml = FakeNvml()
    device = read_device(ADDRESS, root, nvml)
    assert (device.numa_node, device.link.max_generation) == (expected_node, expected_link)
    assert bool(nvml.calls) == ("NVML" in device.sources.values())


@pytest.mark.parametrize(("words", "node"), [((0b11,), -1), ((0,), -1), ((0, 1), -1), ((1,), 0)])
def test_nvml_node_is_taken_if_it_is_one_and_has_cpus(root, words, node):
    """Node 64 has none."""
    write_device(root, ADDRESS, link=None)
    write(root, "/sys/devices/system/node/node64/cpulist", "")
    assert read_device(ADDRESS, root, FakeNvml(words=words)).numa_node == node


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetMemoryAffinity"])
def test_nvml_that_fails_is_said(root, fails):
    write_device(root, ADDRESS, link=None)
    nvml = FakeNvml(fails=fails)
    device = read_device(ADDRESS, root, nvml)
    assert device.problems == ("NVML: not supported; taken instead: what sysfs says",)
    assert device.numa_node == -1
    assert device.link.max_generation == (5 if fails == "nvmlDeviceGetMemoryAffinity" else 0)
    assert (nvml.calls[-1] == ("nvmlShutdown",)) == (fails != "nvmlInit")


def test_nvml_is_asked_of_nvidia_s_devices_of_this_machine_only(root, monkeypatch):
    write_device(root, ADDRESS, link=None, vendor="0x1002")
    other = FakeNvml()
    assert read_device(ADDRESS, root, other) == Device(pci_address=ADDRESS)
    assert other.calls == []
    write_device(root, ADDRESS, link=None)
    monkeypatch.setitem(sys.modules, "pynvml", other)
    assert read_device(ADDRESS, root).link == PciLink()
    assert other.calls == []
    assert read_device("ffff:ff:1f.7").link == PciLink(1, 8, 5, 16)  # of the real root, where there is none such
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_device("ffff:ff:1f.7").link == PciLink()


# Missing and malformed files


def test_no_device():
    assert read_device(None) == Device()


@pytest.mark.parametrize("text", ["", "cuda:0", "0000:1b:00", "0000:1b:00.8", "1b:0.0", "../../x"])
def test_malformed_address(root, text):
    device = read_device(text, root)
    problem = f'PCI address {text!r}: not of the form "0000:1b:00.0"; taken instead: nothing is known of the device'
    assert device == Device(problems=(problem,))


def test_device_that_sysfs_does_not_have(root):
    device = read_device(ADDRESS, root)
    problem = f"{DEVICES}/{ADDRESS}: no such device; taken instead: no bridges above it"
    assert device == Device(pci_address=ADDRESS, problems=(problem,))


@pytest.mark.parametrize(
    ("file", "text", "instead", "change"),
    [
        (f"{DEVICES}/{ADDRESS}/numa_node", "x", "NUMA node unknown", {"numa_node": -1}),
        (f"{DEVICES}/{ADDRESS}/numa_node", None, "NUMA node unknown", {"numa_node": -1}),
        (f"{DEVICES}/{ADDRESS}/max_link_speed", "9 GT/s", "the link's speed is unknown", {"link": (4, 16, 0, 16)}),
        (f"{DEVICES}/{ADDRESS}/max_link_width", "many", "the link's width is unknown", {"link": (4, 16, 5, 0)}),
        (f"{DEVICES}/{ADDRESS}/current_link_width", "64", "the link's width is unknown", {"link": (4, 0, 5, 16)}),
        (STATUS, "Name:\tpython", "affinity unknown", {"cpu_affinity": "unknown", "memory_affinity": "unknown"}),
        (STATUS, None, "affinity unknown", {"cpu_affinity": "unknown", "memory_affinity": "unknown"}),
        (STATUS, "Cpus_allowed_list:\t0\nMems_allowed_list:\t?", "affinity unknown", {"memory_affinity": "unknown"}),
        ("/sys/devices/system/node/node0/cpulist", "x", "affinity unknown", {"cpu_affinity": "unknown"}),
        ("/sys/devices/system/cpu/online", None, "all CPUs count as online", {"cpu_affinity": "local"}),
    ],
)
def test_missing_or_malformed_file(root, file, text, instead, change):
    """None: the file is not there. A problem says its name and what is taken instead, and only that is taken."""
    write_host(root, mem_available=GIB, total=GIB, numa=TWO_NODES, cpus_allowed="0")
    write_device(root, ADDRESS, bridges=("0000:1a:01.0",), numa_node=0)
    if text is None:
        (root / file[1:]).unlink()
    else:
        write(root, file, text)
    device = read_device(ADDRESS, root)
    good = {"numa_node": 0, "link": (4, 16, 5, 16), "cpu_affinity": "local", "memory_affinity": "local"} | change
    if "numa_node" in change:
        good |= {"cpu_affinity": "unknown", "memory_affinity": "unknown"}
    assert {name: getattr(device, name) for name in good} == good | {"link": PciLink(*good["link"])}
    assert device.root_port == "0000:1a:01.0"
    said = [problem for problem in device.problems if problem.startswith(file)]
    assert said
    assert said[-1].endswith(f"; taken instead: {instead}")


# Lists of CPUs


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), (" \n", set()), ("1, 3-3\n", {1, 3})],
)
def test_parse_cpu_list(text, expected):
    assert parse_cpu_list(text) == expected


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "-1", "1,,2", "0-99999999999", "0-3:2"])
def test_malformed_cpu_list(text):
    with pytest.raises(ValueError, match="is not a list of numbers and ranges"):
        parse_cpu_list(text)
