"""The part of `bench_overlap.py` that ``--share N`` runs: ranks that share a port, with limit "memory" and "link".

    python scripts/bench_overlap.py --part paced --share 2
    python scripts/bench_overlap.py --part paced --share 2 --ratios 0.8 --blocks 16

N emulated ranks, a thread each, start each step together, and each runs the same paced stack with an offloader and a
`HostRuntime` of its own. All of them copy through one port (`HostLink`), on which a copy that nobody disturbs takes the
given ratio of a block's forward: while all copy, it takes N times that. Variants take turns:

    AC        activation checkpointing alone
    memory    every block moves, but for ``keep_last``
    link      as "memory" for three steps, which are not counted; then the blocks whose copies hide

The ranks measure the port as `apply_offload` does, alone and together. What each of them finds tells "link" how many
blocks to move, and `simulation.simulate_step` how long a step must take: of the slowest rank, since a step's time is
that of the slowest, too.
"""

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import torch
from bench_paced import INPUT_BYTES, Stack
from bench_report import print_table

from titan_offload import HostRuntime, OffloadConfig, Offloader, OffloadStats, apply_offload
from titan_offload.host_runtime import HostLink
from titan_offload.link import LinkRates, measure_link
from titan_offload.link_limit import NUM_WATCHED_STEPS
from titan_offload.planner.simulation import SimulatedStep, simulate_step

WARM_UP = NUM_WATCHED_STEPS
MEASURE_S = 1.5
CPU = torch.device("cpu")


@dataclass
class Rank:
    """One emulated rank. ``offloader`` is None for AC alone."""

    model: Stack
    offloader: Offloader | None = None
    stats: OffloadStats = field(default_factory=OffloadStats)

    @property
    def num_to_move(self) -> int:
        """Blocks that move in the next step."""
        if self.offloader is None:
            return 0
        choices = self.offloader.link_choices
        return choices[0].num_moved if choices else len(self.model.layers) - self.offloader.engine.config.keep_last

    def run(self, x: torch.Tensor, barrier: Callable[[], object]) -> tuple[list[torch.Tensor], float]:
        """One step. Returns the gradients, and the seconds."""
        self.model.zero_grad()
        x = x.detach().clone().requires_grad_()
        barrier()
        start = time.perf_counter()
        self.model(x).sum().backward()
        seconds = time.perf_counter() - start
        if self.offloader is not None:
            self.stats = self.offloader.step_end()
        return [x.grad, *(weight.grad.clone() for weight in self.model.parameters())], seconds


@dataclass
class Variant:
    """All ranks with one limit. ``limit`` is None for AC alone."""

    limit: str | None
    copy_over_forward: float
    ranks: list[Rank]
    pool: ThreadPoolExecutor
    barrier: threading.Barrier
    step_s: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)  # for copies, either way
    num_expected: list[int] = field(default_factory=list)  # blocks to be moved in the last step, of each rank

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One step of all ranks. Returns the gradients of one after the other."""
        self.num_expected = [rank.num_to_move for rank in self.ranks]
        done = list(self.pool.map(lambda rank: rank.run(x, self.barrier.wait), self.ranks))
        self.step_s.append(max(seconds for _, seconds in done))
        self.wait_ms.append(max(rank.stats.d2h_wait_ms + rank.stats.h2d_wait_ms for rank in self.ranks))
        return [grad for grads, _ in done for grad in grads]

    def forget_steps(self) -> None:
        self.step_s.clear()
        self.wait_ms.clear()

    def find_problems(self, grads: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
        name = f"limit {self.limit}, copy / forward {self.copy_over_forward}"
        num_moved = [rank.stats.num_offloads for rank in self.ranks]
        problems = []
        if not all(map(torch.equal, grads, expected)):
            problems.append(f"{name}: gradients differ from those of AC alone")
        if num_moved != self.num_expected:
            problems.append(f"{name}: moved {num_moved} block inputs, expected {self.num_expected}")
        return problems

    def median_ms(self) -> float:
        return statistics.median(self.step_s) * 1e3


@contextlib.contextmanager
def make_variants(ratio: float, args: argparse.Namespace) -> Iterator[list[Variant]]:
    """AC alone, "memory" and "link", on a port on which a copy takes ``ratio`` of a block's forward."""
    with ThreadPoolExecutor(args.share, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        shared = {"pool": pool, "barrier": threading.Barrier(args.share)}
        variants = [
            Variant(limit, ratio, _make_ranks(limit, ratio, args), **shared) for limit in (None, "memory", "link")
        ]
        rates = _measure(variants[-1])
        for variant in variants[1:]:
            for rank, rank_rates in zip(variant.ranks, rates, strict=True):
                rank.offloader.set_link(rank_rates)
        yield variants


def _make_ranks(limit: str | None, ratio: float, args: argparse.Namespace) -> list[Rank]:
    ranks = [Rank(Stack(args.blocks, args.forward_ms / 1e3)) for _ in range(args.share)]
    if limit is None:
        return ranks
    link = HostLink(INPUT_BYTES / (ratio * args.forward_ms * 1e6))
    config = OffloadConfig(
        limit=limit,
        keep_last=args.keep_last,
        prefetch_lookahead=args.lookahead,
        max_inflight_offloads=args.max_inflight,
    )
    for rank in ranks:
        rank.offloader = apply_offload(rank.model, config, runtime=HostRuntime(link=link))
    return ranks


def _measure(variant: Variant) -> list[LinkRates]:
    num_ranks = len(variant.ranks)

    def measure(position: int) -> LinkRates:
        runtime = variant.ranks[position].offloader.engine.runtime
        barrier = variant.barrier.wait
        return measure_link(runtime, CPU, position=position, num_turns=num_ranks, barrier=barrier, seconds=MEASURE_S)

    return list(variant.pool.map(measure, range(num_ranks)))


# What is told


def make_rows(variants: Sequence[Variant], args: argparse.Namespace) -> list[dict]:
    ac_ms = variants[0].median_ms()
    rows = []
    for variant in variants:
        row = {"limit": variant.limit, "copy_over_forward": variant.copy_over_forward}
        row |= {"step_ms": variant.median_ms(), "slowdown_percent": (variant.median_ms() / ac_ms - 1) * 100}
        if variant.limit is not None:
            row["wait_ms"] = statistics.median(variant.wait_ms)
            row |= {"num_moved": [rank.stats.num_offloads for rank in variant.ranks], "rates": _rates(variant)}
            steps = [predict(rank, args) for rank in variant.ranks]
            slowest = max(steps, key=lambda step: step.step)
            row["simulated_percent"] = (slowest.step / (4 * args.blocks * args.forward_ms) - 1) * 100
            row["simulated"] = asdict(slowest)
        rows.append(row)
    return rows


def predict(rank: Rank, args: argparse.Namespace) -> SimulatedStep:
    """A step in milliseconds, with the rates that this rank found while all copied."""
    rates, choices = rank.offloader.link.shared, rank.offloader.link_choices
    return simulate_step(
        args.blocks,
        args.forward_ms,
        INPUT_BYTES / rates.d2h_gb_per_s / 1e6,
        INPUT_BYTES / rates.h2d_gb_per_s / 1e6,
        keep_last=args.keep_last,
        num_moved=choices[0].num_moved if choices else None,
        num_arrived=choices[0].num_arrived if choices and args.max_inflight else None,
        prefetch_lookahead=args.lookahead,
        max_inflight_offloads=args.max_inflight,
    )


def _rates(variant: Variant) -> dict[str, dict[str, float]]:
    """Of the slowest rank, in GB/s."""
    found = [asdict(rank.offloader.link) for rank in variant.ranks]
    return {
        how: {name: min(rates[how][name] for rates in found) for name in found[0][how]} for how in ("alone", "shared")
    }


def print_rows(rows: Sequence[dict], args: argparse.Namespace) -> None:
    cells = []
    for row in rows:
        cell = [row["limit"] or "AC alone", f"{row['copy_over_forward']:g}", f"{row['step_ms']:.1f}"]
        if row["limit"] is not None:
            moved = sorted(set(row["num_moved"]))
            cell += [f"{row[f'{name}_percent']:.1f}" for name in ("slowdown", "simulated")]
            cell += [f"{row['wait_ms']:.1f}"]
            cell += [" to ".join(str(num) for num in (moved[0], moved[-1])[: len(moved)])]
            cell += [f"{row['rates'][how]['d2h_gb_per_s']:.4f}" for how in ("alone", "shared")]
        cells.append(cell + [""] * (9 - len(cell)))
    print_table(
        f"{args.share} ranks behind one port; each {args.blocks} blocks of {args.forward_ms:g} ms forward, keep_last "
        f"{args.keep_last}, max_inflight_offloads {args.max_inflight}, prefetch_lookahead {args.lookahead}",
        [
            "limit",
            "copy / forward",
            "step ms",
            "slower %",
            "simulated %",
            "wait ms",
            "blocks moved",
            "GB/s out alone",
            "GB/s out shared",
        ],
        cells,
        f"medians of {args.rounds} rounds, of the slowest rank; copy / forward is that of a rank that copies alone. AC "
        f"alone by arithmetic: {4 * args.blocks * args.forward_ms:.1f} ms",
    )
