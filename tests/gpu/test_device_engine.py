"""The engine on the device: gradients are those without offload, bit for bit, exactly what should move does, and a wait
that is missing shows. "Guards" names the line whose loss makes the test fail."""

import functools
import itertools
from types import SimpleNamespace

import attention_toy as at
import pytest
import torch
import toy
from gpu_machine import assert_grads, let_copies_end, reference, step
from test_mode_all import SavedTensors, plain

from titan_offload import OffloadConfig, SelectiveConfig, apply_offload

pytestmark = pytest.mark.gpu

PLAIN_AND_STRICT = pytest.mark.parametrize("is_strict", [False, True], ids=["plain", "strict"])
SETTINGS = [
    *(("overlap", *numbers) for numbers in itertools.product((0, 1), (0, 1, 2), (0, 1, 2))),
    *(("sync", keep_last, 1, 2) for keep_last in (0, 1)),
]


@functools.cache
def expected(machine, seed, seq, **kwargs):
    return reference(machine, machine.tokens(seed, seq), **kwargs)


# Block inputs


@PLAIN_AND_STRICT
@pytest.mark.parametrize(("schedule", "keep_last", "lookahead", "max_inflight"), SETTINGS)
def test_gradients_are_bitwise_equal(machine, schedule, keep_last, lookahead, max_inflight, is_strict):
    """Over steps of other lengths: slots and device memory are reused in other sizes while copies are under way."""
    model = machine.model()
    offloader = toy.offload(
        model,
        runtime=machine.runtime(is_strict),
        schedule=schedule,
        keep_last=keep_last,
        prefetch_lookahead=lookahead,
        max_inflight_offloads=max_inflight,
    )
    num = toy.NUM_BLOCKS - keep_last
    for seed, seq in enumerate(machine.seqs):
        stats = step(model, offloader, machine.tokens(seed, seq))
        assert_grads(model, expected(machine, seed, seq))
        num_bytes = machine.input_bytes(seq)
        assert (stats.num_offloads, stats.offloaded_bytes) == (num, num * num_bytes)
        # What had not arrived yet when backward came to it is taken from the device.
        assert stats.num_reloads + stats.num_resident == num
        assert stats.reloaded_bytes == stats.num_reloads * num_bytes
        assert schedule == "overlap" or stats.num_reloads == num
        assert stats.pinned_in_use_bytes == 0
    assert toy.slots_in_use(offloader) == 0


@PLAIN_AND_STRICT
@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_each_input_moves_once_and_comes_back_in_time(machine, keep_last, is_strict):
    """All copies have ended when backward starts: each input comes from host memory."""
    model, num_bytes = machine.model(), machine.input_bytes()
    offloader = toy.offload(model, runtime=machine.runtime(is_strict), keep_last=keep_last)
    num = toy.NUM_BLOCKS - keep_last
    for i in range(2):
        stats = step(model, offloader, machine.tokens(), does_settle=True)
        assert_grads(model, expected(machine, 0, machine.seqs[0]))
        assert (stats.num_offloads, stats.offloaded_bytes) == (num, num * num_bytes)
        assert (stats.num_reloads, stats.reloaded_bytes) == (num, num * num_bytes)
        assert (stats.num_misses, stats.num_prefetch_hits) == ((1, num - 1) if keep_last == 0 else (0, num))
        assert stats.kept == ({"keep_last": (keep_last, keep_last * num_bytes)} if keep_last else {})
        assert stats.pinned_peak_bytes == stats.pinned_total_bytes == num * num_bytes
        assert (stats.num_slabs_made > 0) == (i == 0)


@PLAIN_AND_STRICT
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=["fifo", "lifo", "mixed"])
def test_several_forwards_before_backward(machine, order, is_strict):
    """And one whose graph is dropped. From the second step on the order is known."""
    batches = [machine.tokens(seed, seq) for seed, seq in enumerate(machine.seqs[:3])]
    model, other = machine.model(), machine.model()
    offloader = toy.offload(model, runtime=machine.runtime(is_strict), keep_last=0)
    for _ in range(3):
        for m in (model, other):
            m.zero_grad()
            losses = {i: m.loss(tokens) for i, tokens in enumerate(batches)}
            abandoned = m.loss(batches[0])
            del abandoned
            for i in order:
                losses.pop(i).backward()
        assert_grads(model, toy.grads(other))
        stats = offloader.step_end()
        assert stats.num_offloads == 4 * toy.NUM_BLOCKS
        assert stats.num_reloads + stats.num_resident == 3 * toy.NUM_BLOCKS
    assert toy.slots_in_use(offloader) == 0


@PLAIN_AND_STRICT
def test_a_retained_graph_is_run_twice(machine, is_strict):
    """Guards: a slot lives as long as its graph."""
    model, other = machine.model(), machine.model()
    offloader = toy.offload(model, runtime=machine.runtime(is_strict))
    for m in (model, other):
        loss = m.loss(machine.tokens())
        let_copies_end(offloader)
        loss.backward(retain_graph=True)
        assert toy.slots_in_use(offloader) == (toy.NUM_BLOCKS - 1 if m is model else 0)
        loss.backward()
    assert_grads(model, toy.grads(other))
    assert toy.slots_in_use(offloader) == 0
    assert offloader.step_end().num_reloads == 2 * (toy.NUM_BLOCKS - 1)


@PLAIN_AND_STRICT
def test_a_compute_stream_of_the_users_own(machine, is_strict):
    """The default stream is busy meanwhile: what waits for it is late. Guards: the compute stream is asked for anew."""
    machine.needs_device("a CPU has one compute stream")
    model, tokens = machine.model(), machine.tokens()
    offloader = toy.offload(model, runtime=machine.runtime(is_strict), max_inflight_offloads=1)
    default, own = torch.accelerator.current_stream(), torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        step(model, offloader, tokens)  # the stream's pool has its memory now
        own.synchronize()
        machine.keep_busy(offloader.engine.runtime, default, 500.0)
        is_busy = default.record_event()
        step(model, offloader, tokens)
        own.synchronize()
        assert not is_busy.query()
    assert_grads(model, expected(machine, 0, machine.seqs[0]))
    assert toy.slots_in_use(offloader) == 0


# Mode "all"


@PLAIN_AND_STRICT
@pytest.mark.parametrize(
    ("schedule", "keep_last", "lookahead", "max_inflight"),
    [("overlap", 1, 1, 2), ("overlap", 0, 0, 1), ("overlap", 0, 2, 0), ("sync", 0, 1, 2)],
)
def test_all_that_is_saved_moves_without_checkpointing(
    machine, schedule, keep_last, lookahead, max_inflight, is_strict
):
    model = machine.model(wrap=plain)
    offloader = toy.offload(
        model,
        runtime=machine.runtime(is_strict),
        mode="all",
        schedule=schedule,
        keep_last=keep_last,
        prefetch_lookahead=lookahead,
        max_inflight_offloads=max_inflight,
    )
    for seed, seq in enumerate(machine.seqs[:3]):
        tokens = machine.tokens(seed, seq)
        counted = machine.model(wrap=plain)
        counter = SavedTensors(counted)
        with counter:
            counted.loss(tokens)
        stats = step(model, offloader, tokens)
        assert_grads(model, expected(machine, seed, seq, wrap=plain))
        assert (stats.num_offloads, stats.offloaded_bytes) == counter.count(keep_last)
    assert toy.slots_in_use(offloader) == 0


# Selective saves


NO_INPUTS, INPUTS = OffloadConfig(mode="none", min_offload_mib=0.0), OffloadConfig(min_offload_mib=0.0)
PLACES = {
    "on the device": (NO_INPUTS, False),
    "on the device, inputs moved": (INPUTS, False),
    "in host memory": (NO_INPUTS, True),
    "in host memory, inputs too": (INPUTS, True),
}


class CountAttention(at.CountOps):
    """Calls of attention's forward, and the bytes of what it returned on the device."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.num_calls = self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        if "scaled_dot_product" in func.name() and "backward" not in func.name():
            on_device = [x for x in outputs if isinstance(x, torch.Tensor) and x.device.type == self.device.type]
            self.num_calls += 1
            self.num_bytes += sum(x.untyped_storage().nbytes() for x in on_device)
        return outputs


@functools.cache
def attention(machine):
    """Of a model that saves nothing: gradients, and calls and bytes of attention in forward and in backward."""
    model, forward = at.make_model().to(machine.device), CountAttention(machine.device)
    with forward:
        loss = model.loss(toy.make_tokens().to(machine.device))
    backward = CountAttention(machine.device)
    with backward:
        loss.backward()
    return toy.grads(model), forward, backward


@PLAIN_AND_STRICT
@pytest.mark.parametrize("place", PLACES)
def test_saved_attention_is_not_run_again(machine, place, is_strict):
    config, is_moved = PLACES[place]
    grads, forward, recompute = attention(machine)
    assert forward.num_calls == recompute.num_calls == toy.NUM_BLOCKS
    model, tokens = at.make_model().to(machine.device), toy.make_tokens().to(machine.device)
    offloader = apply_offload(model, config, SelectiveConfig(offload=is_moved), runtime=machine.runtime(is_strict))
    num = toy.NUM_BLOCKS - 1
    num_bytes = num * toy.INPUT_BYTES * (config is INPUTS) + num * forward.num_bytes // toy.NUM_BLOCKS * is_moved
    for _ in range(3):
        model.zero_grad()
        loss = model.loss(tokens)
        with CountAttention(machine.device) as backward:
            loss.backward()
        assert backward.num_calls == 0
        assert_grads(model, grads)
        stats = offloader.step_end()
        assert stats.saved['save_ops "attention"'][0] == toy.NUM_BLOCKS
        assert (stats.offloaded_bytes, stats.pinned_in_use_bytes) == (num_bytes, 0)


# Mistakes show


def forget_reloads(machine, offloader):
    """The compute stream waits for no copy to the device."""
    offloader.engine._wait = lambda compute, event: None


def forget_offloads(machine, offloader):
    """The compute stream waits for no copy to the host before what it copies is dropped."""
    stash, runtime = offloader.engine.stash, offloader.engine.runtime
    stash._runtime = SimpleNamespace(query=runtime.query, timed_wait=lambda stream, event: lambda: 0.0)


def forget_compute(machine, offloader):
    """Copies to the host do not wait for what they copy."""
    engine = offloader.engine
    copy = engine._copy
    engine._copy = lambda way, region, dst, src, stream, after: copy(
        way, region, dst, src, stream, after if way == "h2d" else ()
    )
    if not machine.is_emulated:  # there the order of events is checked, whatever the time
        machine.keep_busy(engine.runtime, engine.runtime.compute_stream(machine.device), 200.0)


def forget_the_slots_last_user(machine, offloader):
    """Copies to the host do not wait until their slot is free."""
    pool = offloader.engine.pool
    allocate = pool.allocate

    def allocate_too_early(num_bytes):
        slot = allocate(num_bytes)
        slot.events = ()
        return slot

    pool.allocate = allocate_too_early


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of slots freed after the first error
@pytest.mark.parametrize(
    "forget",
    [forget_reloads, forget_offloads, forget_compute, forget_the_slots_last_user],
    ids=["reload", "drop from the stash", "compute", "slot"],
)
def test_a_wait_that_is_missing_shows(machine, forget):
    """Of the strict runtime: a wait may be missing and gradients be right, by luck, but not here."""
    model, other = machine.model(), machine.model()
    offloader = toy.offload(model, runtime=machine.runtime(is_strict=True, late_ms=20.0))
    for seed in range(2):
        other.loss(machine.tokens(seed)).backward()
    model.loss(machine.tokens(0)).backward()
    with pytest.raises(AssertionError):
        forget(machine, offloader)
        model.loss(machine.tokens(1)).backward()
        assert_grads(model, toy.grads(other))
    machine.synchronize()
