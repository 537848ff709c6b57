"""Host time of the engine's bookkeeping per region, for models of 32, 128 and 512 regions: it must not grow with them.

    python scripts/bench_hooks.py

One step is forward and backward of checkpointed blocks that compute next to nothing on tiny tensors, over a link
without a speed limit. Three variants of each model take turns in one process, and medians are compared:

    AC             activation checkpointing alone
    offload        the same with offload; the difference to AC is the price of a region, all included
    hooks timed    the same with a timer around what packs and what unpacks a tensor

Time is the CPU time of the thread that trains, so that waiting for copies (which an accelerator's host never does) and
a busy machine do not count. What `HostRuntime` needs to hand a copy to its threads is in it; an accelerator needs its
driver's launch calls instead. The garbage collector is off, as it is in TorchTitan.

Exit code: 0; 1 if not every region was moved and brought back.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from bench_report import garbage_collector_off, print_json, print_table
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from titan_offload import HostRuntime, OffloadConfig, Offloader, apply_offload

REGIONS = (32, 128, 512)
ROWS, DIM = 4, 16


class Block(nn.Module):
    """One multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Stack(nn.Module):
    """Tiny blocks, each of them checkpointed."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(checkpoint_wrapper(Block()) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x


class Timer:
    """Adds up the CPU time that this thread spends in a function."""

    def __init__(self) -> None:
        self.total_ns = 0

    def around(self, function: Callable) -> Callable:
        def timed(*args: object) -> object:
            start = time.thread_time_ns()
            result = function(*args)
            self.total_ns += time.thread_time_ns() - start
            return result

        return timed

    def take_us(self) -> float:
        total_ns, self.total_ns = self.total_ns, 0
        return total_ns / 1e3


@dataclass
class Variant:
    """One model and how its step is run. ``samples``: of each quantity that is measured, microseconds per region."""

    num_regions: int
    model: Stack
    offloader: Offloader | None = None
    timers: dict[str, Timer] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def run(self, x: torch.Tensor, num_steps: int) -> None:
        """One sample of each quantity: the mean of several steps."""
        step_ns = 0
        for _ in range(num_steps):
            self.model.zero_grad()
            start = time.thread_time_ns()
            self.model(x).sum().backward()
            step_ns += time.thread_time_ns() - start
            self._end_step()
        us = {"step": step_ns / 1e3} | {name: timer.take_us() for name, timer in self.timers.items()}
        for name, total in us.items():
            self.samples.setdefault(name, []).append(total / (num_steps * self.num_regions))

    def _end_step(self) -> None:
        if self.offloader is not None:
            stats = self.offloader.step_end()
            num_back = stats.num_reloads + stats.num_resident
            assert stats.num_offloads == num_back == self.num_regions, f"moved {stats.num_offloads}, back {num_back}"

    def median_us(self, name: str) -> float:
        return statistics.median(self.samples[name])


def make_offloaded(num_regions: int) -> Variant:
    model = Stack(num_regions)
    config = OffloadConfig(keep_last=0, min_offload_mib=0.0)
    return Variant(num_regions, model, apply_offload(model, config, runtime=HostRuntime(strict=False)))


def make_timed(num_regions: int) -> Variant:
    variant = make_offloaded(num_regions)
    engine = variant.offloader.engine
    variant.timers = {"pack": Timer(), "unpack": Timer()}
    for name, timer in (("pack", variant.timers["pack"]), ("unpack", variant.timers["unpack"])):
        setattr(engine, name, timer.around(getattr(engine, name)))
    return variant


def measure(num_regions: Sequence[int], rounds: int) -> list[dict]:
    """Microseconds per region, one row per model size. The first round pins memory and is not counted.

    Small models do more steps, so that each sample is of as many regions: a busy machine disturbs all alike.
    """
    trios = [(Variant(num, Stack(num)), make_offloaded(num), make_timed(num)) for num in num_regions]
    x = torch.ones(ROWS, DIM, requires_grad=True)
    with garbage_collector_off():
        for i in range(rounds + 1):
            for variant in (variant for trio in trios for variant in trio):
                variant.run(x, num_steps=max(num_regions) // variant.num_regions)
                if i == 0:
                    variant.samples.clear()
    return [make_row(*trio) for trio in trios]


def make_row(ac: Variant, offloaded: Variant, timed: Variant) -> dict:
    pack_us, unpack_us = timed.median_us("pack"), timed.median_us("unpack")
    return {
        "regions": ac.num_regions,
        "pack_us": pack_us,
        "unpack_us": unpack_us,
        "pair_us": pack_us + unpack_us,
        "ac_step_us_per_region": ac.median_us("step"),
        "offload_step_us_per_region": offloaded.median_us("step"),
        "added_us_per_region": offloaded.median_us("step") - ac.median_us("step"),
    }


def find_ratios(rows: Sequence[dict]) -> dict[str, float]:
    """Cost of a region in the largest model over that in the smallest: 1 where it is flat."""
    return {f"{name}_ratio": rows[-1][name] / rows[0][name] for name in ("pair_us", "added_us_per_region")}


def print_rows(rows: Sequence[dict], rounds: int) -> None:
    ratios = find_ratios(rows)
    print_table(
        "host time per region, in microseconds",
        ["regions", "pack", "unpack", "pair", "AC step", "offload step", "added"],
        [[str(row["regions"])] + [f"{us:.1f}" for name, us in row.items() if name != "regions"] for row in rows],
        f"medians of {rounds} rounds. {rows[-1]['regions']} regions / {rows[0]['regions']} regions: "
        f"pair {ratios['pair_us_ratio']:.2f}, added {ratios['added_us_per_region_ratio']:.2f}",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Host time of the engine's bookkeeping per region.")
    parser.add_argument("--regions", type=int, nargs="+", default=REGIONS, help="model sizes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each variant (default: %(default)s)")
    args = parser.parse_args(argv)
    if min(args.regions) < 1 or args.rounds < 1:
        parser.error("--regions and --rounds must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        rows = measure(sorted(args.regions), args.rounds)
    except AssertionError as problem:
        print(f"not every region was moved and brought back: {problem}", file=sys.stderr)
        return 1
    print_rows(rows, args.rounds)
    parameters = vars(args) | {"regions": sorted(args.regions), "input_bytes": ROWS * DIM * 4}
    print_json("hooks", "cpu (HostRuntime)", parameters, {"rows": rows} | find_ratios(rows))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are tiny
    sys.exit(main())
