"""What a run leaves on the disk, and what is read from it of a run that was killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from machine_trees import GIB, MIB, write_cgroups, write_group_v2, write_host

from titan_offload import budget, host_report
from titan_offload.budget import Claim, RankFacts
from titan_offload.cli import main
from titan_offload.config import OffloadConfig
from titan_offload.host_memory import read_host_memory
from titan_offload.run_folder import RunFolder, verdict, was_killed_for_memory
from titan_offload.topology import Device, read_host

JOB, V1 = "/sys/fs/cgroup/job", "/sys/fs/cgroup/memory"


@pytest.fixture
def root(tmp_path):
    """A machine whose job may take 10 GiB."""
    root = tmp_path / "machine"
    write_host(root, mem_available=100 * GIB, total=128 * GIB)
    write_cgroups(root, unified="/job")
    write_group_v2(root, JOB, limit=10 * GIB)
    return root


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "outputs" / "offload")


def make_record(root="/", num_ranks=2):
    host = read_host(root)
    ranks = [
        RankFacts(
            rank=rank,
            host=host.identity,
            hostname=host.name,
            device_name="cpu",
            device=Device(),
            memory=read_host_memory(root, {}),
            claims=(Claim("block inputs", 8 * MIB),),
            slot_bytes=MIB,
            num_slots=8,
            stage="",
            config={},
        )
        for rank in range(num_ranks)
    ]
    return host_report.budget_record(budget.share(ranks, 0.8), OffloadConfig())


def start(folder, root, **changes):
    record = make_record(root) | changes
    folder.write_budget(record)
    return folder.budget()


STATE = {"phase": "after step 3", "step": 3, "free_bytes": GIB, "pinned_bytes": 0, "peak_pinned_bytes": 0}


def test_finished_run(folder, root):
    record = start(folder, root)
    folder.write_summary({"started": record["started"], "step": 20, "finished": True})
    write_group_v2(root, JOB, limit=10 * GIB, oom_kills=1)  # of something else
    assert verdict(folder, record, root) == ["The run finished, after step 20."]


def test_run_that_was_killed_for_memory(folder, root):
    record = start(folder, root)
    folder.write_state(record, 0, STATE)
    assert not was_killed_for_memory(record, root)
    write_group_v2(root, JOB, limit=10 * GIB, oom_kills=2)
    assert was_killed_for_memory(record, root)
    assert verdict(folder, record, root) == [
        f"The run was killed for memory: {JOB}/memory.events counts 2 killed since it started.",
        "Last seen: rank 0 after step 3, with 1.000 GiB of host memory free; rank 1 before it pinned anything.",
    ]


def test_kills_before_the_run_do_not_count(folder, root):
    write_group_v2(root, JOB, limit=10 * GIB, oom_kills=5)
    record = start(folder, root)
    assert not was_killed_for_memory(record, root)
    write_group_v2(root, JOB, limit=10 * GIB, oom_kills=4)  # another group of that name
    assert not was_killed_for_memory(record, root)


def test_only_the_host_counts_a_kill(folder, root):
    """The job's group is gone with it; somewhere on the host a process was killed."""
    record = start(folder, root)
    write_host(root, mem_available=100 * GIB, total=128 * GIB, oom_kills=1)
    shutil.rmtree(root / JOB[1:])
    assert verdict(folder, record, root)[0] == (
        "The run was probably killed for memory: /proc/vmstat counts 1 killed since it started."
    )


def test_no_sign_of_a_kill(folder, root):
    record = start(folder, root)
    no_summary = "The run left no summary: it still runs, or it was killed. "
    seen = "The kernel counts no process killed for memory since it started"
    assert verdict(folder, record, root)[0] == f"{no_summary}{seen}."
    shutil.rmtree(root / JOB[1:])
    assert verdict(folder, record, root)[0] == f"{no_summary}{seen}, but {JOB}/memory.events is gone."


def test_another_host_cannot_tell(folder, root):
    record = start(folder, root)
    write_host(root, mem_available=GIB, total=GIB, boot_id="another", hostname="node2", oom_kills=7)
    assert not was_killed_for_memory(record, root)
    assert verdict(folder, record, root)[0].endswith(
        "This host (node2) is none of the run's as it was then (node1): run this there to see."
    )


def test_run_that_ended_early(folder, root):
    record = start(folder, root)
    folder.write_summary({"started": record["started"], "step": 4, "finished": False})
    assert verdict(folder, record, root)[0] == (
        "The run ended early, after step 4, and not for memory: its log tells why."
    )


def test_files_of_an_earlier_run_do_not_count(folder, root):
    """A dump_folder is used again: the summary and the states of the run before are not those of this one."""
    before = start(folder, root)
    folder.write_state(before, 0, STATE)
    folder.write_summary({"started": before["started"], "step": 20, "finished": True})
    record = start(folder, root, started=before["started"] + 1)
    assert folder.summary(record) is None
    assert folder.states(record) == {}
    assert set(folder.states(before)) == {0}


def test_half_written_files_are_as_if_not_there(folder, root):
    record = start(folder, root)
    folder.write_state(record, 1, STATE)
    (folder.path / "ranks" / "rank_00001.json").write_text('{"rank": 1, "ti')
    (folder.path / "summary.json").write_text("")
    assert folder.states(record) == {}
    assert folder.summary(record) is None


@pytest.mark.parametrize("text", [None, "", "[]", '{"ranks": []}', "\xff"])
def test_folder_without_a_budget_is_a_clear_error(folder, text, capsys):
    if text is not None:
        folder.path.mkdir(parents=True)
        (folder.path / "budget.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"budget\.json"):
        folder.budget()
    assert main(["report", str(folder.path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_command_line_prints_the_page(folder, root, capsys):
    record = start(folder, root)
    folder.write_state(record, 0, STATE | {"pinned_bytes": 8 * MIB, "peak_pinned_bytes": 8 * MIB, "kept_bytes": 0})
    for directory in (folder.path, folder.path.parent):
        assert main(["report", str(directory)]) == 0
        page = capsys.readouterr().out
        assert page.startswith("# Activation offload: host memory\n\n")
        assert "| 0 | node1 | cpu | - | - | unknown | - | - | 0.008 | 0.008 | 0.008 | 0.008 | 0.000 | fits |" in page
        assert "| 1 | node1 | cpu | - | - | unknown | - | - | 0.008 | 0.008 | - | - | 0.000 | fits |" in page
        assert "- host node1, ranks 0-1: needed 0.016 GiB" in page


CHILD = """
import os, sys
from test_run_folder import make_record
from titan_offload.run_folder import RunFolder
from pathlib import Path
folder = RunFolder(Path(sys.argv[1]))
print("imported", flush=True)  # not in the group: torch may take more than it may have
sys.stdin.readline()  # until this process is in its group
folder.write_budget(make_record(num_ranks=1))
memory = bytearray(b"1") * (512 << 20)
"""


def test_report_after_a_real_kill(tmp_path, capsys):
    """A process in a group of its own writes its budget and is then killed for memory."""
    group = Path(V1) / f"titan_offload_report_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no writable cgroup v1 memory hierarchy: {error}")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    try:
        child.stdout.readline()
        (group / "memory.limit_in_bytes").write_text(str(256 * MIB))
        (group / "memory.swappiness").write_text("0")
        (group / "cgroup.procs").write_text(str(child.pid))
        child.communicate(b"\n")
        assert child.returncode == -signal.SIGKILL
        assert main(["report", str(tmp_path)]) == 0
    finally:
        child.kill()
        child.wait()
        group.rmdir()
    page = capsys.readouterr().out
    assert f"The run was killed for memory: {group}/memory.oom_control counts 1 killed since it started" in page
    assert "Last seen: rank 0 before it pinned anything." in page
    record = json.loads((tmp_path / "budget.json").read_text())
    assert f"{group}/memory.limit_in_bytes" in [limit["source"] for limit in record["limits"]]
