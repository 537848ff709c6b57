"""Part "sanitizer": a small case under NVIDIA's compute-sanitizer, where it is there.

How it works. The case is a process of its own: a few steps of a small model with offload, in mode "block_inputs" and in
mode "all", whose gradients are compared with those without. It runs without a tool first, then under memcheck, which
sees accesses out of bounds and to freed memory, as torch's caching allocator is off here (`ENVIRONMENT`), and under
racecheck, which sees races within a kernel and none between streams. Errors of API calls do not count: to ask whether
an event is done, and it is not, is one. The tools slow kernels down by far, so each has its time, and what has not
ended by then is stopped.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gpu_parts.device import Device
from gpu_parts.part import Task
from titan_offload import OffloadConfig, apply_offload

TOOLS = (None, "memcheck", "racecheck")
CASE = "sanitizer_case"
"""Name of the case among what `gpu_check.py` runs in a process."""

ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

NUM_BLOCKS, DIM, ROWS, NUM_STEPS = 4, 64, 256, 3
PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)


def run(device: Device, task: Task) -> None:
    """Emits ``sanitizer``, a row per tool."""
    program = find_sanitizer()
    for index, tool in enumerate(TOOLS):
        if tool is not None and program is None:
            task.emit("sanitizer", {"tool": tool, "result": "left out: compute-sanitizer is not there"})
            continue
        command = [sys.executable, sys.argv[0], "--run", CASE, *device.pick((), ("--emulate",))]
        if tool is not None:
            command = [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", *command]
        task.emit("sanitizer", {"tool": tool or "none"} | run_tool(command, task.box.left() / (len(TOOLS) - index)))


def find_sanitizer() -> str | None:
    """Path of the program; None: it is not there."""
    return shutil.which("compute-sanitizer") or next((place for place in PLACES if Path(place).exists()), None)


def run_tool(command: list[str], seconds: float) -> dict[str, Any]:
    """Runs a command for so long at most. Returns what came of it."""
    start = time.perf_counter()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, text=True, start_new_session=True, **streams)
    try:
        output, _ = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what the tool runs holds the device
        process.communicate()
        return {"result": f"stopped after {seconds:.0f} s", "seconds": time.perf_counter() - start}
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", output)
    row = {"result": summary[-1] if summary else "ended", "seconds": time.perf_counter() - start}
    if process.returncode:
        last = output.strip().splitlines()[-1:] or [""]
        row["problem"] = f"exit code {process.returncode}: {last[0]}"
    return row


# The case


class Stack(nn.Module):
    """Small blocks; the same weights each time."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(NUM_BLOCKS)]
        self.layers = nn.ModuleList(map(checkpoint_wrapper, blocks) if is_checkpointed else blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x


def run_case(device: Device) -> None:
    """Raises AssertionError if a gradient differs."""
    expected = train(device, None)
    for mode in ("block_inputs", "all"):
        for got, want in zip(train(device, mode), expected, strict=True):
            assert torch.equal(got, want), f"mode {mode}: gradients differ from those without offload"


def train(device: Device, mode: str | None) -> list[torch.Tensor]:
    """Gradients of the last step. None: without offload."""
    torch.manual_seed(0)
    model = Stack(is_checkpointed=mode != "all").to(device.torch_device)
    x = torch.randn(ROWS, DIM).to(device.torch_device).requires_grad_()
    offloader = None
    if mode is not None:
        [runtime] = device.runtimes()
        offloader = apply_offload(model, OffloadConfig(mode=mode, min_offload_mib=0.0), runtime=runtime)
    for _ in range(NUM_STEPS):
        model.zero_grad()
        model(x).sum().backward()
        if offloader is not None:
            assert offloader.step_end().num_offloads > 0
    device.synchronize()
    return [parameter.grad.clone() for parameter in model.parameters()]
