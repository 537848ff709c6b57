"""TorchTitan trainings in which something goes wrong: each process ends as it would without offload, with the first
error, and without waiting for anything of ours."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from runs import DEFAULTS, REPO, make_corpus

from titan_offload.run_folder import RunFolder, verdict

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine with no accelerator"),
]

TRAIN_TIMEOUT_S = 5
"""``comm.train_timeout_seconds``: how long a rank waits for the others, once step 1 is done."""

START_S, END_S = 120, 30
"""Most that a start takes on a busy machine, and an end, after the timeout."""

VARIANTS = {
    "off": "--activation_offload.mode none",
    "block_inputs": "--activation_offload.min_offload_mib 0.01",
    "all": "--activation_offload.mode all --activation_checkpoint.mode none --activation_offload.min_offload_mib 0.01",
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@dataclass
class Ended:
    """How a process ended: its exit code, what it printed, and how many seconds after the fault."""

    code: int
    text: str
    seconds: float


class Job:
    """A training of two ranks with a fault, see `faulty_training`; ``folder`` is its dump folder."""

    def __init__(self, folder: Path, fault: str, variant: str, has_torchrun: bool) -> None:
        make_corpus()
        self.folder = folder
        flags = {**DEFAULTS, "--training.steps": "1000", "--job.config_file": "train_configs/debug_cpu.toml"}
        flags |= {"--job.dump_folder": str(folder), "--comm.train_timeout_seconds": str(TRAIN_TIMEOUT_S)}
        self._args = ["tests/integration/faulty_training.py", *fault.split(", ")]
        self._args += [x for pair in flags.items() for x in pair if x] + VARIANTS[variant].split()
        if has_torchrun:
            self._processes = [self._start("all", TORCHRUN)]
        else:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
            ranks = ({**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2))
            self._processes = [self._start(env["RANK"], [], **env) for env in ranks]

    def _start(self, name: str, launcher: list[str], **env: str) -> subprocess.Popen:
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPO}:{REPO / 'tests'}", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, *launcher, *self._args]
        with (self.folder / f"{name}.txt").open("w") as out:
            return subprocess.Popen(command, cwd=REPO, env={**os.environ, **env}, stdout=out, stderr=out)

    def wait(self, index: int = 0) -> Ended:
        """For the process ``index``: torchrun, or that of the rank."""
        code = self._processes[index].wait(START_S + TRAIN_TIMEOUT_S + END_S)
        now, texts = time.time(), [path.read_text() for path in sorted(self.folder.glob("*.txt"))]
        [time_of_fault] = re.findall(r"Fault at ([\d.]+)", "".join(texts))
        return Ended(code, texts[index], now - float(time_of_fault))

    def end(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()  # torchrun ends its workers then, which a kill would leave behind
        for process in self._processes:
            process.wait(60)

    def verdict(self) -> str:
        """What ``titan-offload report`` says of how it ended."""
        folder = RunFolder(self.folder / "offload")
        return " ".join(verdict(folder, folder.budget()))


@pytest.fixture
def job(tmp_path):
    """``job(fault, variant, has_torchrun=True)`` starts one; it ends with the test."""
    started: list[Job] = []

    def start(fault: str, variant: str, has_torchrun: bool = True) -> Job:
        started.append(Job(tmp_path, fault, variant, has_torchrun))
        return started[-1]

    yield start
    for job in started:
        job.end()


def errors_of_ranks(ended: Ended) -> list[str]:
    """The last lines of their tracebacks, in which an error that came on top of another would be one more. An interrupt
    that comes in a destructor Python itself prints and drops; nothing else may be dropped."""
    dropped = re.findall(r"Exception ignored in: .*?\n(\w*(?:Error|Interrupt|Exception))\b", ended.text, re.DOTALL)
    assert len(dropped) == ended.text.count("Exception ignored") and {*dropped} <= {"KeyboardInterrupt"}, ended.text
    return re.findall(r"^\[rank\d\]: (\S*(?:Error|Interrupt)\b.*)", ended.text, re.MULTILINE)


def is_lost_peer(error: str) -> bool:
    return "gloo" in error and ("Connection" in error or "imed out" in error)


@pytest.mark.parametrize("variant", VARIANTS)
def test_out_of_memory_on_one_rank(variant, job):
    """Under torchrun: its report names that rank's error, which nobody caught, as the root cause."""
    run = job("backward inside, 1, error", variant)
    ended = run.wait()
    assert ended.code == 1
    assert ended.seconds < END_S
    [error] = [error for error in errors_of_ranks(ended) if not is_lost_peer(error)]
    assert error.startswith("torch.OutOfMemoryError: CUDA out of memory")
    root_cause = ended.text.split("Root Cause (first observed failure)")[-1]
    assert "rank      : 1 " in root_cause and error in root_cause, root_cause
    if variant != "off":
        assert "The run finished" not in run.verdict()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_rank_that_dies_or_hangs(signal, variant, job):
    """Without an agent that watches: the other rank ends by itself, with the error of its process group, at once if the
    rank is dead, else when ``comm.train_timeout_seconds`` are over."""
    run = job(f"backward inside, 1, {signal}", variant, has_torchrun=False)
    ended = run.wait(0)
    assert ended.code == 1
    [error] = errors_of_ranks(ended)
    assert is_lost_peer(error), error
    if signal == "SIGSTOP":
        assert "imed out" in error
        assert ended.seconds > TRAIN_TIMEOUT_S - 1
    assert ended.seconds < TRAIN_TIMEOUT_S + END_S
    if variant != "off":
        assert run.verdict().startswith("The run ended early, after step 1, and not for memory")


@pytest.mark.parametrize("variant", VARIANTS)
def test_ctrl_c(variant, job):
    """Of torchrun in a terminal."""
    run = job("backward inside, 1, SIGINT", variant)
    ended = run.wait()
    assert ended.code == 1
    assert ended.seconds < END_S
    errors = errors_of_ranks(ended)
    assert {error for error in errors if not is_lost_peer(error)} == {"KeyboardInterrupt"}, errors
    if variant != "off":
        assert run.verdict().startswith(
            "The run left no summary: it still runs, or it was killed. The kernel counts no"
        )
