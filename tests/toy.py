"""A small transformer-shaped model whose blocks are called as TorchTitan 0.2.2 calls its own."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from titan_offload import HostRuntime, OffloadConfig, Offloader, apply_offload

VOCAB, DIM, NUM_BLOCKS = 50, 32, 6
BATCH, SEQ = 2, 16
INPUT_BYTES = BATCH * SEQ * DIM * 4


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1 = nn.Linear(dim, 2 * dim)
        self.w2 = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.w2(torch.tanh(self.w1(self.norm(x) * rope)))


class Model(nn.Module):
    """``between`` may change the hidden state before each block; ``call`` says how a block is called; ``wrap`` is done
    to each block."""

    def __init__(
        self,
        num_blocks: int = NUM_BLOCKS,
        dim: int = DIM,
        block: type[nn.Module] = Block,
        wrap: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.register_buffer("rope", torch.linspace(0.5, 1.5, dim), persistent=False)
        self.layers = nn.ModuleDict({str(i): wrap(block(dim)) for i in range(num_blocks)})
        self.head = nn.Linear(dim, VOCAB)
        self.between: Callable[[int, torch.Tensor], torch.Tensor] = lambda i, h: h
        self.call: Callable[..., torch.Tensor] = lambda block, h, rope: block(h, rope, mask=None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.emb(tokens)
        for i, block in enumerate(self.layers.values()):
            h = self.call(block, self.between(i, h), self.rope)
        return self.head(h)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())


def make_model(seed: int = 0, **kwargs) -> Model:
    torch.manual_seed(seed)
    return Model(**kwargs)


def make_tokens(seed: int = 0, batch: int = BATCH, seq: int = SEQ) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


def slow_link() -> HostRuntime:
    """A slow, jittery link, so that a wait that is missing shows."""
    return HostRuntime(link_gb_per_s=0.004, jitter_ms=1.0, seed=1)


def offload(model: nn.Module, *, runtime: HostRuntime | None = None, **config) -> Offloader:
    """Applies offload over a slow link, unless a runtime is given."""
    return apply_offload(model, OffloadConfig(min_offload_mib=0.0, **config), runtime=runtime or slow_link())


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


def assert_same_grads(got: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def slots_in_use(offloader: Offloader) -> int:
    return offloader.engine.pool.num_slots_in_use
