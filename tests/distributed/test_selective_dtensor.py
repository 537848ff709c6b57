"""Selective saves of DTensors, of what collectives return, and under FSDP2, on gloo."""

import weakref

import attention_toy as at
import pytest
import torch
import torch.distributed as dist
import toy
from dtensor_toy import dtensor_model, run_dtensor
from torch import nn
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from toy import slow_link

from titan_offload import (
    HostRuntime,
    OffloadConfig,
    SelectiveConfig,
    apply_offload,
    register_mandatory_save,
    register_preferred_save,
)
from titan_offload import selective as selective_module

MOVE_ALL = OffloadConfig(min_offload_mib=0.0)
NUM_BLOCKS = 4


# DTensors


class DTensorBlock(nn.Module):
    """``edit``: whether an output of a matmul is edited in place afterwards."""

    edit = False

    def __init__(self, dim):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x, rope):
        h = self.w1(x)
        if self.edit:
            h.mul_(2)
        return x + self.w2(torch.tanh(h) * rope)


class EditingBlock(DTensorBlock):
    edit = True


def check_dtensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    expected = dtensor_model(mesh, block=DTensorBlock, num_blocks=NUM_BLOCKS)
    run_dtensor(expected, mesh, 4).backward()
    for offloads in (False, True):
        model = dtensor_model(mesh, block=DTensorBlock, num_blocks=NUM_BLOCKS)
        config = SelectiveConfig(save_ops=(), save_modules=("w1",), offload=offloads)
        offloader = apply_offload(model, MOVE_ALL, config, runtime=slow_link())
        loss = run_dtensor(model, mesh, 4)
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
            for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                assert p.grad is None or torch.equal(p.grad._local_tensor, q.grad._local_tensor)
                assert p.grad is None or p.grad.placements == q.grad.placements
        del loss
        stats = offloader.step_end()
        local_bytes = 2 * toy.SEQ * toy.DIM * 4  # half of a batch of 4
        assert stats.saved == {'save_modules "w1"': (NUM_BLOCKS, NUM_BLOCKS * local_bytes)}
        assert stats.num_offloads == (NUM_BLOCKS - 1) * (2 if offloads else 1)
        assert stats.offloaded_bytes == stats.num_offloads * local_bytes
        assert toy.slots_in_use(offloader) == 0


def test_dtensors_are_saved_and_moved_as_local_tensors(on_gloo):
    on_gloo(check_dtensor)


def check_memory_of_dtensors(rank):
    mesh = init_device_mesh("cpu", (2,))
    outputs: list[weakref.ref] = []
    keep = selective_module.keep

    def spy(output, *args):
        outputs.append(weakref.ref(output._local_tensor.untyped_storage()))
        return keep(output, *args)

    selective_module.keep = spy  # of this process
    model = dtensor_model(mesh, block=DTensorBlock, num_blocks=NUM_BLOCKS)
    config = OffloadConfig(mode="none", min_offload_mib=0.0, schedule="sync")
    selective = SelectiveConfig(save_ops=(), save_modules=("w1",), offload=True)
    apply_offload(model, config, selective, runtime=HostRuntime())
    loss = run_dtensor(model, mesh, 4)
    assert [ref() is not None for ref in outputs] == [False] * (NUM_BLOCKS - 1) + [True]
    loss.backward()


def test_moved_dtensors_leave_the_device(on_gloo):
    on_gloo(check_memory_of_dtensors)


def check_edited_dtensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    for offloads in (False, True):
        for runtime in (HostRuntime(), slow_link()):
            model = dtensor_model(mesh, block=EditingBlock, num_blocks=NUM_BLOCKS)
            config = SelectiveConfig(save_ops=(), save_modules=("w1",), offload=offloads)
            apply_offload(model, MOVE_ALL, config, runtime=runtime)
            with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
                run_dtensor(model, mesh, 4).backward()


def test_in_place_edit_of_a_saved_dtensor_is_an_error(on_gloo):
    on_gloo(check_edited_dtensor)


# Exchanges among ranks


class Dispatch(nn.Module):
    """Sends rows to the other rank and back. How many is decided by noise, another one in recompute.

    The sizes are exchanged first, as expert parallel does, and copied to the host.
    """

    def forward(self, x):
        rank, group = dist.get_rank(), dist.group.WORLD
        seed = 10 * rank + (1 if at.in_backward() and self.is_noisy else 0)
        first = torch.randint(1, len(x) - 1, (), generator=torch.Generator().manual_seed(seed))
        sizes = torch.stack([first, len(x) - first])
        with torch.no_grad():
            received = wait_tensor(all_to_all_single(sizes, None, None, group))
        sent, got = [size.item() for size in sizes], [size.item() for size in received]
        there = wait_tensor(all_to_all_single_autograd(x, got, sent, group))
        there = there * torch.arange(1, len(there) + 1).unsqueeze(1)
        return wait_tensor(all_to_all_single_autograd(there, sent, got, group))

    is_noisy = True


class DispatchBlock(at.AttentionBlock):
    def __init__(self, dim):
        super().__init__(dim)
        self.dispatch = Dispatch()

    def forward(self, x, rope, mask=None):
        x = super().forward(x, rope)
        return x + torch.tanh(self.dispatch(x.flatten(0, 1)).view_as(x))


def check_dispatch(rank):
    tokens = toy.make_tokens(seed=rank)
    Dispatch.is_noisy = False
    expected = at.make_model(DispatchBlock, num_blocks=NUM_BLOCKS)
    expected.loss(tokens).backward()
    Dispatch.is_noisy = True
    ops = ("aten::_local_scalar_dense", "_c10d_functional::all_to_all_single")
    saves = [register_mandatory_save(op, "dispatch", reason="sizes differ in recompute") for op in ops]
    for offloads in (False, True):
        model = at.make_model(DispatchBlock, num_blocks=NUM_BLOCKS)
        apply_offload(model, MOVE_ALL, SelectiveConfig(offload=offloads), runtime=slow_link())
        model.loss(tokens).backward()
        toy.assert_same_grads(model, expected)
    for save in saves:
        save.remove()
    model = at.make_model(DispatchBlock, num_blocks=NUM_BLOCKS)
    apply_offload(model, MOVE_ALL, SelectiveConfig(), runtime=slow_link())
    try:
        model.loss(tokens).backward()
    except torch.utils.checkpoint.CheckpointError:
        return  # shapes of saved tensors differ
    grads = zip(model.parameters(), expected.parameters(), strict=True)
    assert not all(torch.equal(p.grad, q.grad) for p, q in grads)


def test_exchange_whose_sizes_differ_in_recompute(on_gloo):
    """F47."""
    on_gloo(check_dispatch)


class LastOp(at.CountOps):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.name = func.name()
        return super().__torch_dispatch__(func, types, args, kwargs)


def check_waits(rank):
    collective, wait = "_c10d_functional::all_to_all_single", "_c10d_functional::wait_tensor"
    keep = selective_module.keep
    for register, offloads, last in (
        (register_mandatory_save, False, wait),
        (register_preferred_save, True, wait),
        (register_preferred_save, False, collective),  # what is only kept is waited for where it is used
    ):
        with at.removed_afterwards(register(collective, "dispatch", reason="test")):
            model = at.make_model(DispatchBlock, num_blocks=NUM_BLOCKS)
            config = SelectiveConfig(save_ops=(), offload=offloads)
            apply_offload(model, MOVE_ALL, config, runtime=slow_link())
        seen = []
        with LastOp() as op:
            selective_module.keep = lambda *args, op=op, seen=seen: (seen.append(op.name), keep(*args))[1]
            model.loss(toy.make_tokens(seed=rank))
        assert seen == [last] * 3 * NUM_BLOCKS


def test_what_is_cloned_or_moved_is_waited_for(on_gloo):
    on_gloo(check_waits)


class PendingBlock(at.AttentionBlock):
    """Uses what an exchange returns as torch's functional collectives do: pending, until something reads it."""

    def forward(self, x, rope, mask=None):
        x = super().forward(x, rope)
        there = all_to_all_single_autograd(x.flatten(0, 1), None, None, dist.group.WORLD)
        assert isinstance(there, AsyncCollectiveTensor)
        return x + torch.tanh(there.view_as(x))


def check_pending(rank):
    tokens = toy.make_tokens(seed=rank)
    expected = at.make_model(PendingBlock, num_blocks=NUM_BLOCKS)
    expected.loss(tokens).backward()
    for offloads in (False, True):
        model = at.make_model(PendingBlock, num_blocks=NUM_BLOCKS)
        config = SelectiveConfig(save_ops=("all_to_all_single", "aten::tanh"), offload=offloads)
        offloader = apply_offload(model, MOVE_ALL, config, runtime=slow_link())
        model.loss(tokens).backward()
        toy.assert_same_grads(model, expected)
        assert offloader.step_end().saved['save_ops "all_to_all_single"'][0] == NUM_BLOCKS


def test_exchanges_that_are_pending(on_gloo):
    on_gloo(check_pending)


# FSDP2


class NestedBlock(at.AttentionBlock):
    """Its feed-forward is gathered by itself: in forward within the region, in recompute perhaps not again."""


def sharded(model, reshard):
    for block in model.layers.values():
        fully_shard(block.feed_forward, reshard_after_forward=reshard)
        fully_shard(block, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


def check_fsdp(rank):
    tokens = toy.make_tokens(seed=rank)
    for reshard in (True, False):
        expected = sharded(at.make_model(NestedBlock, num_blocks=NUM_BLOCKS), reshard)
        expected.loss(tokens).backward()
        for options in ({"save_modules": ("wo", "w1")}, {"save_ops": ("aten::mm", "aten::tanh")}):
            for offloads in (False, True):
                model = sharded(at.make_model(NestedBlock, num_blocks=NUM_BLOCKS), reshard)
                config = SelectiveConfig(offload=offloads, **options)
                offloader = apply_offload(model, MOVE_ALL, config, runtime=slow_link())
                for _ in range(2):
                    model.zero_grad()
                    model.loss(tokens).backward()
                    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                        assert isinstance(p.grad, DTensor)
                        assert torch.equal(p.grad._local_tensor, q.grad._local_tensor)
                    assert offloader.step_end().saved


def test_fsdp2_with_modules_that_are_gathered_within_a_region(on_gloo):
    """F52."""
    on_gloo(check_fsdp)
