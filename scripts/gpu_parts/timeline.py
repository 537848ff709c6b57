"""Part "timeline": a profiler's trace of one step, and what it says of copies and compute.

How it works. A step that has run a few times before is traced, and `trace` computes from the file how much of the time
of our copies something was computed, and what the device waited for where it computed nothing. The trace of the first
way stays in the folder, for chrome://tracing or Perfetto.
"""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_parts.copy_log import CopyLog
from gpu_parts.device import Device
from gpu_parts.emulated_trace import CLOCK, add_device_work
from gpu_parts.part import Task
from gpu_parts.trace import Timeline, analyse, read_spans
from gpu_parts.ways import make_tokens, model_args, running, ways_of
from titan_offload import OffloadStats

WAYS = ("overlap", "attention_on_host", "all_without_ac")
NUM_BLOCKS, WARM_UP = 6, 3


def run(device: Device, task: Task) -> None:
    """Emits ``timeline``, a row per way, and ``gaps``, a row per gap."""
    with device.mesh() as mesh, TemporaryDirectory() as folder:
        for index, name in enumerate(WAYS):
            path = Path(folder) / f"trace_{name}.json.gz"
            timeline, stats = trace_step(device, mesh, name, path)
            if index == 0:
                shutil.copy(path, task.folder)
            row = {key: value for key, value in asdict(timeline).items() if key != "gaps"}
            task.emit("timeline", {"way": name} | row | find_problem(timeline, stats))
            for gap in timeline.gaps:
                what = {"cause": gap.cause, "before": gap.before, "after": gap.after}
                task.emit("gaps", {"way": name, "gap_us": gap.end_us - gap.start_us} | what)


def find_problem(timeline: Timeline, stats: OffloadStats) -> dict[str, str]:
    """A trace in which copies cannot be told to be ours says nothing of them."""
    seen, moved = (timeline.d2h_bytes, timeline.h2d_bytes), (stats.offloaded_bytes, stats.reloaded_bytes)
    return {} if seen == moved else {"problem": f"the trace shows copies of {seen} bytes, the step moved {moved}"}


def trace_step(device: Device, mesh: DeviceMesh, name: str, path: Path) -> tuple[Timeline, OffloadStats]:
    """Writes the trace of a step to ``path``. Returns what it says, and what the step did."""
    seq_len = device.pick(16 * 1024, 128)
    args = model_args(device, "8B", NUM_BLOCKS, seq_len)
    [runtime] = device.runtimes()
    log = CopyLog(runtime, device.torch_device)
    activities = [ProfilerActivity.CPU, *device.pick((ProfilerActivity.CUDA,), ())]
    with running(device, mesh, args, ways_of(device)[name], runtime) as runs:
        tokens = make_tokens(device, args, seq_len)
        for _ in range(WARM_UP):
            runs.backward(tokens)
            runs.step_end()
        device.synchronize()
        log.copies.clear()
        with profile(activities=activities) as profiler:
            with record_function(CLOCK):
                clock_s = time.perf_counter()
            runs.backward(tokens)
            device.synchronize()
        runs.step_end()
        stats = runs.stats
    profiler.export_chrome_trace(str(path))
    if device.is_emulated:
        add_device_work(path, log.copies, clock_s)
    return analyse(read_spans(path)), stats
