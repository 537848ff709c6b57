"""Context parallel on gloo: the sequence is sharded, and attention exchanges keys and values, or heads."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toy
from context_parallel_cpu import let_context_parallel_run_on_cpu
from torch import nn
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._attention import (
    _context_parallel_shard,
    _ContextParallel,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
)
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _AllToAllRotater,
    _cp_options,
    flex_cp_allgather,
    set_rotate_method,
)
from torch.distributed.tensor.parallel import parallelize_module

from titan_offload import OffloadConfig, SelectiveConfig, apply_offload

HEADS, SEQ_DIM = 4, 2


class Attention(nn.Module):
    """Of the whole sequence on one rank: the reference, and what ``_ContextParallel`` wraps."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class GatheredAttention(nn.Module):
    """Gathers keys and values, by collectives that are pending while the mask is made."""

    def forward(self, q, k, v):
        gathered = [all_gather_tensor_autograd(x.flatten(), 0, group()) for x in (k, v)]
        assert all(isinstance(x, AsyncCollectiveTensor) for x in gathered)
        mask = causal_mask(q)
        key, value = (torch.cat(x.view(-1, *k.shape).unbind(), dim=SEQ_DIM) for x in gathered)
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask)


class FlexAttention(nn.Module):
    """Gathers them as torch does for FlexAttention, whose CPU kernel has no gradients."""

    def forward(self, q, k, v):
        gathered = flex_cp_allgather(k.contiguous(), v.contiguous(), SEQ_DIM, group().group_name)
        return F.scaled_dot_product_attention(q, *gathered, attn_mask=causal_mask(q))


class ExchangedHeads(nn.Module):
    """Each rank has all of the sequence for some heads, as in DeepSpeed Ulysses."""

    def forward(self, q, k, v):
        qkv = torch.stack([q, k, v]).chunk(dist.get_world_size(), dim=2)  # heads
        qkv = torch.cat(list(_exchange(torch.stack(qkv))), dim=SEQ_DIM + 1)
        out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        return torch.cat(list(_exchange(torch.stack(out.chunk(dist.get_world_size(), dim=SEQ_DIM)))), dim=1)


def _exchange(chunks):
    """Sends ``chunks[i]`` to rank i. Returns what all sent here."""
    received = all_to_all_single_autograd(chunks.flatten(), None, None, group())
    assert isinstance(received, AsyncCollectiveTensor)
    return received.view(chunks.shape)


def group():
    return dist.group.WORLD


def causal_mask(q):
    length = q.size(SEQ_DIM)
    rows = torch.arange(length) + dist.get_rank() * length
    return rows[:, None] >= torch.arange(length * dist.get_world_size())


class Block(nn.Module):
    def __init__(self, dim, attention):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.wqkv = nn.Linear(dim, 3 * dim)
        self.attention = attention()
        self.wo = nn.Linear(dim, dim)

    def forward(self, x, rope, mask=None):
        batch, length, dim = x.shape
        qkv = self.wqkv(self.norm(x) * rope).view(batch, length, 3, HEADS, dim // HEADS)
        out = self.attention(*qkv.permute(2, 0, 3, 1, 4))
        return x + self.wo(out.transpose(1, 2).reshape(x.shape))


def ring_model(rotate_method, balances):
    """Torch's own ring, put on attention modules as TorchTitan does."""
    let_context_parallel_run_on_cpu()
    _enable_context_parallel_dispatcher()
    set_rotate_method(rotate_method)
    _cp_options.enable_load_balance = balances
    model = toy.make_model(block=functools.partial(Block, attention=Attention))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = _ContextParallel(seq_dim=SEQ_DIM, attention_type=_ContextParallel.AttentionType.SDPA)
    for module in model.modules():
        if isinstance(module, Attention):
            parallelize_module(module, mesh, plan)
    return model


def make_sharded(kind):
    if kind.startswith("ring"):
        _, rotate_method, *balanced = kind.split()
        return ring_model(rotate_method, bool(balanced))
    attention = {"gather": GatheredAttention, "flex": FlexAttention, "heads": ExchangedHeads}[kind]
    return toy.make_model(block=functools.partial(Block, attention=attention))


def shard(tokens, kind):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    balancer = _HeadTailLoadBalancer(toy.SEQ, size, "cpu") if "balanced" in kind else None
    return _context_parallel_shard(mesh, [tokens], [1], load_balancer=balancer)[0]


def assert_sums_to(model, expected):
    """The ranks' gradients together are those of the whole sequence on one rank, but for rounding."""
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        total = p.grad / dist.get_world_size()
        dist.all_reduce(total)
        torch.testing.assert_close(total, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def check(rank, kind):
    size = dist.get_world_size()
    whole = toy.make_model(block=functools.partial(Block, attention=Attention))
    plain, moving = make_sharded(kind), make_sharded(kind)
    offloader = toy.offload(moving)
    for seed in range(2):
        tokens = toy.make_tokens(seed)
        for model in (whole, plain, moving):
            model.zero_grad()
        whole.loss(tokens).backward()
        for model in (plain, moving):
            model.loss(shard(tokens, kind)).backward()
        toy.assert_same_grads(moving, plain)
        assert_sums_to(moving, whole)
        stats = offloader.step_end()
        assert (stats.num_offloads, stats.offloaded_bytes) == (5, 5 * toy.INPUT_BYTES // size)
        assert stats.num_misses == 0
        assert toy.slots_in_use(offloader) == 0


RINGS = [
    f"ring {method}{balance}" for method, balance in itertools.product(["allgather", "alltoall"], ["", " balanced"])
]


@pytest.mark.parametrize("kind", [*RINGS, "gather", "flex", "heads"])
def test_block_inputs_of_a_sharded_sequence_move(kind, on_gloo):
    on_gloo(functools.partial(check, kind=kind), 2)


@pytest.mark.parametrize("kind", ["ring alltoall balanced", "heads"])
def test_on_four_ranks(kind, on_gloo):
    on_gloo(functools.partial(check, kind=kind), 4)


def check_saved_attention(rank):
    """What the ring of a block returns is saved: backward exchanges no keys and values to recompute it."""
    plain, moving = ring_model("alltoall", True), ring_model("alltoall", True)
    config = OffloadConfig(min_offload_mib=0.0)
    selective = SelectiveConfig(save_ops=("attention",), offload=True)
    offloader = apply_offload(moving, config, selective, runtime=toy.slow_link())
    exchange, exchanged = _AllToAllRotater.exchange_buffers, []
    _AllToAllRotater.exchange_buffers = lambda *args: (exchanged.append(rank), exchange(*args))[1]
    num_exchanges = []
    for model in (plain, moving):
        loss = model.loss(shard(toy.make_tokens(), "ring alltoall balanced"))
        exchanged.clear()
        loss.backward()
        num_exchanges.append(len(exchanged))
    toy.assert_same_grads(moving, plain)
    stats = offloader.step_end()
    logsumexp_bytes = toy.BATCH * HEADS * toy.SEQ * 4
    assert stats.saved == {'save_ops "attention"': (6, 6 * (toy.INPUT_BYTES + logsumexp_bytes) // 2)}
    assert (stats.num_offloads, stats.offloaded_bytes) == (5 * 3, 5 * (2 * toy.INPUT_BYTES + logsumexp_bytes) // 2)
    # On two ranks: of keys and values in a recompute and in backward, twice of their gradients in backward.
    assert num_exchanges == [6 * 4, 6 * 3]
    assert toy.slots_in_use(offloader) == 0


def test_saved_attention_is_not_exchanged_again(on_gloo):
    on_gloo(check_saved_attention)


def check_pending(rank):
    """The hidden state goes to the other rank before each block."""
    pending = []

    def exchange(i, h):
        x = all_to_all_single_autograd(h.flatten(), None, None, group()).view(h.shape)
        pending.append(isinstance(x, AsyncCollectiveTensor) and x.requires_grad and not x.completed)
        x.register_hook(lambda grad: grads.append(grad))
        return x

    grads = []
    plain, moving = toy.make_model(), toy.make_model()
    plain.between = moving.between = exchange
    offloader = toy.offload(moving, keep_last=0)
    for model in (plain, moving):
        model.loss(toy.make_tokens(rank)).backward()
    assert pending == [True] * 2 * toy.NUM_BLOCKS
    toy.assert_same_grads(moving, plain)
    half = len(grads) // 2
    assert half == toy.NUM_BLOCKS and all(map(torch.equal, grads[:half], grads[half:]))
    assert offloader.step_end().num_offloads == toy.NUM_BLOCKS
    assert toy.slots_in_use(offloader) == 0


def test_pending_inputs_that_pass_a_gradient_back(on_gloo):
    """The gradient of what a block was given starts a collective, too."""
    on_gloo(check_pending)
