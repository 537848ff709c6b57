"""How much memory the host has free for this process, and who says so.

Owns every figure about host memory: ``MemAvailable``, the limits of all cgroups above the process, SLURM's, the free
memory of each NUMA node, the memlock limit, and the counts of processes killed for memory. Relies on `machine_files`
for files below a root directory that tests can set, and on the environment; imports nothing else of ours, nor torch.

How it works: each figure is read once, when asked for; nothing is cached, so a later call tells of a later time. File
cache counts as free everywhere, because the kernel gives it up for memory that is pinned; shared memory and what is
pinned already do not. NUMA nodes without CPUs are the memory of a device (Grace) or far memory (CXL), and count
nowhere.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_offload.cgroups import Group, read_groups
from titan_offload.machine_files import PROCESS_STATUS, MachineFiles

MEMINFO, NODES = "/proc/meminfo", "/sys/devices/system/node"
LIMITS, VMSTAT = "/proc/self/limits", "/proc/vmstat"

NO_LIMIT = 2**62
"""cgroup v1 writes the largest multiple of the page size below 2**63 where there is no limit."""

# By cgroup version.
LIMIT_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
USE_FILES = {1: ("memory.usage_in_bytes", "total_"), 2: ("memory.current", "")}
OOM_FILES = {1: "memory.oom_control", 2: "memory.events"}

SLURM_LIMITS = {
    "SLURM_MEM_PER_NODE": (),
    "SLURM_MEM_PER_CPU": ("SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE"),
    "SLURM_MEM_PER_GPU": ("SLURM_GPUS_ON_NODE",),
}
"""What SLURM gives, and which variables say how many times; at most one of the three is set."""


@dataclass(frozen=True)
class MemoryLimit:
    """One thing that bounds the host memory of this process.

    Attributes:
        kind: ``"host"``: the machine's memory. ``"numa"``: that of one of its NUMA nodes. ``"cgroup"``: a limit on a
            control group above the process, also one to some NUMA nodes. ``"slurm"``: what the job was given.
        group: identity of what is limited, the same on all processes of a host that share it.
        source: the file, or the environment variables, that it was read from.
        limit_bytes: the limit.
        free_bytes: what can still be taken: the limit less use that cannot be reclaimed. Where the use is not known,
            as of ``"slurm"``, the limit itself.
        own_bytes: use by this process that ``free_bytes`` still holds, to be subtracted for each process that shares
            the group.
    """

    kind: str
    group: str
    source: str
    limit_bytes: int
    free_bytes: int
    own_bytes: int = 0


@dataclass(frozen=True)
class HostMemory:
    """What bounds the host memory of this process.

    Attributes:
        limits: all of them; exactly one of kind ``"host"``, first (a limit of 0 bytes: unknown); NUMA nodes by number;
            cgroups from the process's own upwards.
        memlock_bytes: the memlock limit; None: unlimited or unknown. Reported only: drivers do not apply it to
            memory that they pin.
        oom_kills: by source, how many processes were killed for memory so far.
        problems: what could not be read, with the file and what was taken in its place.
    """

    limits: tuple[MemoryLimit, ...]
    memlock_bytes: int | None = None
    oom_kills: dict[str, int] | None = None
    problems: tuple[str, ...] = ()

    @property
    def free_bytes(self) -> int:
        """What this process could still take, were it alone: the least that is free under any limit whose use is
        known."""
        return min((limit.free_bytes for limit in self.limits if limit.kind in ("host", "cgroup")), default=0)


@dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of this process by kind, as the kernel counts it; 0 where it does not say.

    Attributes:
        rss_anon_bytes: heap, stacks and other memory of its own.
        rss_file_bytes: mapped files.
        rss_shmem_bytes: shared memory. What CUDA pins is in here, also on hosts where /dev/shm stays empty.
    """

    rss_anon_bytes: int
    rss_file_bytes: int
    rss_shmem_bytes: int


@dataclass(frozen=True)
class _Node:
    """One NUMA node; without CPUs it is the memory of a device, or far memory."""

    number: int
    has_cpus: bool
    total_bytes: int
    free_bytes: int


def read_host_memory(root: Path | str = "/", environ: Mapping[str, str] | None = None) -> HostMemory:
    """What bounds the host memory of this process now.

    Args:
        root: directory that stands for ``/``.
        environ: environment variables, for what SLURM gave. Default: those of this process.

    Returns:
        Always; what is unreadable or malformed is in `HostMemory.problems`.
    """
    files = MachineFiles(root)
    nodes, groups = _read_nodes(files), read_groups(files)
    limits = [
        _host_limit(files, nodes),
        *(_numa_limit(node) for node in nodes if node.has_cpus),
        _cpuset_limit(files, nodes),
        *_group_limits(files, groups),
        _slurm_limit(files, os.environ if environ is None else environ),
    ]
    kills = read_oom_kills_at(_oom_sources(groups), root)
    known = tuple(limit for limit in limits if limit is not None)
    return HostMemory(known, _read_memlock(files), kills, tuple(files.problems))


def read_oom_kills(root: Path | str = "/") -> dict[str, int]:
    """By source, how many processes were killed for memory so far: in each cgroup above this process, and in all.

    Sources are ``memory.events`` (cgroup v2: with the groups below it), ``memory.oom_control`` (v1: in the group alone)
    and ``/proc/vmstat`` (since the machine was started). Those that do not count kills are left out.
    """
    return read_oom_kills_at(_oom_sources(read_groups(MachineFiles(root))), root)


def read_oom_kills_at(sources: Iterable[str], root: Path | str = "/") -> dict[str, int]:
    """The counts of `read_oom_kills` again, at the same ``sources``; groups that are gone are left out."""
    files = MachineFiles(root)
    counts = {source: files.numbers(source).get("oom_kill") for source in sources}
    return {source: count for source, count in counts.items() if count is not None}


def read_process_memory(root: Path | str = "/") -> ProcessMemory:
    """The resident memory of this process now."""
    status = MachineFiles(root).numbers(PROCESS_STATUS)
    return ProcessMemory(status.get("RssAnon", 0), status.get("RssFile", 0), status.get("RssShmem", 0))


# The host and its NUMA nodes


def _read_nodes(files: MachineFiles) -> list[_Node]:
    """The NUMA nodes whose memory is known, by number."""
    found = [re.fullmatch(r"node([0-9]{1,6})", path.name) for path in files.path(NODES).glob("node*")]
    numbers = sorted(int(name[1]) for name in found if name)
    if not numbers:
        files.note(NODES, "no NUMA nodes", "the host as a whole")
    nodes = [_read_node(files, number) for number in numbers]
    return [node for node in nodes if node is not None]


def _read_node(files: MachineFiles, number: int) -> _Node | None:
    left_out = f"NUMA node {number} is left out"
    cpus = files.cpu_list(f"{NODES}/node{number}/cpulist", f"NUMA node {number} counts as one with CPUs")
    source = f"{NODES}/node{number}/meminfo"
    info = files.numbers(source, left_out)
    if not {"MemTotal", "MemFree"} <= set(info):
        if info or os.path.exists(files.path(source)):
            files.note(source, "no MemTotal and MemFree in kB", left_out)
        return None
    total = info["MemTotal"]
    return _Node(number, cpus is None or bool(cpus), total, min(total, _free_with_cache(info)))


def _free_with_cache(info: Mapping[str, int]) -> int:
    """Free memory and the file cache, which the kernel gives up for it; shmem is not in these lists."""
    return info["MemFree"] + info.get("Active(file)", 0) + info.get("Inactive(file)", 0)


def _numa_limit(node: _Node) -> MemoryLimit:
    source = f"{NODES}/node{node.number}/meminfo"
    return MemoryLimit("numa", f"numa:{node.number}", source, node.total_bytes, node.free_bytes)


def _host_limit(files: MachineFiles, nodes: Sequence[_Node]) -> MemoryLimit:
    """``MemAvailable``, less what is free on nodes without CPUs: pinned memory must not come from those."""
    info = files.numbers(MEMINFO)
    if "MemAvailable" not in info and "MemFree" not in info:
        return _host_limit_without_meminfo(files, nodes)
    free = info.get("MemAvailable", info.get("MemFree", 0))
    if "MemAvailable" not in info:
        files.note(MEMINFO, "no MemAvailable in kB", "MemFree")
    if "MemTotal" not in info:
        files.note(MEMINFO, "no MemTotal in kB", "what is free as the total")
    far = [node for node in nodes if not node.has_cpus and node.total_bytes]
    source = MEMINFO
    if far:
        source += f" less NUMA nodes without CPUs: {', '.join(str(node.number) for node in far)}"
    total = max(0, info.get("MemTotal", free) - sum(node.total_bytes for node in far))
    free = max(0, free - sum(node.free_bytes for node in far))
    return MemoryLimit("host", "host", source, total, min(free, total))


def _host_limit_without_meminfo(files: MachineFiles, nodes: Sequence[_Node]) -> MemoryLimit:
    """The sum of the NUMA nodes, else what the C library says of this machine, else nothing at all."""
    what = "no MemAvailable and no MemFree in kB" if files.read(MEMINFO) is not None else "cannot be read"
    with_cpus = [node for node in nodes if node.has_cpus]
    if with_cpus:
        files.note(MEMINFO, what, "the sum of the NUMA nodes")
        total, free = sum(node.total_bytes for node in with_cpus), sum(node.free_bytes for node in with_cpus)
        return MemoryLimit("host", "host", f"{NODES}/node*/meminfo", total, free)
    pages = _sysconf_pages() if files.is_real else None
    if pages is not None:
        files.note(MEMINFO, what, "the free pages of sysconf")
        return MemoryLimit("host", "host", "sysconf", *pages)
    files.note(MEMINFO, what, "0 bytes: set activation_offload.pinned_budget_gib to what the host can spare")
    return MemoryLimit("host", "host", "unknown", 0, 0)


def _sysconf_pages() -> tuple[int, int] | None:
    """Bytes of the machine's memory, and of it free."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    except (ValueError, OSError):
        return None
    return (total, free) if 0 <= free <= total else None


def _cpuset_limit(files: MachineFiles, nodes: Sequence[_Node]) -> MemoryLimit | None:
    """The nodes that this process may take memory of, where these are not all: beyond them it is killed."""
    allowed = files.cpu_list(PROCESS_STATUS, "memory of all NUMA nodes is allowed", key="Mems_allowed_list")
    mine = [node for node in nodes if node.has_cpus and node.number in (allowed or ())]
    if not mine or len(mine) == sum(node.has_cpus for node in nodes):
        return None
    group = "cpuset:" + ",".join(str(node.number) for node in mine)
    total, free = sum(node.total_bytes for node in mine), sum(node.free_bytes for node in mine)
    return MemoryLimit("cgroup", group, f"{PROCESS_STATUS} Mems_allowed_list", total, free)


# cgroups


def _group_limits(files: MachineFiles, groups: Sequence[Group]) -> list[MemoryLimit]:
    limits = [limit for group in groups if (limit := _group_limit(files, group)) is not None]
    hidden = _hidden_limit(files, groups, limits)
    return limits if hidden is None else [*limits, hidden]


def _hidden_limit(files: MachineFiles, groups: Sequence[Group], limits: Sequence[MemoryLimit]) -> MemoryLimit | None:
    """A limit on a group above the mount point, of which cgroup v1 shows the figure and no use.

    Taken to be used by what is seen of it, and shared by all that see the same figure.
    """
    legacy = [group for group in groups if group.version == 1]
    source = f"{legacy[0].directory}/memory.stat" if legacy else ""
    limit = files.numbers(source).get("hierarchical_memory_limit", NO_LIMIT) if legacy else NO_LIMIT
    if limit >= min([NO_LIMIT, *(known.limit_bytes for known in limits)]):
        return None
    return _limit_less_use(files, legacy[-1], f"cgroup:above:{limit}", f"{source} hierarchical_memory_limit", limit)


def _group_limit(files: MachineFiles, group: Group) -> MemoryLimit | None:
    bounds = [_read_bound(files, f"{group.directory}/{name}") for name in LIMIT_FILES[group.version]]
    known = [bound for bound in bounds if bound is not None]
    if not known:
        return None
    limit, source = min(known)
    return _limit_less_use(files, group, group.identity, source, limit)


def _limit_less_use(files: MachineFiles, group: Group, identity: str, source: str, limit: int) -> MemoryLimit:
    """The record of ``limit``, less what ``group`` uses, or else this process."""
    use = _read_use(files, group)
    own = files.numbers(PROCESS_STATUS).get("VmRSS", 0) if use is None else 0
    return MemoryLimit("cgroup", identity, source, limit, max(0, limit - (use or 0)), own)


def _read_bound(files: MachineFiles, source: str) -> tuple[int, str] | None:
    """The limit in ``source``; None: none. A group without the memory controller has no such file."""
    text = files.read(source)
    if text is None or text == "max":
        return None
    if not re.fullmatch(r"[0-9]{1,20}", text):
        files.note(source, f"{text[:40]!r} is not a number of bytes", "no limit by it")
        return None
    return (int(text), source) if int(text) < NO_LIMIT else None


def _read_use(files: MachineFiles, group: Group) -> int | None:
    """What is in use in ``group`` and below, less its file cache; None: unknown. Shmem is not in the lists of files."""
    use_file, prefix = USE_FILES[group.version]
    use = files.number(f"{group.directory}/{use_file}", "the use of this process alone")
    stat_file = f"{group.directory}/memory.stat"
    stat = files.numbers(stat_file, "none of the use can be reclaimed")
    cache = [stat.get(f"{prefix}{name}_file") for name in ("inactive", "active")]
    if stat and None in cache:
        files.note(stat_file, f"no {prefix}inactive_file and {prefix}active_file", "none of the use can be reclaimed")
    return None if use is None else max(0, use - sum(num for num in cache if num is not None))


def _oom_sources(groups: Sequence[Group]) -> list[str]:
    return [*(f"{group.directory}/{OOM_FILES[group.version]}" for group in groups), VMSTAT]


# SLURM and memlock


def _slurm_limit(files: MachineFiles, environ: Mapping[str, str]) -> MemoryLimit | None:
    """What ``--mem``, ``--mem-per-cpu`` or ``--mem-per-gpu`` gives this job on this node; None: no limit."""
    for name, counts in SLURM_LIMITS.items():
        if name not in environ:
            continue
        size = _parse_slurm_size(environ[name])
        if size is None:
            files.note(name, f"{environ[name]!r} is not a size such as 65536 (MiB) or 64G", "no limit by SLURM")
            return None
        if not size:  # 0: all of the node's memory
            return None
        count, sources = _slurm_count(files, environ, name, counts) if counts else (1, [name])
        if not count:
            return None
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "unknown"
        own = files.numbers(PROCESS_STATUS).get("VmRSS", 0)
        return MemoryLimit("slurm", f"slurm:{job}", " x ".join(sources), size * count, size * count, own)
    return None


def _parse_slurm_size(text: str) -> int | None:
    """Bytes of a size that is in MiB, or has another unit behind it."""
    size = re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", text.strip().upper())
    return int(size[1]) * 1024 ** (1 + "KMGT".index(size[2] or "M")) if size else None


def _slurm_count(
    files: MachineFiles, environ: Mapping[str, str], name: str, counts: Sequence[str]
) -> tuple[int, list[str]]:
    """Of the variables ``counts`` the first that is set says how many times the node has what ``name`` gives."""
    for source in counts:
        numbers = _parse_slurm_counts(environ.get(source, ""))
        if numbers:
            node = environ.get("SLURM_NODEID", "")
            index = int(node) if re.fullmatch(r"[0-9]{1,6}", node) else len(numbers)
            return numbers[index] if index < len(numbers) else min(numbers), [name, source]
    files.note(name, f"set, but how often is not in {' or '.join(counts)}", "no limit by SLURM")
    return 0, []


def _parse_slurm_counts(text: str) -> list[int]:
    """One number per node of a list such as ``"128(x2),64"``; empty where malformed."""
    numbers: list[int] = []
    for part in text.split(","):
        count = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if count is None:
            return []
        numbers += [int(count[1])] * int(count[2] or 1)
    return numbers


def _read_memlock(files: MachineFiles) -> int | None:
    text = files.read(LIMITS, "no memlock limit")
    if text is None:
        return None
    line = re.search(r"^Max locked memory +([0-9]{1,20}|unlimited) ", text, re.MULTILINE)
    if line is None:
        files.note(LIMITS, "no soft limit of Max locked memory", "no memlock limit")
    return int(line[1]) if line and line[1] != "unlimited" else None
