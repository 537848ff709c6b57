"""Part "device_tests": the tests in ``tests/gpu``, in a process of their own."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_parts.device import Device
from gpu_parts.part import Task, TimeBox

TESTS = Path(__file__).parents[2] / "tests" / "gpu"
EMULATE = "TITAN_OFFLOAD_EMULATE"
"""Environment variable with which they run on a CPU."""


def run(device: Device, task: Task) -> None:
    """Emits ``device tests``, one row."""
    task.emit("device tests", run_tests(device, task.box))


def run_tests(device: Device, box: TimeBox) -> dict[str, Any]:
    """Runs them for so long at most. Returns the row."""
    env = os.environ | ({EMULATE: "1"} if device.is_emulated else {})
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(TESTS)]
    settings = {"cwd": TESTS.parents[1], "env": env, "capture_output": True, "text": True}
    start, problem = time.perf_counter(), ""
    try:
        done = subprocess.run(command, timeout=max(1.0, box.left()), **settings)
        output = done.stdout + done.stderr
        if done.returncode != 0:
            problem = f"pytest ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, problem = (error.stdout or b"").decode(errors="replace"), "they did not end in time"
    return count_tests(output) | {"problem": problem, "seconds": time.perf_counter() - start}


def count_tests(output: str) -> dict[str, Any]:
    """What pytest says at its end: how many passed, failed and were skipped, and which failed."""
    summary = ""
    for line in output.splitlines():
        if re.search(r"\d+ (passed|failed|skipped|error)", line):
            summary = line
    counts = {kind: int(num) for num, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, flags=re.MULTILINE)
    return {kind: counts.get(kind, 0) for kind in ("passed", "failed", "skipped", "error")} | {"failures": failed}
