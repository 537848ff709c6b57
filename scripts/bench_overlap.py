"""Step time with offload over links of known speed, beside what the arithmetic says.

    python scripts/bench_overlap.py
    python scripts/bench_overlap.py --blocks 16 --max-inflight 0 --lookahead 2
    python scripts/bench_overlap.py --part attention
    python scripts/bench_overlap.py --part paced --share 2 --ratios 0.8

With ``--share`` the first part is another one, in `bench_share.py`: several ranks behind one port, with limit "memory"
and with limit "link". Without it, there are two parts. The second, in `bench_selective.py`, is of selective saves: what
saving attention on the device or in host memory spares of recompute, and how many bytes it moves. The rest of this text
is about the first.

One step is forward and backward of a stack of checkpointed blocks. It is run with activation checkpointing alone (AC),
with schedule "sync" and with schedule "overlap", for links on which one copy takes 0.2 to 4 times a block's forward.
All variants take turns in one process, round by round, and medians are compared.

The blocks are paced: each does its (small) work for real and then sleeps until a given time is over, once for forward
and recompute, twice for backward. So this is a device whose compute and copies never compete for the same cores, as on
an accelerator with copy engines, and not a measurement of what offload costs a CPU.

Three predictions of the slow-down against AC stand beside the measurement. A step with AC takes four forwards a block.

    sync          two copies per moved block over four forwards
    closed form   of overlap, in a steady state: what a copy to the host outlasts one forward by (only where
                  max_inflight_offloads is finite: else it costs memory, not time), and what a copy back outlasts three
                  forwards by, over four forwards; times the fraction of blocks that move
    planned       what `planner.make_plan` says of a model whose blocks take this long and whose inputs are as large:
                  the engine's rules, event by event. Right also with few blocks, where the copies still in flight at
                  the end of forward overlap with backward

Exit code: 0; 1 if a gradient of any variant differs from AC's in a single bit, if a step did not move all it should, or
if what it saved or ran again is not what arithmetic says.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import bench_selective
import bench_share
import torch
from bench_paced import DIM, INPUT_BYTES, ROWS, Stack, make_input
from bench_report import garbage_collector_off, print_json, print_table
from torch import nn

from titan_offload import HostRuntime, OffloadConfig, Offloader, OffloadStats, apply_offload
from titan_offload.config import SCHEDULES
from titan_offload.planner import Job, LayerShape, Machine, ModelShape, make_plan
from titan_offload.planner.costs import attention_flop, matmul_flop
from titan_offload.planner.plan import StepCost

PARTS = ("paced", "attention")
COPY_OVER_FORWARD = (0.2, 0.5, 1.0, 2.0, 4.0)


# What is measured


@dataclass
class Variant:
    """One way to run the step. ``schedule`` is None for AC alone."""

    schedule: str | None
    copy_over_forward: float | None
    model: Stack
    offloader: Offloader | None = None
    step_s: list[float] = field(default_factory=list)
    stats: list[OffloadStats] = field(default_factory=list)

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One step. Returns the gradients: of the input, then of each block's weight."""
        grads = timed_step(self.model, x, self.step_s)
        if self.offloader is not None:
            self.stats.append(self.offloader.step_end())
        return grads

    def forget_steps(self) -> None:
        self.step_s.clear()
        self.stats.clear()

    def find_problems(self, grads: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
        name = f"{self.schedule}, copy / forward {self.copy_over_forward}"
        problems = []
        if not all(map(torch.equal, grads, expected)):
            problems.append(f"{name}: gradients differ from those of AC alone")
        if self.offloader is not None:
            num_moved = len(self.model.layers) - self.offloader.engine.config.keep_last
            if self.stats[-1].num_offloads != num_moved:
                problems.append(f"{name}: moved {self.stats[-1].num_offloads} block inputs, expected {num_moved}")
        return problems

    def median_ms(self) -> float:
        return statistics.median(self.step_s) * 1e3

    def median_stats(self) -> dict[str, float]:
        names = ("num_reloads", "num_misses", "num_resident", "d2h_wait_ms", "h2d_wait_ms")
        return {name: statistics.median(getattr(stats, name) for stats in self.stats) for name in names}


def make_variants(args: argparse.Namespace) -> list[Variant]:
    variants = [Variant(None, None, Stack(args.blocks, args.forward_ms / 1e3))]
    for ratio in args.ratios:
        for schedule in ("sync", "overlap"):
            model = Stack(args.blocks, args.forward_ms / 1e3)
            config = OffloadConfig(
                schedule=schedule,
                keep_last=args.keep_last,
                prefetch_lookahead=args.lookahead,
                max_inflight_offloads=args.max_inflight,
            )
            runtime = HostRuntime(link_gb_per_s=INPUT_BYTES / (ratio * args.forward_ms * 1e6))
            variants.append(Variant(schedule, ratio, model, apply_offload(model, config, runtime=runtime)))
    return variants


class TakesTurns(Protocol):
    """What `run_rounds` needs of a variant."""

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One step. Returns the gradients."""

    def forget_steps(self) -> None:
        """Takes all steps until now out of the measurement."""

    def find_problems(self, grads: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
        """What is wrong with the step that was run last, and with its gradients."""


def timed_step(model: nn.Module, x: torch.Tensor, step_s: list[float]) -> list[torch.Tensor]:
    """One step; its seconds are added to ``step_s``. Returns the gradients: of the input, then of each weight."""
    model.zero_grad()
    x.grad = None
    start = time.perf_counter()
    model(x).sum().backward()
    step_s.append(time.perf_counter() - start)
    return [x.grad, *(weight.grad.clone() for weight in model.parameters())]


def run_rounds(variants: Sequence[TakesTurns], x: torch.Tensor, rounds: int, warm_up: int = 1) -> list[str]:
    """Lets the variants take turns. The first rounds, which pin memory, are not counted. Returns what went wrong."""
    problems = []
    with garbage_collector_off():
        for i in range(rounds + warm_up):
            expected = None
            for variant in variants:
                grads = variant.run(x)
                expected = grads if expected is None else expected
                problems += [f"round {i}: {problem}" for problem in variant.find_problems(grads, expected)]
                if i < warm_up:
                    variant.forget_steps()
    return problems


# What is told


def make_rows(variants: Sequence[Variant], args: argparse.Namespace) -> list[dict]:
    ac_ms = variants[0].median_ms()
    rows = [{"schedule": None, "step_ms": ac_ms, "closed_form_step_ms": 4 * args.blocks * args.forward_ms}]
    for variant in variants[1:]:
        row = {"schedule": variant.schedule, "copy_over_forward": variant.copy_over_forward}
        row |= {"step_ms": variant.median_ms(), "slowdown_percent": (variant.median_ms() / ac_ms - 1) * 100}
        rows.append(row | predict(variant, args) | variant.median_stats())
    return rows


def predict(variant: Variant, args: argparse.Namespace) -> dict:
    """What the planner says of a variant's slow-down. Its closed form is of a model in which all blocks move."""
    cost, moved_fraction = (
        plan_step(variant.copy_over_forward, args)[variant.schedule],
        1 - args.keep_last / args.blocks,
    )
    closed = cost.closed_form_limited_percent if args.max_inflight else cost.closed_form_unlimited_percent
    return {
        "closed_form_percent": closed * moved_fraction,
        "planned_percent": cost.simulated_percent,
    }


def plan_step(ratio: float, args: argparse.Namespace) -> dict[str, StepCost]:
    """The plan's rows of the paced blocks: a device and a link of the speed that makes them take this long."""
    layer = LayerShape(params=DIM * DIM, attention_width=DIM, num_heads=1)
    model = ModelShape("paced", DIM, (layer,) * args.blocks)
    job = Job(seq_len=ROWS, itemsize=INPUT_BYTES // (ROWS * DIM), num_devices=1)
    flop = matmul_flop(layer, job) + attention_flop(layer, job)
    rate = INPUT_BYTES / (ratio * args.forward_ms * 1e6)
    machine = Machine(rate, rate, tflops=flop / (args.forward_ms * 1e9), devices_per_node=1)
    config = OffloadConfig(
        keep_last=args.keep_last, prefetch_lookahead=args.lookahead, max_inflight_offloads=args.max_inflight
    )
    return {
        schedule: make_plan(model, job, machine, replace(config, schedule=schedule)).steps[schedule]
        for schedule in SCHEDULES
    }


def print_rows(rows: Sequence[dict], args: argparse.Namespace) -> None:
    cells = [["AC alone", "", f"{rows[0]['step_ms']:.1f}", "", "", "", "", ""]]
    for row in rows[1:]:
        percents = (row.get(f"{name}_percent") for name in ("slowdown", "closed_form", "planned"))
        cells.append(
            [row["schedule"], f"{row['copy_over_forward']:g}", f"{row['step_ms']:.1f}"]
            + ["" if percent is None else f"{percent:.1f}" for percent in percents]
            + ["" if row["schedule"] == "sync" else f"{row[f'{copy}_wait_ms']:.1f}" for copy in ("d2h", "h2d")]
        )
    print_table(
        f"{args.blocks} blocks of {args.forward_ms:g} ms forward, keep_last {args.keep_last}, "
        f"max_inflight_offloads {args.max_inflight}, prefetch_lookahead {args.lookahead}",
        [
            "schedule",
            "copy / forward",
            "step ms",
            "slower %",
            "closed form %",
            "planned %",
            "d2h wait ms",
            "h2d wait ms",
        ],
        cells,
        f"medians of {args.rounds} rounds. AC alone by arithmetic: {rows[0]['closed_form_step_ms']:.1f} ms",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = OffloadConfig()
    parser = argparse.ArgumentParser(description="Step time with offload over links of known speed, beside arithmetic.")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all", help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=8, help="checkpointed blocks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each variant (default: %(default)s)")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="a block's forward (default: %(default)s)")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=COPY_OVER_FORWARD, help="copy / forward (default: %(default)s)"
    )
    parser.add_argument("--keep-last", type=int, default=defaults.keep_last, help="default: %(default)s")
    parser.add_argument("--max-inflight", type=int, default=defaults.max_inflight_offloads, help="default: %(default)s")
    parser.add_argument("--lookahead", type=int, default=defaults.prefetch_lookahead, help="default: %(default)s")
    parser.add_argument("--share", type=int, default=1, help="ranks that share a port (default: %(default)s)")
    add_attention_arguments(parser)
    args = parser.parse_args(argv)
    if args.blocks < 2 or args.rounds < 1 or args.forward_ms <= 0 or min(args.ratios) <= 0:
        parser.error("--blocks must be at least 2, --rounds at least 1, --forward-ms and --ratios more than 0")
    if not 0 <= args.keep_last < args.blocks or min(args.max_inflight, args.lookahead) < 0:
        parser.error("--keep-last must be from 0 to --blocks - 1, --max-inflight and --lookahead at least 0")
    if args.share < 1 or (args.share > 1 and args.part == "attention"):
        parser.error("--share must be at least 1, and does not go with --part attention")
    if args.attention_blocks < 2 or min(args.attention_rounds, *args.tokens) < 1:
        parser.error("--attention-blocks must be at least 2, --attention-rounds and --tokens at least 1")
    return args


def add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("attention")
    group.add_argument(
        "--tokens", type=int, nargs="+", default=bench_selective.TOKENS, help="of a sequence (default: %(default)s)"
    )
    group.add_argument("--attention-blocks", type=int, default=4, help="blocks of this part (default: %(default)s)")
    group.add_argument("--attention-rounds", type=int, default=3, help="steps of each variant (default: %(default)s)")


def run_paced(args: argparse.Namespace) -> tuple[dict, list[str]]:
    """The first part. Returns what came out, and what went wrong."""
    variants = make_variants(args)
    problems = run_rounds(variants, make_input(), args.rounds)
    rows = make_rows(variants, args)
    if not problems:
        print_rows(rows, args)
    return {"rows": rows}, problems


def run_shared(args: argparse.Namespace) -> tuple[dict, list[str]]:
    """The first part with ``--share``, likewise."""
    rows, problems = [], []
    for ratio in args.ratios:
        with bench_share.make_variants(ratio, args) as variants:
            problems += run_rounds(variants, make_input(), args.rounds, warm_up=bench_share.WARM_UP)
            if not problems:
                rows += bench_share.make_rows(variants, args)
    if not problems:
        bench_share.print_rows(rows, args)
    return {"shared_rows": rows}, problems


def run_attention(args: argparse.Namespace) -> tuple[dict, list[str]]:
    """The second part, likewise."""
    rows, problems = [], []
    for tokens in args.tokens:
        variants = bench_selective.make_variants(tokens, args.attention_blocks)
        problems += run_rounds(variants, bench_selective.make_input(tokens), args.attention_rounds)
        rows += bench_selective.make_rows(variants)
    if not problems:
        bench_selective.print_rows(rows, args)
    return {"attention_rows": rows}, problems


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    results = {"gradients": "bitwise equal"}
    for part in PARTS if args.part == "all" else [args.part]:
        run = run_attention if part == "attention" else run_paced if args.share == 1 else run_shared
        part_results, problems = run(args)
        if problems:
            print("\n".join(problems), file=sys.stderr)
            return 1
        results |= part_results
    parameters = vars(args) | {"ratios": list(args.ratios), "tokens": list(args.tokens), "input_bytes": INPUT_BYTES}
    parameters |= {"threads": torch.get_num_threads()}
    parameters |= {"attention_dim": bench_selective.DIM, "attention_heads": bench_selective.HEADS}
    print_json("overlap", "cpu (HostRuntime)", parameters, results)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads would take cores from the copies
    sys.exit(main())
