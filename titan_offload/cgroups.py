"""Which control groups are above this process.

Owns the way from /proc/self/cgroup to directories: cgroup v1, v2 or both, with and without a cgroup namespace, with the
whole hierarchy mounted or only a container's part of it. Relies on `machine_files`; what is in a group's files is read
by `host_memory`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from titan_offload.machine_files import MachineFiles

CGROUP, MOUNTINFO = "/proc/self/cgroup", "/proc/self/mountinfo"


@dataclass(frozen=True)
class Group:
    """One cgroup.

    Attributes:
        directory: its path on the machine.
        version: of its hierarchy, 1 or 2.
        identity: made of the inode number of the directory, which is the same in all containers and cgroup namespaces
            of a host.
    """

    directory: str
    version: int
    identity: str


@dataclass(frozen=True)
class _Mount:
    """Where a cgroup hierarchy is mounted (``point``), and which of its groups is seen there (``root``)."""

    root: str
    point: str


def read_groups(files: MachineFiles) -> list[Group]:
    """All visible groups above this process that may limit its memory, from its own to the mount point."""
    text = files.read(CGROUP, "no cgroup limits")
    if text is None:
        return []
    lines = re.findall(r"^([0-9]+):([^:]*):(/.*)$", text, re.MULTILINE)
    legacy = [path for _, controllers, path in lines if "memory" in controllers.split(",")]
    unified = [path for number, controllers, path in lines if number == "0" and not controllers]
    if not legacy and not unified:
        files.note(CGROUP, "no line with the memory controller", "no cgroup limits")
    mounts = _read_mounts(files) if legacy or unified else {}
    groups = [group for path in legacy[:1] for group in _visible_groups(files, mounts[1], path, 1)]
    if unified and (mounts[2] or not legacy):  # beside v1, version 2 rarely has the memory controller
        groups += _visible_groups(files, mounts[2], unified[0], 2)
    return groups


def _read_mounts(files: MachineFiles) -> dict[int, list[_Mount]]:
    """By cgroup version, where the hierarchy that may have the memory controller is mounted."""
    mounts: dict[int, list[_Mount]] = {1: [], 2: []}
    for line in (files.read(MOUNTINFO, "no cgroup limits") or "").split("\n"):
        left, _, right = line.partition(" - ")
        fields, (kind, *options) = left.split(" "), right.split(" ")
        if len(fields) < 5:
            continue
        mount = _Mount(_unescape(fields[3]), _unescape(fields[4]))
        if kind == "cgroup2":
            mounts[2].append(mount)
        elif kind == "cgroup" and "memory" in ",".join(options[1:]).split(","):
            mounts[1].append(mount)
    return mounts


def _unescape(path: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)


def _visible_groups(files: MachineFiles, mounts: Sequence[_Mount], path: str, version: int) -> list[Group]:
    """The directories of the group at ``path`` and of its ancestors, below the mount that shows most of them."""
    chains = [_chain(mount, path) for mount in mounts]
    chain = max((chain for chain in chains if chain), key=len, default=None)
    if chain is None:
        # Moved out of its namespace, or the runtime mounted the container's group alone: that one is at the mount
        # point, and is the best guess.
        instead = f"the group at {mounts[0].point}" if mounts else "no limit of it"
        files.note(CGROUP, f"group {path} (cgroup v{version}) is not below a mount of {MOUNTINFO}", instead)
        chain = [mounts[0].point] if mounts else []
    groups = [Group(directory, version, _identity(files, directory)) for directory in chain]
    found = [group for group in groups if group.identity]
    if found != groups:
        files.note(chain[0], "no such group", f"the group at {found[0].directory}" if found else "no limit of it")
    return found


def _identity(files: MachineFiles, directory: str) -> str:
    """Empty: there is no such directory."""
    try:
        return f"cgroup:{files.path(directory).stat().st_ino}"
    except (OSError, ValueError):  # ValueError: a null character
        return ""


def _chain(mount: _Mount, path: str) -> list[str] | None:
    """Directories from the group at ``path`` up to the mount point; None: the mount does not show that group.

    Both paths are relative to the root of the process's cgroup namespace, and may start with ``/..`` above it.
    """
    inside, above = _parts(path), _parts(mount.root)
    below = inside[len(above) :]
    if inside[: len(above)] != above or ".." in below:
        return None
    return ["/".join([mount.point.rstrip("/"), *below[:depth]]) for depth in range(len(below), -1, -1)]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]
