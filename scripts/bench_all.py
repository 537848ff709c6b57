"""Step time with mode "all", nothing checkpointed, over links of known speed, beside what the planner says.

    python scripts/bench_all.py
    python scripts/bench_all.py --blocks 16 --ratios 1.5 3 --lookahead 2

One step is forward and backward of a stack of blocks, each a row of paced ops as in `bench_paced`, every one of which
saves its input. It is run without offload, and with mode "all" for links on which the copies of one block take 0.5 to 4
times its forward. The planner's figure is of blocks: this shows what comes of tensors that move one by one.
Ops of a few milliseconds are too short for it: a busy machine wakes them late.

Exit code: 0; 1 if a gradient differs in a single bit, or if a step did not move all it should.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from bench_overlap import run_rounds, timed_step
from bench_paced import DIM, INPUT_BYTES, ROWS, Block, make_input
from bench_report import print_json, print_table
from torch import nn

from titan_offload import HostRuntime, OffloadConfig, Offloader, OffloadStats, apply_offload
from titan_offload.planner import Job, LayerShape, Machine, ModelShape, make_plan
from titan_offload.planner.costs import attention_flop, matmul_flop
from titan_offload.planner.plan import StepCost

COPY_OVER_FORWARD = (0.5, 1.0, 2.0, 4.0)


class Stack(nn.Module):
    """Blocks of paced ops, not checkpointed; the same weights each time."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        op_s = args.forward_ms / args.ops / 1e3
        blocks = (nn.Sequential(*[Block(op_s) for _ in range(args.ops)]) for _ in range(args.blocks))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x


@dataclass
class Variant:
    """One way to run the step. ``copy_over_forward`` is None without offload."""

    copy_over_forward: float | None
    model: Stack
    num_moved: int = 0
    offloader: Offloader | None = None
    step_s: list[float] = field(default_factory=list)
    stats: OffloadStats = field(default_factory=OffloadStats)

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One step. Returns the gradients: of the input, then of each op's weight."""
        grads = timed_step(self.model, x, self.step_s)
        if self.offloader is not None:
            self.stats = self.offloader.step_end()
        return grads

    def forget_steps(self) -> None:
        self.step_s.clear()

    def find_problems(self, grads: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
        problems = []
        if not all(map(torch.equal, grads, expected)):
            problems.append(f"copy / forward {self.copy_over_forward}: gradients differ from those without offload")
        if self.stats.num_offloads != self.num_moved:
            problems.append(f"moved {self.stats.num_offloads} tensors, expected {self.num_moved}")
        return problems


def config_of(args: argparse.Namespace) -> OffloadConfig:
    keys = {"prefetch_lookahead": args.lookahead, "max_inflight_offloads": args.max_inflight}
    return OffloadConfig(mode="all", keep_last=1, **keys)


def rate_of(ratio: float, args: argparse.Namespace) -> float:
    return args.ops * INPUT_BYTES / (ratio * args.forward_ms * 1e6)


def make_variants(args: argparse.Namespace) -> list[Variant]:
    variants = [Variant(None, Stack(args))]
    for ratio in args.ratios:
        model = Stack(args)
        runtime = HostRuntime(link_gb_per_s=rate_of(ratio, args))
        offloader = apply_offload(model, config_of(args), runtime=runtime)
        variants.append(Variant(ratio, model, args.ops * (args.blocks - 1), offloader))
    return variants


def plan_step(ratio: float, args: argparse.Namespace) -> StepCost:
    """The plan's row of these blocks: a device and a link of the speed that makes them take this long."""
    layer = LayerShape(DIM * DIM, DIM, num_heads=1, activations=(INPUT_BYTES / ROWS,) * args.ops)
    job = Job(seq_len=ROWS, itemsize=INPUT_BYTES // (ROWS * DIM), num_devices=1, is_checkpointed=False)
    tflops = (matmul_flop(layer, job) + attention_flop(layer, job)) / (args.forward_ms * 1e9)
    machine = Machine(rate_of(ratio, args), rate_of(ratio, args), tflops=tflops, devices_per_node=1)
    plan = make_plan(ModelShape("paced", DIM, (layer,) * args.blocks), job, machine, config_of(args))
    return plan.steps[plan.variant]


def make_rows(variants: Sequence[Variant], args: argparse.Namespace) -> list[dict]:
    base_ms = statistics.median(variants[0].step_s) * 1e3
    rows = [{"copy_over_forward": None, "step_ms": base_ms, "planned_ms": 3 * args.blocks * args.forward_ms}]
    for variant in variants[1:]:
        step_ms, cost = statistics.median(variant.step_s) * 1e3, plan_step(variant.copy_over_forward, args)
        row = {"copy_over_forward": variant.copy_over_forward, "step_ms": step_ms, "planned_ms": cost.step_ms}
        row |= {"slowdown_percent": (step_ms / base_ms - 1) * 100, "planned_percent": cost.simulated_percent}
        rows.append(row | {"num_misses": variant.stats.num_misses, "num_resident": variant.stats.num_resident})
    return rows


def print_rows(rows: Sequence[dict], args: argparse.Namespace) -> None:
    cells = [
        ["none" if row["copy_over_forward"] is None else f"{row['copy_over_forward']:g}"]
        + [f"{row[f'{name}_ms']:.1f}" for name in ("step", "planned")]
        + [f"{row[f'{name}_percent']:.1f}" if f"{name}_percent" in row else "" for name in ("slowdown", "planned")]
        for row in rows
    ]
    print_table(
        f"{args.blocks} blocks of {args.ops} ops, {args.forward_ms:g} ms forward, all of 1 MiB move; "
        f"max_inflight_offloads {args.max_inflight}, prefetch_lookahead {args.lookahead}",
        ["copy / forward", "step ms", "planned ms", "slower %", "planned %"],
        cells,
        f"medians of {args.rounds} rounds; slower: than the same without offload",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = OffloadConfig()
    parser = argparse.ArgumentParser(description='Step time with mode "all" over links of known speed, beside a plan.')
    parser.add_argument("--blocks", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--ops", type=int, default=8, help="of a block (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each variant (default: %(default)s)")
    parser.add_argument("--forward-ms", type=float, default=160.0, help="a block's forward (default: %(default)s)")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=COPY_OVER_FORWARD, help="copy / forward (default: %(default)s)"
    )
    parser.add_argument("--max-inflight", type=int, default=defaults.max_inflight_offloads, help="default: %(default)s")
    parser.add_argument("--lookahead", type=int, default=defaults.prefetch_lookahead, help="default: %(default)s")
    args = parser.parse_args(argv)
    if min(args.blocks - 1, args.ops, args.rounds) < 1 or args.forward_ms <= 0 or min(args.ratios) <= 0:
        parser.error("--blocks must be at least 2, --ops and --rounds at least 1, --forward-ms and --ratios above 0")
    if min(args.max_inflight, args.lookahead) < 0:
        parser.error("--max-inflight and --lookahead must be at least 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    variants = make_variants(args)
    if problems := run_rounds(variants, make_input(), args.rounds):
        print("\n".join(problems), file=sys.stderr)
        return 1
    rows = make_rows(variants, args)
    print_rows(rows, args)
    parameters = vars(args) | {"ratios": list(args.ratios), "tensor_bytes": INPUT_BYTES}
    results = {"gradients": "bitwise equal", "rows": rows}
    print_json("all", "cpu (HostRuntime)", parameters | {"threads": torch.get_num_threads()}, results)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads would take cores from the copies
    sys.exit(main())
