"""The second part of `bench_overlap.py`: what saving attention spares of recompute, and what it moves for that.

    python scripts/bench_overlap.py --part attention
    python scripts/bench_overlap.py --part attention --tokens 16384 --attention-rounds 5

One step is forward and backward of a stack of checkpointed transformer blocks with causal attention, float32, one
sequence. They are not paced: all time is that of real work. Variants of each sequence length take turns, as in the
first part:

    AC                   activation checkpointing alone: backward runs attention's forward again
    + saved on device    attention's output and log-sum-exp are saved instead, and stay where they are
    + saved on host      they are moved to host memory, those of the last block excepted (`keep_last`)
    + inputs on host     and so are the blocks' inputs
    attention alone      attention's forward once per block, and nothing else: about the most that can be spared

The link is as fast as the memory copies, and nothing fills memory with patterns. On a CPU the copies need a core and
the memory's bandwidth, as the blocks do, so compute gets one thread, and another core is left for the copies; what they
take from the blocks all the same, an accelerator's copy engines would not.

In each step gradients, bytes saved, bytes moved and (in the first, whose time is not counted) the attention forwards
run in backward are compared with what they must be.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from bench_report import print_table
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from titan_offload import HostRuntime, OffloadConfig, Offloader, OffloadStats, SelectiveConfig, apply_offload
from titan_offload.config import MIB
from titan_offload.save_policy import is_attention

TOKENS = (2048, 8192)
DIM, HEADS = 128, 4
ALONE = "attention alone"

CONFIGS = {
    "AC": None,
    "+ saved on device": (OffloadConfig(mode="none"), SelectiveConfig()),
    "+ saved on host": (OffloadConfig(mode="none", min_offload_mib=0.0), SelectiveConfig(offload=True)),
    "+ inputs on host": (OffloadConfig(min_offload_mib=0.0), SelectiveConfig(offload=True)),
}


# The arithmetic


def input_bytes(tokens: int) -> int:
    """Of a block."""
    return tokens * DIM * 4


def saved_bytes(tokens: int) -> int:
    """Of a block's attention: the output, as large as the block's input, and the log-sum-exp of each row of scores."""
    return input_bytes(tokens) + HEADS * tokens * 4


# What is measured


class Block(nn.Module):
    """Causal attention and a feed-forward of four times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = attend(self.wqkv(self.norm1(x)))
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


def attend(qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def make_model(num_blocks: int) -> nn.Sequential:
    """Checkpointed blocks; the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(checkpoint_wrapper(Block()) for _ in range(num_blocks)))


class CountAttention(TorchDispatchMode):
    """How many attention forwards really run: one that a region's own modes answer does not come this far."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += is_attention(func)
        return func(*args, **(kwargs or {}))


@dataclass
class AttentionVariant:
    """One way to run the step. ``offloader`` is None for AC alone. The first step counts what backward runs."""

    name: str
    tokens: int
    model: nn.Sequential
    offloader: Offloader | None = None
    step_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    stats: list[OffloadStats] = field(default_factory=list)
    num_attention_forwards: int | None = None

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One step. Returns the gradients: of the input, then of each parameter."""
        self.model.zero_grad()
        x.grad = None
        count = CountAttention() if self.num_attention_forwards is None else None
        start = time.perf_counter()
        loss = self.model(x).sum()
        middle = time.perf_counter()
        with count or nullcontext():
            loss.backward()
        end = time.perf_counter()
        self.step_s.append(end - start)
        self.backward_s.append(end - middle)
        self.stats.append(OffloadStats() if self.offloader is None else self.offloader.step_end())
        if count is not None:
            self.num_attention_forwards = count.num
        return [x.grad, *(parameter.grad for parameter in self.model.parameters())]

    def forget_steps(self) -> None:
        for samples in (self.step_s, self.backward_s, self.stats):
            samples.clear()

    def find_problems(self, grads: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
        name = f"{self.tokens} tokens, {self.name}"
        problems = []
        if not all(map(torch.equal, grads, expected)):
            problems.append(f"{name}: gradients differ from those of AC alone")
        numbers = self.numbers()
        for what, number in self.expected_numbers().items():
            if numbers[what] != number:
                problems.append(f"{name}: {what} {numbers[what]}, expected {number}")
        return problems

    def numbers(self) -> dict[str, int]:
        """What the last step did."""
        stats = self.stats[-1]
        return {
            "bytes saved": sum(num_bytes for _, num_bytes in stats.saved.values()),
            "bytes moved to the host": stats.offloaded_bytes,
            "attention forwards in backward": self.num_attention_forwards,
        }

    def expected_numbers(self) -> dict[str, int]:
        """What each step is to do, by arithmetic."""
        num_blocks = len(self.model)
        if self.offloader is None:
            moved_per_block, num_moved = 0, 0
        else:
            config = self.offloader.engine.config
            moved_per_block = saved_bytes(self.tokens) if self.offloader.saves.offloads else 0
            moved_per_block += input_bytes(self.tokens) if config.mode == "block_inputs" else 0
            num_moved = num_blocks - config.keep_last
        return {
            "bytes saved": 0 if self.offloader is None else num_blocks * saved_bytes(self.tokens),
            "bytes moved to the host": num_moved * moved_per_block,
            "attention forwards in backward": num_blocks if self.offloader is None else 0,
        }


@dataclass
class AttentionAlone:
    """Attention's forward once per block, and nothing else. Takes turns with the variants."""

    tokens: int
    num_blocks: int
    step_s: list[float] = field(default_factory=list)

    @torch.no_grad()
    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        qkv = torch.cat([x, x, x], -1)
        start = time.perf_counter()
        for _ in range(self.num_blocks):
            attend(qkv)
        self.step_s.append(time.perf_counter() - start)
        return []

    def forget_steps(self) -> None:
        self.step_s.clear()

    def find_problems(self, grads: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
        return []


def make_variants(tokens: int, num_blocks: int) -> list[AttentionVariant | AttentionAlone]:
    variants = []
    for name, configs in CONFIGS.items():
        model, offloader = make_model(num_blocks), None
        if configs is not None:
            offloader = apply_offload(model, *configs, blocks="*", runtime=HostRuntime(strict=False))
        variants.append(AttentionVariant(name, tokens, model, offloader))
    return [*variants, AttentionAlone(tokens, num_blocks)]


def make_input(tokens: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, tokens, DIM, requires_grad=True)


# What is told

COLUMNS = (
    "tokens",
    "variant",
    "step\nms",
    "backward\nms",
    "spared\nms",
    "spared\n%",
    "MiB\nsaved /\nblock",
    "MiB\nto host",
    "attention\nin\nbackward",
)


def make_rows(variants: Sequence[AttentionVariant | AttentionAlone]) -> list[dict]:
    """One row per variant of one sequence length. AC is the first; attention alone, the last."""
    *variants, alone = variants
    ac_ms = median_ms(variants[0].step_s)
    rows = [make_row(variant, ac_ms) for variant in variants]
    return [*rows, {"tokens": alone.tokens, "variant": ALONE} | spared(median_ms(alone.step_s), ac_ms)]


def make_row(variant: AttentionVariant, ac_ms: float) -> dict:
    step_ms, numbers = median_ms(variant.step_s), variant.numbers()
    row = {"tokens": variant.tokens, "variant": variant.name, "step_ms": step_ms}
    row |= {"backward_ms": median_ms(variant.backward_s)} | spared(ac_ms - step_ms, ac_ms)
    row |= {
        "saved_bytes_per_block": numbers["bytes saved"] // len(variant.model),
        "to_host_bytes": numbers["bytes moved to the host"],
        "attention_forwards_in_backward": numbers["attention forwards in backward"],
    }
    names = ("reloaded_bytes", "num_resident", "d2h_wait_ms", "h2d_wait_ms")
    return row | {name: statistics.median(getattr(stats, name) for stats in variant.stats) for name in names}


def spared(ms: float, ac_ms: float) -> dict[str, float]:
    return {"recompute_spared_ms": ms, "recompute_spared_percent": ms / ac_ms * 100}


def median_ms(samples_s: Sequence[float]) -> float:
    return statistics.median(samples_s) * 1e3


def print_rows(rows: Sequence[dict], args: argparse.Namespace) -> None:
    print_table(
        f"recompute time spared and bytes moved by saving attention, {args.attention_blocks} checkpointed blocks",
        COLUMNS,
        [make_cells(row) for row in rows],
        f"medians of {args.attention_rounds} rounds. spared: AC's step minus the variant's; of attention alone, about "
        f"the most that can be. Threads of compute: {torch.get_num_threads()}; copies have their own, and compete with "
        f"it for cores and memory. {DIM} wide, {HEADS} heads, float32",
    )


def make_cells(row: dict) -> list[str]:
    def cell(name: str, spec: str = ".1f", unit: int = 1) -> str:
        return format(row[name] / unit, spec) if name in row else ""

    is_ac = row["variant"] == "AC"
    return [
        str(row["tokens"]),
        row["variant"],
        cell("step_ms"),
        cell("backward_ms"),
        "" if is_ac else cell("recompute_spared_ms"),
        "" if is_ac else cell("recompute_spared_percent"),
        cell("saved_bytes_per_block", ".3f", MIB),
        cell("to_host_bytes", ".3f", MIB),
        cell("attention_forwards_in_backward", ".0f"),
    ]
