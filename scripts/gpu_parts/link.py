"""Part "link": what the link carries, by size of the copies, and what a run reaches of it while the device computes.

How it works. `titan_offload.link` copies in each direction alone and in both at once, with copies of each size, and as
``measure_link = true`` does it before step 1. Then a model is trained with offload, and each of its copies is timed on
its stream. What they reached stands beside what copies of the very same size reached on a device that did nothing else.
"""

from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from gpu_parts.copy_log import CopyLog
from gpu_parts.device import Device
from gpu_parts.part import Task
from gpu_parts.ways import make_tokens, model_args, running, ways_of
from titan_offload.config import MIB
from titan_offload.link import Port
from titan_offload.need import block_input_bytes
from titan_offload.share import measure_links

COPY_MIB = (1, 4, 16, 64, 256)
IN_FLIGHT_BYTES = 64 * MIB
NUM_STEPS = 3
"""Steps whose copies count, after one that pins memory."""


def run(device: Device, task: Task) -> None:
    """Emits ``link``, a row per size; ``link at start``, one row; ``link in steps``, a row per direction and shape."""
    for size_mib in COPY_MIB:
        num_bytes = size_mib * MIB // device.pick(1, 256)
        task.emit("link", {"copy_bytes": num_bytes} | measure_port(device, num_bytes))
    rates = measure_links(device.runtimes()[0], device.torch_device)
    at_start = asdict(rates[0])
    task.emit("link at start", {f"{when}_{name}": rate for when in at_start for name, rate in at_start[when].items()})
    with device.mesh() as mesh:
        for flavor, seq_len in (("1.7B", 16 * 1024), ("8B", 32 * 1024)):
            for row in measure_steps(device, mesh, flavor, device.pick(seq_len, seq_len // 128)):
                task.emit("link in steps", row)


def measure_port(device: Device, num_bytes: int) -> dict[str, float]:
    """GB/s of each direction alone, and while the other one is busy too, with copies of this size."""
    box_s = device.pick(0.4, 0.05)
    depth = max(2, IN_FLIGHT_BYTES // num_bytes)  # small copies end before the host looks again
    port = Port(device.runtimes()[0], device.torch_device, num_bytes, device.pick(depth, 2))
    try:
        alone = port.measure(("d2h",), box_s) | port.measure(("h2d",), box_s)
        both = port.measure(("d2h", "h2d"), box_s)
    finally:
        port.close()
    rates = alone | {f"both_{name}": rate for name, rate in both.items()}
    return {f"{name}_gb_per_s": rate for name, rate in rates.items()}


def measure_steps(device: Device, mesh: DeviceMesh, flavor: str, seq_len: int) -> list[dict[str, Any]]:
    """What the copies of steps with offload reached, by direction."""
    args = model_args(device, flavor, 6, seq_len)
    num_bytes = block_input_bytes(1, seq_len, args.dim, torch.bfloat16.itemsize)
    rates = measure_port(device, num_bytes)
    [runtime] = device.runtimes()
    log = CopyLog(runtime, device.torch_device)
    with running(device, mesh, args, ways_of(device)["overlap"], runtime) as runs:
        tokens = make_tokens(device, args, seq_len)
        for step in range(1 + NUM_STEPS):
            if step == 1:
                device.synchronize()
                log.copies.clear()
            runs.backward(tokens)
            runs.step_end()
        device.synchronize()
        reached = {direction: log.gb_per_s(direction) for direction in ("d2h", "h2d")}
        log.copies.clear()
    return [
        {
            "model": flavor,
            "seq_len": seq_len,
            "copy_bytes": num_bytes,
            "direction": direction,
            "gb_per_s": reached[direction],
            "idle_gb_per_s": rates[f"{direction}_gb_per_s"],
            "reached_fraction": reached[direction] / rates[f"{direction}_gb_per_s"],
        }
        for direction in reached
    ]
