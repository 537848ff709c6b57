"""Writes files of /proc, /sys and cgroup hierarchies below a folder, which then stands for ``/`` of a machine.

The figures are the caller's, in bytes and multiples of 1024 where the kernel writes kB. A host in one call, for a test
that runs several of them::

    write_host(root, mem_available=96 * GIB, total=128 * GIB, boot_id="host-a",
               numa={0: (64 * GIB, 48 * GIB, "0-15"), 1: (64 * GIB, 48 * GIB, "16-31")})
    write_device(root, "0000:1b:00.0", bridges=("0000:16:01.0",), numa_node=0)     # one device on a root port
    write_pairs(root)                                                              # or eight, in pairs behind switches

A host's process is in the root group of cgroup v2, without limits, until `write_cgroups` and the like overwrite that.
"""

from collections.abc import Mapping
from pathlib import Path

MIB, GIB = 1024**2, 1024**3

CPUS, MEMS = "0-127", "0-1"
"""What a process may use that is bound to nothing."""


def write(root: Path, file: str, text: str) -> None:
    """Writes one file, by its path on the machine."""
    path = root / file.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.endswith("\n") else text + "\n")


def write_host(
    root: Path,
    *,
    mem_available: int,
    total: int,
    numa: Mapping[int, tuple[int, int, str]] | None = None,
    boot_id: str = "11111111-2222-3333-4444-555555555555",
    hostname: str = "node1",
    cpus_allowed: str = CPUS,
    mems_allowed: str | None = None,
    memlock: str = "unlimited",
    vm_rss: int = 512 * MIB,
    oom_kills: int = 0,
) -> None:
    """A host without devices and cgroup limits.

    Args:
        root: stands for ``/``.
        mem_available, total: of /proc/meminfo.
        numa: by node, its memory, what is free of it, and its CPUs (``""``: none). Default: one with all of the host's.
        boot_id: the host's identity.
        hostname: its name.
        cpus_allowed, mems_allowed: CPUs and NUMA nodes that the process may use; default of the latter: all.
        memlock: soft limit as /proc/self/limits writes it.
        vm_rss: resident memory of the process: 5/8 anonymous, 1/8 files, 1/4 shared.
        oom_kills: processes of the host killed for memory so far.
    """
    nodes = {0: (total, mem_available, CPUS)} if numa is None else numa
    write(root, "/proc/meminfo", _meminfo(total, mem_available))
    for number, (node_total, free, cpus) in nodes.items():
        write_node(root, number, node_total, free, cpus)
    write(root, "/sys/devices/system/cpu/online", ",".join(cpus for *_, cpus in nodes.values() if cpus))
    write(root, "/proc/sys/kernel/random/boot_id", boot_id)
    write(root, "/proc/sys/kernel/hostname", hostname)
    write(root, "/proc/vmstat", f"nr_free_pages 1\noom_kill {oom_kills}\nhtlb_buddy_alloc_success 0")
    write(root, "/proc/self/limits", _limits(memlock))
    mems = ",".join(map(str, nodes)) if mems_allowed is None else mems_allowed
    write(root, "/proc/self/status", _status(cpus_allowed, mems, vm_rss))
    write_cgroups(root, unified="/")


def write_node(
    root: Path, number: int, total: int, free: int, cpus: str, *, file_cache: int = 0, shmem: int = 0
) -> None:
    """One NUMA node. Of ``free``, ``file_cache`` is in use for files; ``shmem`` is in use beside them."""
    folder = f"/sys/devices/system/node/node{number}"
    figures = {
        "MemTotal": total,
        "MemFree": free - file_cache,
        "MemUsed": total - free + file_cache,
        "Active(anon)": shmem,
        "Active(file)": file_cache // 4,
        "Inactive(file)": file_cache - file_cache // 4,
        "FilePages": file_cache + shmem,
        "Shmem": shmem,
    }
    lines = [f"Node {number} {key + ':':<16}{num // 1024:>9} kB" for key, num in figures.items()]
    write(root, f"{folder}/meminfo", "\n".join([*lines, f"Node {number} HugePages_Total:     0"]))
    write(root, f"{folder}/cpulist", cpus)


def _meminfo(total: int, available: int) -> str:
    figures = {"MemTotal": total, "MemFree": available * 3 // 4, "MemAvailable": available, "Shmem": 64 * MIB}
    lines = [f"{key + ':':<16}{num // 1024:>9} kB" for key, num in figures.items()]
    return "\n".join([*lines, "HugePages_Total:       0"])


def _limits(memlock: str) -> str:
    rows = [("Limit", "Soft Limit", "Hard Limit", "Units"), ("Max processes", "96365", "96365", "processes")]
    rows.append(("Max locked memory", memlock, "unlimited", "bytes"))
    return "\n".join(f"{name:<25} {soft:<20} {hard:<20} {unit:<10}" for name, soft, hard, unit in rows)


def _status(cpus: str, mems: str, vm_rss: int) -> str:
    kb = vm_rss // 1024
    parts = {"RssAnon": kb * 5 // 8, "RssFile": kb // 8, "RssShmem": kb // 4}
    memory = [f"{key}:\t{num:>8} kB" for key, num in {"VmHWM": kb * 2, "VmRSS": kb, **parts}.items()]
    return "\n".join(["Name:\tpython", *memory, f"Cpus_allowed_list:\t{cpus}", f"Mems_allowed_list:\t{mems}"])


# PCI


def write_device(
    root: Path,
    address: str,
    *,
    bridges: tuple[str, ...] = (),
    numa_node: int | str = -1,
    link: tuple[str, int, str, int] | None = ("16.0 GT/s PCIe", 16, "32.0 GT/s PCIe", 16),
    vendor: str = "0x10de",
    host_bridge: str = "",
) -> None:
    """A PCI device below ``bridges`` (from the root port down), which are made if need be.

    Args:
        root: stands for ``/``.
        address: as sysfs writes it.
        bridges: their addresses.
        numa_node: what the file says.
        link: speed and lanes now, and at most; None: no such files, as in many virtual machines.
        vendor: of the device.
        host_bridge: its folder below /sys/devices. Default: that of the first bus.
    """
    first = (bridges or (address,))[0]
    folder = f"/sys/devices/{host_bridge or 'pci' + first[:7]}"
    for bridge in bridges:
        folder += f"/{bridge}"
        if not (root / folder[1:]).exists():
            write_function(root, bridge, folder, link, "0x1000")
    write_function(root, address, f"{folder}/{address}", link, vendor)
    write(root, f"{folder}/{address}/numa_node", str(numa_node))


def write_function(root: Path, address: str, folder: str, link: tuple[str, int, str, int] | None, vendor: str) -> None:
    """The files of a device or bridge, and the symbolic link to them."""
    write(root, f"{folder}/vendor", vendor)
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    for name, value in zip(names, link or (), strict=False):
        write(root, f"{folder}/{name}", str(value))
    name = root / "sys/bus/pci/devices" / address
    name.parent.mkdir(parents=True, exist_ok=True)
    name.unlink(missing_ok=True)
    name.symlink_to(f"../../../{folder.removeprefix('/sys/')}")


def write_link(root: Path, address: str, *link: str | int) -> None:
    """Overwrites speed and lanes, now and at most, of a device or bridge that is there."""
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    for name, value in zip(names, link, strict=True):
        write(root, f"/sys/bus/pci/devices/{address}/{name}", str(value))


def write_pairs(root: Path) -> list[str]:
    """Eight devices in pairs behind four switches, one switch per root port, on NUMA nodes 0 and 1. Their addresses."""
    addresses = []
    for index, bus in enumerate((0x10, 0x30, 0x90, 0xB0)):
        above = (f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0")
        for slot in range(2):
            addresses.append(f"0000:{bus + 3 + slot:02x}:00.0")
            bridges = (*above, f"0000:{bus + 2:02x}:0{slot}.0")
            write_device(root, addresses[-1], bridges=bridges, numa_node=index // 2)
    return addresses


def write_nested(root: Path) -> list[str]:
    """Four devices behind two switches behind one more, below one root port. Their addresses."""
    top = ("0000:50:01.0", "0000:51:00.0")
    addresses = []
    for branch in range(2):
        bus = 0x53 + 8 * branch
        above = (*top, f"0000:52:0{branch}.0", f"0000:{bus:02x}:00.0")
        for slot in range(2):
            addresses.append(f"0000:{bus + 2 + slot:02x}:00.0")
            write_device(root, addresses[-1], bridges=(*above, f"0000:{bus + 1:02x}:0{slot}.0"), numa_node=0)
    return addresses


# cgroups


def write_cgroups(
    root: Path, *, memory: str | None = None, unified: str | None = None, mounts: Mapping[str, str] | None = None
) -> None:
    """/proc/self/cgroup and /proc/self/mountinfo of a process.

    Args:
        root: stands for ``/``.
        memory: path of its group in the v1 hierarchy of the memory controller; None: there is none.
        unified: the same in the v2 hierarchy.
        mounts: by mount point, the group that is seen there. Default: ``/`` at /sys/fs/cgroup, of v1 in ``memory`` in
            it and of v2, beside v1, in ``unified``. The folders are made.
    """
    lines = [f"12:cpu,cpuacct:{memory}", f"4:memory:{memory}", "1:name=systemd:/"] if memory else []
    write(root, "/proc/self/cgroup", "\n".join([*lines, *([f"0::{unified}"] if unified else [])]))
    default = {"/sys/fs/cgroup/memory": "/", "/sys/fs/cgroup/unified": "/"} if memory else {"/sys/fs/cgroup": "/"}
    rows = ["22 27 0:21 / /proc rw,relatime - proc proc rw", "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw"]
    if memory:
        rows.append("32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct")
    for point, group in (default if mounts is None else mounts).items():
        is_v1 = memory and "unified" not in point
        kind = "cgroup cgroup rw,memory" if is_v1 else "cgroup2 cgroup2 rw,nsdelegate"
        rows.append(f"35 31 0:32 {group} {point} rw,relatime shared:9 - {kind}")
        (root / point[1:].replace("\\040", " ")).mkdir(parents=True, exist_ok=True)
    write(root, "/proc/self/mountinfo", "\n".join(rows))


def write_group_v2(
    root: Path,
    directory: str,
    *,
    limit: int | None = None,
    high: int | None = None,
    used: int = 0,
    file_cache: int = 0,
    shmem: int = 0,
    oom_kills: int = 0,
) -> None:
    """A group of cgroup v2, of which ``used`` bytes hold ``file_cache`` and ``shmem``."""
    figures = {"anon": used - file_cache - shmem, "file": file_cache + shmem, "shmem": shmem, "inactive_anon": shmem}
    figures |= {"inactive_file": file_cache - file_cache // 4, "active_file": file_cache // 4}
    write(root, f"{directory}/memory.max", "max" if limit is None else str(limit))
    write(root, f"{directory}/memory.high", "max" if high is None else str(high))
    write(root, f"{directory}/memory.current", str(used))
    write(root, f"{directory}/memory.stat", "\n".join(f"{key} {num}" for key, num in figures.items()))
    write(root, f"{directory}/memory.events", f"low 0\nhigh 0\nmax 7\noom 9\noom_kill {oom_kills}\noom_group_kill 0")


def write_group_v1(
    root: Path,
    directory: str,
    *,
    limit: int | None = None,
    used: int = 0,
    file_cache: int = 0,
    shmem: int = 0,
    hierarchical_limit: int = 2**63 - 4096,
    oom_kills: int = 0,
) -> None:
    """A group of cgroup v1, of which ``used`` bytes, with the groups below, hold ``file_cache`` and ``shmem``."""
    figures = {"cache": 4096, "inactive_file": 4096, "active_file": 0, "hierarchical_memory_limit": hierarchical_limit}
    figures |= {"total_cache": file_cache + shmem, "total_shmem": shmem, "total_rss": used - file_cache - shmem}
    figures |= {"total_inactive_file": file_cache - file_cache // 4, "total_active_file": file_cache // 4}
    write(root, f"{directory}/memory.limit_in_bytes", str(2**63 - 4096 if limit is None else limit))
    write(root, f"{directory}/memory.usage_in_bytes", str(used))
    write(root, f"{directory}/memory.stat", "\n".join(f"{key} {num}" for key, num in figures.items()))
    write(root, f"{directory}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {oom_kills}")
