"""Part "step time": how long a step takes in each way, beside activation checkpointing (AC) alone and beside a plan.

How it works. For a model and a sequence length there is one model per way, with the same weights. They take turns,
round by round, and forward with backward is timed. The ratio to AC is the median of the rounds' ratios, so that a clock
that changes between rounds does not count. What a plan says stands beside it: of a machine whose link is as fast as it
was measured at the start of this part, and which computes as fast as AC alone did in this very case. So a plan of AC is
right by construction, and what is judged is what it makes of the other ways.

There are fewer blocks than the models have, as many as the time allows: what they cost is the same for each. Where time
is short for the fewest, the essential ways alone are measured. What does not fit the device, or half of what the host
has free, is left out, and the row says so. ``save_on_cpu`` is what Hugging Face Transformers does.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from gpu_parts.device import Device
from gpu_parts.part import Task, TimeBox
from gpu_parts.ways import FAMILY, Qwen3ModelArgs, Running, Way, make_tokens, model_args, ways_of
from titan_offload import OffloadConfig
from titan_offload.config import GIB
from titan_offload.host_memory import read_host_memory
from titan_offload.link import PortRates
from titan_offload.planner import Job, Machine, make_plan
from titan_offload.planner.model_shape import model_shape
from titan_offload.planner.plan import Plan
from titan_offload.share import measure_links

K = 1024
CASES = (
    *(("8B", 32 * K), ("1.7B", 32 * K), ("8B", 128 * K), ("8B", 4 * K), ("1.7B", 4 * K), ("1.7B", 128 * K)),
    *(("8B", 16 * K), ("1.7B", 16 * K), ("8B", 64 * K), ("1.7B", 64 * K)),
)
"""Models and sequence lengths, by worth: time may end before they do."""

WAYS = (
    *("ac", "save_on_cpu", "sync", "overlap", "attention_on_device", "attention_on_host"),
    *("all_without_ac", "no_ac"),
)
ESSENTIAL = ("ac", "save_on_cpu", "overlap")
SHARES = {WAYS: 0.4, ESSENTIAL: 0.7}
"""What a case may take of the time that is left, with these ways."""

START_S = 1.5
"""Seconds that a way takes besides its steps: to make the model, to pin and to give back; a guess."""

MIN_BLOCKS, MAX_BLOCKS = 3, 6
WARM_UP = 2
"""Steps that are not timed: the first pins memory, the second one goes by what the first has learned."""
MIN_ROUNDS, MAX_ROUNDS = 2, 5

GUESSED_TFLOPS = 400.0
"""For how long the first case will take."""

HOST_FRACTION = 0.5
NO_TIME = "there is no time left for it"


def run(device: Device, task: Task) -> None:
    """Emits ``step time``, a row per case and way."""
    rates = measure_links(device.runtimes()[0], device.torch_device)[0].alone
    cases, tflops = device.pick(CASES, CASES[:2]), device.pick(GUESSED_TFLOPS, 1e-3)
    with device.mesh() as mesh:
        for flavor, seq_len in cases:
            case = Case(device, flavor, device.pick(seq_len, seq_len // 256), rates, tflops)
            seconds = case.choose(task.box.left())
            if seconds is None:
                task.emit("step time", case.row | {"left_out": NO_TIME})
                continue
            for row in case.measure(mesh, TimeBox(seconds)):
                task.emit("step time", row)
            tflops = case.tflops


@dataclass
class Case:
    """A model and a sequence length.

    Attributes:
        tflops: what the device sustains; a guess, until AC alone was measured.
        ways, num_blocks: chosen by the time that there is.
        step_ms: for each way, its timed steps.
        row: what all rows of the case have in common.
    """

    device: Device
    flavor: str
    seq_len: int
    rates: PortRates
    tflops: float
    ways: Sequence[str] = WAYS
    num_blocks: int = MIN_BLOCKS
    step_ms: dict[str, list[float]] = field(default_factory=dict)
    problems: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def args(self) -> Qwen3ModelArgs:
        return model_args(self.device, self.flavor, self.num_blocks, self.seq_len)

    @property
    def row(self) -> dict[str, Any]:
        return {"model": self.flavor, "seq_len": self.seq_len, "num_blocks": self.num_blocks}

    def choose(self, left_s: float) -> float | None:
        """Chooses ways and number of blocks, of all that fit into ``left_s`` seconds the most.

        Returns:
            How many seconds the case may take. None: not even the essential ways fit.
        """
        self.num_blocks = 1
        block_s = self.plan(Way("ac", "ac")).steps["ac"].step_ms / 1e3
        self.num_blocks = MIN_BLOCKS
        for ways, share in SHARES.items():
            num_steps = WARM_UP + MIN_ROUNDS
            fitting = (share * left_s / len(ways) - self.device.pick(START_S, 0.0)) / (num_steps * block_s)
            if fitting >= MIN_BLOCKS:
                self.ways, self.num_blocks = ways, min(int(fitting), self.device.pick(MAX_BLOCKS, MIN_BLOCKS))
                return share * left_s
        return None

    def plan(self, way: Way) -> Plan:
        """What the planner says of a way, with what is known of the device so far."""
        shape = model_shape(self.flavor, FAMILY, self.args, way.selective, on_cpu=self.device.is_emulated)
        job = Job(self.seq_len, num_devices=1, is_checkpointed=way.is_checkpointed)
        machine = Machine(self.rates.d2h_gb_per_s, self.rates.h2d_gb_per_s, tflops=self.tflops, devices_per_node=1)
        return make_plan(shape, job, machine, way.offload or OffloadConfig(mode="none"), way.selective)

    def measure(self, mesh: DeviceMesh, box: TimeBox) -> list[dict[str, Any]]:
        """Runs the rounds. Returns a row per way."""
        ways = {name: ways_of(self.device)[name] for name in WAYS}
        tokens = make_tokens(self.device, self.args, self.seq_len)
        runs = {}
        try:
            for name in self.ways:
                started = self.start(mesh, ways[name], tokens)
                if started is not None:
                    runs[name] = started
            for index in range(MAX_ROUNDS):
                if index >= MIN_ROUNDS and box.left() < self.round_s():
                    break
                for name in list(runs):
                    self.time_step(runs, name, tokens)
        finally:
            stats = {name: started.stats for name, started in runs.items()}
            for started in runs.values():
                started.close()
            runs.clear()
            self.device.empty_cache()
        self.calibrate()
        for name in set(WAYS) - set(self.ways):
            self.leave_out(name, NO_TIME)
        return [self.result(ways[name], stats.get(name)) for name in WAYS]

    def start(self, mesh: DeviceMesh, way: Way, tokens: torch.Tensor) -> Running | None:
        """A model that has come past its first steps. None: it does not fit, or failed; the row will say so."""
        pinned = self.pinned_bytes(way)
        budget = self.host_budget()
        if pinned > budget:
            self.leave_out(way.name, f"pins {pinned / GIB:.1f} GiB of host memory: more than {budget / GIB:.1f}")
            return None
        runs = None
        try:
            # More than planned: slabs of what an earlier step needed may stay.
            runs = Running(self.device, mesh, self.args, way, budget_bytes=2 * pinned or None)
            for _ in range(WARM_UP):
                runs.backward(tokens)
                runs.step_end()
            return runs
        except Exception as error:
            self.note(way.name, error)
        if runs is not None:
            runs.close()
        self.device.empty_cache()
        return None

    def time_step(self, runs: dict[str, Running], name: str, tokens: torch.Tensor) -> None:
        try:
            step_ms = self.device.timed_ms(lambda: runs[name].backward(tokens))
            runs[name].step_end()
            self.step_ms.setdefault(name, []).append(step_ms)
            return
        except Exception as error:
            self.note(name, error)
        runs.pop(name).close()
        self.step_ms.pop(name, None)
        self.device.empty_cache()

    def note(self, name: str, error: Exception) -> None:
        """What kept a way from running: that it does not fit is no fault."""
        text = str(error).partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError):
            self.leave_out(name, "out of device memory")
        elif "pinned host memory" in text:
            self.leave_out(name, text)
        else:
            self.problems[name] = {"problem": f"{type(error).__name__}: {text}"}

    def leave_out(self, name: str, why: str) -> None:
        self.problems[name] = {"left_out": why}

    def pinned_bytes(self, way: Way) -> int:
        """Pinned memory that a way will take, in bytes. torch's allocator rounds up to a power of two."""
        if way.variant is None:
            return 2 * self.plan(Way("ac", "ac")).block_inputs_bytes if way.saves_on_cpu else 0
        return self.plan(way).steps[way.variant].pinned_bytes

    def host_budget(self) -> int:
        free = [limit.free_bytes for limit in read_host_memory().limits if limit.limit_bytes]
        return int(HOST_FRACTION * min(free))

    def round_s(self) -> float:
        """Seconds that a round takes."""
        return sum(statistics.median(steps) for steps in self.step_ms.values()) / 1e3

    def calibrate(self) -> None:
        """From now on the device computes as fast as it did with AC alone."""
        if "ac" in self.step_ms:
            planned_ms = self.plan(Way("ac", "ac")).steps["ac"].step_ms
            self.tflops *= planned_ms / statistics.median(self.step_ms["ac"])

    def result(self, way: Way, stats: Any) -> dict[str, Any]:
        """The row of a way."""
        row = self.row | {"way": way.name}
        if way.name not in self.step_ms:
            return row | self.problems.get(way.name, {})
        steps, ac = self.step_ms[way.name], self.step_ms.get("ac")
        row |= {"step_ms": statistics.median(steps), "num_steps": len(steps)}
        if ac:
            row |= self.compare(way, steps, ac)
        names = ("num_offloads", "offloaded_bytes", "num_misses", "d2h_wait_ms", "h2d_wait_ms", "pinned_total_bytes")
        return row | {name: getattr(stats, name) for name in names}

    def compare(self, way: Way, steps: Sequence[float], ac: Sequence[float]) -> dict[str, Any]:
        """A way beside AC and beside its plan."""
        plan = self.plan(way)
        ratios = [step / ac_step for step, ac_step in zip(steps, ac, strict=True)]
        figures = {"ratio_to_ac": statistics.median(ratios), "tflops": self.tflops}
        planned_ms = None
        if way.variant is not None:
            planned_ms = plan.steps[way.variant].step_ms
            figures |= {"copy_over_forward": plan.layers[0].copy_over_forward} if way.offload is not None else {}
        elif not way.is_checkpointed:
            planned_ms = plan.steps["all_without_ac"].compute_ms  # nothing is copied, nothing is recomputed
        if planned_ms is None:
            return figures
        return figures | {
            "planned_ms": planned_ms,
            "planned_ratio": planned_ms / statistics.median(ac),
            "planner_error_percent": (planned_ms / statistics.median(steps) - 1) * 100,
        }
