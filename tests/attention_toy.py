"""A small transformer with attention and, if asked, a MoE router: what selective saves are tried on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import toy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

DIM, HEADS, SEQ, BATCH = 32, 4, 16, 2
ATTENTION_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BYTES = BATCH * SEQ * DIM * 4 + BATCH * HEADS * SEQ * 4  # output and log-sum-exp, float32


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.tanh(self.w1(x)))


class AttentionBlock(nn.Module):
    """Called with ``(x, rope, mask=None)``, as `toy.Model` does."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.feed_forward = Attention(dim), FeedForward(dim)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x) * rope)
        return x + self.feed_forward(self.norm2(x))


def make_model(block: type[nn.Module] = AttentionBlock, **kwargs) -> toy.Model:
    return toy.make_model(block=block, dim=DIM, **kwargs)


class CountOps(TorchDispatchMode):
    """How often each op ran. A mode that is pushed before checkpoint's own sees only what really runs."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.num: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num[func.name()] = self.num.get(func.name(), 0) + 1
        return func(*args, **(kwargs or {}))


def num_ops_in_backward(model: toy.Model, tokens: torch.Tensor) -> dict[str, int]:
    loss = model.loss(tokens)
    with CountOps() as count:
        loss.backward()
    return count.num


@contextmanager
def removed_afterwards(*saves) -> Iterator[None]:
    try:
        yield
    finally:
        for save in saves:
            save.remove()


# Mixture of experts


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Router(nn.Module):
    """Scores for ``(tokens, experts)``, and the ``top_k`` best. ``perturb`` may change the logits."""

    def __init__(self, dim: int, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.top_k = top_k

    def perturb(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.perturb(self.gate(x)).float().softmax(-1)
        return scores, scores.topk(self.top_k, dim=-1).indices


class MoE(nn.Module):
    """Every expert runs on every token, weighted by 0 where it was not picked: no shape depends on the routing."""

    router_type: type[Router] = Router

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router = self.router_type(dim)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        scores, picked = self.router(flat)
        weights = torch.zeros_like(scores).scatter(1, picked, scores.gather(1, picked))
        out = sum(weights[:, i : i + 1] * expert(flat) for i, expert in enumerate(self.experts))
        return out.view_as(x)


class MoEBlock(AttentionBlock):
    moe_type: type[MoE] = MoE

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        self.feed_forward = self.moe_type(dim)
