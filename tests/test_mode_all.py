"""Mode "all": every saved activation moves, nothing is recomputed. "Guards" names the line whose loss makes the test
fail."""

import copy
import re
import weakref

import pytest
import torch
import toy
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from titan_offload import HostRuntime, OffloadConfig, SelectiveConfig, apply_offload
from titan_offload.tape import State


def plain(block):
    """No checkpointing."""
    return block


def make_pair(**kwargs):
    kwargs = {"wrap": plain, **kwargs}
    return toy.make_model(**kwargs), toy.make_model(**kwargs)


def offload_all(model, **config):
    return toy.offload(model, **{"mode": "all", **config})


def never_arrives(offloader):
    """The host sees no copy end, so nothing is on the device longer than the engine wants it there."""
    offloader.engine.runtime.query = lambda event: False
    return offloader


class SavedTensors(saved_tensors_hooks):
    """An independent count of what autograd saves: for each block, and before the first one, the bytes by storage.

    Parameters, buffers and their views are left out, and what is saved after the last block.
    """

    def __init__(self, model):
        self.state = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self.blocks = list(model.layers.values())
        self.index = -1
        self.by_region = {}
        self.hold = []  # so that no address is used twice
        for index, block in enumerate(self.blocks):
            block.register_forward_pre_hook(lambda *args, index=index: setattr(self, "index", index))
        self.blocks[-1].register_forward_hook(lambda *args: setattr(self, "index", len(self.blocks)))
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        storage = tensor.detach().untyped_storage()
        self.hold.append(storage)
        if storage.data_ptr() not in self.state and self.index < len(self.blocks):
            self.by_region.setdefault(self.index, {})[storage.data_ptr()] = storage.nbytes()
        return tensor

    def count(self, keep_last):
        """Number and bytes of what moves; a storage that two regions saved moves once."""
        moving = {}
        for index, storages in self.by_region.items():
            if index < len(self.blocks) - keep_last:
                moving |= storages
        return len(moving), sum(moving.values())


def count_saved(tokens, keep_last, **kwargs):
    model = toy.make_model(**{"wrap": plain, **kwargs})
    counter = SavedTensors(model)
    with counter:
        model.loss(tokens)
    return counter.count(keep_last)


class Counting(toy.Block):
    """Counts its forwards."""

    num = 0

    def forward(self, *args, **kwargs):
        Counting.num += 1
        return super().forward(*args, **kwargs)


# Same gradients, exact counts


@pytest.mark.parametrize("schedule", ["overlap", "sync"])
@pytest.mark.parametrize(
    ("keep_last", "lookahead", "max_inflight"),
    [(1, 1, 2), (0, 0, 1), (0, 1, 0), (0, 2, 2), (1, 0, 0), (1, 5, 1), (3, 1, 2), (5, 2, 0)],
)
def test_gradients_are_bitwise_equal(schedule, keep_last, lookahead, max_inflight):
    """Against no checkpointing and no offload. Guards, among others: `_share`."""
    expected, model = make_pair()
    settings = {"keep_last": keep_last, "prefetch_lookahead": lookahead, "max_inflight_offloads": max_inflight}
    offloader = offload_all(model, schedule=schedule, **settings)
    for step in range(3):
        tokens = toy.make_tokens(step, seq=toy.SEQ - step)
        for m in (expected, model):
            m.zero_grad()
            m.loss(tokens).backward()
        toy.assert_same_grads(model, expected)
        stats = offloader.step_end()
        assert (stats.num_offloads, stats.offloaded_bytes) == count_saved(tokens, keep_last)
    assert toy.slots_in_use(offloader) == 0


@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_nothing_is_recomputed_and_all_that_is_saved_moves_once(keep_last):
    """Issue: recompute count zero, bytes moved equal an independent count of the saved tensors; each comes back once,
    in time, though several ops saved it. Guards: `_find_moved`, `_share`, and the order of `_plan_reloads`."""
    tokens = toy.make_tokens()
    expected = count_saved(tokens, keep_last)
    Counting.num = 0
    model = toy.make_model(wrap=plain, block=Counting)
    offloader = never_arrives(offload_all(model, keep_last=keep_last, max_inflight_offloads=1))
    for step in range(1, 4):
        model.loss(tokens).backward()
        stats = offloader.step_end()
        assert Counting.num == step * toy.NUM_BLOCKS
        assert (stats.num_offloads, stats.offloaded_bytes) == expected
        # What the stash holds when backward begins has not left: the newest block that moves.
        in_stash = 5
        assert (stats.num_reloads, stats.num_misses) == (expected[0] - in_stash, 0)
        assert stats.num_prefetch_hits == stats.num_reloads
    assert expected[0] == 1 + 5 * (toy.NUM_BLOCKS - keep_last)  # tokens; x, mean, rstd, norm(x), norm(x) * rope, tanh


def test_with_checkpointing_block_inputs_move_and_what_is_saved_outside():
    """The tokens, which the embedding saves, and what an op between two blocks saves. Guards: `around_blocks`."""
    expected, model = make_pair(wrap=checkpoint_wrapper)
    for m in (expected, model):
        m.between = lambda i, h: torch.tanh(h) if i == 2 else h
    offloader = offload_all(model)
    for step in range(2):
        tokens = toy.make_tokens(step)
        for m in (expected, model):
            m.zero_grad()
            m.loss(tokens).backward()
        toy.assert_same_grads(model, expected)
        stats = offloader.step_end()
        # tanh's output is the input of the block that follows it: one storage
        assert stats.num_offloads == (toy.NUM_BLOCKS - 1) + 1
        assert stats.offloaded_bytes == (toy.NUM_BLOCKS - 1) * toy.INPUT_BYTES + tokens.nbytes
        assert stats.num_misses == 0


def test_blocks_with_and_without_checkpointing():
    """As with selective checkpointing of every second block. Guards: `is_checkpointed` of each block."""
    wraps = iter([plain, checkpoint_wrapper] * toy.NUM_BLOCKS)
    expected = toy.make_model(wrap=lambda block: next(wraps)(block))
    model = copy.deepcopy(expected)
    offloader = offload_all(model)
    for m in (expected, model):
        m.loss(toy.make_tokens()).backward()
    toy.assert_same_grads(model, expected)
    assert offloader.step_end().num_offloads == 1 + 3 * 5 + 2 * 1  # of the second and fourth the input; the last stays


@pytest.mark.parametrize("wrap", [plain, checkpoint_wrapper])
@pytest.mark.parametrize("keep_last", [0, 1])
def test_what_comes_after_the_last_block_stays(wrap, keep_last):
    """The head's input is saved by its linear. Guards: `Stay.HEAD`."""
    model = toy.make_model(wrap=wrap)
    offloader = offload_all(model, keep_last=keep_last)
    model.loss(toy.make_tokens()).backward()
    kept = offloader.step_end().kept
    assert kept["after the last block"] == (1, toy.INPUT_BYTES)
    assert set(kept) == {"after the last block", *(["keep_last"] if keep_last else [])}


class WithState(toy.Block):
    """Saves parameters and buffers in many ways, and shares the rope of the model."""

    def __init__(self, dim):
        super().__init__(dim)
        self.scale = nn.Parameter(torch.ones(dim))
        self.register_buffer("shift", torch.linspace(0, 1, dim))
        self.frozen = nn.Parameter(torch.ones(dim), requires_grad=False)

    def forward(self, x, rope, mask=None):
        x = x * self.scale * self.shift * self.frozen.view(1, -1)
        return super().forward(x * self.scale[None], rope)


def test_parameters_buffers_and_their_views_never_move():
    """Guards: `state_of`, for the block's own and for those outside the blocks."""
    tokens = toy.make_tokens()
    expected, model = make_pair(block=WithState)
    offloader = offload_all(model)
    state = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    moved = []
    copy_ = offloader.engine.runtime.copy
    offloader.engine.runtime.copy = lambda dst, src, stream: (
        moved.append(src.untyped_storage()._cdata),
        copy_(dst, src, stream),
    )
    for m in (expected, model):
        m.loss(tokens).backward()
    toy.assert_same_grads(model, expected)
    assert not state & set(moved)
    stats = offloader.step_end()
    assert (stats.num_offloads, stats.offloaded_bytes) == count_saved(tokens, 1, block=WithState)


class Late(toy.Block):
    """Its second linear gets its weight only when the block runs, as FSDP2 gathers a module inside a block."""

    def forward(self, x, rope, mask=None):
        h = torch.tanh(self.w1(self.norm(x) * rope))
        parameters = self.w2._parameters
        sharded, parameters["weight"] = parameters["weight"], parameters["weight"].detach().clone().requires_grad_()
        try:
            return x + self.w2(h)
        finally:
            parameters["weight"] = sharded


def test_a_parameter_that_is_gathered_while_the_block_runs_does_not_move():
    """Guards: `StateStorages` looks anew at each tensor."""
    model = toy.make_model(wrap=plain, block=Late)
    offloader = offload_all(model)
    model.loss(toy.make_tokens()).backward()
    stats = offloader.step_end()
    assert (stats.num_offloads, stats.offloaded_bytes) == count_saved(toy.make_tokens(), 1)


class Views(nn.Module):
    """One matmul for three, whose parts are saved by several ops: none is half of the storage."""

    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, rope, mask=None):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + q * k + k * v + v * q


def test_a_small_view_that_several_ops_save_moves_once():
    """Guards: `view_id` among the keys of `moved`."""
    expected, model = make_pair(block=Views)
    offloader = offload_all(model)
    for m in (expected, model):
        m.loss(toy.make_tokens()).backward()
    toy.assert_same_grads(model, expected)
    stats = offloader.step_end()
    assert stats.num_offloads == 1 + 5 * 4  # x, q, k, v
    assert stats.offloaded_bytes == 5 * 4 * toy.INPUT_BYTES + toy.make_tokens().nbytes


# Prefetch


class TwoOrders(nn.Module):
    """Backward of the product asks for its right factor, then for the left one, then a linear for the input."""

    def __init__(self, dim):
        super().__init__()
        self.w = nn.Linear(dim, dim)

    def forward(self, x, rope, mask=None):
        return x + torch.tanh(x) * torch.sigmoid(self.w(x))


def log_order(offloader):
    """For each reload and each use, what and of which region and place."""
    log, engine = [], offloader.engine
    start, bring_back = engine._start_reload, engine._bring_back

    def name(payload):
        return payload.region.fqn, payload.region.payloads[weakref.ref(payload)]

    def spy_start(payload):
        log.append(("start", *name(payload)))
        start(payload)

    def spy_use(region, payload):
        log.append(("use", *name(payload)))
        return bring_back(region, payload)

    engine._start_reload, engine._bring_back = spy_start, spy_use
    return log


def places(log, kind, fqn):
    return list(dict.fromkeys(place for what, name, place in log if (what, name) == (kind, fqn)))


def test_order_within_a_block_is_learned_from_the_first_backward():
    """Guards: `use_order`."""
    model = toy.make_model(wrap=plain, block=TwoOrders)
    offloader = never_arrives(offload_all(model, max_inflight_offloads=1))
    log = log_order(offloader)
    model.loss(toy.make_tokens()).backward()
    used = places(log, "use", "layers.2")
    assert len(used) == 3 and places(log, "start", "layers.2") == [2, 1, 0]  # newest first, as a guess
    assert used != [2, 1, 0]
    log.clear()
    model.loss(toy.make_tokens()).backward()
    assert places(log, "start", "layers.2") == places(log, "use", "layers.2") == used


@pytest.mark.parametrize("lookahead", [1, 2])
def test_reloads_run_ahead_by_the_bytes_of_so_many_regions(lookahead):
    """Issue: prefetch by bytes ahead. Guards: `max_bytes_ahead`, and that a use frees its part of it."""
    model = toy.make_model(wrap=plain, num_blocks=8)
    offloader = never_arrives(offload_all(model, max_inflight_offloads=1, prefetch_lookahead=lookahead))
    engine, ahead = offloader.engine, []
    start = engine._start_reload

    def spy(payload):
        start(payload)
        tape = payload.region.tape
        moving = [ref() for region in tape.regions if region() for ref in region().payloads]
        ahead.append(sum(p.reload.numel() for p in moving if p is not None and p.state is State.H2D_IN_FLIGHT))

    engine._start_reload = spy
    for _ in range(2):
        ahead.clear()
        model.loss(toy.make_tokens()).backward()
        stats = offloader.step_end()
    region_bytes = (stats.offloaded_bytes - toy.make_tokens().nbytes) // 7
    # The tensor in use is still counted here when the next one starts.
    assert lookahead * region_bytes <= max(ahead) <= lookahead * region_bytes + 2 * toy.INPUT_BYTES
    assert stats.num_misses == 0


class AsksTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        [x] = ctx.saved_tensors
        grad = grad * torch.cos(x)
        del x
        [x] = ctx.saved_tensors  # the first copy is gone
        return grad + torch.sin(x)


class Twice(toy.Block):
    """Saves what it asks for twice first, so that all else was used when backward comes to it."""

    def forward(self, x, rope, mask=None):
        return super().forward(AsksTwice.apply(x + 1), rope)


def test_what_was_used_is_not_reloaded_with_what_is_late():
    """In a retained graph what was used is still there to be used. Guards: `region.used` in `_reload_late`."""
    expected, model = make_pair(block=Twice)
    offloader = never_arrives(offload_all(model, max_inflight_offloads=1))
    for _ in range(2):
        for m in (expected, model):
            m.zero_grad()
            loss = m.loss(toy.make_tokens())
            loss.backward(retain_graph=True)
            del loss
        toy.assert_same_grads(model, expected)
        stats = offloader.step_end()
    # The stash has the newest block's; of four blocks one tensor comes twice.
    per_block = (stats.num_offloads - 1) // 5
    assert (stats.num_reloads, stats.num_misses) == (4 * (per_block + 1) + 1, 4)


class Skip(toy.Block):
    """The second block uses the output of the first one's tanh, and so does the fifth."""

    made = 0
    held = None

    def forward(self, x, rope, mask=None):
        number, Skip.made = Skip.made, Skip.made + 1
        if number == 1:
            Skip.held = torch.tanh(x)
        if number in (1, 4):
            x = x * Skip.held
        return super().forward(x, rope)


def test_a_tensor_that_a_far_block_saved_too_is_not_kept_for_it():
    """A skip connection: between the two its place on the device is free. Guards: the range in `_share`."""
    expected, model = make_pair(block=Skip)
    offloader = never_arrives(offload_all(model, max_inflight_offloads=1))
    log = log_order(offloader)
    for m in (expected, model):
        Skip.made = 0
        loss, Skip.held = m.loss(toy.make_tokens()), None
        loss.backward()
    toy.assert_same_grads(model, expected)
    starts = [entry[1:] for entry in log if entry[0] == "start"]
    assert {starts.count(name) for name in set(starts)} == {1, 2}
    [twice] = {name for name in starts if starts.count(name) == 2}
    assert twice[0] == "layers.1"


def test_device_memory_does_not_grow_with_depth():
    """Of activations: what is alive of reloads, and in the stash. Guards: weak references, `Stash.drop_arrived`."""

    def most_alive(num_blocks):
        model = toy.make_model(wrap=plain, num_blocks=num_blocks)
        offloader = never_arrives(offload_all(model))
        engine, alive, most = offloader.engine, [], [0, 0]
        empty, offload = engine.runtime.empty, engine._offload

        def spy_empty(num_bytes, device):
            buffer = empty(num_bytes, device)
            alive.append((weakref.ref(buffer.untyped_storage()), num_bytes))
            most[0] = max(most[0], sum(size for ref, size in alive if ref() is not None))
            return buffer

        def spy_offload(region, tensor):
            payload = offload(region, tensor)
            most[1] = max(most[1], sum(entry.source.numel() for entry in engine.stash))
            return payload

        engine.runtime.empty, engine._offload = spy_empty, spy_offload
        for _ in range(2):
            model.loss(toy.make_tokens()).backward()
        return most

    few, many = most_alive(5), most_alive(15)
    assert few == many
    region_bytes = count_saved(toy.make_tokens(), 5)[1] - toy.make_tokens().nbytes
    assert many[1] == 2 * region_bytes  # max_inflight_offloads
    assert many[0] <= 2 * region_bytes


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_stash_holds_as_many_blocks_as_may_be_in_flight(limit):
    """Guards: `max_inflight_offloads` counts blocks here, the one that runs included."""
    model = toy.make_model(wrap=plain, num_blocks=8)
    offloader = never_arrives(offload_all(model, max_inflight_offloads=limit))
    seen = []
    model.between = lambda i, h: (seen.append(len({entry.place for entry in offloader.engine.stash})), h)[1]
    model.loss(toy.make_tokens()).backward()
    assert max(seen) == limit


# Passes, graphs, branches


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
def test_several_microbatches_alive(order):
    expected, model = make_pair()
    offloader = offload_all(model, keep_last=0)
    for step in range(3):
        for m in (expected, model):
            m.zero_grad()
            losses = [m.loss(toy.make_tokens(10 * step + i)) for i in range(3)]
            while losses:
                losses.pop(0 if order == "first in, first out" else -1).backward()
        toy.assert_same_grads(model, expected)
        stats = offloader.step_end()
    assert stats.num_misses == 0
    assert toy.slots_in_use(offloader) == 0


def test_retained_graph_and_second_backward():
    expected, model = make_pair()
    offloader = offload_all(model, max_inflight_offloads=1)
    for m in (expected, model):
        loss = m.loss(toy.make_tokens())
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
    toy.assert_same_grads(model, expected)
    assert toy.slots_in_use(offloader) == 0


def test_a_retained_graph_holds_nothing_on_the_device():
    """Guards: `used.storage = None`."""
    model = toy.make_model(wrap=plain)
    offloader = never_arrives(offload_all(model, max_inflight_offloads=1))
    empty, buffers = offloader.engine.runtime.empty, []

    def spy(num_bytes, device):
        buffer = empty(num_bytes, device)
        buffers.append(weakref.ref(buffer.untyped_storage()))
        return buffer

    offloader.engine.runtime.empty = spy
    loss = model.loss(toy.make_tokens())
    loss.backward(retain_graph=True)
    assert len(buffers) == count_saved(toy.make_tokens(), 2)[0]  # the newest block that moves is in the stash
    assert [ref() for ref in buffers] == [None] * len(buffers)


def test_split_backward():
    """First towards the input, later towards the weights, as zero-bubble schedules do."""
    expected, model = make_pair()
    offloader = offload_all(model, keep_last=0)
    grads = []
    for m in (expected, model):
        outputs = []
        m.between = lambda i, h, outputs=outputs: (outputs.append(h), h)[1]
        loss = m.loss(toy.make_tokens())
        first = torch.autograd.grad(loss, outputs, retain_graph=True)
        grads.append((first, torch.autograd.grad(loss, list(m.parameters()))))
        del loss, outputs
    for got, want in zip(*[(*a, *b) for a, b in grads], strict=True):
        assert torch.equal(got, want)
    assert toy.slots_in_use(offloader) == 0


def test_abandoned_forward_unused_branch_and_eval():
    expected, model = make_pair()
    offloader = offload_all(model)
    model.loss(toy.make_tokens(5))  # nobody keeps it
    model.eval()
    model.loss(toy.make_tokens(6))
    model.train()
    with torch.no_grad():
        model.loss(toy.make_tokens(7))
    for m in (expected, model):
        m.loss(toy.make_tokens()).backward()
    toy.assert_same_grads(model, expected)
    assert toy.slots_in_use(offloader) == 0
    stats = offloader.step_end()
    assert stats.num_offloads == 2 * count_saved(toy.make_tokens(), 1)[0]


class Raising(toy.Block):
    fails = False

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if Raising.fails:
            raise RuntimeError("in the middle")
        return out


def test_forward_that_raises_leaves_no_hook_and_no_slot():
    expected, model = make_pair(block=Raising)
    offloader = offload_all(model)
    Raising.fails = True
    with pytest.raises(RuntimeError, match="in the middle"):
        model.loss(toy.make_tokens())
    Raising.fails = False
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert toy.slots_in_use(offloader) == 0
    for m in (expected, model):
        m.loss(toy.make_tokens()).backward()
    toy.assert_same_grads(model, expected)


def test_in_place_change_of_a_saved_activation_raises_as_autograd_would():
    model = toy.make_model(wrap=plain)
    offload_all(model, keep_last=0, max_inflight_offloads=0)
    inputs = []
    model.between = lambda i, h: (inputs.append(h), h)[1]
    loss = model.loss(toy.make_tokens())
    with torch.no_grad():
        inputs[5].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Sparse(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w = nn.Linear(dim, dim)

    def forward(self, x, rope, mask=None):
        mixing = torch.eye(x.shape[0] * x.shape[1]).to_sparse()
        return self.w(torch.sparse.mm(mixing, x.flatten(0, 1)).view_as(x))


def test_layouts_without_a_storage_stay():
    """Guards: `storage_id` of a sparse tensor."""
    expected, model = make_pair(block=Sparse)
    offloader = offload_all(model)
    for m in (expected, model):
        m.loss(toy.make_tokens()).backward()
    toy.assert_same_grads(model, expected)
    assert "expanded, overlapping, conjugate, sparse or a tensor subclass" in offloader.step_end().kept


# The model


def test_small_tensors_stay():
    expected, model = make_pair()
    config = OffloadConfig(mode="all", min_offload_mib=toy.INPUT_BYTES / 2**20)
    offloader = apply_offload(model, config, runtime=toy.slow_link())
    for m in (expected, model):
        m.loss(toy.make_tokens()).backward()
    toy.assert_same_grads(model, expected)
    stats = offloader.step_end()
    assert stats.num_offloads == 5 * 3
    assert stats.kept["smaller than min_offload_mib"][0] == 1 + 5 * 2  # tokens; mean and rstd


def test_exhausted_pool_keeps_the_rest_and_counts_each_storage_once():
    """Guards: `region.kept`."""
    expected, model = make_pair()
    budget = 6 * toy.INPUT_BYTES
    config = OffloadConfig(mode="all", min_offload_mib=toy.INPUT_BYTES / 2**20)
    offloader = apply_offload(model, config, runtime=toy.slow_link(), budget_bytes=budget)
    for m in (expected, model):
        m.loss(toy.make_tokens()).backward()
    toy.assert_same_grads(model, expected)
    stats = offloader.step_end()
    num, num_bytes = stats.kept["pinned budget exhausted"]
    assert stats.num_offloads + num == 5 * 3
    assert stats.offloaded_bytes + num_bytes == 5 * 4 * toy.INPUT_BYTES  # tanh's output is twice as wide
    assert stats.pinned_total_bytes <= budget


def test_remove_and_deepcopy_leave_the_model_as_it_was():
    """Guards: `ModelForward` among what is undone, and its `__deepcopy__`."""
    model = toy.make_model(wrap=plain)
    before = [dict(module.__dict__) for module in model.modules()]
    names = [name for name, _ in model.named_modules()]
    offloader = offload_all(model)
    assert [name for name, _ in model.named_modules()] == names
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.weight.zero_()
    assert not torch.equal(twin(toy.make_tokens()), model(toy.make_tokens()))
    assert torch.equal(twin(toy.make_tokens())[0, 0], twin.head.bias)
    offloader.remove()
    for module, attributes in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert "forward" not in module.__dict__


def test_applied_twice_is_refused():
    model = toy.make_model(wrap=plain)
    offload_all(model)
    with pytest.raises(ValueError, match="has activation offload already"):
        offload_all(model)


def test_block_inputs_need_checkpointed_blocks():
    with pytest.raises(ValueError, match=re.escape("no module matched by blocks = 'layers.*' is wrapped")):
        toy.offload(toy.make_model(wrap=plain))


def test_saved_outputs_in_host_memory_beside_mode_all():
    """Selective saves need checkpointing; what is saved outside the blocks moves too."""
    expected, model = make_pair(wrap=checkpoint_wrapper)
    selective = SelectiveConfig(save_ops=("aten::tanh",), offload=True)
    config = OffloadConfig(mode="all", min_offload_mib=0.0)
    offloader = apply_offload(model, config, selective, runtime=toy.slow_link())
    for m in (expected, model):
        m.loss(toy.make_tokens()).backward()
    toy.assert_same_grads(model, expected)
    assert offloader.step_end().num_offloads == 1 + 5 * 2


def test_300_steps_leave_nothing_behind():
    """Shapes change, some passes are abandoned."""
    model = toy.make_model(wrap=plain, num_blocks=3)
    offloader = offload_all(model, runtime=HostRuntime())
    pinned = []
    for step in range(300):
        loss = model.loss(toy.make_tokens(step, seq=4 + step % 9))
        if step % 3:
            loss.backward()
        del loss
        offloader.step_end()
        pinned.append(offloader.engine.pool.bytes_pinned)
    assert toy.slots_in_use(offloader) == 0
    assert max(pinned[150:]) == max(pinned[:150])
    assert offloader.engine.tapes.alive() == []
