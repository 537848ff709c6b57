"""Blocks that take a given time: what `bench_overlap` and `bench_share` run.

Each does its (small) work for real and then sleeps until its time is over, once for forward and recompute, twice for
backward.
"""

import time

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

ROWS, DIM = 4096, 64  # of a block's input: 1 MiB
INPUT_BYTES = ROWS * DIM * 4
LATENESS_S, SHORT_SLEEP_S = 3e-3, 2e-4  # how late a long sleep may end; of which short ones make up


def make_input() -> torch.Tensor:
    """Of the first block; the same each time."""
    torch.manual_seed(1)
    return torch.randn(ROWS, DIM, requires_grad=True)


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
