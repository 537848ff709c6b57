"""PinnedPool on a runtime whose slabs take no memory: sizes, reuse, growth, budget, and which events a slot carries."""

import logging
import math
import random
import weakref
from collections import Counter

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from titan_offload.pinned_memory import MAX_BYTES, MAX_BYTES_OF_OLD_KERNELS
from titan_offload.pool import ALIGNMENT, PinnedPool

MIB = 1024**2
GIB = 1024**3


class FakeEvent:
    """Done when somebody says so."""

    def __init__(self) -> None:
        self.is_done = False


class FakeRuntime:
    """What a pool asks of a runtime. Slabs are meta tensors: they have sizes, offsets and identities, and no bytes."""

    def __init__(self, *, rounds: bool = False, max_pinned_bytes: int = MAX_BYTES) -> None:
        self.slabs: dict[int, torch.Tensor] = {}
        self.log: list[tuple[str, int]] = []
        self.synchronized: list[FakeEvent] = []
        self.on_free = lambda buffer: None
        self.refuses = lambda num_bytes: False
        self.rounds = rounds
        self.max_pinned_bytes = max_pinned_bytes

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        if self.refuses(num_bytes):
            self.log.append(("refuse", num_bytes))
            raise RuntimeError("no pinned host memory: out of memory (2)")
        self.log.append(("allocate", num_bytes))
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        self.slabs[slab_of(buffer)] = buffer
        return buffer

    def free_pinned(self, buffer: torch.Tensor) -> None:
        self.on_free(buffer)
        self.log.append(("free", buffer.numel()))
        del self.slabs[slab_of(buffer)]

    def pinned_bytes(self, num_bytes: int) -> int:
        return 1 << (num_bytes - 1).bit_length() if self.rounds else num_bytes

    def scrub(self, buffer: torch.Tensor, event: FakeEvent) -> FakeEvent:
        return event

    def query(self, event: FakeEvent) -> bool:
        return event.is_done

    def synchronize(self, event: FakeEvent) -> None:
        event.is_done = True
        self.synchronized.append(event)


def slab_of(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage()._cdata


def place_of(slot) -> tuple[int, int, int]:
    """Slab, first byte, byte after the last."""
    start = slot.buffer.storage_offset()
    return slab_of(slot.buffer), start, start + slot.buffer.numel()


def make_pool(budget_bytes: int | None = None, **kwargs) -> PinnedPool:
    return PinnedPool(FakeRuntime(**kwargs), budget_bytes)


# Sizes


@pytest.mark.parametrize("num_bytes", [1, 511, 512, 513, 80 * MIB, 80 * MIB + 1, 9 * 1024**3])
def test_slot_has_exactly_the_bytes_asked_for(num_bytes):
    """Guards: `Slot.buffer` (exact) and the slab (rounded up to `ALIGNMENT`, not to a power of two)."""
    pool = make_pool()
    slot = pool.allocate(num_bytes)
    aligned = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    assert slot.buffer.numel() == num_bytes
    assert pool.bytes_in_use == pool.bytes_pinned == pool.peak_bytes_in_use == pool.peak_bytes_pinned == aligned
    assert pool._runtime.log == [("allocate", aligned)]
    assert slot.events == ()
    pool.free(slot, None)
    assert (pool.bytes_in_use, pool.bytes_pinned, pool.peak_bytes_in_use) == (0, aligned, aligned)
    pool.reset_peak()
    assert (pool.peak_bytes_in_use, pool.peak_bytes_pinned) == (0, aligned)


@pytest.mark.parametrize("num_slots", [1, 36, 200, 700])
def test_block_inputs_of_80_mib_pin_at_most_2_percent_more_than_is_in_use(num_slots):
    """Issue 2, point 6; torch's allocator would pin 128 MiB each. Guards: the 1/64 in `_grow`."""
    pool = make_pool()
    for num in range(1, num_slots + 1):
        assert pool.allocate(80 * MIB).buffer.numel() == 80 * MIB
        assert pool.bytes_in_use == num * 80 * MIB
        assert pool.bytes_pinned <= 1.02 * pool.bytes_in_use


def test_many_small_slots_make_few_slabs():
    """At most 1/64 idle, and the number of slabs grows with the logarithm. Guards: `spare` in `_grow`."""
    pool = make_pool()
    for num in range(1, 20_001):
        slot = pool.allocate(100)
        assert slot.buffer.numel() == 100
        assert num * ALIGNMENT <= pool.bytes_pinned <= num * ALIGNMENT * 65 / 64
    assert pool.num_slabs == pool.num_grown <= 128 + 75 * math.log(20_000 / 128)


def test_slabs_made_ahead_are_bounded():
    """Guards: `_max_slab_bytes` in `_grow`."""
    pool = make_pool(max_pinned_bytes=5 * ALIGNMENT)
    for _ in range(1000):
        pool.allocate(2 * ALIGNMENT)
    assert max(num_bytes for _, num_bytes in pool._runtime.log) == 4 * ALIGNMENT


def test_slab_made_ahead_stays_within_the_budget():
    """Guards: `_has_room(spare)`: near the budget's end the pool grows by what is asked for, not by more."""
    pool = make_pool(201 * MIB)
    slots = [pool.allocate(MIB) for _ in range(202)]
    assert slots.pop() is None
    assert None not in slots
    assert pool.bytes_pinned == pool.bytes_in_use == 201 * MIB
    assert ("allocate", 3 * MIB) in pool._runtime.log


def test_budget_counts_what_the_runtime_really_pins():
    """Where there is no registration torch rounds up to a power of two. Guards: `pinned_bytes` in `_has_room`."""
    pool = make_pool(300 * MIB, rounds=True)
    assert [pool.allocate(80 * MIB) is not None for _ in range(3)] == [True, True, False]
    assert (pool.bytes_pinned, pool.bytes_in_use) == (256 * MIB, 160 * MIB)


# Constant shapes


def train(pool: PinnedPool, sizes: list[int], num_microbatches: int, num_alive: int, is_lifo: bool = False) -> int:
    """One step: each forward takes a slot per region; backward gives them back, newest region first. At most
    ``num_alive`` microbatches wait for their backward (1F1B on a stage that far from the last one). Returns the largest
    number of events that a slot had to wait for."""
    alive: list[list] = []
    num_events = 0

    def backward() -> None:
        for slot in reversed(alive.pop(-1 if is_lifo else 0)):
            pool.free(slot, FakeEvent())

    for _ in range(num_microbatches):
        if len(alive) == num_alive:
            backward()
        alive.append([pool.allocate(size) for size in sizes])
        num_events = max(num_events, *(len(slot.events) for slot in alive[-1]))
    while alive:
        backward()
    return num_events


@pytest.mark.parametrize("is_lifo", [False, True], ids=["1f1b", "lifo"])
@pytest.mark.parametrize("num_alive", [1, 2, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        [80 * MIB] * 12,
        [80 * MIB] * 8 + [5 * MIB] * 6,
        [5 * MIB] * 6 + [80 * MIB] * 8,
        [7 * MIB, 3 * MIB, 5 * MIB + 100] * 4,
        [3 * MIB, 100, 7 * MIB, 513, 5 * MIB, 3 * MIB, 7 * MIB, 90],
    ],
)
def test_constant_shapes_allocate_nothing_after_the_first_step(sizes, num_alive, is_lifo):
    """And a slot waits for its own last user only. Guards: that extents are not joined while they fit (`_take` first),
    and that exact sizes are taken first."""
    pool = make_pool()
    train(pool, sizes, num_microbatches=6, num_alive=num_alive, is_lifo=is_lifo)
    after_first_step = list(pool._runtime.log)
    assert pool.bytes_pinned <= 1.02 * pool.peak_bytes_in_use
    for _ in range(4):
        assert train(pool, sizes, num_microbatches=6, num_alive=num_alive, is_lifo=is_lifo) == 1
    assert pool._runtime.log == after_first_step
    assert (pool.bytes_in_use, pool.num_slots_in_use) == (0, 0)


def test_one_size_needs_no_more_than_its_peak_in_any_order_of_frees():
    rng = random.Random(0)
    pool = make_pool()
    for _ in range(20):
        slots = []
        for _ in range(12):
            while slots and rng.random() < 0.3:
                pool.free(slots.pop(rng.randrange(len(slots))), FakeEvent())
            slots.append(pool.allocate(80 * MIB))
        rng.shuffle(slots)
        for slot in slots:
            pool.free(slot, FakeEvent())
    assert pool.bytes_pinned == pool.peak_bytes_in_use


# Shapes that vary


def test_growth_is_bounded_by_the_budget_when_shapes_vary():
    """Issue 2, point 6. What finds no room is refused, and only that. Guards: `_has_room` in `_grow`."""
    budget = 100 * MIB
    pool = make_pool(budget)
    rng = random.Random(1)
    num_refused = 0
    for _ in range(200):
        slots = [pool.allocate(rng.randrange(1, 20 * MIB)) for _ in range(12)]
        num_refused += slots.count(None)
        assert slots[0] is not None
        assert pool.bytes_pinned == sum(map(torch.Tensor.numel, pool._runtime.slabs.values()))
        for slot in filter(None, slots):
            pool.free(slot, FakeEvent())
    assert pool.peak_bytes_pinned <= budget
    assert 0 < num_refused < 200 * 12 / 2


def test_one_size_at_a_time_fits_whenever_the_budget_has_room_for_the_largest():
    """Guards: that what is idle is joined or given back before anything is refused."""
    pool = make_pool(12 * 20 * MIB)
    rng = random.Random(1)
    for _ in range(200):
        size = rng.randrange(1, 20 * MIB)
        slots = [pool.allocate(size) for _ in range(12)]
        assert None not in slots
        for slot in slots:
            pool.free(slot, FakeEvent())


def test_growing_shapes_cost_the_largest_not_the_sum():
    """No budget. Guards: the release of idle slabs before growth in `_grow`."""
    pool = make_pool()
    for mib in [*range(1, 11), *range(10, 0, -1), *range(1, 11)]:
        slots = [pool.allocate(mib * MIB) for _ in range(6)]
        for slot in slots:
            pool.free(slot, None)
    assert pool.peak_bytes_pinned == 6 * 10 * MIB


def test_slots_in_use_are_never_given_back():
    pool = make_pool()
    slot = pool.allocate(MIB)
    pool.free(pool.allocate(2 * MIB), None)
    assert pool.allocate(3 * MIB) is not None  # takes the place of the idle 2 MiB
    assert pool._runtime.log[2:] == [("free", 2 * MIB), ("allocate", 3 * MIB)]
    assert slab_of(slot.buffer) in pool._runtime.slabs


def test_too_large_for_the_budget_gives_none_and_releases_nothing():
    """Guards: `_has_room(size, freed=...)` before the first release."""
    pool = make_pool(10 * MIB)
    kept = pool.allocate(2 * MIB)
    for slot in [pool.allocate(4 * MIB), pool.allocate(4 * MIB)]:
        pool.free(slot, None)
    log = list(pool._runtime.log)
    assert pool.allocate(9 * MIB) is None
    assert pool.allocate(11 * MIB) is None
    assert pool._runtime.log == log
    assert (pool.bytes_in_use, pool.bytes_pinned, pool.num_slots_in_use, pool.num_slabs) == (2 * MIB, 10 * MIB, 1, 3)
    assert pool.allocate(8 * MIB) is not None
    assert pool._runtime.log[len(log) :] == [("free", 4 * MIB), ("free", 4 * MIB), ("allocate", 8 * MIB)]
    pool.free(kept, None)


@pytest.mark.parametrize("budget", [0, 511])
def test_a_budget_of_almost_nothing_is_not_no_limit(budget):
    pool = make_pool(budget)
    assert pool.allocate(100) is None
    assert pool._runtime.log == []


# Events


def test_a_slot_carries_the_event_of_its_last_user():
    """Guards: `extent.events` in `free` and `Slot`. Without a copy of its own, the user before still counts."""
    pool = make_pool()
    event = FakeEvent()
    slot = pool.allocate(MIB)
    pool.free(slot, event)
    again = pool.allocate(MIB)
    assert (place_of(again), again.events) == (place_of(slot), (event,))
    pool.free(again, None)
    assert pool.allocate(MIB).events == (event,)


def test_pieces_of_a_slot_carry_its_event():
    """Guards: `extent.events` of both pieces in `_take`."""
    pool = make_pool()
    event = FakeEvent()
    pool.free(pool.allocate(6 * MIB), event)
    pieces = [pool.allocate(MIB) for _ in range(6)]
    assert [piece.events for piece in pieces] == [(event,)] * 6
    assert pool.num_grown == 1


def test_a_joined_slab_carries_the_events_of_its_pieces_that_are_not_done():
    """Guards: `_pending`, `_join_free_slab`."""
    pool = make_pool()
    pool.reserve([(MIB, 3)])
    events = [FakeEvent() for _ in range(3)]
    for slot, event in zip([pool.allocate(MIB) for _ in range(3)], events, strict=True):
        pool.free(slot, event)
    events[1].is_done = True
    joined = pool.allocate(3 * MIB)
    assert set(joined.events) == {events[0], events[2]}
    assert pool.num_grown == 1
    assert pool._runtime.synchronized == []  # the host waits for nothing here


@pytest.mark.parametrize("how", ["retire", "growth"])
def test_a_slab_is_given_back_only_after_its_copies_are_done(how):
    """Guards: `synchronize` in `_release`."""
    pool = make_pool()
    pool.free(pool.allocate(2 * MIB), None)
    events = [FakeEvent(), FakeEvent()]
    for slot, event in zip([pool.allocate(MIB), pool.allocate(MIB)], events, strict=True):
        pool.free(slot, event)
    pool._runtime.on_free = lambda buffer: done.append([event.is_done for event in events])
    done = []
    if how == "retire":
        pool.retire()
    else:
        assert pool.allocate(5 * MIB).events == ()
    assert done == [[True, True]]
    assert pool.bytes_pinned == (0 if how == "retire" else 5 * MIB)


def test_retired_pool_gives_each_slab_back_with_its_last_slot():
    pool = make_pool()
    slot = pool.allocate(MIB)
    pool.free(pool.allocate(2 * MIB), None)
    pool.retire()
    assert (pool.num_slabs, pool.bytes_pinned, pool.num_slots_in_use) == (1, MIB, 1)
    pool.free(slot, None)
    assert (pool.num_slabs, pool.bytes_pinned, pool._runtime.slabs) == (0, 0, {})


def test_a_scrubbed_slot_carries_the_scrubbers_event():
    """The host runtime overwrites freed slots. Guards: `scrub` in `free`."""
    pool = make_pool()
    freed, scrubbed = FakeEvent(), FakeEvent()
    calls = []
    pool._runtime.scrub = lambda buffer, event: (calls.append((buffer.numel(), event)), scrubbed)[1]
    pool.free(pool.allocate(700), freed)
    assert calls == [(700, freed)]
    assert pool.allocate(700).events == (scrubbed,)


# Reserved slabs


@pytest.mark.parametrize(
    ("slots", "slabs"),
    [
        ([(80 * MIB, 36)], [36 * 80]),
        ([(80 * MIB, 36), (5 * MIB, 100)], [36 * 80, 500]),
        ([(80 * MIB, 6), (5 * MIB, 4), (80 * MIB, 4)], [800, 20]),
        ([(80 * MIB, 0), (5 * MIB, 1)], [5]),
        ([(80 * MIB, 1700)], [65520, 65520, 62 * 80]),
        ([(70 * 1024 * MIB, 2)], [70 * 1024] * 2),  # more than a slab should have, but a slot is not divided
        ([], []),
    ],
)
def test_reserve_makes_few_large_slabs_of_whole_slots(slots, slabs):
    """Guards: `_plan`, `_num_that_fit` and `max_pinned_bytes` in it."""
    pool = make_pool()
    progress = []
    assert pool.reserve(slots, lambda *numbers: progress.append(numbers)) == sum(slabs) * MIB
    assert pool._runtime.log == [("allocate", mib * MIB) for mib in slabs]
    assert progress == [(sum(slabs[: num + 1]) * MIB, sum(slabs) * MIB) for num in range(len(slabs))]
    assert (pool.bytes_pinned, pool.num_grown, pool.bytes_in_use) == (sum(slabs) * MIB, len(slabs), 0)
    for num_bytes, count in slots:
        assert None not in [pool.allocate(num_bytes) for _ in range(count)]
    assert (pool.bytes_pinned, pool.num_grown, pool.bytes_in_use) == (sum(slabs) * MIB, len(slabs), sum(slabs) * MIB)


def test_reserve_on_a_kernel_that_pins_2_gb_at_once():
    """F93. Guards: `max_pinned_bytes` in `_num_that_fit`."""
    pool = make_pool(max_pinned_bytes=MAX_BYTES_OF_OLD_KERNELS)
    assert pool.reserve([(80 * MIB, 60)]) == 60 * 80 * MIB
    assert pool._runtime.log == [("allocate", num * 80 * MIB) for num in (23, 23, 14)]
    assert 23 * 80 * MIB <= 2_000_000_000 < 24 * 80 * MIB


@pytest.mark.parametrize(
    ("budget_mib", "slabs"), [(0, []), (79, [75]), (80, [80]), (94, [80, 10]), (240, [240]), (251, [240, 10])]
)
def test_reserve_takes_whole_slots_within_the_budget(budget_mib, slabs):
    """The first shapes go first. Guards: ``room`` in `_num_that_fit`."""
    pool = make_pool(budget_mib * MIB)
    progress = []
    got = pool.reserve([(80 * MIB, 3), (5 * MIB, 40)][: 1 if budget_mib == 80 else 2], lambda *p: progress.append(p))
    if budget_mib in (80, 240):
        assert got == budget_mib * MIB
    assert got == pool.bytes_pinned == sum(slabs) * MIB <= budget_mib * MIB
    assert pool._runtime.log == [("allocate", mib * MIB) for mib in slabs]
    assert not slabs or progress[-1] == (got, got)


def test_reserve_counts_what_the_runtime_really_pins():
    """36 slots of 80 MiB in one slab would pin 4 GiB for 2.8; each for itself 4.5. Guards: ``limit`` and the bisection
    in `_num_that_fit`."""
    pool = make_pool(rounds=True)
    assert pool.reserve([(80 * MIB, 36)]) == 36 * 80 * MIB
    assert pool._runtime.log == [("allocate", num * 80 * MIB) for num in (25, 6, 3, 1, 1)]
    assert pool.bytes_pinned == (2048 + 512 + 256 + 128 + 128) * MIB
    short = make_pool(2880 * MIB, rounds=True)
    assert short.reserve([(80 * MIB, 36)]) == 34 * 80 * MIB
    assert short.bytes_pinned == (2048 + 512 + 256) * MIB
    capped = make_pool(rounds=True, max_pinned_bytes=MAX_BYTES_OF_OLD_KERNELS)
    assert capped.reserve([(80 * MIB, 36)]) == 36 * 80 * MIB
    assert max(capped._runtime.pinned_bytes(num_bytes) for _, num_bytes in capped._runtime.log) == GIB


def test_reserve_makes_only_what_is_missing():
    pool = make_pool()
    pool.reserve([(80 * MIB, 6)])
    assert pool.reserve([(80 * MIB, 4)]) == 4 * 80 * MIB
    slot = pool.allocate(80 * MIB)
    assert pool.reserve([(5 * MIB, 2), (80 * MIB, 7)]) == (10 + 7 * 80) * MIB
    assert pool._runtime.log == [("allocate", mib * MIB) for mib in (480, 10, 160)]
    pool.free(slot, None)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 9 * ALIGNMENT), st.integers(1, 12)), max_size=4), st.randoms(), st.booleans()
)
def test_steps_of_reserved_shapes_make_no_slab_in_any_order(slots, rng, rounds):
    """Guards: that reserved slabs are cut into slots: else small tensors would eat into slabs for large ones."""
    pool = make_pool(rounds=rounds)
    pool.reserve(slots)
    num_grown = pool.num_grown
    sizes = [num_bytes for num_bytes, count in slots for _ in range(count)]
    for _ in range(3):
        rng.shuffle(sizes)
        live = [pool.allocate(size) for size in sizes]
        assert None not in live
        rng.shuffle(live)
        events = [FakeEvent() for _ in live]
        for slot, event in zip(live, events, strict=True):
            pool.free(slot, event)
    assert (pool.num_grown, pool.bytes_in_use) == (num_grown, 0)
    assert all(len(slot.events) == 1 for slot in [pool.allocate(size) for size in sizes])


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(1, 40 * ALIGNMENT), min_size=1, max_size=20), st.randoms())
def test_smaller_shapes_in_between_make_no_slab(sizes, rng):
    """Nothing was reserved; each step has all slots of the first one, in any order, each as large or smaller. Guards:
    that slabs for which nobody foresaw the shape get their slots back, too."""
    pool = make_pool()
    pinned = []
    for step in range(6):
        live = [pool.allocate(rng.randint(1, size) if step else size) for size in sizes]
        pinned.append(pool.bytes_pinned)
        rng.shuffle(live)
        for slot in live:
            pool.free(slot, None)
        rng.shuffle(sizes)
    assert pinned == pinned[:1] * 6
    assert pool.bytes_in_use == 0


@pytest.mark.parametrize("odd", [79, 81, 40, 39, 700, 1])
def test_reserved_slabs_get_their_slots_back_after_a_step_of_another_shape(odd):
    """The budget is what the usual shapes need. Guards: `_cut` in `free`, and `is_recut` of split and joined slabs."""
    pool = make_pool(820 * MIB)
    usual = [80 * MIB] * 10 + [5 * MIB] * 4
    pool.reserve(Counter(usual).items())
    log = list(pool._runtime.log)
    for sizes in (usual, [odd * MIB] * 20, usual, [odd * MIB], usual):
        slots = [pool.allocate(size) for size in sizes]
        if sizes is usual:
            assert None not in slots
        assert slots[0] is not None
        events = [FakeEvent() for _ in slots]
        for slot, event in zip(slots, events, strict=True):
            if slot is not None:
                pool.free(slot, event)
    assert pool._runtime.log == log


def test_slots_of_a_slab_that_was_cut_otherwise_carry_the_events_of_what_was_there():
    """Guards: the events in `_cut`."""
    pool = make_pool()
    pool.reserve([(80 * MIB, 3)])
    slots = [pool.allocate(120 * MIB), pool.allocate(100 * MIB)]
    events = [FakeEvent(), FakeEvent()]
    events[0].is_done = True
    for slot, event in zip(slots, events, strict=True):
        pool.free(slot, event)
    assert [pool.allocate(80 * MIB).events for _ in range(3)] == [(events[1],)] * 3
    assert (pool.num_grown, pool._runtime.synchronized) == (1, [])


def test_a_reserved_slab_that_was_one_slot_is_cut_anew():
    """Guards: ``is_recut`` in `_join_free_slab`."""
    pool = make_pool()
    pool.reserve([(80 * MIB, 3)])
    event = FakeEvent()
    pool.free(pool.allocate(240 * MIB), event)
    assert pool.reserve([(80 * MIB, 3)]) == 240 * MIB
    assert [pool.allocate(80 * MIB).events for _ in range(3)] == [(event,)] * 3
    assert pool.num_grown == 1


def test_a_reserved_slab_that_is_cut_as_it_should_be_is_left_alone():
    """A slot waits for its own last user, not for those of the whole slab. Guards: ``is_recut`` in `free`."""
    pool = make_pool()
    pool.reserve([(80 * MIB, 3)])
    slots = [pool.allocate(80 * MIB) for _ in range(3)]
    events = {place_of(slot): FakeEvent() for slot in slots}
    for slot in slots:
        pool.free(slot, events[place_of(slot)])
    assert all(slot.events == (events[place_of(slot)],) for slot in [pool.allocate(80 * MIB) for _ in range(3)])


def test_what_is_reserved_gives_way_to_shapes_that_grow():
    """Freed first, then made. Guards: the order in `_grow`."""
    pool = make_pool(500 * MIB)
    pool.reserve([(80 * MIB, 5), (25 * MIB, 4)])
    live = pool.allocate(80 * MIB)
    assert pool.allocate(450 * MIB) is None
    pool.free(live, None)
    assert pool.allocate(450 * MIB) is not None
    assert pool._runtime.log[2:] == [("free", 100 * MIB), ("free", 400 * MIB), ("allocate", 450 * MIB)]


@pytest.mark.parametrize("refuses", [False, True])
def test_memory_that_is_given_back_is_gone_before_more_is_asked_for(refuses):
    """Not only when somebody collects garbage. Guards: that nothing in `_grow` and `_release` holds on to a slab."""
    pool = make_pool()
    pool.free(pool.allocate(3 * MIB), None)
    pool.reserve([(MIB, 2)])
    pool.free(pool.allocate(MIB), FakeEvent())
    runtime = pool._runtime
    freed, alive = [], []
    runtime.on_free = lambda buffer: freed.append(weakref.ref(buffer))
    runtime.refuses = lambda num_bytes: alive.extend(ref() is not None for ref in freed) or refuses
    assert (pool.allocate(6 * MIB) is None) == refuses
    assert alive == [False, False]
    assert runtime.log[-3:-1] == [("free", 2 * MIB), ("free", 3 * MIB)]


def test_many_small_slots_are_cut_and_joined_in_good_time():
    """100,000 slots; going through all of them for each would take minutes. Guards: `_unlist`."""
    pool = make_pool()
    pool.reserve([(ALIGNMENT, 100_000)])
    for size in (2 * ALIGNMENT, ALIGNMENT):
        pool.free(pool.allocate(size), FakeEvent())
    pool.retire()
    assert pool._runtime.log == [("allocate", 100_000 * ALIGNMENT), ("free", 100_000 * ALIGNMENT)]


# Refusal by the machine


def train_on_what_there_is(pool: PinnedPool, num_slots: int, num_steps: int = 3) -> list[int]:
    """For each step, how many of ``num_slots`` tensors of 80 MiB found room."""
    found = []
    for _ in range(num_steps):
        slots = [slot for slot in (pool.allocate(80 * MIB) for _ in range(num_slots)) if slot is not None]
        found.append(len(slots))
        for slot in slots:
            pool.free(slot, FakeEvent())
    return found


def test_a_refused_slab_is_asked_for_once_more_an_eighth_of_it(caplog):
    """Guards: `SMALLER`, and that all later slabs are as small."""
    pool = make_pool()
    pool._runtime.refuses = lambda num_bytes: num_bytes > 5 * 80 * MIB
    progress = []
    assert pool.reserve([(80 * MIB, 36), (200 * MIB, 3)], lambda *p: progress.append(p)) == (36 * 80 + 600) * MIB
    assert pool._runtime.log == [
        ("refuse", 36 * 80 * MIB),
        *[("allocate", 4 * 80 * MIB)] * 9,
        *[("allocate", 200 * MIB)] * 3,
    ]
    assert progress[0] == (4 * 80 * MIB, (36 * 80 + 600) * MIB)
    assert progress[-1] == ((36 * 80 + 600) * MIB, (36 * 80 + 600) * MIB)
    assert train_on_what_there_is(pool, 36) == [36] * 3
    assert (pool.refusal, caplog.records) == (None, [])


@pytest.mark.parametrize(("small_slabs", "has_budget"), [(0, True), (3, True), (3, False)])
def test_memory_refused_twice_is_never_asked_for_again(caplog, small_slabs, has_budget):
    """F87, F88: the pool stays at what it has and says so once. Guards: ``refusal``."""
    pool = make_pool(4000 * MIB if has_budget else None)
    runtime = pool._runtime
    runtime.refuses = lambda num_bytes: len(runtime.slabs) == small_slabs or num_bytes > 320 * MIB
    with caplog.at_level(logging.WARNING):
        got = pool.reserve([(80 * MIB, 36), (5 * MIB, 8)])
        made = [("allocate", 320 * MIB)] * small_slabs
        log = [("refuse", 2880 * MIB), *made, ("refuse", 320 * MIB)]
        assert (got, pool.bytes_pinned, runtime.log) == (small_slabs * 320 * MIB,) * 2 + (log,)
        runtime.refuses = lambda num_bytes: False
        assert train_on_what_there_is(pool, 36) == [4 * small_slabs] * 3
        assert pool.reserve([(80 * MIB, 36)]) == small_slabs * 320 * MIB
        assert (pool.allocate(100 * MIB) is None) == (small_slabs == 0)  # takes it from what is free
        assert pool.allocate(1000 * MIB) is None
    assert runtime.log == log
    assert pool.refusal == "no pinned host memory: out of memory (2)"
    assert pool.budget_bytes == (4000 * MIB if has_budget else 960 * MIB)
    [record] = caplog.records
    text = record.getMessage()
    assert "pinned host memory, which is not device memory: no pinned host memory: out of memory (2)" in text
    assert "asked for 0.312 GiB, and 2.812 GiB at once before" in text
    expected = (
        ("it has 0.938 GiB", "pinned_budget_gib to at most 0.938") if small_slabs else ("0.000 GiB", 'mode to "none"')
    )
    assert all(part in text for part in expected)


def test_growth_that_is_refused_frees_first_and_does_not_try_again(caplog):
    """A slab of one slot cannot be smaller. Guards: the order in `_grow`, and ``refusal`` in it before the release."""
    pool = make_pool(100 * MIB)
    first = pool.allocate(MIB)
    pool.free(pool.allocate(2 * MIB), None)
    pool._runtime.refuses = lambda num_bytes: True
    assert pool.allocate(3 * MIB) is None
    assert pool._runtime.log[2:] == [("free", 2 * MIB), ("refuse", 3 * MIB)]
    assert (pool.bytes_pinned, pool.bytes_in_use, pool.num_slots_in_use, pool.num_slabs) == (MIB, MIB, 1, 1)
    pool.free(first, None)
    pool._runtime.refuses = lambda num_bytes: False
    assert pool.allocate(3 * MIB) is None
    assert pool.allocate(MIB) is not None  # from what is free
    assert len(pool._runtime.log) == 4
    assert len(caplog.records) == 1


def test_refused_growth_ahead_of_need_falls_back_to_what_is_needed(caplog):
    pool = make_pool()
    for _ in range(640):
        pool.allocate(MIB)
    largest = max(num_bytes for _, num_bytes in pool._runtime.log)
    assert largest > 4 * MIB
    pool._runtime.refuses = lambda num_bytes: num_bytes > MIB
    log = len(pool._runtime.log)
    assert None not in [pool.allocate(MIB) for _ in range(30)]
    tried = pool._runtime.log[log:]
    assert [kind for kind, _ in tried].count("refuse") == 1
    assert tried[-1] == ("allocate", MIB)
    assert (pool.refusal, caplog.records) == (None, [])


def test_a_refused_pool_goes_back_when_it_retires():
    pool = make_pool()
    pool.reserve([(80 * MIB, 2)])
    slot = pool.allocate(80 * MIB)
    pool._runtime.refuses = lambda num_bytes: True
    assert pool.allocate(200 * MIB) is None
    pool.retire()
    pool.free(slot, None)
    assert (pool.num_slabs, pool.bytes_pinned, pool._runtime.slabs) == (0, 0, {})


# Any sequence

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 12 * ALIGNMENT)),
        st.tuples(st.just("refused"), st.integers(1, 12 * ALIGNMENT)),
        st.tuples(st.sampled_from(["reserve", "refused reserve"]), st.integers(1, 6 * ALIGNMENT)),
        st.tuples(st.sampled_from(["free", "free without copy"]), st.integers(0, 99)),
        st.tuples(st.just("done"), st.integers(0, 99)),
    ),
    max_size=60,
)


class Model:
    """What must hold of a pool, kept by cell of `ALIGNMENT` bytes: who is in it, and which copy was last in it."""

    def __init__(self, budget_bytes: int | None, rounds: bool) -> None:
        self.budget_bytes = budget_bytes
        self.pool = make_pool(budget_bytes, rounds=rounds)
        self.runtime = self.pool._runtime
        self.runtime.on_free = self.check_freed
        self.live: list = []
        self.owner: dict[tuple[int, int], object] = {}
        self.last: dict[tuple[int, int], FakeEvent] = {}
        self.events: list[FakeEvent] = []

    def cells(self, slot) -> list[tuple[int, int]]:
        slab, start, stop = place_of(slot)
        assert start % ALIGNMENT == 0
        assert stop <= self.runtime.slabs[slab].numel()
        return [(slab, cell) for cell in range(start // ALIGNMENT, -(-stop // ALIGNMENT))]

    def check_freed(self, buffer: torch.Tensor) -> None:
        slab = slab_of(buffer)
        assert all(key[0] != slab for key in self.owner), "a slab in use was given back"
        for key in [key for key in self.last if key[0] == slab]:
            assert self.last.pop(key).is_done, "a slab was given back before its copies were done"

    def reserve(self, num_bytes: int, refuses: bool = False) -> None:
        """As many slots as the number says; a machine that refuses does so above 3 cells."""
        count, size = num_bytes % 9, -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.runtime.refuses = lambda num_bytes: refuses and num_bytes > 3 * ALIGNMENT
        got = self.pool.reserve([(num_bytes, count)])
        self.runtime.refuses = lambda num_bytes: False
        assert got in range(0, count * size + 1, size)
        if self.pool.refusal is None and got < count * size:
            assert self.pool.bytes_pinned + self.runtime.pinned_bytes(size) > self.pool.budget_bytes, "there was room"
        for _ in range(got // size):
            log = list(self.runtime.log)
            self.allocate(num_bytes)
            assert self.runtime.log == log, "it was not there"

    def allocate(self, num_bytes: int, refuses: bool = False) -> None:
        self.runtime.refuses = lambda num_bytes: refuses
        log, was_refused = list(self.runtime.log), self.pool.refusal is not None
        slot = self.pool.allocate(num_bytes)
        self.runtime.refuses = lambda num_bytes: False
        if was_refused:
            assert self.runtime.log == log, "asked again"
        if slot is None and self.pool.refusal is not None:
            return
        if slot is None:
            assert self.runtime.log == log, "nothing is released or made in vain"
            used = {slab for slab, _ in self.owner}
            pinned = sum(self.runtime.pinned_bytes(self.runtime.slabs[slab].numel()) for slab in used)
            needed = self.runtime.pinned_bytes(-(-num_bytes // ALIGNMENT) * ALIGNMENT)
            assert pinned + needed > self.pool.budget_bytes, "there was room"
            return
        assert slot.buffer.numel() == num_bytes
        cells = self.cells(slot)
        assert not any(cell in self.owner for cell in cells), "slots overlap"
        for cell in cells:
            self.owner[cell] = slot
            event = self.last.get(cell)
            assert event is None or event.is_done or event in slot.events, "a slot lost the event of its last user"
        self.live.append(slot)

    def free(self, number: int, has_copy: bool = True) -> None:
        if not self.live:
            return
        slot = self.live.pop(number % len(self.live))
        event = FakeEvent() if has_copy else None
        for cell in self.cells(slot):
            del self.owner[cell]
            if event is not None:
                self.last[cell] = event
        if event is not None:
            self.events.append(event)
        self.pool.free(slot, event)

    def check(self) -> None:
        pool = self.pool
        pinned = sum(self.runtime.pinned_bytes(slab.numel()) for slab in self.runtime.slabs.values())
        assert pool.bytes_in_use == len(self.owner) * ALIGNMENT
        assert pool.num_slots_in_use == len(self.live)
        assert (pool.bytes_pinned, pool.num_slabs) == (pinned, len(self.runtime.slabs))
        assert pool.bytes_in_use <= pool.bytes_pinned <= pool.peak_bytes_pinned
        assert self.budget_bytes is None or pool.peak_bytes_pinned <= self.budget_bytes
        free = sum(extent.size for extents in pool._free.values() for extent in extents)
        assert free + pool.bytes_in_use == sum(slab.numel() for slab in self.runtime.slabs.values())


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(OPERATIONS, st.one_of(st.none(), st.integers(0, 40 * ALIGNMENT)), st.booleans())
def test_any_sequence_of_allocate_and_free(operations, budget, rounds):
    """Slots never overlap, the budget holds, the sums are right, no event is lost, and what is free can be had."""
    model = Model(budget, rounds)
    for operation, number in operations:
        match operation:
            case "allocate":
                model.allocate(number)
            case "refused":
                model.allocate(number, refuses=True)
            case "reserve" | "refused reserve":
                model.reserve(number, refuses=operation != "reserve")
            case "free":
                model.free(number)
            case "free without copy":
                model.free(number, has_copy=False)
            case "done" if model.events:
                model.events[number % len(model.events)].is_done = True
        model.check()
    while model.live:
        model.free(0)
    model.check()
    if model.runtime.slabs:
        largest = max(slab.numel() for slab in model.runtime.slabs.values())
        log = list(model.runtime.log)
        model.allocate(largest)
        assert len(model.live) == 1
        assert model.runtime.log == log
        model.free(0)
    if model.pool.refusal is None and budget is not None and (whole := budget // ALIGNMENT * ALIGNMENT) and not rounds:
        model.allocate(whole)
        assert len(model.live) == 1
