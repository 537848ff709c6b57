"""A table that FSDP2 casts for each block: one cast per forward pass, and never one of something else."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from toy import NUM_BLOCKS, Block, Model, assert_same_grads, make_model, make_tokens, offload

from titan_offload import SelectiveConfig, apply_offload
from titan_offload.cast_inputs import SharedCasts, look
from titan_offload.config import OffloadConfig


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TellingBlock(Block):
    """Notes the storage of the table of each forward, recompute left out. What is noted while graphs are alive cannot
    be recycled, as each region keeps its table."""

    tables: list[int]

    def forward(self, x: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:
            self.tables.append(rope.untyped_storage()._cdata)
        return super().forward(x, rope, mask)


def sharded(param_dtype: torch.dtype | None = torch.bfloat16, block: type[TellingBlock] = TellingBlock) -> Model:
    """The toy under FSDP2 as TorchTitan has it."""
    TellingBlock.tables = []
    model = make_model(block=block)
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def train(model: Model, *seeds: int) -> None:
    """Forwards of all, then their backwards."""
    for loss in [model.loss(make_tokens(seed)) for seed in seeds]:
        loss.backward()


def num_tables() -> int:
    return len(set(TellingBlock.tables))


def test_blocks_share_one_cast_of_their_table():
    """Guards: device memory that grows by a table per block."""
    expected = sharded()
    loss = expected.loss(make_tokens(1))
    assert num_tables() == NUM_BLOCKS
    loss.backward()
    model = sharded()
    offload(model)
    loss = model.loss(make_tokens(1))
    assert len(TellingBlock.tables) == NUM_BLOCKS
    assert num_tables() == 1
    loss.backward()
    assert_same_grads(model, expected)


def test_each_forward_pass_has_its_own_and_none_is_left():
    """Guards: a pass that keeps another one's memory, and one that outlives its backward."""
    model = sharded()
    offloader = offload(model)
    losses = [model.loss(make_tokens(seed)) for seed in (1, 2)]
    assert num_tables() == 2
    assert len(offloader.engine.tapes.alive()) == 2
    for loss in losses:
        loss.backward()
    del loss, losses
    assert offloader.engine.tapes.alive() == []


def test_casts_are_shared_beside_selective_saves():
    expected, model = sharded(), sharded()
    selective = SelectiveConfig(save_ops=("aten::tanh",), save_modules=("w1",))
    apply_offload(model, OffloadConfig(min_offload_mib=0.0), selective, budget_bytes=2**20)
    train(expected, 1)
    TellingBlock.tables.clear()
    loss = model.loss(make_tokens(1))
    assert num_tables() == 1
    loss.backward()
    assert_same_grads(model, expected)


def test_a_table_that_changes_between_blocks_is_cast_again():
    """Guards: the version of the source."""

    def scale(i: int, h: torch.Tensor, model: Model) -> torch.Tensor:
        if i == 3:
            model.rope.mul_(1.5)
        return h

    expected, model = sharded(), sharded()
    offload(model)
    for each in (expected, model):
        each.between = lambda i, h, each=each: scale(i, h, each)
        each.loss(make_tokens(1)).backward()
    assert_same_grads(model, expected)


def test_a_table_that_is_made_for_each_block_is_its_own():
    """Guards: memory that is recycled from one block's table for the next one's, at the same version."""

    def call(block: torch.nn.Module, h: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        return block(h, rope + len(TellingBlock.tables))

    expected, model = sharded(), sharded()
    offload(model)
    for each in (expected, model):
        TellingBlock.tables.clear()
        each.call = call
        each.loss(make_tokens(1)).backward()
        assert num_tables() == NUM_BLOCKS
    assert_same_grads(model, expected)


def test_a_table_with_the_identity_of_a_dead_one_is_another():
    """Guards: identities that are recycled, of storages that are alive and of dead ones."""
    first, second = torch.rand(4), torch.rand(4)
    [given], casts = look((first,)), SharedCasts()
    cast = first.bfloat16()
    assert casts.share([given], (cast,)) == (cast,)
    assert casts.share([given], (first.bfloat16(),))[0].data_ptr() == cast.data_ptr()
    recycled = replace(given, storage=weakref.ref(second.untyped_storage()))
    own = second.bfloat16()
    assert casts.share([recycled], (own,))[0] is own
    casts.share([given], (cast,))
    del first
    assert given.storage() is None
    assert casts.share([given], (own,))[0] is own


def test_a_view_of_a_table_is_another_table():
    """Guards: the place within the storage."""

    def call(block: torch.nn.Module, h: torch.Tensor, long: torch.Tensor) -> torch.Tensor:
        return block(h, long[len(TellingBlock.tables) :][: len(long) // 2])

    expected, model = sharded(), sharded()
    offload(model)
    for each in (expected, model):
        TellingBlock.tables.clear()
        each.rope = each.rope.repeat(2)
        each.call = call
        each.loss(make_tokens(1)).backward()
    assert_same_grads(model, expected)


def test_a_cast_that_a_block_changes_is_no_other_blocks():
    """Guards: the version of the cast. That the block itself is recomputed with a changed table is an error, with
    offload and without: here it has no backward."""

    class ChangingBlock(TellingBlock):
        def forward(self, x: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            out = super().forward(x, rope, mask)
            rope.mul_(2.0)
            return out

    expected, model = sharded(block=ChangingBlock), sharded(block=ChangingBlock)
    offload(model)
    assert torch.equal(model(make_tokens(1)), expected(make_tokens(1)))


def test_what_another_hook_makes_of_a_table_is_not_shared():
    """Guards: an input that is no cast of what the block was given."""

    def add(block: torch.nn.Module, args: tuple) -> tuple:
        h, rope = args
        return h, rope + len(TellingBlock.tables)

    expected, model = sharded(), sharded()
    offload(model)
    for each in (expected, model):
        TellingBlock.tables.clear()
        for block in each.layers.values():
            block.register_forward_pre_hook(add)
        each.loss(make_tokens(1)).backward()
    assert_same_grads(model, expected)


def test_without_a_cast_nothing_changes():
    model = sharded(param_dtype=None)
    offload(model)
    assert all(len(block._forward_pre_hooks) == 1 for block in model.layers.values())
    train(model, 1)


def test_remove_takes_the_hook_away():
    model = sharded()
    offloader = offload(model)
    assert all(len(block._forward_pre_hooks) == 2 for block in model.layers.values())
    offloader.remove()
    assert all(len(block._forward_pre_hooks) == 1 for block in model.layers.values())
