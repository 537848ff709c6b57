"""Part "memory": device memory against depth, host memory as the system sees it, and what pinning costs.

How it works. A step of models of the same shape with more and more blocks: what it needs above what there was before
it grows by one input per block with activation checkpointing (AC) alone, and must not grow with offload. Weights are
there before the step, and gradients are kept from the step before, so that neither is in the figure. Of the host:
resident memory by kind, and pinned memory against what is in use of it.

Then memory is pinned as the pool does it, its pages touched by 1 thread and by 8, beside torch's own allocator of
pinned memory, which rounds up to a power of two.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from gpu_parts.device import Device
from gpu_parts.part import Task
from gpu_parts.ways import Way, make_tokens, model_args, running, ways_of
from titan_offload import Runtime
from titan_offload.config import GIB, MIB
from titan_offload.host_memory import read_process_memory
from titan_offload.need import block_input_bytes
from titan_offload.pinned_memory import MAX_TOUCH_THREADS

WAYS = ("ac", "overlap")
NUM_STEPS = 3
"""The last one is measured: the first makes gradients, and until the second the pool grows."""


def run(device: Device, task: Task) -> None:
    """Emits ``device memory``, a row per depth and way, and ``pinning``, a row per way to pin."""
    with device.mesh() as mesh:
        for num_blocks in device.pick((8, 16, 32), (4, 8)):
            for name in WAYS:
                task.emit("device memory", measure(device, mesh, ways_of(device)[name], num_blocks))
    for row in time_pinning(device):
        task.emit("pinning", row)


def measure(device: Device, mesh: DeviceMesh, way: Way, num_blocks: int) -> dict[str, Any]:
    """Memory of a step, in bytes."""
    seq_len = device.pick(32 * 1024, 256)
    args = model_args(device, "1.7B", num_blocks, seq_len)
    with running(device, mesh, args, way) as runs:
        tokens = make_tokens(device, args, seq_len)
        for _ in range(NUM_STEPS):
            with device.peak() as peak:
                runs.backward(tokens)
            runs.step_end(keeps_gradients=True)
        process = read_process_memory()
    return {
        "way": way.name,
        "num_blocks": num_blocks,
        "input_bytes": block_input_bytes(1, seq_len, args.dim, torch.bfloat16.itemsize),
        "step_bytes": peak.allocated - peak.before,
        "allocated_bytes": peak.allocated,
        "reserved_bytes": peak.reserved,
        "num_offloads": runs.stats.num_offloads,
        "pinned_bytes": runs.stats.pinned_total_bytes,
        "pinned_peak_bytes": runs.stats.pinned_peak_bytes,
        "rss_anon_bytes": process.rss_anon_bytes,
        "rss_file_bytes": process.rss_file_bytes,
        "rss_shmem_bytes": process.rss_shmem_bytes,
    }


# Pinning


def time_pinning(device: Device) -> Iterator[dict[str, Any]]:
    """Rows: how long it takes to pin, and to give back."""
    num_bytes = device.pick(5 * GIB, 5 * MIB)  # no power of two
    for num_threads in (1, MAX_TOUCH_THREADS):
        with touch_threads(num_threads) as really:
            how, [runtime] = f"registered, touched by {really} threads", device.runtimes()
            yield timed(how, num_bytes, lambda runtime=runtime: pin(runtime, num_bytes))
    if not device.is_emulated:
        rounded = 1 << (num_bytes - 1).bit_length()
        how = f"torch's allocator, which takes {rounded / GIB:g} GiB"
        yield timed(how, num_bytes, lambda: pin_by_torch(num_bytes))


def timed(how: str, num_bytes: int, pin: Callable[[], Callable[[], object]]) -> dict[str, Any]:
    start = time.perf_counter()
    free = pin()
    pinned = time.perf_counter()
    free()
    return {
        "how": how,
        "num_bytes": num_bytes,
        "pin_s": pinned - start,
        "gib_per_s": num_bytes / GIB / (pinned - start),
        "free_s": time.perf_counter() - pinned,
    }


def pin(runtime: Runtime, num_bytes: int) -> Callable[[], object]:
    """As the pool does it. Returns what gives it back, its mapping too."""
    held = [runtime.allocate_pinned(num_bytes)]
    return lambda: runtime.free_pinned(held.pop())


def pin_by_torch(num_bytes: int) -> Callable[[], object]:
    held = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)]

    def free() -> None:
        held.clear()
        torch._C._host_emptyCache()

    return free


@contextmanager
def touch_threads(num: int) -> Iterator[int]:
    """`pinned_memory.touch` uses as many threads as the CPUs that it may run on, at most. Yields how many it will."""
    cpus, torch_threads = os.sched_getaffinity(0), torch.get_num_threads()
    allowed = sorted(cpus)[:num]
    os.sched_setaffinity(0, allowed)
    torch.set_num_threads(1)  # of which each toucher has one
    try:
        yield len(allowed)
    finally:
        torch.set_num_threads(torch_threads)
        os.sched_setaffinity(0, cpus)
