"""What happens when things go wrong: the first error is raised as itself, and a caller that goes on trains as if
nothing had been. docs/reliability.md has the table of faults; the injector is `fault_injector`."""

import contextlib
import itertools
import sys
from dataclasses import dataclass, field

import attention_toy
import pytest
import torch
import toy
from fault_injector import (
    BLOCK_POINTS,
    POINTS,
    RUNTIME_POINTS,
    FaultInjector,
    FaultyRuntime,
    LineInterrupt,
    device_error,
)

from titan_offload import HostRuntime, OffloadConfig, Offloader, SelectiveConfig, apply_offload
from titan_offload.pool import PinnedPool
from titan_offload.stats import Stay
from titan_offload.tape import State

NUM_BLOCKS = 4
SLOW = {"link_gb_per_s": 0.05, "jitter_ms": 0.1, "seed": 1}
FAST = {"link_gb_per_s": None, "jitter_ms": 0.0}
TOKENS = [toy.make_tokens(seed) for seed in range(2)]  # of two microbatches, whose graphs are alive at once


def plain(block):
    return block


def narrow(i, h):
    """A block input whose storage is mostly somebody else's: it is gathered."""
    return torch.cat((h, h, h), dim=-1)[..., : toy.DIM]


@dataclass
class Setting:
    """How a toy model is offloaded."""

    config: dict = field(default_factory=dict)
    budget_bytes: int = 2**30
    selective: SelectiveConfig | None = None
    make_model: object = toy.make_model
    model: dict = field(default_factory=dict)
    between: object = None

    def make(self):
        model = self.make_model(num_blocks=NUM_BLOCKS, **self.model)
        if self.between is not None:
            model.between = self.between
        return model


SETTINGS = {
    "no room is an error": Setting({"on_exhausted": "error"}),
    "link": Setting({"limit": "link", "keep_last": 0}),
    "overlap": Setting(),
    "two ahead, one in the stash": Setting({"keep_last": 0, "prefetch_lookahead": 2, "max_inflight_offloads": 1}),
    "none ahead, no limit of the stash": Setting({"prefetch_lookahead": 0, "max_inflight_offloads": 0}),
    "sync": Setting({"schedule": "sync"}),
    "room for three": Setting(budget_bytes=3 * toy.INPUT_BYTES),
    "gathered": Setting(between=narrow),
    "saved outputs": Setting(
        selective=SelectiveConfig(save_ops=("attention",), offload=True), make_model=attention_toy.make_model
    ),
    "all": Setting({"mode": "all"}, model={"wrap": plain}),
    "all, checkpointed": Setting({"mode": "all", "keep_last": 0}),
}


class Run:
    """A toy model under offload with faults, and the gradients that it would have without either."""

    def __init__(self, setting: str, **runtime) -> None:
        self.injector = FaultInjector()
        setting = SETTINGS[setting]
        self.expected = setting.make()
        step(self.expected)
        self.model = setting.make()
        self.injector.install(self.model)
        self.runtime = FaultyRuntime(self.injector, **(runtime or SLOW))
        config = OffloadConfig(min_offload_mib=0.0, **setting.config)
        self.offloader: Offloader = apply_offload(
            self.model, config, setting.selective, runtime=self.runtime, budget_bytes=setting.budget_bytes
        )

    def train(self) -> None:
        step(self.model, self.let_copies_end)
        toy.assert_same_grads(self.model, self.expected)

    def let_copies_end(self) -> None:
        for entry in self.offloader.engine.stash:
            self.runtime.synchronize(entry.event)

    def fails(self, body=None) -> bool:
        """Whether the fault came in ``body`` (default: in a step). If it was raised, then as itself, with nothing of
        ours on top; a release that failed need not raise, and changes nothing."""
        try:
            (body or self.train)()
        except BaseException as error:
            assert error is self.injector.raised, repr(error)
            assert error.__context__ is None, repr(error.__context__)
            let_go(error)
        failed = self.injector.raised is not None
        self.injector.disarm()
        return failed

    def assert_nothing_left(self, max_lost: int = 0, place: str = "") -> None:
        engine = self.offloader.engine
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert not engine._lock.locked()
        self.let_copies_end()
        self.offloader.step_end()
        assert not engine.stash
        assert engine.pool.num_slots_in_use <= max_lost, place
        assert engine.pool.bytes_in_use == 0 or max_lost, place
        assert engine.tapes.alive() == []


def step(model, before_backward=lambda: None) -> None:
    model.zero_grad()
    losses = [model.loss(tokens) for tokens in TOKENS]
    before_backward()
    while losses:
        losses.pop(0).backward()


def let_go(error: BaseException) -> None:
    """As when the caller's ``except`` is left: the traceback holds the frames, and these hold the graph."""
    error.__traceback__ = None


def passings(spread: int):
    """1, 2, 3, 4, and then each ``spread``-th."""
    return itertools.chain(range(1, 5), itertools.count(7, spread))


@pytest.fixture(autouse=True)
def ignored():
    """What was raised in a ``__del__``: Python prints it and goes on. There must be nothing."""
    errors, before = [], sys.unraisablehook
    sys.unraisablehook = lambda error: errors.append(error.exc_value)
    yield errors
    sys.unraisablehook = before
    assert errors == []


def has_point(setting: str, point: str) -> bool:
    """Whether it is passed; of the blocks' own, whether the setting makes a difference to it."""
    if point == "gather":
        return setting == "gathered"
    if point == "query":
        return setting != "sync"
    if point in BLOCK_POINTS and setting not in ("overlap", "sync", "room for three", "saved outputs", "all"):
        return False
    return setting != "all" or not point.startswith("recompute")


CASES = [(setting, point) for setting in list(SETTINGS)[2:] for point in POINTS if has_point(setting, point)]
IN_BACKWARD = [case for case in CASES if not case[1].startswith("forward") and case[1] not in ("gather", "query")]


@pytest.mark.parametrize(("setting", "point"), CASES)
def test_step_that_failed_is_done_again(setting, point):
    """Forward or backward raises, the caller lets go of the graphs and does the same step again. Guards: `_settled`,
    and the order of what is done in `_offload`, `_start_reload`, `Stash.drop_oldest` and `_release_all`."""
    run = Run(setting)
    with run.injector.in_gather():
        run.train()
        for n in passings(spread=13):
            run.injector.fail_at(point, n)
            if not run.fails():
                break
            run.assert_nothing_left()
            run.train()
            run.assert_nothing_left()
    assert n > 1


@pytest.mark.parametrize(("setting", "point"), IN_BACKWARD)
def test_backward_that_failed_is_done_again_on_the_same_graph(setting, point):
    """As who catches an out-of-memory error does. The other microbatch's graph is alive too. Guards: `_start_reload`
    changes nothing before the reload has begun."""
    run = Run(setting)
    expected = []
    for tokens in TOKENS:
        run.expected.zero_grad()
        run.expected.loss(tokens).backward()
        expected.append(toy.grads(run.expected))

    def backward(loss):
        run.model.zero_grad()
        loss.backward(retain_graph=True)

    for n in passings(spread=13):
        losses = [run.model.loss(tokens) for tokens in TOKENS]
        run.let_copies_end()
        run.injector.fail_at(point, n)
        failed = run.fails(lambda losses=losses: backward(losses[0]))
        for i in (0, 0, 1):
            backward(losses[i])
            assert all(map(torch.equal, toy.grads(run.model), expected[i]))
        losses.clear()
        run.assert_nothing_left()
        if not failed:
            break
    assert n > 1


@pytest.mark.parametrize("point", [point for point in POINTS if point != "gather"])
def test_interrupt_is_raised_as_itself(point):
    """Ctrl-C while the device is asked for something, or within a block. Guards: `BaseException` in `_settled`."""
    run = Run("overlap")
    run.train()
    for n in passings(spread=13):
        run.injector.fail_at(point, n, KeyboardInterrupt())
        if not run.fails():
            break
        run.assert_nothing_left()
        run.train()
    assert n > 1


ENGINE = ("engine.py", "tape.py", "tape_order.py", "pool.py")


BOOKKEEPING = ("pool.py", "engine.py OffloadEngine._release_all")
"""Where an interrupt may cost a slot."""


def interrupt_lines(setting: str, first: int, stride: int, ignored: list, functions: tuple[str, ...] = ()) -> int:
    """Does steps that are interrupted at line ``first`` of the engine, the ``stride``-th after that, and so on. Returns
    how many lines a step has."""
    run = Run(setting, **FAST)
    run.train()
    for n in itertools.count(first, stride):
        interrupt = LineInterrupt(ENGINE, n, functions)
        try:
            with interrupt:
                run.train()
        except KeyboardInterrupt as error:
            assert error is interrupt.raised
            let_go(error)
        if interrupt.raised is None:
            return n
        let_go(interrupt.raised)
        place, is_swallowed = interrupt.place, ignored == [interrupt.raised]
        max_lost = int(is_swallowed or place.startswith(BOOKKEEPING))
        ignored[:] = [] if is_swallowed else ignored
        del interrupt
        for _ in range(2):
            run.assert_nothing_left(max_lost, place)
            run.train()
        run.assert_nothing_left(max_lost, place)
        if run.offloader.engine.pool.bytes_in_use or toy.slots_in_use(run.offloader):
            run = Run(setting, **FAST)
            run.train()


@pytest.mark.parametrize(
    ("setting", "stride"), [("overlap", 61), ("sync", 61), ("room for three", 61), ("saved outputs", 293), ("all", 401)]
)
def test_interrupt_at_any_line(setting, stride, ignored):
    """Ctrl-C anywhere in the engine, and the caller goes on. If it comes while a tensor is released, Python prints it
    and goes on itself; there, and in the pool, one slot may be lost."""
    assert interrupt_lines(setting, 1, stride, ignored) > 15 * stride


@pytest.mark.parametrize(
    ("functions", "stride"),
    [(("_release_if_free",), 2), (("_take", "_pop", "_put", "_forget_if_empty"), 1), (("_allocate", "_free_slot"), 1)],
)
def test_interrupt_while_a_slot_is_taken_or_given_back(functions, stride, ignored):
    """Guards: that no lock is left locked in `_release_if_free`; `PinnedPool._index`, and the order in `_allocate`,
    `_take` and `_put`."""
    assert interrupt_lines("overlap", 1, stride, ignored, functions) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("setting", "stride"), [("overlap", 1), ("all", 29)])
def test_interrupt_at_every_line(setting, stride, ignored):
    assert interrupt_lines(setting, 2, stride, ignored) > 15 * stride


class NeverDone(HostRuntime):
    """No event of a freed slot is ever done."""

    def query(self, event):
        return False

    def scrub(self, buffer, event):
        return event


class PoolUser:
    """Takes slots and gives them back.

    Attributes:
        slots: those that it has.
        pending: events of slots that were given back and not taken since.
    """

    def __init__(self):
        self.pool = PinnedPool(NeverDone(**FAST), budget_bytes=8192)
        self.pool.reserve([(2048, 4)])
        self.slots = []
        self.pending = set()

    def take(self, num_bytes):
        slot = self.pool.allocate(num_bytes)
        self.slots.append(slot)
        self.pending -= set(slot.events)

    def give_back(self):
        event = object()
        self.pending.add(event)
        self.pool.free(self.slots.pop(), event)

    def work(self):
        """Slots of a reserved slab are taken, cut, given back, joined, and the slab is cut into its slots again."""
        for num_bytes in (2048, 1024, 512, 512):
            self.take(num_bytes)
        for _ in range(4):
            self.give_back()
        for num_bytes in (8192, 1024, 2048):
            self.take(num_bytes)
            self.give_back()

    def assert_no_overlap(self, place):
        taken = [(slot.extent.slab, slot.extent.start, slot.extent.size) for slot in self.slots]
        free = [(slab, extent.start, extent.size) for slab in self.pool._slabs for extent in slab.free]
        for slab in self.pool._slabs:
            pieces = sorted((start, start + size) for own, start, size in taken + free if own is slab)
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(pieces)), place


def test_interrupt_at_every_line_of_the_pool_hands_nothing_out_twice():
    """Nor before what must be waited for. Guards: the order in `_allocate`, `_free_slot`, `_take` and `_recut`."""
    for n in itertools.count(1):
        user, interrupt = PoolUser(), LineInterrupt(("pool.py",), n)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            user.work()
        user.assert_no_overlap(interrupt.place)
        while user.slots:
            user.give_back()
        whole = user.pool.allocate(8192)  # None: one slot was lost
        assert whole is None or user.pending <= set(whole.events), interrupt.place
        assert whole is not None or interrupt.raised is not None
        if interrupt.raised is None:
            break
    assert n > 100


def test_device_error_while_a_slab_is_cut_anew_loses_no_memory():
    """Guards: `_recut` asks for events before it takes anything away."""
    injector = FaultInjector()
    runtime = FaultyRuntime(injector, **FAST)
    pool = PinnedPool(runtime, budget_bytes=4096)
    pool.reserve([(1024, 4)])
    event = runtime.record_event(runtime.compute_stream(torch.device("cpu")))
    for slot in [pool.allocate(1024) for _ in range(4)]:
        pool.free(slot, event)
    injector.fail_at("query", 2)
    with pytest.raises(RuntimeError) as error:
        pool.allocate(4096)
    assert error.value is injector.raised
    assert pool.num_slots_in_use == pool.bytes_in_use == 0
    slots = [pool.allocate(1024) for _ in range(4)]
    assert len({slot.buffer.data_ptr() for slot in slots}) == 4
    assert pool.num_slabs == 1


def test_memory_that_cannot_be_lent_to_another_stream_is_reloaded_again():
    """Guards: in `_end_reload`, `lend` comes before the state changes."""
    run = Run("two ahead, one in the stash")
    loss = run.model.loss(TOKENS[0])
    run.let_copies_end()
    compute, lend, lent = run.runtime.compute_stream, run.runtime.lend, []

    class Another:
        """The compute stream under another name each time."""

        def __init__(self):
            self.stream = compute(None)

        def __getattr__(self, name):
            return getattr(self.stream, name)

    def fail_once(buffer, stream):
        lent.append(buffer.numel())
        if len(lent) == 2:
            raise device_error()
        lend(buffer, stream)

    run.runtime.compute_stream, run.runtime.lend = lambda device: Another(), fail_once
    with pytest.raises(RuntimeError, match="CUDA error") as error:
        loss.backward(retain_graph=True)
    let_go(error.value)
    [tape] = run.offloader.engine.tapes.alive()
    payloads = [ref() for region in tape.regions for ref in region().payloads]
    reloading = [payload.state for payload in payloads if payload.reload is not None]
    assert reloading and set(reloading) == {State.H2D_IN_FLIGHT}
    del tape, payloads
    run.runtime.compute_stream = compute
    run.model.zero_grad()
    loss.backward()
    got = toy.grads(run.model)
    run.expected.zero_grad()
    run.expected.loss(TOKENS[0]).backward()
    assert all(map(torch.equal, got, toy.grads(run.expected)))
    del loss, error
    run.assert_nothing_left()


@pytest.mark.parametrize("setting", ["overlap", "sync", "saved outputs", "all"])
def test_machine_that_refuses_the_nth_slab(setting):
    """``on_exhausted = "keep"``: what finds no room stays on the device."""
    run = Run(setting)
    run.train()
    num_slabs = run.runtime.num_pinned_allocations
    for n in range(1, num_slabs + 1):
        run = Run(setting)
        run.runtime.fail_pinned_at = range(n, 1000)
        for _ in range(2):
            run.train()
            kept = run.offloader.engine._counter._num_kept[Stay.EXHAUSTED]
            assert kept > 0
            run.assert_nothing_left()
        assert run.offloader.engine.pool.num_slabs == n - 1


def test_machine_that_refuses_the_nth_slab_is_an_error_if_asked_for():
    """``on_exhausted = "error"``: our error, which names the machine's, and the same one at the next try."""
    for n in range(1, 4):
        run = Run("no room is an error")
        run.runtime.fail_pinned_at = range(n, 1000)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"no pinned host memory for a tensor of layers.*refused by fail_pinned_at"
            ) as e:
                step(run.model)
            assert e.value.__context__ is None
            let_go(e.value)
            del e
            run.assert_nothing_left()


@pytest.mark.parametrize("point", RUNTIME_POINTS)
def test_device_that_is_lost(point):
    """Nothing that is asked of it works any more, and every tensor that is released asks: the first error stays the one
    that is raised, and none is printed on top. Guards: `suppress` in `_release_if_free` and in `_settled`."""
    for n in passings(spread=5):
        run = Run("gathered")
        with run.injector.in_gather():
            run.injector.fail_at(point, n, loses_device=True)
            if not run.fails():
                break
    assert n > 1


def test_wait_for_the_stash_that_failed_frees_no_memory_under_a_copy():
    """The runtime would raise in the next step. Guards: `Stash.drop_oldest` takes nothing off before its wait."""
    run = Run("two ahead, one in the stash", link_gb_per_s=0.0002)  # 20 ms a copy
    timed_wait, num_waits = run.runtime.timed_wait, itertools.count(1)

    def fail_once(stream, event):
        if next(num_waits) == 1:
            raise device_error()
        return timed_wait(stream, event)

    run.runtime.timed_wait = fail_once
    with pytest.raises(RuntimeError, match="CUDA error") as error:
        step(run.model)
    let_go(error.value)
    del error
    assert next(num_waits) == 2
    run.train()
    run.assert_nothing_left()


def test_release_that_failed_is_done_by_the_next_call():
    """The graph is dropped where nobody can be raised to. Guards: `_release_all` takes nothing off its list before what
    may fail is done."""

    def fail(*args):
        raise device_error()

    run = Run("overlap")
    losses = [run.model.loss(tokens) for tokens in TOKENS]
    run.let_copies_end()
    run.injector.fail_at("backward inside", 1)
    assert run.fails(losses[1].backward)  # a reload is under way
    timed_wait, run.runtime.timed_wait = run.runtime.timed_wait, fail
    losses.clear()
    assert toy.slots_in_use(run.offloader) > 0
    run.runtime.timed_wait = timed_wait
    run.assert_nothing_left()
    run.train()


@pytest.mark.parametrize("mode", ["block_inputs", "all"])
def test_tensor_that_was_changed_in_place_fails_its_own_backward_only(mode):
    """The error comes where autograd would raise it, each time, and not in the forward of another microbatch that finds
    the change. Guards: the version in `Stash.drop_oldest`."""
    run = Run("all" if mode == "all" else "overlap")
    changed = []
    query, run.runtime.query = run.runtime.query, lambda event: False  # nothing leaves the stash unless it must
    run.model.between = lambda i, h: (changed.append(h), h)[1]
    losses = [run.model.loss(TOKENS[0])]
    with torch.no_grad():
        changed[2].add_(1)
    changed.clear()
    run.runtime.query = query
    run.model.between = lambda i, h: h
    losses.append(run.model.loss(TOKENS[1]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            losses[0].backward(retain_graph=True)
        let_go(error.value)
        del error
    run.model.zero_grad()
    losses.pop().backward()
    got = toy.grads(run.model)
    losses.clear()
    run.expected.zero_grad()
    run.expected.loss(TOKENS[1]).backward()
    assert all(map(torch.equal, got, toy.grads(run.expected)))
    run.assert_nothing_left()


def test_error_on_the_way_out_of_a_region_keeps_nothing():
    """The garbage collector is off: an error must not be in a cycle with the frame that holds it. Guards: that
    `BlockForward` has no ExitStack."""
    run = Run("link")
    record = run.runtime.record_timed_event
    end = iter(range(2))
    run.runtime.record_timed_event = lambda stream: record(stream) if next(end, 2) == 0 else 1 / 0
    with pytest.raises(ZeroDivisionError) as error:
        run.model.loss(TOKENS[0])
    let_go(error.value)
    del error
    run.runtime.record_timed_event = record
    run.assert_nothing_left()
    run.train()
