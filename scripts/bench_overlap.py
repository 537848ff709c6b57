"""Step time with offload over links of known speed, beside what the arithmetic says.

    python scripts/bench_overlap.py
    python scripts/bench_overlap.py --blocks 16 --max-inflight 0 --lookahead 2
    python scripts/bench_overlap.py --part attention

There are two parts. The second, in `bench_selective.py`, is of selective saves: what saving attention on the device or
in host memory spares of recompute, and how many bytes it moves. The rest of this text is about the first.

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
    simulated     `simulate_step`: the engine's rules, event by event. Right also with few blocks, where the copies
                  still in flight at the end of forward overlap with backward; and without a limit, where backward waits
                  for them once a block is done whose input is still being copied

Exit code: 0; 1 if a gradient of any variant differs from AC's in a single bit, if a step did not move all it should, or
if what it saved or ran again is not what arithmetic says.
"""

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import bench_selective
import torch
from bench_report import garbage_collector_off, print_json, print_table
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from titan_offload import HostRuntime, OffloadConfig, Offloader, OffloadStats, apply_offload

PARTS = ("paced", "attention")
COPY_OVER_FORWARD = (0.2, 0.5, 1.0, 2.0, 4.0)
ROWS, DIM = 4096, 64  # of a block's input: 1 MiB
INPUT_BYTES = ROWS * DIM * 4
LATENESS_S, SHORT_SLEEP_S = 3e-3, 2e-4  # how late a long sleep may end; of which short ones make up


# The arithmetic


@dataclass(frozen=True)
class SimulatedStep:
    """What `simulate_step` foretells. Times are in the unit of its arguments.

    Attributes:
        step: forward and backward.
        d2h_wait: how long compute stood still for copies to the host.
        h2d_wait: how long it stood still for copies back.
        num_reloads: block inputs copied back.
        num_misses: those whose copy back started only when backward asked.
        num_resident: block inputs that backward found still on the device, their copy to the host under way.
    """

    step: float
    d2h_wait: float
    h2d_wait: float
    num_reloads: int
    num_misses: int
    num_resident: int


def simulate_step(
    num_blocks: int,
    forward: float,
    d2h: float,
    h2d: float,
    *,
    keep_last: int = 1,
    prefetch_lookahead: int = 1,
    max_inflight_offloads: int = 2,
    host_runs_ahead: bool = False,
) -> SimulatedStep:
    """One step of schedule "overlap" on a virtual clock, by the engine's rules.

    Compute runs block by block; each direction of the link does its copies one after the other, in the order given.

    Args:
        num_blocks: checkpointed blocks of the only model part.
        forward: time of a block's forward. Its recompute and backward take three times that.
        d2h: time of one copy to the host.
        h2d: time of one copy back.
        keep_last, prefetch_lookahead, max_inflight_offloads: see `OffloadConfig`.
        host_runs_ahead: whether the host has given the device the whole step before the first copy ends: then it never
            sees one ended, and the stash empties only by its limit. Default: host and device go in step, as with
            `HostRuntime`.
    """
    num_moved = num_blocks - keep_last
    now = d2h_free = h2d_free = d2h_wait = h2d_wait = 0.0
    on_host: list[float] = []  # per moved block: when its copy to the host ends
    stash: deque[int] = deque()

    def reap() -> None:
        while not host_runs_ahead and stash and on_host[stash[0]] <= now:
            stash.popleft()

    for k in range(num_blocks):
        reap()
        if k < num_moved:
            while max_inflight_offloads and len(stash) >= max_inflight_offloads:
                wait = max(0.0, on_host[stash.popleft()] - now)
                now, d2h_wait = now + wait, d2h_wait + wait
            d2h_free = max(d2h_free, now) + d2h
            on_host.append(d2h_free)
            stash.append(k)
        now += forward
    reap()  # when backward starts, and then no more: what is in the stash now is there when its block is reached
    resident = set(stash)
    ready: dict[int, float] = {}  # when the copy back ends
    num_misses = 0
    for k in reversed(range(num_blocks)):
        num_misses += k < num_moved and k not in resident and k not in ready
        for j in range(k, max(-1, k - prefetch_lookahead - 1), -1):
            if j < num_moved and j not in resident and j not in ready:
                ready[j] = h2d_free = max(h2d_free, now, on_host[j]) + h2d
        wait = max(0.0, ready.get(k, now) - now)
        now, h2d_wait = now + wait + 3 * forward, h2d_wait + wait
    return SimulatedStep(now, d2h_wait, h2d_wait, len(ready), num_misses, len(resident))


def sync_slowdown(copy_over_forward: float) -> float:
    """Of a step in which every block moves, as a fraction: two copies over four forwards."""
    return 2 * copy_over_forward / 4


def overlap_slowdown(copy_over_forward: float, max_inflight_offloads: int) -> float:
    """Steady state of a step in which every block moves, as a fraction."""
    out = max(0.0, copy_over_forward - 1) if max_inflight_offloads else 0.0
    return (out + max(0.0, copy_over_forward - 3)) / 4


# What is measured


class _Paced(torch.autograd.Function):
    """``x * weight`` in ``forward_s`` seconds, and its gradients in twice that."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, forward_s: float) -> torch.Tensor:
        end = time.perf_counter() + forward_s
        ctx.forward_s = forward_s
        out = x * weight
        _sleep_until(end)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors  # reloads the block's input and recomputes: not in this function's time
        end = time.perf_counter() + 2 * ctx.forward_s
        grads = grad * weight, (grad * x).sum(0)
        _sleep_until(end)
        return *grads, None


def _sleep_until(end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        # A busy machine wakes long sleepers late; it must not wait with the interpreter's lock, the copies need it.
        time.sleep(left - LATENESS_S if left > 2 * LATENESS_S else min(left, SHORT_SLEEP_S))


class Block(nn.Module):
    """One paced block."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(DIM))
        self.forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Paced.apply(x, self.weight, self.forward_s)


class Stack(nn.Module):
    """Paced blocks, each of them checkpointed; the same weights each time."""

    def __init__(self, num_blocks: int, forward_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(checkpoint_wrapper(Block(forward_s)) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x


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
        self.model.zero_grad()
        x.grad = None
        start = time.perf_counter()
        self.model(x).sum().backward()
        self.step_s.append(time.perf_counter() - start)
        if self.offloader is not None:
            self.stats.append(self.offloader.step_end())
        return [x.grad, *(weight.grad.clone() for weight in self.model.parameters())]

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


def run_rounds(variants: Sequence[TakesTurns], x: torch.Tensor, rounds: int) -> list[str]:
    """Lets the variants take turns. The first round pins memory and is not counted. Returns what went wrong."""
    problems = []
    with garbage_collector_off():
        for i in range(rounds + 1):
            expected = None
            for variant in variants:
                grads = variant.run(x)
                expected = grads if expected is None else expected
                problems += [f"round {i}: {problem}" for problem in variant.find_problems(grads, expected)]
                if i == 0:
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
    ratio, moved_fraction = variant.copy_over_forward, 1 - args.keep_last / args.blocks
    if variant.schedule == "sync":
        return {"closed_form_percent": sync_slowdown(ratio) * moved_fraction * 100}
    copy_ms = ratio * args.forward_ms
    simulated = simulate_step(
        args.blocks,
        args.forward_ms,
        copy_ms,
        copy_ms,
        keep_last=args.keep_last,
        prefetch_lookahead=args.lookahead,
        max_inflight_offloads=args.max_inflight,
    )
    return {
        "closed_form_percent": overlap_slowdown(ratio, args.max_inflight) * moved_fraction * 100,
        "simulated_percent": (simulated.step / (4 * args.blocks * args.forward_ms) - 1) * 100,
        "simulated": asdict(simulated),
    }


def print_rows(rows: Sequence[dict], args: argparse.Namespace) -> None:
    cells = [["AC alone", "", f"{rows[0]['step_ms']:.1f}", "", "", "", "", ""]]
    for row in rows[1:]:
        percents = (row.get(f"{name}_percent") for name in ("slowdown", "closed_form", "simulated"))
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
            "simulated %",
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
    add_attention_arguments(parser)
    args = parser.parse_args(argv)
    if args.blocks < 2 or args.rounds < 1 or args.forward_ms <= 0 or min(args.ratios) <= 0:
        parser.error("--blocks must be at least 2, --rounds at least 1, --forward-ms and --ratios more than 0")
    if not 0 <= args.keep_last < args.blocks or min(args.max_inflight, args.lookahead) < 0:
        parser.error("--keep-last must be from 0 to --blocks - 1, --max-inflight and --lookahead at least 0")
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
    torch.manual_seed(1)
    problems = run_rounds(variants, torch.randn(ROWS, DIM, requires_grad=True), args.rounds)
    rows = make_rows(variants, args)
    if not problems:
        print_rows(rows, args)
    return {"rows": rows}, problems


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
        part_results, problems = (run_paced if part == "paced" else run_attention)(args)
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
