"""Where a device hangs: which host, which switch and root port, which NUMA node, and over which link.

Owns every fact about the machine that is not a number of free bytes. Relies on `machine_files` for sysfs and /proc
below a root directory that tests can set, and on NVML where it is there; imports nothing else of ours, nor torch.

How it works: sysfs has a directory for each device inside that of the bridge above it, so that the path to a device is
the list of its bridges. Devices below the same root port share the link between it and the host.
"""

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from titan_offload.machine_files import PROCESS_STATUS, MachineFiles

HOSTNAME, BOOT_ID = "/proc/sys/kernel/hostname", "/proc/sys/kernel/random/boot_id"
DEVICES, NODES, ONLINE = "/sys/bus/pci/devices", "/sys/devices/system/node", "/sys/devices/system/cpu/online"

ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
"""PCIe generations by GT/s."""

NVIDIA, QEMU = "0x10de", "0x1b36"
NVML_NODE_WORDS = 16
"""Room for 1024 NUMA nodes, as many as Linux can have."""


@dataclass(frozen=True)
class Host:
    """The machine that this process runs on.

    Attributes:
        name: its hostname, for people.
        identity: equal in all processes of a machine, also from different containers; different on different machines.
        source: the file that the identity was read from.
    """

    name: str
    identity: str
    source: str


@dataclass(frozen=True)
class PciLink:
    """Generation and number of lanes of a PCIe link, now and at most; 0: unknown."""

    generation: int = 0
    width: int = 0
    max_generation: int = 0
    max_width: int = 0


@dataclass(frozen=True)
class Device:
    """Where a device hangs.

    Attributes:
        pci_address: such as ``"0000:1b:00.0"``; None: it has none, or it is unknown.
        bridges: PCI addresses of the bridges above it, from the root port down.
        root_port: the first of ``bridges``.
        switch: upstream port of the nearest PCIe switch above the device, if there is one.
        link: the device's own link.
        uplink: the slowest link between it and the host by what both of its ends can do, its own included; links of
            which that is not known are left out.
        numa_node: -1: unknown.
        cpu_affinity: how the CPUs that this process may use lie to that node: ``"local"``: all of them on it.
            ``"partly"``: some. ``"remote"``: none. ``"unknown"``.
        memory_affinity: whether the process may take memory of that node: ``"local"``, ``"remote"`` or ``"unknown"``.
            By its cpuset; a policy of numactl is not seen.
        sources: by attribute, the file that it was read from.
        problems: what could not be read, with the file and what was taken in its place.
    """

    pci_address: str | None = None
    bridges: tuple[str, ...] = ()
    root_port: str | None = None
    switch: str | None = None
    link: PciLink = PciLink()
    uplink: PciLink = PciLink()
    numa_node: int = -1
    cpu_affinity: str = "unknown"
    memory_affinity: str = "unknown"
    sources: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_host(root: Path | str = "/") -> Host:
    """The machine that this process runs on.

    Its identity is the boot id, which all containers of a running kernel share and no two machines have, not even
    clones of one disk image. Without one it is the hostname, which `Host.source` then says.
    """
    files = MachineFiles(root)
    name = files.read(HOSTNAME) or socket.gethostname()
    boot_id = files.read(BOOT_ID) or ""
    if re.fullmatch(r"\S{1,100}", boot_id):
        return Host(name, boot_id, BOOT_ID)
    what = f"{BOOT_ID} is malformed" if boot_id else f"{BOOT_ID} cannot be read"
    return Host(name, name, f"hostname, as {what}: containers of one machine may count as machines of their own")


def read_device(pci_address: str | None, root: Path | str = "/", nvml: Any = None) -> Device:
    """Where the device at ``pci_address`` hangs.

    A GPU that idles lowers the speed of its link: ``generation`` and ``width`` may be those of sleep, so
    `Device.uplink` is chosen by the maxima. Links of ports that QEMU emulates are left out: their figures mean nothing.

    Args:
        pci_address: such as ``"0000:1b:00.0"``; also with another number of digits in its domain, as NVML writes it, or
            without domain. None: the device has none.
        root: directory that stands for ``/``.
        nvml: the module ``pynvml``, asked for the device's link and NUMA node where sysfs does not know them. Default:
            the installed one if ``root`` is ``/``, else none.

    Returns:
        Always; what is unreadable or malformed is in `Device.problems`.
    """
    if pci_address is None:
        return Device()
    files = MachineFiles(root)
    address = _normalise(pci_address)
    if address is None:
        files.note(f"PCI address {pci_address!r}", 'not of the form "0000:1b:00.0"', "nothing is known of the device")
        return Device(problems=tuple(files.problems))
    sources: dict[str, str] = {}
    bridges = _read_bridges(files, address, sources)
    link, node = _read_own(files, address, nvml, sources)
    cpus, memory = _read_affinity(files, node, sources) if node >= 0 else ("unknown", "unknown")
    ends = {**{bridge: _read_link(files, f"{DEVICES}/{bridge}") for bridge in bridges}, address: link}
    return Device(
        pci_address=address,
        bridges=bridges,
        root_port=bridges[0] if bridges else None,
        switch=bridges[-2] if len(bridges) >= 3 else None,  # a switch is two bridges: upstream and downstream port
        link=link,
        uplink=_slowest(list(ends.values())),
        numa_node=node,
        cpu_affinity=cpus,
        memory_affinity=memory,
        sources=sources,
        problems=tuple(files.problems),
    )


def switch_groups(devices: Sequence[Device]) -> list[tuple[int, ...]]:
    """For each of a host's devices, the indices of those that share its link to the host, its own included.

    They are those below the same root port, behind however many switches. A device above which no bridge is known,
    as in many virtual machines, is alone as far as can be seen; so is one of unknown address.
    """
    ports = [device.root_port or device.pci_address or index for index, device in enumerate(devices)]
    return [tuple(other for other, port in enumerate(ports) if port == mine) for mine in ports]


# PCI


def _normalise(pci_address: str) -> str | None:
    """As sysfs writes it: lower case, and a domain of four digits or more."""
    parts = ADDRESS.fullmatch(pci_address.strip().lower())
    return f"{int(parts[1] or '0', 16):04x}:{parts[2]}" if parts else None


def _read_bridges(files: MachineFiles, address: str, sources: dict[str, str]) -> tuple[str, ...]:
    """The bridges between the host bridge (``pci0000:16``) and the device, from the directories that it lies in."""
    link = f"{DEVICES}/{address}"
    folders = Path(os.path.realpath(files.path(link))).parts
    if not os.path.exists(files.path(link)):
        files.note(link, "no such device", "no bridges above it")
        return ()
    hosts = [index for index, name in enumerate(folders) if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", name)]
    above = folders[hosts[-1] + 1 : -1] if hosts else ()
    if not hosts:
        files.note(link, "does not lead below a PCI host bridge", "no bridges above it")
    bridges = tuple(name for name in above if ADDRESS.fullmatch(name))
    if bridges:
        sources["bridges"] = sources["root_port"] = link
    return bridges


def _read_own(files: MachineFiles, address: str, nvml: Any, sources: dict[str, str]) -> tuple[PciLink, int]:
    """The device's own link and NUMA node, from sysfs, else from NVML."""
    folder = f"{DEVICES}/{address}"
    link, node = _read_link(files, folder), _read_numa_node(files, folder)
    sources |= {name: folder for name, known in (("link", link.max_generation), ("numa_node", node >= 0)) if known}
    if "link" in sources and "numa_node" in sources:
        return link, node
    nvml_link, nvml_node = _ask_nvml(files, address, nvml)
    if "link" not in sources and nvml_link.max_generation:
        link, sources["link"] = nvml_link, "NVML"
    if "numa_node" not in sources and nvml_node >= 0:
        node, sources["numa_node"] = nvml_node, "NVML"
    return link, node


def _read_link(files: MachineFiles, folder: str) -> PciLink:
    """The link of one device or port. A downstream port says what it could do, not what hangs on it."""
    if (files.read(f"{folder}/vendor") or "") == QEMU:
        return PciLink()
    speeds = [_read_speed(files, f"{folder}/{which}_link_speed") for which in ("current", "max")]
    widths = [_read_width(files, f"{folder}/{which}_link_width") for which in ("current", "max")]
    return PciLink(speeds[0], widths[0], speeds[1], widths[1])


def _read_speed(files: MachineFiles, file: str) -> int:
    text = files.read(file)
    if text is None or text.lower().startswith("unknown"):
        return 0
    speed = re.match(r"([0-9]{1,4}(?:\.[0-9])?) GT/s", text)
    generation = GENERATIONS.get(float(speed[1]), 0) if speed else 0
    if not generation:
        files.note(file, f"{text[:40]!r} is not the speed of a PCIe generation", "the link's speed is unknown")
    return generation


def _read_width(files: MachineFiles, file: str) -> int:
    text = files.read(file)
    if text is None or text in ("0", "255"):  # 255 is what the kernel writes for unknown
        return 0
    if re.fullmatch(r"[0-9]{1,2}", text) and int(text) <= 32:
        return int(text)
    files.note(file, f"{text[:40]!r} is not a number of lanes", "the link's width is unknown")
    return 0


def _slowest(ends: Sequence[PciLink]) -> PciLink:
    """Of the links between the host and a device, the slowest at most.

    ``ends``: what each port and, last, the device says. Ports come in pairs, the downstream end of a link and the
    upstream end of the same one; a link can do what both of its ends can. Each generation has twice the rate of the one
    before it.
    """
    pairs = [ends[index : index + 2] for index in range(0, len(ends), 2)]
    links = [PciLink(*(_least(values) for values in zip(*map(astuple, pair), strict=True))) for pair in pairs]
    known = [link for link in links if link.max_generation and link.max_width]
    return min(known, key=lambda link: 2**link.max_generation * link.max_width, default=PciLink())


def _least(values: Sequence[int]) -> int:
    return min((value for value in values if value), default=0)


# NUMA


def _read_numa_node(files: MachineFiles, folder: str) -> int:
    if not os.path.exists(files.path(folder)):
        return -1
    node = files.number(f"{folder}/numa_node", "NUMA node unknown")
    return _with_cpus(files, -1 if node is None else node)


def _with_cpus(files: MachineFiles, node: int) -> int:
    """``node``, or -1 where it has no CPUs: then it is a GPU's own memory (Grace), not host memory that is near."""
    cpulist = f"{NODES}/node{node}/cpulist"
    if node < 0 or files.cpu_list(cpulist, "the NUMA node counts as one with CPUs") != set():
        return max(node, -1)
    files.note(cpulist, "no CPUs", "NUMA node unknown")
    return -1


def _read_affinity(files: MachineFiles, node: int, sources: dict[str, str]) -> tuple[str, str]:
    """How the CPUs and the memory that this process may use lie to ``node``."""
    instead = "affinity unknown"
    local = files.cpu_list(f"{NODES}/node{node}/cpulist", instead)
    online = files.cpu_list(ONLINE, "all CPUs count as online")
    allowed = files.cpu_list(PROCESS_STATUS, instead, key="Cpus_allowed_list")
    nodes = files.cpu_list(PROCESS_STATUS, instead, key="Mems_allowed_list")
    if allowed and online:
        allowed &= online  # the list may name CPUs that the machine could have
    cpus = memory = "unknown"
    if local and allowed:
        cpus = "local" if allowed <= local else "partly" if allowed & local else "remote"
        sources["cpu_affinity"] = PROCESS_STATUS
    if nodes:
        memory = "local" if node in nodes else "remote"
        sources["memory_affinity"] = PROCESS_STATUS
    return cpus, memory


# NVML


def _ask_nvml(files: MachineFiles, address: str, nvml: Any) -> tuple[PciLink, int]:
    """The device's link and NUMA node as NVML knows them."""
    nvml = nvml or (_import_nvml() if files.is_real else None)
    if nvml is None or files.read(f"{DEVICES}/{address}/vendor") not in (None, NVIDIA):
        return PciLink(), -1
    try:
        nvml.nvmlInit()
    except Exception as error:  # of whatever class: no library, no driver, no permission
        files.note("NVML", str(error), "what sysfs says")
        return PciLink(), -1
    link, node = PciLink(), -1
    try:
        device = nvml.nvmlDeviceGetHandleByPciBusId(address)
        link = _nvml_link(nvml, device)
        node = _with_cpus(files, _nvml_numa_node(nvml, device))
    except Exception as error:
        files.note("NVML", str(error), "what sysfs says")
    finally:
        nvml.nvmlShutdown()
    return link, node


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _nvml_link(nvml: Any, device: Any) -> PciLink:
    return PciLink(
        nvml.nvmlDeviceGetCurrPcieLinkGeneration(device),
        nvml.nvmlDeviceGetCurrPcieLinkWidth(device),
        nvml.nvmlDeviceGetMaxPcieLinkGeneration(device),
        nvml.nvmlDeviceGetMaxPcieLinkWidth(device),
    )


def _nvml_numa_node(nvml: Any, device: Any) -> int:
    """The one node whose memory is nearest, -1 if there is not one.

    Not nvmlDeviceGetNumaNodeId: that is the node that a GPU's own memory makes up.
    """
    words = nvml.nvmlDeviceGetMemoryAffinity(device, NVML_NODE_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
    nodes = [64 * index + bit for index, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else -1
