"""What is free of the host's memory, from trees of files written here; the expected bytes are worked out by hand."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from machine_trees import (
    GIB,
    MIB,
    write,
    write_cgroups,
    write_group_v1,
    write_group_v2,
    write_host,
    write_node,
)

import titan_offload.host_memory
from titan_offload.host_memory import (
    MemoryLimit,
    ProcessMemory,
    read_host_memory,
    read_oom_kills,
    read_oom_kills_at,
    read_process_memory,
)

SYS = "/sys/fs/cgroup"
V1 = f"{SYS}/memory"
TWO_NODES = {0: (128 * GIB, 96 * GIB, "0-63"), 1: (128 * GIB, 64 * GIB, "64-127")}


@pytest.fixture
def root(tmp_path):
    """A host of two NUMA nodes, 150 of 256 GiB available."""
    write_host(tmp_path, mem_available=150 * GIB, total=256 * GIB, numa=TWO_NODES)
    return tmp_path


def read(root: Path, **environ: str):
    return read_host_memory(root, environ)


def limits(root: Path, kind: str, **environ: str) -> list[tuple[str, int, int]]:
    """Group (of cgroups: source), limit and free bytes of each limit of one kind; nothing else may be wrong."""
    memory = read(root, **environ)
    assert memory.problems == ()
    return [
        (limit.source if kind == "cgroup" else limit.group, limit.limit_bytes, limit.free_bytes)
        for limit in memory.limits
        if limit.kind == kind
    ]


def inode(root: Path, directory: str) -> str:
    return f"cgroup:{os.stat(root / directory[1:]).st_ino}"


# The host and its NUMA nodes


def test_host_and_numa_nodes(root):
    """Guards: the records of /proc/meminfo and of each node, first and by number."""
    memory = read(root)
    nodes = "/sys/devices/system/node"
    assert memory.limits == (
        MemoryLimit("host", "host", "/proc/meminfo", 256 * GIB, 150 * GIB),
        MemoryLimit("numa", "numa:0", f"{nodes}/node0/meminfo", 128 * GIB, 96 * GIB),
        MemoryLimit("numa", "numa:1", f"{nodes}/node1/meminfo", 128 * GIB, 64 * GIB),
    )
    assert memory.problems == ()
    assert memory.oom_kills == {"/proc/vmstat": 0}


def test_ten_nodes_are_in_order_of_their_numbers(root):
    for number in range(2, 11):
        write_node(root, number, GIB, GIB, str(number))
    assert [group for group, *_ in limits(root, "numa")] == [f"numa:{number}" for number in range(11)]


def test_file_cache_of_a_node_is_free_and_shmem_is_not(root):
    """128 GiB: 40 free, 20 of files, 30 of shmem, 38 of processes."""
    write_node(root, 0, 128 * GIB, 60 * GIB, "0-63", file_cache=20 * GIB, shmem=30 * GIB)
    assert limits(root, "numa")[0] == ("numa:0", 128 * GIB, 60 * GIB)


def test_no_more_is_free_of_a_node_than_it_has(root):
    """Its counters are read one after the other, while files come and go."""
    write(root, "/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 4 kB\nNode 1 MemFree: 9 kB")
    assert limits(root, "numa")[1] == ("numa:1", 4096, 4096)


def test_memory_of_a_device_that_is_a_numa_node_does_not_count(tmp_path):
    """Grace: 480 GiB of the CPU, 96 of the GPU (90 free, 2 of these cache), and an empty node reserved for it."""
    numa = {0: (480 * GIB, 400 * GIB, "0-71"), 1: (96 * GIB, 90 * GIB, ""), 2: (0, 0, "")}
    write_host(tmp_path, mem_available=490 * GIB, total=576 * GIB, numa=numa, mems_allowed="0")
    write_node(tmp_path, 1, 96 * GIB, 90 * GIB, "", file_cache=2 * GIB)
    memory = read(tmp_path)
    assert memory.limits == (
        MemoryLimit("host", "host", "/proc/meminfo less NUMA nodes without CPUs: 1", 480 * GIB, 400 * GIB),
        MemoryLimit("numa", "numa:0", "/sys/devices/system/node/node0/meminfo", 480 * GIB, 400 * GIB),
    )
    assert memory.problems == ()


def test_process_that_may_use_one_node_only_has_its_memory(root):
    """Guards: `_cpuset_limit`. With all nodes, as in the other tests, there is no such limit."""
    write_host(root, mem_available=150 * GIB, total=256 * GIB, numa=TWO_NODES, mems_allowed="1")
    (limit,) = (limit for limit in read(root).limits if limit.kind == "cgroup")
    source = "/proc/self/status Mems_allowed_list"
    assert limit == MemoryLimit("cgroup", "cpuset:1", source, 128 * GIB, 64 * GIB)


# cgroup v2


def test_limit_on_a_grandparent_group(root):
    """Of 100 GiB, 30 are in use, of which 8 of files and 5 of shmem: 78 GiB are free. The process's group has none."""
    leaf = f"{SYS}/kubepods/pod7/ctr"
    write_cgroups(root, unified="/kubepods/pod7/ctr")
    write_group_v2(root, leaf, used=2 * GIB)
    write_group_v2(root, f"{SYS}/kubepods/pod7", used=20 * GIB)
    write_group_v2(root, f"{SYS}/kubepods", limit=100 * GIB, used=30 * GIB, file_cache=8 * GIB, shmem=5 * GIB)
    assert limits(root, "cgroup") == [(f"{SYS}/kubepods/memory.max", 100 * GIB, 78 * GIB)]
    assert read(root).limits[-1].group == inode(root, f"{SYS}/kubepods")


def test_every_ancestor_that_has_a_limit_is_one(root):
    """Guards: the order, from the process's group upwards, and min(memory.max, memory.high)."""
    write_cgroups(root, unified="/a/b")
    write_group_v2(root, f"{SYS}/a/b", limit=40 * GIB, high=32 * GIB, used=12 * GIB)
    write_group_v2(root, f"{SYS}/a", limit=64 * GIB, high=96 * GIB, used=70 * GIB, file_cache=4 * GIB)
    assert limits(root, "cgroup") == [
        (f"{SYS}/a/b/memory.high", 32 * GIB, 20 * GIB),
        (f"{SYS}/a/memory.max", 64 * GIB, 0),
    ]


def test_free_is_never_more_than_the_limit(root):
    """The kernel's counters lag: more file cache than use."""
    write_cgroups(root, unified="/a")
    write_group_v2(root, f"{SYS}/a", limit=10 * GIB, used=GIB, file_cache=0)
    write(root, f"{SYS}/a/memory.stat", f"inactive_file {2 * GIB}\nactive_file 0")
    assert limits(root, "cgroup") == [(f"{SYS}/a/memory.max", 10 * GIB, 10 * GIB)]


def test_group_without_the_memory_controller_is_passed_over(root):
    write_cgroups(root, unified="/a/b")
    (root / SYS[1:] / "a/b").mkdir(parents=True)
    write_group_v2(root, f"{SYS}/a", limit=GIB)
    assert limits(root, "cgroup") == [(f"{SYS}/a/memory.max", GIB, GIB)]


def test_container_with_a_cgroup_namespace(root):
    """Its group is ``/``, at the mount point, and not the root group: it has a limit."""
    write_group_v2(root, SYS, limit=50 * GIB, used=10 * GIB)
    assert limits(root, "cgroup") == [(f"{SYS}/memory.max", 50 * GIB, 40 * GIB)]


def test_container_without_a_cgroup_namespace_that_sees_its_own_group_only(root):
    """Guards: the mount's root is taken off the group's path."""
    write_cgroups(root, unified="/docker/abc/init", mounts={SYS: "/docker/abc"})
    write_group_v2(root, f"{SYS}/init", used=GIB)
    write_group_v2(root, SYS, limit=50 * GIB, used=10 * GIB)
    assert limits(root, "cgroup") == [(f"{SYS}/memory.max", 50 * GIB, 40 * GIB)]


def test_mount_from_above_the_namespace(root):
    """The host's hierarchy is mounted in a container with a namespace: both paths climb out of it."""
    write_cgroups(root, unified="/../other/job", mounts={SYS: "/../.."})
    assert "is not below a mount" in read(root).problems[0]
    write_cgroups(root, unified="/../other/job", mounts={SYS: "/.."})
    write_group_v2(root, f"{SYS}/other/job", limit=20 * GIB, used=GIB)
    write_group_v2(root, f"{SYS}/other", limit=30 * GIB, used=GIB)
    expected = [(f"{SYS}/other/job/memory.max", 20 * GIB, 19 * GIB), (f"{SYS}/other/memory.max", 30 * GIB, 29 * GIB)]
    assert limits(root, "cgroup") == expected


def test_of_several_mounts_the_one_that_shows_most_ancestors_counts(root):
    mounts = {SYS: "/pod/ctr", r"/host\040sys/cgroup": "/"}
    write_cgroups(root, unified="/pod/ctr", mounts=mounts)
    write_group_v2(root, "/host sys/cgroup/pod", limit=5 * GIB, used=GIB)
    write_group_v2(root, "/host sys/cgroup/pod/ctr")
    assert limits(root, "cgroup") == [("/host sys/cgroup/pod/memory.max", 5 * GIB, 4 * GIB)]


def test_two_containers_of_a_host_share_the_identity_of_their_common_group(root, tmp_path_factory):
    """One sees the whole hierarchy, the other, in a cgroup namespace, its pod at the mount point."""
    pod = f"{SYS}/kubepods/pod7"
    for name in ("a", "b"):
        write_group_v2(root, f"{pod}/{name}", limit=10 * GIB)
    write_group_v2(root, pod, limit=16 * GIB, used=6 * GIB)
    write_cgroups(root, unified="/kubepods/pod7/a")
    other = tmp_path_factory.mktemp("other")
    write_host(other, mem_available=150 * GIB, total=256 * GIB, numa=TWO_NODES)
    write_cgroups(other, unified="/b", mounts={})
    write(other, "/proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    (other / SYS[1:]).rmdir()
    (other / SYS[1:]).symlink_to(root / pod[1:])
    first, second = ([limit for limit in read(host).limits if limit.kind == "cgroup"] for host in (root, other))
    assert [limit.group for limit in first] == [inode(root, f"{pod}/a"), inode(root, pod)]
    assert [limit.group for limit in second] == [inode(root, f"{pod}/b"), inode(root, pod)]
    assert first[1].free_bytes == second[1].free_bytes == 10 * GIB


# cgroup v1


def test_cgroup_v1(root):
    """Limits on the process's group and its grandparent; in between 2**63 less a page of 64 KiB, which is none."""
    write_cgroups(root, memory="/slurm/uid_1/job_2")
    write_group_v1(root, f"{V1}/slurm/uid_1/job_2", limit=60 * GIB, used=20 * GIB, file_cache=4 * GIB, shmem=3 * GIB)
    write_group_v1(root, f"{V1}/slurm/uid_1", limit=2**63 - 65536, used=20 * GIB)
    write_group_v1(root, f"{V1}/slurm", limit=200 * GIB, used=50 * GIB)
    write_group_v1(root, V1, used=90 * GIB)
    assert limits(root, "cgroup") == [
        (f"{V1}/slurm/uid_1/job_2/memory.limit_in_bytes", 60 * GIB, 44 * GIB),
        (f"{V1}/slurm/memory.limit_in_bytes", 200 * GIB, 150 * GIB),
    ]
    assert read(root).limits[-1].group == inode(root, f"{V1}/slurm")


def test_hybrid_has_its_memory_limits_in_v1(root):
    """The v2 hierarchy is mounted beside it, without the memory controller."""
    write_cgroups(root, memory="/job", unified="/user.slice")
    write_group_v1(root, f"{V1}/job", limit=8 * GIB, used=GIB)
    write_group_v1(root, V1)
    (root / SYS[1:] / "unified/user.slice").mkdir(parents=True)
    assert limits(root, "cgroup") == [(f"{V1}/job/memory.limit_in_bytes", 8 * GIB, 7 * GIB)]


def test_limit_of_v1_on_a_group_outside_the_container(root):
    """Only its figure is seen, in memory.stat; where it is that of a group that is seen, it is that limit."""
    write_cgroups(root, memory="/docker/abc", mounts={V1: "/docker/abc"})
    write_group_v1(root, V1, used=3 * GIB, file_cache=GIB, hierarchical_limit=30 * GIB)
    (limit,) = (limit for limit in read(root).limits if limit.kind == "cgroup")
    source = f"{V1}/memory.stat hierarchical_memory_limit"
    assert limit == MemoryLimit("cgroup", f"cgroup:above:{30 * GIB}", source, 30 * GIB, 28 * GIB)
    write_group_v1(root, V1, limit=30 * GIB, hierarchical_limit=30 * GIB)
    assert limits(root, "cgroup") == [(f"{V1}/memory.limit_in_bytes", 30 * GIB, 30 * GIB)]


# SLURM


@pytest.mark.parametrize(
    ("environ", "expected_gib"),
    [
        ({"SLURM_MEM_PER_NODE": "409600"}, 400),
        ({"SLURM_MEM_PER_NODE": "400G"}, 400),
        ({"SLURM_MEM_PER_NODE": "2T"}, 2048),
        ({"SLURM_MEM_PER_NODE": str(64 * 1024**2) + "K"}, 64),
        ({"SLURM_MEM_PER_CPU": "4096", "SLURM_CPUS_ON_NODE": "16", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}, 64),
        ({"SLURM_MEM_PER_CPU": "4096", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}, 512),
        ({"SLURM_MEM_PER_CPU": "1G", "SLURM_JOB_CPUS_PER_NODE": "128(x2),96", "SLURM_NODEID": "2"}, 96),
        ({"SLURM_MEM_PER_CPU": "1G", "SLURM_JOB_CPUS_PER_NODE": "128,96,64(x3)", "SLURM_NODEID": "1"}, 96),
        ({"SLURM_MEM_PER_CPU": "1G", "SLURM_JOB_CPUS_PER_NODE": "128,96"}, 96),
        ({"SLURM_MEM_PER_GPU": "100G", "SLURM_GPUS_ON_NODE": "8"}, 800),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "0", "SLURM_CPUS_ON_NODE": "16"}, None),
        ({}, None),
    ],
)
def test_slurm_step(root, environ, expected_gib):
    """``--mem``, ``--mem-per-cpu``, ``--mem-per-gpu``; 0 is the whole node, which is no limit."""
    found = limits(root, "slurm", SLURM_JOB_ID="77", **environ)
    assert found == ([] if expected_gib is None else [("slurm:77", expected_gib * GIB, expected_gib * GIB)])


def test_slurm_names_its_variables_and_this_process_s_use(root):
    environ = {"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "8", "SLURM_JOB_ID": "5"}
    source = "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE"
    assert read(root, **environ).limits[-1] == MemoryLimit("slurm", "slurm:5", source, 8 * GIB, 8 * GIB, 512 * MIB)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"SLURM_MEM_PER_NODE": "lots"}, "SLURM_MEM_PER_NODE: 'lots' is not a size"),
        ({"SLURM_MEM_PER_CPU": "1G"}, "SLURM_MEM_PER_CPU: set, but how often is not in SLURM_CPUS_ON_NODE or"),
        ({"SLURM_MEM_PER_CPU": "1G", "SLURM_CPUS_ON_NODE": "8(y2)"}, "SLURM_MEM_PER_CPU: set, but how often"),
    ],
)
def test_malformed_slurm_variable_is_no_limit_and_is_said(root, environ, problem):
    memory = read(root, **environ)
    assert [limit.kind for limit in memory.limits] == ["host", "numa", "numa"]
    assert len(memory.problems) == 1
    assert memory.problems[0].startswith(problem)
    assert memory.problems[0].endswith("taken instead: no limit by SLURM")


# The process


@pytest.mark.parametrize(("text", "expected"), [("8388608", 8388608), ("0", 0), ("unlimited", None)])
def test_memlock(root, text, expected):
    """The soft limit; the hard one is "unlimited" in all of them."""
    write_host(root, mem_available=GIB, total=GIB, memlock=text)
    memory = read(root)
    assert (memory.memlock_bytes, memory.problems) == (expected, ())


def test_process_memory(root):
    """Guards: pinned memory is told from other kinds, see `ProcessMemory.rss_shmem_bytes`."""
    assert read_process_memory(root) == ProcessMemory(320 * MIB, 64 * MIB, 128 * MIB)
    write(root, "/proc/self/status", "Name:\tpython")
    assert read_process_memory(root) == ProcessMemory(0, 0, 0)


# Processes killed for memory


def test_oom_kills_of_all_groups_and_of_the_host(root):
    write_host(root, mem_available=GIB, total=GIB, oom_kills=9)
    write_cgroups(root, unified="/a/b")
    write_group_v2(root, f"{SYS}/a/b", oom_kills=2)
    write_group_v2(root, f"{SYS}/a", oom_kills=3)
    expected = {f"{SYS}/a/b/memory.events": 2, f"{SYS}/a/memory.events": 3, "/proc/vmstat": 9}
    assert read_oom_kills(root) == read(root).oom_kills == expected
    write_group_v2(root, f"{SYS}/a", oom_kills=4)
    shutil.rmtree(root / SYS[1:] / "a/b")
    write_cgroups(root, unified="/")
    assert read_oom_kills_at(expected, root) == {f"{SYS}/a/memory.events": 4, "/proc/vmstat": 9}


def test_oom_kills_of_v1(root):
    """Kernels before 4.13 do not count them: left out."""
    write_cgroups(root, memory="/job")
    write_group_v1(root, f"{V1}/job", oom_kills=1)
    write_group_v1(root, V1)
    write(root, f"{V1}/memory.oom_control", "oom_kill_disable 0\nunder_oom 0")
    assert read_oom_kills(root) == {f"{V1}/job/memory.oom_control": 1, "/proc/vmstat": 0}


# Missing and malformed files

MEMINFO, CGROUP, MOUNTINFO, STATUS = "/proc/meminfo", "/proc/self/cgroup", "/proc/self/mountinfo", "/proc/self/status"
NODE1 = "/sys/devices/system/node/node1"
JOB = f"{SYS}/job"
NUMA, ALL = ["numa:0", "numa:1"], ["host", "numa:0", "numa:1", "job"]


@pytest.fixture
def job(root):
    """The host with a limit of 10 GiB, of which 3 are in use and 1 of these is file cache."""
    write_cgroups(root, unified="/job")
    write_group_v2(root, JOB, limit=10 * GIB, high=12 * GIB, used=3 * GIB, file_cache=GIB)
    return root


@pytest.mark.parametrize(
    ("file", "text", "instead", "kinds", "place", "expected"),
    [
        (MEMINFO, "MemTotal: 8388608 kB\nMemFree: 4194304 kB", "MemFree", ALL, 0, (8 * GIB, 4 * GIB)),
        (MEMINFO, "MemAvailable: 4194304 kB", "what is free as the total", ALL, 0, (4 * GIB, 4 * GIB)),
        (MEMINFO, "MemAvailable: -5 kB\nMemFree: many", "the sum of the NUMA nodes", ALL, 0, (256 * GIB, 160 * GIB)),
        (MEMINFO, None, "the sum of the NUMA nodes", ALL, 0, (256 * GIB, 160 * GIB)),
        (f"{NODE1}/meminfo", None, "NUMA node 1 is left out", ["host", "numa:0", "job"], 0, (256 * GIB, 150 * GIB)),
        (f"{NODE1}/meminfo", "x", "NUMA node 1 is left out", ["host", "numa:0", "job"], 0, (256 * GIB, 150 * GIB)),
        (f"{NODE1}/cpulist", "3-1", "NUMA node 1 counts as one with CPUs", ALL, 0, (256 * GIB, 150 * GIB)),
        (f"{NODE1}/cpulist", None, "NUMA node 1 counts as one with CPUs", ALL, 0, (256 * GIB, 150 * GIB)),
        (STATUS, "Mems_allowed_list:\tx", "memory of all NUMA nodes is allowed", ALL, 0, (256 * GIB, 150 * GIB)),
        (STATUS, "Name:\tpython", "memory of all NUMA nodes is allowed", ALL, 0, (256 * GIB, 150 * GIB)),
        (CGROUP, None, "no cgroup limits", ALL[:3], 0, (256 * GIB, 150 * GIB)),
        (CGROUP, "garbage", "no cgroup limits", ALL[:3], 0, (256 * GIB, 150 * GIB)),
        (MOUNTINFO, None, "no cgroup limits", ALL[:3], 0, (256 * GIB, 150 * GIB)),
        (MOUNTINFO, "gar bage - \n - ", "no limit of it", ALL[:3], 0, (256 * GIB, 150 * GIB)),
        (f"{JOB}/memory.max", "1e9", "no limit by it", ALL, 3, (12 * GIB, 10 * GIB)),
        (f"{JOB}/memory.current", "x", "the use of this process alone", ALL, 3, (10 * GIB, 10 * GIB)),
        (f"{JOB}/memory.current", None, "the use of this process alone", ALL, 3, (10 * GIB, 10 * GIB)),
        (f"{JOB}/memory.stat", None, "none of the use can be reclaimed", ALL, 3, (10 * GIB, 7 * GIB)),
        (f"{JOB}/memory.stat", "file 7", "none of the use can be reclaimed", ALL, 3, (10 * GIB, 7 * GIB)),
        ("/proc/self/limits", None, "no memlock limit", ALL, 0, (256 * GIB, 150 * GIB)),
        ("/proc/self/limits", "Max locked", "no memlock limit", ALL, 0, (256 * GIB, 150 * GIB)),
    ],
)
def test_missing_or_malformed_file(job, file, text, instead, kinds, place, expected):
    """None: the file is not there. A problem says its name and what is taken instead, and that is what is taken."""
    if text is None:
        (job / file[1:]).unlink()
    else:
        write(job, file, text)
    memory = read(job)
    names = ["job" if limit.kind == "cgroup" else limit.group for limit in memory.limits]
    assert names == kinds
    assert (memory.limits[place].limit_bytes, memory.limits[place].free_bytes) == expected
    said = [problem for problem in memory.problems if problem.endswith(f"; taken instead: {instead}")]
    assert said
    assert said[0].startswith(CGROUP if instead == "no limit of it" else file)
    assert memory.memlock_bytes is None


def test_use_that_is_unknown_holds_at_least_this_process(job):
    write(job, f"{JOB}/memory.current", "x")
    assert read(job).limits[-1].own_bytes == 512 * MIB


def test_group_that_is_not_where_it_should_be(job):
    """Its nearest ancestor that is there is taken, and said."""
    write_cgroups(job, unified="/job/gone")
    memory = read(job)
    assert (memory.limits[-1].source, memory.limits[-1].free_bytes) == (f"{JOB}/memory.max", 8 * GIB)
    assert memory.problems == (f"{JOB}/gone: no such group; taken instead: the group at {JOB}",)


def test_group_with_a_null_character_in_its_name(job):
    write_cgroups(job, unified="/job/\0")
    assert read(job).limits[-1].source == f"{JOB}/memory.max"


def test_group_that_no_mount_shows(job):
    """The group at the mount point is taken, and said."""
    write_cgroups(job, unified="/other/ctr", mounts={JOB: "/docker/abc"})
    memory = read(job)
    assert (memory.limits[-1].source, memory.limits[-1].free_bytes) == (f"{JOB}/memory.max", 8 * GIB)
    assert len(memory.problems) == 1
    assert memory.problems[0].endswith(f"taken instead: the group at {JOB}")


def test_nothing_at_all(tmp_path):
    """One limit of kind "host" all the same, of unknown size."""
    memory = read(tmp_path)
    assert memory.limits == (MemoryLimit("host", "host", "unknown", 0, 0),)
    assert {problem.split(":")[0] for problem in memory.problems} >= {MEMINFO, CGROUP, "/proc/self/limits"}
    assert "activation_offload.pinned_budget_gib" in " ".join(memory.problems)


def test_without_proc_and_sys_the_c_library_is_asked(monkeypatch):
    monkeypatch.setattr(titan_offload.host_memory, "MEMINFO", "/proc/none")
    monkeypatch.setattr(titan_offload.host_memory, "NODES", "/sys/none")
    memory = read_host_memory()
    page = os.sysconf("SC_PAGE_SIZE")
    assert (memory.limits[0].source, memory.limits[0].limit_bytes) == ("sysconf", os.sysconf("SC_PHYS_PAGES") * page)
    assert memory.limits[0].free_bytes == pytest.approx(os.sysconf("SC_AVPHYS_PAGES") * page, rel=0.2)
    assert "/proc/none: cannot be read; taken instead: the free pages of sysconf" in memory.problems


FILES = (MEMINFO, CGROUP, MOUNTINFO, STATUS, "/proc/self/limits", "/proc/vmstat", f"{NODE1}/cpulist")
FILES += (f"{NODE1}/meminfo", *(f"{JOB}/memory.{name}" for name in ("max", "high", "current", "stat", "events")))
LINES = st.sampled_from(
    [
        *(b"0::/../x", b"0::/job\0", b"4:memory:/job", b"1 2 0:3 /.. /sys/fs/cgroup rw - cgroup2 c rw", b"9" * 30),
        *(b"MemFree: 9 kB", b"MemTotal: 4 kB", b"Node 1 MemFree: 9 kB", b"Node 1 MemTotal: 4 kB", b"active_file 99"),
        *(b"max", b"-1", b"18446744073709551615", b"Mems_allowed_list: 1"),
    ]
)


def test_no_content_of_any_file_raises(job):
    """And there is one limit of kind "host", no byte is negative, and no more is free than there is."""
    good = {file: (job / file[1:]).read_bytes() for file in FILES}

    @hypothesis.given(st.dictionaries(st.sampled_from(FILES), st.lists(LINES | st.binary(max_size=20)), max_size=4))
    @hypothesis.settings(max_examples=60, deadline=None, database=None)
    def check(texts):
        bad = {file: b"\n".join(lines) for file, lines in texts.items()}
        for file, content in bad.items():
            (job / file[1:]).write_bytes(content)
        memory = read(job)
        assert [limit.kind for limit in memory.limits].count("host") == 1
        assert memory.limits[0].kind == "host"
        assert all(0 <= limit.free_bytes <= limit.limit_bytes for limit in memory.limits)
        for file in bad:
            (job / file[1:]).write_bytes(good[file])

    check()


def test_folders_where_files_should_be(tmp_path):
    for file in (MEMINFO, CGROUP, MOUNTINFO, STATUS, "/proc/self/limits", f"{NODE1}/cpulist", f"{NODE1}/meminfo"):
        (tmp_path / file[1:]).mkdir(parents=True)
    memory = read(tmp_path)
    assert memory.limits == (MemoryLimit("host", "host", "unknown", 0, 0),)
    assert [problem for problem in memory.problems if "Is a directory" in problem]


# This machine


def test_this_machine():
    """Against figures that are read here, within 5 %: others allocate meanwhile."""
    memory = read_host_memory()
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available, total = (int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    host = memory.limits[0]
    assert host.kind == "host"
    if host.source == "/proc/meminfo":
        assert host.limit_bytes == total
        assert host.free_bytes == pytest.approx(available, abs=0.05 * total)
    for problem in memory.problems:
        assert re.fullmatch(r"[^:]+: .+; taken instead: .+", problem)
    resident = read_process_memory()
    assert sum(vars(resident).values()) == pytest.approx(
        int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024, rel=0.05
    )


def test_limit_and_oom_kill_of_a_real_cgroup(tmp_path):
    """A child in a group of its own, limited to 32 MiB: the limit is found, and that the child is killed by it."""
    group = Path(V1) / f"titan_offload_test_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no writable cgroup v1 memory hierarchy: {error}")
    code = "import sys; sys.stdin.readline(); memory = bytearray(b'1') * (256 << 20)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)
    try:
        (group / "memory.limit_in_bytes").write_text(str(32 * MIB))
        (group / "memory.swappiness").write_text("0")
        (group / "cgroup.procs").write_text(str(child.pid))
        (tmp_path / "proc").mkdir()
        (tmp_path / "sys").symlink_to("/sys")
        for name, target in {"self": str(child.pid), "meminfo": "meminfo", "vmstat": "vmstat"}.items():
            (tmp_path / "proc" / name).symlink_to(f"/proc/{target}")
        before = read(tmp_path)
        (limit,) = (limit for limit in before.limits if limit.source == f"{group}/memory.limit_in_bytes")
        assert limit.group == f"cgroup:{group.stat().st_ino}"
        assert limit.limit_bytes == 32 * MIB
        assert 24 * MIB < limit.free_bytes <= 32 * MIB
        child.communicate(b"\n")
        assert child.returncode == -signal.SIGKILL
        after = read_oom_kills_at(before.oom_kills, tmp_path)
        source = f"{group}/memory.oom_control"
        assert after[source] == before.oom_kills[source] + 1
        assert after["/proc/vmstat"] >= before.oom_kills["/proc/vmstat"] + 1
    finally:
        child.kill()
        child.wait()
        _remove(group)
    assert source not in read_oom_kills_at(before.oom_kills, tmp_path)


def _remove(group: Path) -> None:
    """A group can go once the kernel is done with its last process."""
    for _ in range(50):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.02)
    group.rmdir()
