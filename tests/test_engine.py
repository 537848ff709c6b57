"""The engine's contract on the host runtime. "Guards" names the line whose loss makes the test fail."""

import gc
import logging
import threading
import weakref
from collections import Counter

import pytest
import torch
import toy
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import titan_offload.engine
import titan_offload.saved_tensor
from titan_offload import HostRuntime, OffloadConfig, SelectiveConfig, apply_offload
from titan_offload.link import LinkRates, PortRates
from titan_offload.tape import State

FAST = {"link_gb_per_s": None, "jitter_ms": 0.0}


def reference(tokens, **kwargs):
    model = toy.make_model(**kwargs)
    model.loss(tokens).backward()
    return model


def let_copies_end(offloader):
    for entry in offloader.engine.stash:
        offloader.engine.runtime.synchronize(entry.event)


# Same gradients, exact counts


@pytest.mark.parametrize("schedule", ["overlap", "sync"])
@pytest.mark.parametrize(
    ("keep_last", "lookahead", "max_inflight"),
    [(1, 1, 2), (0, 0, 1), (0, 1, 0), (0, 2, 2), (1, 0, 0), (1, 5, 1), (3, 1, 2), (5, 2, 0)],
)
def test_gradients_are_bitwise_equal(schedule, keep_last, lookahead, max_inflight):
    """Guards, among others: the compute stream's wait in `_end_reload` (the reload would still be the pattern)."""
    model = toy.make_model()
    offloader = toy.offload(
        model,
        schedule=schedule,
        keep_last=keep_last,
        prefetch_lookahead=lookahead,
        max_inflight_offloads=max_inflight,
    )
    for step in range(3):
        tokens = toy.make_tokens(step)
        expected = reference(tokens)
        model.zero_grad()
        model.loss(tokens).backward()
        toy.assert_same_grads(model, expected)
        assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - keep_last
    assert toy.slots_in_use(offloader) == 0


@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_exact_counts(keep_last):
    """L blocks, K kept: L-K inputs of b x s x d x bytes move, each is reloaded once, none is missed; the rotary table,
    parameters and buffers never move. Guards: `_prefetch`, the choice of inputs in `input_storages`, and `Stash.reap`
    when backward starts: no copy is seen to end before."""
    model = toy.make_model()
    runtime = HostRuntime(**FAST)
    query = runtime.query
    offloader = toy.offload(model, runtime=runtime, keep_last=keep_last)
    num = toy.NUM_BLOCKS - keep_last
    for step in range(2):
        runtime.query = lambda event: False
        loss = model.loss(toy.make_tokens())
        let_copies_end(offloader)
        runtime.query = query
        loss.backward()
        stats = offloader.step_end()
        assert (stats.num_offloads, stats.offloaded_bytes) == (num, num * toy.INPUT_BYTES)
        assert (stats.num_reloads, stats.reloaded_bytes) == (num, num * toy.INPUT_BYTES)
        assert (stats.num_misses, stats.num_prefetch_hits) == ((1, num - 1) if keep_last == 0 else (0, num))
        assert stats.kept == ({"keep_last": (keep_last, keep_last * toy.INPUT_BYTES)} if keep_last else {})
        assert stats.pinned_peak_bytes == num * toy.INPUT_BYTES
        assert stats.num_slabs_made == (0 if step else runtime.num_pinned_allocations)


def test_after_forward_only_the_newest_inputs_are_on_the_device():
    """Guards: `Stash.make_room`, and that neither payload nor tape holds the device tensor."""
    model = toy.make_model()
    storages = []

    def watch(i, h):
        storages.append(weakref.ref(h.untyped_storage()))
        return h

    model.between = watch
    offloader = toy.offload(model, keep_last=1, max_inflight_offloads=2)
    loss = model.loss(toy.make_tokens())
    alive = [i for i, ref in enumerate(storages) if ref() is not None]
    stashed = [toy.NUM_BLOCKS - 3, toy.NUM_BLOCKS - 2]
    assert set(alive) <= {*stashed, toy.NUM_BLOCKS - 1}
    assert toy.NUM_BLOCKS - 1 in alive
    let_copies_end(offloader)
    loss.backward()
    assert [ref() for ref in storages] == [None] * toy.NUM_BLOCKS
    assert toy.slots_in_use(offloader) == 0


def test_stash_is_bounded_at_every_moment():
    """Guards: the limit in `Stash.make_room`."""
    model = toy.make_model(num_blocks=10)
    offloader = toy.offload(model, max_inflight_offloads=2)
    sizes = []
    model.between = lambda i, h: (sizes.append(len(offloader.engine.stash)), h)[1]
    model.loss(toy.make_tokens()).backward()
    assert max(sizes) == 2


def test_reloaded_tensors_are_not_held():
    """Guards: the weak reference in `_end_reload`. A strong one brings the whole peak back (DeepSpeed's fault)."""
    model = toy.make_model()
    offloader = toy.offload(model, max_inflight_offloads=1)
    alive = []
    reloads = []
    start = offloader.engine._start_reload

    def spy(payload):
        start(payload)
        reloads.append(weakref.ref(payload.reload.untyped_storage()))
        alive.append(sum(ref() is not None for ref in reloads))

    offloader.engine._start_reload = spy
    loss = model.loss(toy.make_tokens())
    loss.backward(retain_graph=True)
    # At a start: the region in use, the one being prefetched, and the region before, whose grads are being computed.
    assert len(reloads) >= 4
    assert max(alive) <= 3
    assert sum(ref() is not None for ref in reloads) == 0


# Ownership: whatever ends a graph releases what it held


def test_dropped_graph_releases_everything():
    """Guards: `Payload.__del__`, and that no cycle keeps it from running (the collector is off)."""
    model = toy.make_model()
    offloader = toy.offload(model)
    loss = model.loss(toy.make_tokens())
    assert toy.slots_in_use(offloader) == toy.NUM_BLOCKS - 1
    let_copies_end(offloader)
    del loss
    assert toy.slots_in_use(offloader) == 0
    assert not offloader.engine.stash


def test_backward_does_not_wait_for_copies_of_what_it_is_done_with():
    """Guards: that releasing a tensor in the stash only asks. What was dropped before its copy ended leaves the stash
    with the next call that finds it ended."""
    model = toy.make_model()
    offloader = toy.offload(model, max_inflight_offloads=0, runtime=HostRuntime(link_gb_per_s=0.0001))
    loss = model.loss(toy.make_tokens())  # 40 ms per copy
    loss.backward()
    assert toy.slots_in_use(offloader) == 0
    assert offloader.engine.stash
    let_copies_end(offloader)
    assert offloader.step_end().d2h_wait_ms < 20
    assert not offloader.engine.stash


@pytest.mark.parametrize("at", range(toy.NUM_BLOCKS))
def test_forward_that_raises_releases_everything_and_leaves_no_hook(at):
    """Guards: `with saved_tensors_hooks` in `region`; a hook left pushed would also see the tensor saved below."""
    model = toy.make_model()
    offloader = toy.offload(model)

    def explode(i, h):
        if i == at:
            raise KeyError("boom")
        return h

    inner = model.layers[str(at)]._checkpoint_wrapped_module
    inner.register_forward_pre_hook(lambda *_: explode(at, None))
    with pytest.raises(KeyError):
        model.loss(toy.make_tokens())
    assert toy.slots_in_use(offloader) == 0
    x = torch.ones(2, requires_grad=True)
    assert x.exp().grad_fn._saved_result is not None  # not a handle
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    inner._forward_pre_hooks.clear()
    tokens = toy.make_tokens()
    model.loss(tokens).backward()
    toy.assert_same_grads(model, reference(tokens))


def test_backward_that_raises_releases_everything():
    model = toy.make_model()
    offloader = toy.offload(model)

    def explode(grad):
        raise KeyError("boom")

    model.between = lambda i, h: (h.register_hook(explode) if i == 3 else None, h)[1]
    with pytest.raises(KeyError):
        model.loss(toy.make_tokens()).backward()
    assert toy.slots_in_use(offloader) == 0


def test_unused_branch_is_released():
    """A block whose output is never used never unpacks. Guards: release by the graph, not by counting unpacks."""
    model, expected = toy.make_model(), toy.make_model()
    for m in (model, expected):
        m.call = lambda block, h, rope: (block(h * 2, rope), block(h, rope))[1]
    offloader = toy.offload(model)
    tokens = toy.make_tokens()
    for _ in range(3):
        model.zero_grad()
        model.loss(tokens).backward()
        assert toy.slots_in_use(offloader) == 0
    expected.loss(tokens).backward()
    toy.assert_same_grads(model, expected)


def test_300_steps_leave_nothing_behind():
    """F23: with branches that never run backward, live handles and slabs stay flat."""

    def num_alive():
        return sum(type(o).__name__ in ("Payload", "Tape", "Region", "Handle") for o in gc.get_objects())

    gc.collect()
    before = num_alive()  # of tests that raised
    model = toy.make_model(num_blocks=3)
    offloader = toy.offload(model, runtime=HostRuntime(**FAST))
    model.call = lambda block, h, rope: (block(h * 2, rope), block(h, rope))[1]
    tokens = toy.make_tokens(batch=1, seq=4)
    for step in range(300):
        model.loss(tokens).backward()
        stats = offloader.step_end()
        if step == 1:
            slabs = offloader.engine.pool.num_slabs
    assert stats.pinned_in_use_bytes == 0
    assert offloader.engine.pool.num_slabs == slabs
    assert num_alive() <= before


def test_release_from_another_thread_while_the_lock_is_held():
    """A handle may die on any thread at any time. Guards: the queue in `_release` (the lock itself would dead-lock) and
    the second look in `_locked`."""
    model = toy.make_model()
    offloader = toy.offload(model)
    loss = [model.loss(toy.make_tokens())]
    with offloader.engine._locked():
        thread = threading.Thread(target=loss.clear)
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
        assert toy.slots_in_use(offloader) == toy.NUM_BLOCKS - 1
    assert toy.slots_in_use(offloader) == 0


# Unpack any number of times


def test_retained_graph_and_second_backward():
    """Guards: the slot lives until the handle dies, not until the first unpack."""
    tokens = toy.make_tokens()
    model, expected = toy.make_model(), toy.make_model()
    offloader = toy.offload(model)
    for m in (model, expected):
        loss = m.loss(tokens)
        loss.backward(retain_graph=True)
        loss.backward()
    toy.assert_same_grads(model, expected)
    del loss
    assert toy.slots_in_use(offloader) == 0


def test_split_backward_unpacks_each_region_three_times():
    """Zero-bubble pipelines run backward for inputs first and for weights later (torch's own stage functions).
    Guards: as above, and that `reloaded` is asked before a slot is read again."""
    tokens = toy.make_tokens()
    counts = []

    def split_backward(m):
        x = m.emb(tokens).detach().requires_grad_()
        h = x
        for block in m.layers.values():
            h = block(h, m.rope)
        weights = list(m.layers.parameters())
        dinputs, groups = stage_backward_input([h], [torch.ones_like(h)], [x], iter(weights))
        stage_backward_weight(iter(weights), groups)
        return dinputs[0]

    model, expected = toy.make_model(block=TwoLinears), toy.make_model(block=TwoLinears)
    offloader = toy.offload(model)
    unpack = offloader.engine.unpack

    def count(handle):
        tensor = unpack(handle)
        if tensor.dim() == 3:  # the hidden state
            counts.append(handle.region.index)
        return tensor

    offloader.engine.unpack = count
    assert torch.equal(split_backward(model), split_backward(expected))
    toy.assert_same_grads(model, expected)
    assert [counts.count(i) for i in range(toy.NUM_BLOCKS)] == [3] * toy.NUM_BLOCKS
    assert toy.slots_in_use(offloader) == 0


class TwoLinears(nn.Module):
    """The smallest block of which a split backward recomputes thrice: once for inputs, once per weight."""

    def __init__(self, dim):
        super().__init__()
        self.w1 = nn.Linear(dim, dim, bias=False)
        self.w2 = nn.Linear(dim, dim, bias=False)

    def forward(self, x, rope):
        return self.w2(torch.tanh(self.w1(x) * rope))


# Several forwards alive


@pytest.mark.parametrize("order", ["fifo", "lifo"])
def test_two_microbatches_alive(order):
    """Guards: tapes are apart (a reset at the next forward would kill the first one's slots)."""
    batches = [toy.make_tokens(seed) for seed in range(2)]
    model, expected = toy.make_model(), toy.make_model()
    offloader = toy.offload(model)
    for _ in range(3):
        for m in (model, expected):
            m.zero_grad()
            losses = [m.loss(tokens) for tokens in batches]
            if order == "lifo":
                losses.reverse()
            while losses:
                losses.pop(0).backward()
        toy.assert_same_grads(model, expected)
        stats = offloader.step_end()
        assert stats.num_misses == 0
        assert toy.slots_in_use(offloader) == 0


def test_next_tape_is_learned_from_the_step_before():
    """With keep_last 0 each tape's last region must come back before backward gets there: in the first step by the rule
    last in, first out, which is wrong here, then as recorded. Guards: `_next_tape` in `step_end`."""
    model = toy.make_model()
    offloader = toy.offload(model, keep_last=0, max_inflight_offloads=1)
    misses = []
    for _ in range(3):
        losses = [model.loss(toy.make_tokens(seed)) for seed in range(3)]
        let_copies_end(offloader)
        while losses:
            losses.pop(0).backward()
        misses.append(offloader.step_end().num_misses)
    # The first region of the first tape has nothing before it to start its reload.
    assert misses == [3, 1, 1]


def test_last_in_first_out_until_an_order_is_known():
    """Guards: the fallback in `_tape_after`."""
    model = toy.make_model()
    offloader = toy.offload(model, keep_last=0, max_inflight_offloads=1)
    losses = [model.loss(toy.make_tokens(seed)) for seed in range(3)]
    let_copies_end(offloader)
    while losses:
        losses.pop().backward()
    assert offloader.step_end().num_misses == 1


def test_backward_that_goes_another_way_gives_prefetched_memory_back():
    """Guards: the clean-up in `_prefetch`. Backward from the middle: what was prefetched and not used is dropped."""
    model = toy.make_model()
    offloader = toy.offload(model, keep_last=0, prefetch_lookahead=1, max_inflight_offloads=1)
    outputs = []
    model.between = lambda i, h: (outputs.append(h), h)[1]
    loss = model.loss(toy.make_tokens())
    let_copies_end(offloader)
    weight = model.layers["4"]._checkpoint_wrapped_module.w1.weight
    torch.autograd.grad(outputs[5].sum(), weight, retain_graph=True)  # works on region 4, prefetches 3
    weight = model.layers["1"]._checkpoint_wrapped_module.w1.weight
    torch.autograd.grad(outputs[2].sum(), weight, retain_graph=True)  # works on region 1, prefetches 0
    regions = [ref() for ref in offloader.engine.tapes.alive()[0].regions]
    states = [next(iter(region.payloads))().state for region in regions]
    assert states.count(State.H2D_IN_FLIGHT) == 1
    assert states[0] is State.H2D_IN_FLIGHT
    outputs.clear()
    del loss, regions
    assert toy.slots_in_use(offloader) == 0


def test_two_models_in_one_process():
    tokens = toy.make_tokens()
    models = [toy.make_model(seed) for seed in range(2)]
    offloaders = [toy.offload(models[0])]
    offloaders.append(toy.offload(models[1], runtime=offloaders[0].engine.runtime))
    expected = [toy.make_model(seed) for seed in range(2)]
    for pair in (models, expected):
        (pair[0].loss(tokens) + pair[1].loss(tokens) * 2).backward()
    for model, other in zip(models, expected, strict=True):
        toy.assert_same_grads(model, other)
    assert [toy.slots_in_use(offloader) for offloader in offloaders] == [0, 0]


def test_parts_of_one_model_share_the_pool():
    tokens = toy.make_tokens()
    models = [toy.make_model(seed) for seed in range(2)]
    offloader = toy.offload(models[0])
    offloader.attach(models[1])
    losses = [model.loss(tokens) for model in models]
    assert toy.slots_in_use(offloader) == 2 * (toy.NUM_BLOCKS - 1)
    while losses:
        losses.pop().backward()
    for seed, model in enumerate(models):
        toy.assert_same_grads(model, reference(tokens, seed=seed))
    assert toy.slots_in_use(offloader) == 0


@pytest.mark.parametrize("how", ["no_grad", "eval"])
def test_forwards_without_backward_leave_no_trace(how):
    """Guards: the first lines of `HookedForward.__call__`. A validation pass between forward and backward."""
    tokens = toy.make_tokens()
    model = toy.make_model()
    offloader = toy.offload(model)
    loss = model.loss(tokens)
    before = (offloader.engine.tapes.num_opened, toy.slots_in_use(offloader))
    if how == "no_grad":
        with torch.no_grad():
            model.loss(toy.make_tokens(1))
    else:
        model.eval()
        model.loss(toy.make_tokens(1))
        model.train()
    assert (offloader.engine.tapes.num_opened, toy.slots_in_use(offloader)) == before
    loss.backward()
    toy.assert_same_grads(model, reference(tokens))


def test_recompute_by_an_outer_checkpoint_does_not_offload_again():
    """H20, F13: an outer checkpoint recomputes our blocks inside backward. Guards: the graph task check in `region`."""
    tokens = toy.make_tokens()
    model, expected = toy.make_model(), toy.make_model()
    offloader = toy.offload(model)
    for m in (model, expected):
        torch.utils.checkpoint.checkpoint(m.loss, tokens, use_reentrant=False).backward()
    toy.assert_same_grads(model, expected)
    assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - 1


def test_variable_sequence_length():
    model = toy.make_model()
    offloader = toy.offload(model, runtime=HostRuntime(**FAST))
    for step, seq in enumerate([16, 5, 31, 7, 16, 40, 3, 40]):
        tokens = toy.make_tokens(step, seq=seq)
        model.zero_grad()
        model.loss(tokens).backward()
        toy.assert_same_grads(model, reference(tokens))
        assert toy.slots_in_use(offloader) == 0


# Kinds of tensors


CHANGES = {
    "transposed": lambda i, h: h.transpose(0, 1).contiguous().transpose(0, 1),
    "slice of much": lambda i, h: torch.cat([h.detach(), h, h.detach()], 1)[:, h.shape[1] : 2 * h.shape[1]],
    "slice of most": lambda i, h: torch.cat([h, h.detach()[:, :2]], 1)[:, : h.shape[1]],
    "offset": lambda i, h: torch.cat([h.detach()[:1, :1].expand(1, *h.shape[1:]), h], 0)[1:],
    "strided": lambda i, h: torch.stack([h, h.detach()], -1)[..., 0],
    "expanded": lambda i, h: h[:, :1].expand_as(h),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kinds_of_views(name, dtype):
    """Guards: `as_view` (offset, strides), `gather`, `is_dense`. Equal bits need equal strides."""
    tokens = toy.make_tokens()
    model, expected = toy.make_model().to(dtype), toy.make_model().to(dtype)
    strides, expected_strides = [], []
    for m, seen in ((model, strides), (expected, expected_strides)):
        m.between = CHANGES[name]
        for block in m.layers.values():
            inner = block._checkpoint_wrapped_module
            inner.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].stride()))
    offloader = toy.offload(model, keep_last=0, max_inflight_offloads=1)
    for m in (model, expected):
        m.loss(tokens).backward()
    toy.assert_same_grads(model, expected)
    assert strides == expected_strides
    stats = offloader.step_end()
    if name == "expanded":
        assert stats.num_offloads == 0
        assert "expanded" in next(iter(stats.kept))
    else:
        assert stats.num_offloads == toy.NUM_BLOCKS
    if name in ("slice of much", "strided"):
        assert stats.offloaded_bytes <= toy.NUM_BLOCKS * toy.INPUT_BYTES * dtype.itemsize // 4 * 2
    assert toy.slots_in_use(offloader) == 0


class Several(nn.Module):
    """A block with several positional inputs that may share storage."""

    def __init__(self, dim):
        super().__init__()
        self.w = nn.Linear(dim, dim)

    def forward(self, x, *others):
        for other in others:
            x = x + torch.tanh(self.w(other.expand(x.shape) if other.dim() == x.dim() else other))
        return x


@pytest.mark.parametrize(
    "views",
    [
        lambda h: (h, h),
        lambda h: (h, h.transpose(0, 1).transpose(0, 1), h[:, :]),
        lambda h: (h, h.flip(1), h[:1]),
        lambda h: (h.view(h.shape), h[1:2], h[:, 1:2]),
        lambda h: (h, h.transpose(0, 1).reshape(h.shape)),
    ],
)
def test_inputs_that_share_storage_move_once(views):
    """Guards: `_find_moved` and its key. x, a transpose and slices of x: one move per storage, each view rebuilt."""
    tokens = toy.make_tokens()
    model, expected = toy.make_model(block=Several), toy.make_model(block=Several)
    for m in (model, expected):
        m.call = lambda block, h, rope: block(*views(h), rope)
    offloader = toy.offload(model, keep_last=0)
    for m in (model, expected):
        m.loss(tokens).backward()
    toy.assert_same_grads(model, expected)
    inputs = views(torch.ones(toy.BATCH, toy.SEQ, toy.DIM))
    num_storages = len({x.untyped_storage()._cdata for x in inputs})
    assert offloader.step_end().num_offloads == num_storages * toy.NUM_BLOCKS


def test_the_same_storage_with_new_content_is_another_payload():
    """Guards: the version in `_find_moved`. The second block reads what an in-place op made of the first one's input,
    after the first one's copy is on the host."""
    weight = nn.Parameter(torch.linspace(-1, 1, toy.DIM))

    class Add(nn.Module):
        def forward(self, x):
            return (x * weight).sin()

    def run(offloaded):
        weight.grad = None
        blocks = nn.ModuleDict({str(i): checkpoint_wrapper(Add()) for i in range(3)})
        model = nn.Module()
        model.layers = blocks
        offloader = toy.offload(model, runtime=HostRuntime(**FAST), keep_last=1) if offloaded else None
        x = torch.ones(4, toy.DIM)
        y = blocks["0"](x)
        if offloaded:
            let_copies_end(offloader)
            offloader.engine.stash.reap()
        x = x.clone() if not offloaded else x.mul_(3) / 3
        x.mul_(3)
        z = blocks["1"](x)
        (y + z).sum().backward()
        return weight.grad

    assert torch.equal(run(True), run(False))


def test_parameters_and_buffers_never_move():
    """A parameter, a view of one and a buffer as positional inputs. Guards: `- region.tape.protected`."""
    model = toy.make_model(block=Several)
    model.call = lambda block, h, rope: block(h, rope, model.head.weight[:1].view(1, 1, -1), model.rope[None, None])
    offloader = toy.offload(model, keep_last=0)
    model.loss(toy.make_tokens()).backward()
    stats = offloader.step_end()
    assert (stats.num_offloads, stats.offloaded_bytes) == (toy.NUM_BLOCKS, toy.NUM_BLOCKS * toy.INPUT_BYTES)


def test_frozen_embedding_still_moves_block_inputs():
    """Guards: the second choice in `input_storages`."""
    model = toy.make_model()
    model.emb.requires_grad_(False)
    offloader = toy.offload(model)
    model.loss(toy.make_tokens()).backward()
    assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - 1


def test_hidden_state_by_keyword_moves_too():
    """F38: hooks never see keyword tensors. Guards: `_make_inputs_positional`."""
    tokens = toy.make_tokens()
    model = toy.make_model()
    model.call = lambda block, h, rope: block(mask=None, rope=rope, x=h)
    offloader = toy.offload(model)
    model.loss(tokens).backward()
    assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - 1
    toy.assert_same_grads(model, reference(tokens))


@pytest.mark.parametrize("when", ["copying", "copied", "kept"])
def test_in_place_change_of_a_packed_input_raises_as_autograd_would(when):
    """Guards: the version in `Stash.drop_oldest`, and `check_version` in `_bring_back` and in `unpack`."""
    model = toy.make_model(num_blocks=3)
    offloader = toy.offload(model, keep_last=1, max_inflight_offloads=0)
    runtime = offloader.engine.runtime
    query, runtime.query = runtime.query, lambda event: False  # nothing leaves the stash during forward
    at = 2 if when == "kept" else 1
    inputs = []

    def edit(i, h):
        inputs.append(h)
        return h

    model.between = edit
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss = model.loss(toy.make_tokens())
        if when == "copied":
            let_copies_end(offloader)
            runtime.query = query
        with torch.no_grad():
            inputs[at].add_(1)
        loss.backward()
    loss = None
    inputs.clear()
    assert toy.slots_in_use(offloader) == 0


def test_in_place_change_after_the_device_copy_is_gone_is_harmless():
    """Once the host has the value, the input's memory is nobody's business."""
    tokens = toy.make_tokens()
    model = toy.make_model()
    offloader = toy.offload(model, schedule="sync")
    inputs = []
    model.between = lambda i, h: (inputs.append(h), h)[1]
    loss = model.loss(tokens)
    with torch.no_grad():
        inputs[0].zero_()
    loss.backward()
    toy.assert_same_grads(model, reference(tokens))
    inputs.clear()
    assert toy.slots_in_use(offloader) == 0


def test_small_tensors_stay_and_a_run_that_moves_nothing_says_so(caplog):
    """F14, F35. Guards: `min_offload_bytes` in `_why_stay`, `_warn`."""
    tokens = toy.make_tokens()
    model = toy.make_model()
    offloader = apply_offload(model, OffloadConfig(min_offload_mib=1.0), runtime=HostRuntime())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.zero_grad()
            model.loss(tokens).backward()
            stats = offloader.step_end()
    assert stats.num_offloads == 0
    assert stats.kept["smaller than min_offload_mib"] == (toy.NUM_BLOCKS - 1, (toy.NUM_BLOCKS - 1) * toy.INPUT_BYTES)
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1
    assert "nothing was moved" in warnings[0]
    assert "5 x smaller than min_offload_mib" in warnings[0]
    toy.assert_same_grads(model, reference(tokens))


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda model: model.eval(), "training mode"),
        (lambda model: setattr(model, "call", lambda block, h, rope: block._checkpoint_wrapped_module(h, rope)), "ran"),
        (lambda model: setattr(model, "call", lambda block, h, rope: nested(block, h, rope)), "positional tensor"),
    ],
)
def test_reasons_why_nothing_moved(caplog, prepare, reason):
    model = toy.make_model(block=Nested if reason == "positional tensor" else toy.Block)
    prepare(model)
    offloader = toy.offload(model)
    with caplog.at_level(logging.WARNING):
        model.loss(toy.make_tokens()).backward()
        offloader.step_end()
    assert reason in caplog.text


class Nested(toy.Block):
    def forward(self, state):
        return super().forward(state["x"], state["rope"])


def nested(block, h, rope):
    return block({"x": h, "rope": rope})


# Budget


@pytest.mark.parametrize("room_for", [1, 2, 4])
def test_exhausted_pool_keeps_the_rest_on_the_device(room_for, caplog):
    """Guards: the None of `_offload`, and one report per step with bytes and blocks."""
    tokens = toy.make_tokens()
    model = toy.make_model()
    offloader = toy.offload(model, pinned_budget_gib=room_for * toy.INPUT_BYTES / 1024**3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.zero_grad()
            model.loss(tokens).backward()
            stats = offloader.step_end()
            toy.assert_same_grads(model, reference(tokens))
            assert stats.num_offloads == room_for
            kept = toy.NUM_BLOCKS - 1 - room_for
            assert stats.kept["pinned budget exhausted"] == (kept, kept * toy.INPUT_BYTES)
            assert stats.pinned_total_bytes <= room_for * toy.INPUT_BYTES
    assert len(caplog.records) == 2
    assert f"layers.{room_for}, " in caplog.text or f"layers.{room_for};" in caplog.text


@pytest.mark.parametrize("room_for", [1, 3])
def test_exhausted_pool_raises_if_asked_to(room_for):
    model = toy.make_model()
    budget = room_for * toy.INPUT_BYTES / 1024**3
    offloader = toy.offload(model, pinned_budget_gib=budget, on_exhausted="error")
    with pytest.raises(RuntimeError, match=rf"layers\.{room_for} .*pinned_budget_gib.*on_exhausted"):
        model.loss(toy.make_tokens())
    assert toy.slots_in_use(offloader) == 0


def test_budget_smaller_than_one_block_input_stops_at_once():
    model = toy.make_model()
    offloader = toy.offload(model, pinned_budget_gib=(toy.INPUT_BYTES - 1) / 1024**3)
    with pytest.raises(ValueError, match=r"pinned_budget_gib = .* is smaller than one tensor to move: layers\.0"):
        model.loss(toy.make_tokens())
    assert toy.slots_in_use(offloader) == 0


# limit = "link": after some steps, only what hides behind compute moves


def limited(model, copies_per_forward=1.5, **config):
    """Offload whose blocks take a second each, on a link that carries a block's input in so many of these seconds."""
    offloader = toy.offload(model, limit="link", **config)
    speed = toy.INPUT_BYTES / copies_per_forward / 1e9
    rates = PortRates(speed, speed, speed / 100, speed / 100)
    offloader.set_link(LinkRates(alone=PortRates(*[1e3] * 4), shared=rates))
    watch = offloader.engine.watch
    measured = watch.costs

    def costs(part, num_blocks):
        times_and_sizes = measured(part, num_blocks)
        return times_and_sizes and ((1.0,) * num_blocks, times_and_sizes[1])

    watch.costs = costs
    return offloader


def link_step(model, offloader, tokens, schedule=None):
    model.zero_grad()
    (schedule or (lambda: model.loss(tokens).backward()))()
    return offloader.step_end()


def test_link_limit_moves_all_first_and_then_what_hides(caplog):
    """Before, at and after the choice, gradients are those of AC alone. Of six forwards, four copies of 1.5 fit.
    Guards: `_why_stay`'s reason, and `NUM_WATCHED_STEPS`."""
    model = toy.make_model()
    offloader = limited(model)
    moved = []
    with caplog.at_level(logging.INFO):
        for step in range(6):
            tokens = toy.make_tokens(step)
            stats = link_step(model, offloader, tokens)
            toy.assert_same_grads(model, reference(tokens))
            moved.append(stats.num_offloads)
            kept = {"keep_last": (1, toy.INPUT_BYTES)}
            if step >= 3:
                kept["the copy would not hide behind compute"] = (1, toy.INPUT_BYTES)
            assert stats.kept == kept
    assert moved == [5, 5, 5, 4, 4, 4]
    [choice] = offloader.link_choices
    assert (choice.num_moved, choice.hidden_bytes) == (4, 4 * toy.INPUT_BYTES)
    assert offloader.engine.watch is None
    [line] = [record.getMessage() for record in caplog.records]
    assert '"link": 4 of 6 blocks (layers.0 .. layers.3) go on moving' in line
    assert f"stall each 24000.0 ms of blocks by {choice.stall_s_if_all * 1e3:.1f} ms" in line
    assert choice.stall_s_if_all > 0
    assert toy.slots_in_use(offloader) == 0


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_link_limit_raises_that_of_the_stash(max_inflight):
    """Copies of 2 forwards: six of twelve blocks move, and up to four are in the stash. Guards:
    `Stash.drop_arrived`, and `num_arrived` in `Stash.make_room`."""
    model = toy.make_model(num_blocks=12)
    offloader = limited(model, copies_per_forward=2, max_inflight_offloads=max_inflight)
    engine, sizes = offloader.engine, []
    engine.runtime.query = lambda event: False  # as on a device that the host runs ahead of
    model.between = lambda i, h: (sizes.append(len(engine.stash)), h)[1]
    for _ in range(3):
        link_step(model, offloader, toy.make_tokens())
    assert max(sizes) == max_inflight
    sizes.clear()
    link_step(model, offloader, toy.make_tokens())
    [choice] = offloader.link_choices
    arrived = [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert (choice.num_moved, choice.num_arrived, choice.max_inflight_offloads) == (6, tuple(arrived), 4)
    # Before block i runs: those that were packed, less those that had to be gone when block i - 1 started. Before the
    # first, what is left of the step before.
    assert sizes[1:] == [min(i, 6) - arrived[i - 1] for i in range(1, 12)]


def test_no_limit_on_the_stash_stays_none():
    model = toy.make_model()
    offloader = limited(model, max_inflight_offloads=0)
    for _ in range(3):
        link_step(model, offloader, toy.make_tokens())
    let_copies_end(offloader)
    offloader.step_end()
    offloader.engine.runtime.query = lambda event: False
    loss = model.loss(toy.make_tokens())
    assert len(offloader.engine.stash) == offloader.link_choices[0].num_moved == 4
    let_copies_end(offloader)
    loss.backward()


def test_steps_without_backward_are_no_ground_for_a_choice():
    """Nor is the first one with a backward, in which blocks are compiled. Guards: `ForwardWatch.step_end`."""
    model = toy.make_model()
    offloader = limited(model)
    tokens = toy.make_tokens()
    has_choice = []
    for schedule in (
        lambda: None,
        lambda: model.loss(tokens),
        lambda: model.loss(tokens).backward(),
        lambda: model.loss(tokens),
        lambda: model.loss(tokens).backward(),
    ):
        link_step(model, offloader, tokens, schedule)
        has_choice.append(bool(offloader.link_choices))
    assert has_choice == [False, False, False, False, True]


def test_forwards_are_timed_without_their_waits():
    """Guards: `waits` in `ForwardRecord`. Each block's input takes far longer to copy than the block to run, and waits
    for the copy before the last one."""
    model = toy.make_model()
    offloader = toy.offload(model, limit="link", runtime=HostRuntime(link_gb_per_s=toy.INPUT_BYTES / 50e-3 / 1e9))
    offloader.set_link(LinkRates(*[PortRates(1, 1, 1, 1)] * 2))
    for _ in range(3):
        stats = link_step(model, offloader, toy.make_tokens())
    assert stats.d2h_wait_ms > 100
    costs = offloader.link_choices[0].costs
    assert all(0 < forward_s < 30e-3 for forward_s in costs.forward_s)
    assert costs.num_bytes == (toy.INPUT_BYTES,) * 5 + (0,)
    assert costs.d2h_bytes_per_s == 1e9


def test_a_forward_that_raises_is_not_timed():
    model = toy.make_model()
    offloader = limited(model)
    inner = model.layers["2"]._checkpoint_wrapped_module
    hook = inner.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.loss(toy.make_tokens())
    assert offloader.engine._counter.watched is None
    hook.remove()
    [records] = offloader.engine.watch._of_step.values()
    assert [record.index for record in records] == [0, 1]


def test_microbatches_alive_at_once_reckon_with_both_ways():
    """As in a pipeline: copies out of one forward run beside copies back for the backward of another."""
    model = toy.make_model()
    offloader = limited(model)
    batches = [toy.make_tokens(seed) for seed in range(2)]

    def both():
        losses = [model.loss(tokens) for tokens in batches]
        for loss in losses:
            loss.backward()

    for _ in range(4):
        stats = link_step(model, offloader, None, both)
    assert offloader.link_choices[0].num_moved == stats.num_offloads == 0  # a hundredth of the speed
    assert stats.kept["the copy would not hide behind compute"] == (2 * 5, 2 * 5 * toy.INPUT_BYTES)


def test_each_part_has_its_own_choice():
    parts = [toy.make_model(seed=seed, num_blocks=num) for seed, num in ((0, 6), (1, 3))]
    offloader = limited(parts[0])
    offloader.attach(parts[1])

    def both():
        for part in parts:
            part.loss(toy.make_tokens()).backward()

    for _ in range(4):
        for part in parts:
            part.zero_grad()
        stats = link_step(parts[0], offloader, None, both)
    assert [choice.num_moved for choice in offloader.link_choices] == [4, 2]
    assert stats.num_offloads == 6
    for part, (seed, num) in zip(parts, ((0, 6), (1, 3)), strict=True):
        expected = toy.make_model(seed=seed, num_blocks=num)
        expected.loss(toy.make_tokens()).backward()
        toy.assert_same_grads(part, expected)


def test_saved_outputs_count_and_stay_with_their_region():
    """The output of tanh is twice as large as the input: copies of 1.5 forwards become 4.5. Guards: `num_bytes`."""
    model = toy.make_model()
    selective = SelectiveConfig(save_ops=("aten::tanh",), offload=True)
    config = OffloadConfig(min_offload_mib=0.0, limit="link")
    offloader = apply_offload(model, config, selective, runtime=toy.slow_link())
    speed = toy.INPUT_BYTES / 1.5 / 1e9
    offloader.set_link(LinkRates(*[PortRates(speed, 1e3, speed, 1e3)] * 2))
    watch, costs = offloader.engine.watch, offloader.engine.watch.costs
    watch.costs = lambda part, num: ((1.0,) * num, costs(part, num)[1])
    for _ in range(4):
        stats = link_step(model, offloader, toy.make_tokens())
        toy.assert_same_grads(model, reference(toy.make_tokens()))
    [choice] = offloader.link_choices
    assert choice.costs.num_bytes == (3 * toy.INPUT_BYTES,) * 5 + (0,)
    assert choice.num_moved == 1
    assert (stats.num_offloads, stats.offloaded_bytes) == (2, 3 * toy.INPUT_BYTES)
    assert stats.kept["the copy would not hide behind compute"] == (2 * 4, 3 * 4 * toy.INPUT_BYTES)


def test_with_limit_memory_nothing_is_timed():
    model = toy.make_model()
    offloader = toy.offload(model)
    offloader.engine.runtime.record_timed_event = None
    for _ in range(4):
        stats = link_step(model, offloader, toy.make_tokens())
    assert offloader.engine.watch is offloader.link is None
    assert (offloader.link_choices, stats.num_offloads) == ([], 5)


def test_link_that_nobody_told_is_measured():
    model = toy.make_model()
    offloader = toy.offload(model, limit="link", runtime=HostRuntime(link_gb_per_s=0.02))
    link_step(model, offloader, toy.make_tokens())
    for rates in (offloader.link.alone, offloader.link.shared):
        assert 0.005e9 < min(rates.bytes_per_s(False)) <= max(rates.bytes_per_s(False)) < 0.025e9
    offloader.remove()
    offloader.step_end()
    assert offloader.link_choices == []


# Order of copies. The host runtime checks each copy against a vector clock: see test_host_runtime.


def test_slots_are_reused_in_order_when_backward_and_forward_interleave():
    """Guards: the wait for `slot.events` in `_offload`. 1F1B with a pool of exactly what is needed: each slot that
    backward frees is written again while its reload may still be under way."""
    batches = [toy.make_tokens(seed) for seed in range(6)]
    model, expected = toy.make_model(), toy.make_model()
    offloader = toy.offload(model, runtime=HostRuntime(link_gb_per_s=0.008, jitter_ms=2, seed=3))
    for m in (model, expected):
        losses = [m.loss(batches[0]), m.loss(batches[1])]
        for tokens in batches[2:]:
            losses.pop(0).backward()
            losses.append(m.loss(tokens))
        while losses:
            losses.pop(0).backward()
    toy.assert_same_grads(model, expected)
    assert offloader.engine.pool.peak_bytes_pinned == 2 * (toy.NUM_BLOCKS - 1) * toy.INPUT_BYTES


def test_profiler_labels():
    model = toy.make_model()
    toy.offload(model, runtime=HostRuntime(**FAST), max_inflight_offloads=1)
    with torch.profiler.profile() as profiler:
        model.loss(toy.make_tokens()).backward()
    names = {event.name for event in profiler.events()}
    assert {"Offload::d2h (layers.3)", "Offload::h2d (layers.0)"} <= names


def test_our_hooks_do_not_reach_what_is_saved_elsewhere():
    """F27, F113: an outer hook of the user's sees what it saw before, less the block inputs."""

    def packed_shapes(offloaded):
        model = toy.make_model()
        if offloaded:
            toy.offload(model)
        seen = []
        with saved_tensors_hooks(lambda t: (seen.append(tuple(t.shape)), t)[1], lambda t: t):
            loss = model.loss(toy.make_tokens())
        loss.backward()
        return seen

    hidden, rope = (toy.BATCH, toy.SEQ, toy.DIM), (toy.DIM,)
    without, with_offload = packed_shapes(False), packed_shapes(True)
    for _ in range(toy.NUM_BLOCKS):
        without.remove(hidden)
        without.remove(rope)
    without = [shape for shape in without if shape != (0,)]  # torch 2.11 saves an empty dummy per checkpoint
    assert sorted(with_offload) == sorted(without)


def test_backward_on_another_compute_stream_lends_the_memory():
    """H4: the compute stream is asked for each time. What one stream's unpack prefetched, another stream uses: the
    memory must not go back to the first one's pool too early. Guards: `lend` in `_end_reload`."""
    model = toy.make_model()
    offloader = toy.offload(model, keep_last=0, max_inflight_offloads=1)
    runtime = offloader.engine.runtime
    asked, lent = [0], []
    compute_stream = runtime.compute_stream

    class Alternating:
        """The same stream under two names: each unpack sees another one."""

        def __init__(self, name):
            self.name, self.stream = name, compute_stream(None)

        def __getattr__(self, name):
            return getattr(self.stream, name)

        def __eq__(self, other):
            return self.name == getattr(other, "name", None)

    names = iter("abcdefghijklmnopqrstuvwxyz" * 10)
    loss = model.loss(toy.make_tokens())
    let_copies_end(offloader)
    runtime.compute_stream = lambda device: (asked.__setitem__(0, asked[0] + 1), Alternating(next(names)))[1]
    runtime.lend = lambda buffer, stream: lent.append((buffer.numel(), stream.name))
    loss.backward()
    stats = offloader.step_end()
    assert len(lent) == stats.num_reloads
    assert asked[0] == 2 * stats.num_reloads


# Exact order of events


class Recording(HostRuntime):
    """Writes down what the engine asks for. No copy is seen as done before somebody waits for it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.log = []
        self.names = {}
        self.slots = {}
        self.counts = Counter()

    def name(self, event):
        return self.names.get(id(event), "?")

    def slot_name(self, dst, src):
        slot = dst if dst.untyped_storage()._cdata in self._pinned else src
        return self.slots.setdefault(slot.data_ptr(), f"slot {len(self.slots)}")

    def compute_stream(self, device):
        self.log.append("compute?")
        return super().compute_stream(device)

    def empty(self, num_bytes, device):
        self.log.append("empty")
        return super().empty(num_bytes, device)

    def record_event(self, stream):
        event = super().record_event(stream)
        if stream is not self._scrubber:
            self.counts[stream.name] += 1
            self.names[id(event)] = f"{stream.name} {self.counts[stream.name]}"
            self.keep = [*getattr(self, "keep", ()), event]  # ids stay unique
            self.log.append(f"record {self.name(event)}")
        return event

    def wait_event(self, stream, event):
        if stream is not self._scrubber:
            self.log.append(f"{stream.name} waits for {self.name(event)}")
        super().wait_event(stream, event)

    def copy(self, dst, src, stream):
        self.log.append(f"{stream.name} copies {self.slot_name(dst, src)}")
        super().copy(dst, src, stream)

    def query(self, event):
        return False


def log_frees(offloader):
    runtime, pool = offloader.engine.runtime, offloader.engine.pool
    free = pool.free
    pool.free = lambda slot, event: (runtime.log.append(f"free after {runtime.name(event)}"), free(slot, event))


def logs_of_forward_and_backward(num_blocks, **config):
    model = toy.make_model(num_blocks=num_blocks)
    runtime = Recording()
    offloader = toy.offload(model, runtime=runtime, **config)
    log_frees(offloader)
    loss = model.loss(toy.make_tokens())
    forward, runtime.log = runtime.log, []
    loss.backward()
    toy.assert_same_grads(model, reference(toy.make_tokens(), num_blocks=num_blocks))
    assert toy.slots_in_use(offloader) == 0
    return forward, runtime.log


def test_exact_order_with_schedule_overlap():
    """Every wait of the engine's contract in its place. Guards, alone, those that another wait happens to imply here:
    h2d's for the D2H (in `_start_reload`), and that the compute stream is asked for anew each time."""
    forward, backward = logs_of_forward_and_backward(3, keep_last=0, max_inflight_offloads=1)
    offload = ["compute?", "record compute 1", "d2h waits for compute 1", "d2h copies slot 0", "record d2h 1"]
    assert forward[:5] == offload
    assert forward[5:] == [
        "compute waits for d2h 1",  # room in the stash, before the next copy starts
        *("compute?", "record compute 2", "d2h waits for compute 2", "d2h copies slot 1", "record d2h 2"),
        "compute waits for d2h 2",
        *("compute?", "record compute 3", "d2h waits for compute 3", "d2h copies slot 2", "record d2h 3"),
    ]
    assert backward == [
        # Region 2 is still in the stash; region 1 is prefetched.
        *("compute?", "empty", "record compute 4", "h2d waits for compute 4", "h2d waits for d2h 2"),
        *("h2d copies slot 1", "record h2d 1"),
        # Region 2 is done, its copy to the host perhaps not: compute does not wait for what nobody needs.
        "free after d2h 3",
        # Region 1: region 0 is prefetched before the wait for its own reload.
        *("compute?", "empty", "record compute 5", "h2d waits for compute 5", "h2d waits for d2h 1"),
        *("h2d copies slot 0", "record h2d 2"),
        *("compute?", "compute waits for h2d 1", "free after h2d 1"),
        # Region 0.
        *("compute?", "compute waits for h2d 2", "free after h2d 2"),
    ]


def test_exact_order_with_schedule_sync():
    """Guards: `self._is_sync` at each place: all on the compute stream, nothing in the stash, nothing prefetched."""
    forward, backward = logs_of_forward_and_backward(2, schedule="sync", keep_last=0)
    assert forward == [
        *("compute?", "record compute 1", "compute waits for compute 1", "compute copies slot 0", "record compute 2"),
        "compute waits for compute 2",
        *("compute?", "record compute 3", "compute waits for compute 3", "compute copies slot 1", "record compute 4"),
        "compute waits for compute 4",
    ]
    assert backward == [
        *("compute?", "empty", "record compute 5", "compute waits for compute 5", "compute waits for compute 4"),
        *("compute copies slot 1", "record compute 6", "compute?", "compute waits for compute 6"),
        "free after compute 6",
        *("compute?", "empty", "record compute 7", "compute waits for compute 7", "compute waits for compute 2"),
        *("compute copies slot 0", "record compute 8", "compute?", "compute waits for compute 8"),
        "free after compute 8",
    ]


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_lookahead_is_the_number_of_regions_reloaded_ahead(lookahead):
    """Guards: `regions_after`. Which reloads have started once each region has unpacked its inputs."""
    model = toy.make_model()
    offloader = toy.offload(model, keep_last=1, max_inflight_offloads=1, prefetch_lookahead=lookahead)
    started, reached = [], {}
    start, unpack = offloader.engine._start_reload, offloader.engine.unpack
    offloader.engine._start_reload = lambda payload: (started.append(payload.region.index), start(payload))[1]

    def spy(handle):
        tensor = unpack(handle)
        reached[handle.region.index] = list(started)
        return tensor

    offloader.engine.unpack = spy
    loss = model.loss(toy.make_tokens())
    let_copies_end(offloader)
    loss.backward()
    last = toy.NUM_BLOCKS - 1  # stays
    for region in range(toy.NUM_BLOCKS):
        assert reached[region] == list(range(last - 1, max(-1, min(region - lookahead, last) - 1), -1)), region


def test_prefetch_does_not_repeat_what_is_alive():
    """Guards: `alive_storage` in `_prefetch`. Somebody keeps the recomputed inputs: a second backward reloads none."""
    model = toy.make_model()
    offloader = toy.offload(model, max_inflight_offloads=1)
    loss = model.loss(toy.make_tokens())
    let_copies_end(offloader)
    kept = []
    for block in model.layers.values():
        block._checkpoint_wrapped_module.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    loss.backward(retain_graph=True)
    loss.backward()
    assert offloader.step_end().num_reloads == toy.NUM_BLOCKS - 1


def test_waits_are_measured():
    """Guards: `_wait` and `_take_waits`."""
    model = toy.make_model()
    offloader = toy.offload(model, runtime=Recording(), max_inflight_offloads=1)
    runtime = offloader.engine.runtime

    def each_wait_takes(milliseconds):
        runtime.timed_wait = lambda stream, event: (runtime.wait_event(stream, event), lambda: milliseconds)[1]

    each_wait_takes(2.0)
    loss = model.loss(toy.make_tokens())
    each_wait_takes(3.0)
    loss.backward()
    stats = offloader.step_end()
    num = toy.NUM_BLOCKS - 1
    # Each copy but the last made room for the next; backward took the last one's source from the stash.
    assert stats.d2h_wait_ms == (num - 1) * 2.0
    assert stats.h2d_wait_ms == (num - 1) * 3.0
    assert offloader.step_end().h2d_wait_ms == 0.0


def test_a_wait_that_the_device_has_not_come_past_counts_in_the_next_step():
    offloader = toy.offload(toy.make_model())
    measured = [None]
    offloader.engine._counter._waits["h2d"].append(lambda: measured[0])
    assert offloader.step_end().h2d_wait_ms == 0.0
    measured[0] = 7.0
    assert offloader.step_end().h2d_wait_ms == 7.0
    assert offloader.step_end().h2d_wait_ms == 0.0


# What is moved


def test_what_needs_no_gradient_stays():
    """A rotary table that is no buffer, and another constant. Guards: the first choice in `input_storages`."""
    model = toy.make_model(block=Several)
    model.call = lambda block, h, rope: block(h, rope.clone(), torch.ones(h.shape))
    offloader = toy.offload(model, keep_last=0)
    model.loss(toy.make_tokens()).backward()
    stats = offloader.step_end()
    assert (stats.num_offloads, stats.offloaded_bytes) == (toy.NUM_BLOCKS, toy.NUM_BLOCKS * toy.INPUT_BYTES)
    assert stats.kept == {}


def test_what_lives_elsewhere_stays():
    """CPU tensors under an accelerator. Guards: `runtime.owns` in `_why_stay`."""

    class Elsewhere(HostRuntime):
        device_type = "meta"

    tokens = toy.make_tokens()
    model = toy.make_model()
    offloader = toy.offload(model, runtime=Elsewhere())
    model.loss(tokens).backward()
    toy.assert_same_grads(model, reference(tokens))
    stats = offloader.step_end()
    assert (stats.num_offloads, stats.kept) == (0, {})


def test_what_has_arrived_leaves_the_device_at_the_next_pack():
    """Guards: `Stash.reap` in `pack`. Without a limit the stash must not grow with depth on a fast link."""
    model = toy.make_model()
    offloader = toy.offload(model, runtime=HostRuntime(**FAST), max_inflight_offloads=0)
    stashed = []

    def watch(i, h):
        stashed.append(len(offloader.engine.stash))
        let_copies_end(offloader)
        return h

    model.between = watch
    model.loss(toy.make_tokens()).backward()
    assert max(stashed) <= 1


def test_an_input_that_all_blocks_share_moves_once_and_does_not_disturb_prefetch():
    """A skip from the embedding to every block (value residual, nanochat's x0). Guards: that `unpack` prefetches from
    the region that backward works on, not from the one that moved the payload."""
    tokens = toy.make_tokens()
    model, expected = toy.make_model(block=Several), toy.make_model(block=Several)
    for m in (model, expected):
        first = m.first = []
        m.between = lambda i, h, first=first: (first.append(h.clone()) if i == 0 else None, h)[1]
        m.call = lambda block, h, rope, first=first: block(h, first[0], rope)
    offloader = toy.offload(model, keep_last=1, max_inflight_offloads=1)
    reloads = Counter()
    start = offloader.engine._start_reload
    offloader.engine._start_reload = lambda payload: (reloads.update([payload.slot.buffer.data_ptr()]), start(payload))
    for m in (model, expected):
        loss = m.loss(tokens)
        m.first.clear()
        if m is model:
            let_copies_end(offloader)
        loss.backward()
    toy.assert_same_grads(model, expected)
    num = toy.NUM_BLOCKS - 1
    stats = offloader.step_end()
    assert stats.num_offloads == num + 1
    *hidden_states, shared = sorted(reloads.values())
    assert hidden_states == [1] * num
    assert shared <= num  # at most once per region that moved
    assert stats.num_prefetch_hits >= num
    assert toy.slots_in_use(offloader) == 0


def test_a_miss_of_what_blocks_share_reloads_what_its_own_block_needs():
    """Of the block that backward works on, not of the one that moved it. Guards: the region in `_bring_back`."""
    model = toy.make_model(block=Several)
    first = []
    model.between = lambda i, h: (first.append(h.clone()) if i == 0 else None, h)[1]
    model.call = lambda block, h, rope: block(first[0], h)
    offloader = toy.offload(model, keep_last=1, max_inflight_offloads=1, prefetch_lookahead=0)
    loss = model.loss(toy.make_tokens())
    first.clear()
    let_copies_end(offloader)
    starts = []
    start, [tape] = offloader.engine._start_reload, offloader.engine.tapes.alive()
    shared = next(iter(tape.regions[0]().payloads))
    offloader.engine._start_reload = lambda payload: (
        starts.append((payload.region.index, tape.reached().index)) if weakref.ref(payload) != shared else None,
        start(payload),
    )
    loss.backward()
    assert starts == [(index, index) for index in reversed(range(toy.NUM_BLOCKS - 1))]


def test_graph_dropped_by_another_thread_while_its_stash_entry_is_dropped():
    """The payload died and waits in the queue, and this thread makes room in the stash before it gets to the queue.
    Guards: that `_release_all` does not take the entry out of the stash a second time."""
    model = toy.make_model()
    offloader = toy.offload(model, runtime=Recording(), max_inflight_offloads=1)  # nothing leaves the stash by itself
    loss = [model.loss(toy.make_tokens())]
    with offloader.engine._locked():
        thread = threading.Thread(target=loss.clear)
        thread.start()
        thread.join(timeout=10)
        offloader.engine.stash.drop_oldest()
    assert toy.slots_in_use(offloader) == 0
    assert not offloader.engine.stash
    tokens = toy.make_tokens(1)
    model.loss(tokens).backward()
    toy.assert_same_grads(model, reference(tokens))


def test_recycled_storage_identity_is_another_payload(monkeypatch):
    """An address is used again once its storage is freed: here all storages have the same one. Guards: `origin` in
    `_find_moved`."""
    for module in (titan_offload.engine, titan_offload.saved_tensor):
        monkeypatch.setattr(module, "storage_id", lambda tensor: 1)
    tokens = toy.make_tokens()
    model = toy.make_model()
    offloader = toy.offload(model)
    model.loss(tokens).backward()
    toy.assert_same_grads(model, reference(tokens))
    assert offloader.step_end().num_offloads == 2 * (toy.NUM_BLOCKS - 1)  # the rotary table, in its turn, each time


def test_a_moved_storage_whose_content_changed_is_another_payload():
    """The second block gets the first one's input after an in-place change: same storage, other values. Guards: the
    version in `_find_moved`."""

    class Scale(nn.Module):
        def forward(self, x):
            return (x * weight).sin()

    weight = nn.Parameter(torch.linspace(-1, 1, toy.DIM))

    def run(is_offloaded):
        weight.grad = None
        model = nn.Module()
        model.layers = nn.ModuleDict({str(i): checkpoint_wrapper(Scale()) for i in range(3)})
        offloader = toy.offload(model) if is_offloaded else None
        x = torch.linspace(1, 2, 4 * toy.DIM).view(4, toy.DIM)
        y = model.layers["0"](x)
        if is_offloaded:
            let_copies_end(offloader)  # from here on the device copy is nobody's business
            offloader.engine.stash.reap()
        else:
            x = x.clone()
        x.mul_(3)
        (y + model.layers["1"](x)).sum().backward()
        assert not is_offloaded or offloader.step_end().num_offloads == 2
        return weight.grad

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("in_backward", [False, True])
def test_saved_outputs_do_not_keep_their_own_graph_alive(in_backward):
    """A compiled block saves outputs of its own, and hooks are given them with their history: a handle that held that
    would close a cycle. Guards: `detach` in `pack`, and in the hooks of a recompute in `region`."""
    offloader = toy.offload(toy.make_model(), keep_last=0)
    part = titan_offload.tape.ModelPart(["block"], lambda index: ())
    storages = []

    def run(x):
        with offloader.engine.region(part, 0, (x,)):
            y = torch.tanh(x)
        storages.append(weakref.ref(y.untyped_storage()))
        return y

    x = torch.ones(4, requires_grad=True)
    if in_backward:
        torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    else:
        y = run(x)
        del y
    assert [ref() for ref in storages] == [None] * len(storages)


def test_graph_dropped_while_a_reload_is_under_way():
    """Backward stops half way; what it had prefetched was never used. Guards: the wait in `_release_all`."""
    model = toy.make_model()
    runtime = Recording(link_gb_per_s=0.0004)
    offloader = toy.offload(model, runtime=runtime, keep_last=0, max_inflight_offloads=1)
    log_frees(offloader)
    outputs = []
    model.between = lambda i, h: (outputs.append(h), h)[1]
    loss = model.loss(toy.make_tokens())
    weight = model.layers["4"]._checkpoint_wrapped_module.w1.weight
    torch.autograd.grad(outputs[5].sum(), weight, retain_graph=True)  # works on region 4, prefetches 3
    started = {line.removeprefix("record ") for line in runtime.log if line.startswith("record h2d")}
    [reload] = started - {line.removeprefix("compute waits for ") for line in runtime.log}
    runtime.log = []
    outputs.clear()
    del loss
    assert toy.slots_in_use(offloader) == 0
    at = runtime.log.index(f"compute waits for {reload}")
    assert runtime.log[at + 1] == f"free after {reload}"
    assert [line for line in runtime.log if line.startswith("compute waits")] == [f"compute waits for {reload}"]
    runtime.check()


def test_saved_outputs_of_a_recompute_do_not_keep_their_own_graph_alive():
    """As above where an outer checkpoint recomputes the region inside backward. Guards: `detach` in the hooks there."""
    offloader = toy.offload(toy.make_model(), keep_last=0)
    part = titan_offload.tape.ModelPart(["block"], lambda index: ())
    storages = []

    def run(x):
        with offloader.engine.region(part, 0, (x,)):
            y = torch.tanh(x)
        storages.append(weakref.ref(y.untyped_storage()))
        return y.exp()  # saved by the outer checkpoint: backward recomputes up to here

    x = torch.ones(4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    assert [ref() for ref in storages] == [None, None]


def test_what_is_dead_stays_in_the_stash_until_its_copy_has_ended():
    """Guards: `query` in `Stash.drop_dead`. The copy reads the tensor still."""
    model = toy.make_model()
    offloader = toy.offload(model, runtime=Recording(link_gb_per_s=0.001), max_inflight_offloads=0)
    loss = model.loss(toy.make_tokens())
    del loss
    assert toy.slots_in_use(offloader) == 0
    assert len(offloader.engine.stash) == toy.NUM_BLOCKS - 1
    let_copies_end(offloader)
    offloader.engine.runtime.query = lambda event: True
    offloader.step_end()
    assert not offloader.engine.stash
    offloader.engine.runtime.check()


def test_dropped_graph_leaves_nothing_in_the_stash_if_its_copies_have_ended():
    """Not only with the next call: there may be none. (A weak reference is still alive inside `__del__`.)"""
    model = toy.make_model()
    offloader = toy.offload(model, runtime=Recording(), max_inflight_offloads=0)
    loss = model.loss(toy.make_tokens())
    assert len(offloader.engine.stash) == toy.NUM_BLOCKS - 1
    let_copies_end(offloader)
    offloader.engine.runtime.query = lambda event: True
    del loss
    assert not offloader.engine.stash


def test_a_regions_own_reload_starts_before_those_of_the_next():
    """What stayed on the device may be unpacked first: here the rotary table, on torch 2.11 always an empty dummy.
    Guards: `if not handle.region.payloads` in `unpack`."""

    class Swapped(toy.Block):
        def forward(self, rope, x):
            return super().forward(x, rope)

    model = toy.make_model(block=Swapped)
    model.call = lambda block, h, rope: block(rope, h)
    offloader = toy.offload(model, keep_last=0, max_inflight_offloads=1)
    started = []
    start = offloader.engine._start_reload
    offloader.engine._start_reload = lambda payload: (started.append(payload.region.index), start(payload))[1]
    loss = model.loss(toy.make_tokens())
    let_copies_end(offloader)
    loss.backward()
    assert started == list(reversed(range(toy.NUM_BLOCKS)))
