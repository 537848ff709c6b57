"""What `measure_link` finds on links of known speed, in how much time, and what it leaves behind."""

import gc
import threading
import time
import weakref

import pytest
import torch

import titan_offload.link
from titan_offload import HostRuntime
from titan_offload.host_runtime import HostLink
from titan_offload.link import MAX_COPY_BYTES, LinkRates, PortRates, measure_link
from titan_offload.share import measure_links

CPU = torch.device("cpu")
NAMES = ("d2h_gb_per_s", "h2d_gb_per_s", "both_d2h_gb_per_s", "both_h2d_gb_per_s")


def rates_of(port: PortRates) -> list[float]:
    return [getattr(port, name) for name in NAMES]


def some_time(is_good, measure, tries=6):
    """What ``measure`` returns, once it ``is_good``: a busy machine wakes threads late, which makes rates too low and
    times too long, now and then."""
    for _ in range(tries):
        result = measure()
        if is_good(result):
            return result
    raise AssertionError(f"not even once in {tries} tries: the last was {result}")


class Counting(HostRuntime):
    """Writes down pinned memory and copies."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.pinned, self.copied = {}, []

    def allocate_pinned(self, num_bytes):
        buffer = super().allocate_pinned(num_bytes)
        self.pinned[buffer.data_ptr()] = num_bytes
        return buffer

    def free_pinned(self, buffer):
        del self.pinned[buffer.data_ptr()]
        super().free_pinned(buffer)

    def copy(self, dst, src, stream):
        self.copied.append(src.numel())
        super().copy(dst, src, stream)


@pytest.mark.parametrize("gb_per_s", [0.05, 0.5])
def test_rates_are_those_of_the_link_within_the_time(gb_per_s):
    """No direction slows the other one here. No rate can be above the link's."""

    def measure():
        runtime = Counting(link_gb_per_s=gb_per_s)
        start = time.perf_counter()
        rates = measure_link(runtime, CPU, seconds=1.0)
        seconds = time.perf_counter() - start
        assert not runtime.pinned
        assert 6 * 3 < len(runtime.copied) < 5000
        assert max(runtime.copied) <= MAX_COPY_BYTES
        all_rates = rates_of(rates.alone) + rates_of(rates.shared)
        assert max(all_rates) < 1.05 * gb_per_s
        return seconds, min(all_rates)

    some_time(lambda result: result[0] < 1.0 and result[1] > 0.7 * gb_per_s, measure)


def test_a_slow_link_gets_small_copies():
    """A box of 0.1 s holds 0.4 MB. Guards also that the first copy is not counted: it would make the rate a third
    more."""
    runtime = Counting(link_gb_per_s=0.004)
    rates = measure_link(runtime, CPU, seconds=0.8)
    assert min(runtime.copied) == max(runtime.copied) == titan_offload.link.MIN_COPY_BYTES
    assert max(rates_of(rates.alone)) < 0.0042


def test_a_fast_link_gets_large_copies_and_pinned_memory_for_two():
    runtime = Counting(strict=False)
    taken = []
    allocate = runtime.allocate_pinned
    runtime.allocate_pinned = lambda num_bytes: (taken.append(num_bytes), allocate(num_bytes))[1]
    measure_link(runtime, CPU, seconds=2.0)
    assert max(taken) == 2 * max(runtime.copied) <= 2 * MAX_COPY_BYTES
    assert max(runtime.copied) > 1024**2


def test_directions_are_measured_apart():
    """A link that is three times as fast to the host as back."""

    class Lopsided(HostLink):
        def carry(self, direction, num_bytes, spent_s=0.0):
            super().carry(direction, num_bytes * (3 if direction == "h2d" else 1), spent_s)

    def is_good(rates):
        return all(
            2 < port.d2h_gb_per_s / port.h2d_gb_per_s < 4 and 2 < port.both_d2h_gb_per_s / port.both_h2d_gb_per_s < 4
            for port in (rates.alone, rates.shared)
        )

    some_time(is_good, lambda: measure_link(HostRuntime(link=Lopsided(0.3)), CPU, seconds=1.0))


def test_both_ways_are_measured_together():
    """A link whose directions slow each other to a third, as some do."""

    class HalfDuplex(HostLink):
        def __init__(self, gb_per_s):
            super().__init__(gb_per_s)
            self.active = {"d2h": 0, "h2d": 0}

        def carry(self, direction, num_bytes, spent_s=0.0):
            self.active[direction] += 1
            other = "h2d" if direction == "d2h" else "d2h"
            super().carry(direction, num_bytes * (3 if self.active[other] else 1), spent_s)
            self.active[direction] -= 1

    def is_good(rates):
        ratios = (
            rates.alone.d2h_gb_per_s / rates.alone.both_d2h_gb_per_s,
            rates.alone.h2d_gb_per_s / rates.alone.both_h2d_gb_per_s,
        )
        return 2 < min(ratios) <= max(ratios) < 4.5

    rates = some_time(is_good, lambda: measure_link(HostRuntime(link=HalfDuplex(0.3)), CPU, seconds=1.0))
    assert rates.alone.bytes_per_s(both_ways=False) == (
        rates.alone.d2h_gb_per_s * 1e9,
        rates.alone.h2d_gb_per_s * 1e9,
    )
    assert rates.alone.bytes_per_s(both_ways=True) == (
        rates.alone.both_d2h_gb_per_s * 1e9,
        rates.alone.both_h2d_gb_per_s * 1e9,
    )


def test_ranks_take_turns_alone_and_then_share():
    """Two ranks on one port: alone each has all of it, and half while both copy. The barrier is called as often as is
    said, by each of them."""

    def is_good(result):
        seconds, found = result
        alone = [rate for rates in found for rate in rates_of(rates.alone)]
        shared = [rate for rates in found for rate in rates_of(rates.shared)]
        # Together they have the whole port, and no more.
        sums = [sum(getattr(rates.shared, name) for rates in found) for name in NAMES]
        return seconds < 1.5 and min(alone) > 0.13 and min(shared) > 0.06 and max(shared) < 0.13 and max(sums) < 0.25

    _, found = some_time(is_good, measure_two)
    assert max(rate for rates in found for rate in rates_of(rates.alone)) < 0.21


def measure_two():
    link, start_line = HostLink(0.2), threading.Barrier(2)
    found, num_calls = [None, None], [0, 0]

    def rank(position):
        def barrier():
            num_calls[position] += 1
            start_line.wait()

        found[position] = measure_link(
            HostRuntime(link=link), CPU, position=position, num_turns=2, barrier=barrier, seconds=1.5
        )

    start = time.perf_counter()
    threads = [threading.Thread(target=rank, args=(position,)) for position in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    seconds = time.perf_counter() - start
    assert num_calls == [2 + 4, 2 + 4]
    return seconds, found


def test_pinned_memory_goes_back_when_the_measurement_fails():
    runtime = Counting(link_gb_per_s=1.0)
    calls = []

    def barrier():
        calls.append(len(runtime.pinned))
        if len(calls) == 2:
            raise RuntimeError("another rank failed")

    with pytest.raises(RuntimeError, match="another rank failed"):
        measure_link(runtime, CPU, barrier=barrier, seconds=0.2)
    assert calls == [1, 1]
    assert not runtime.pinned


def test_compute_is_drained_first(monkeypatch):
    """What the compute stream still does must not count as time on the link. Guards: the first wait of `Port`."""
    runtime = HostRuntime(link_gb_per_s=1.0)
    log = []
    record, synchronize, copy = runtime.record_event, runtime.synchronize, runtime.copy
    names = {}

    def record_event(stream):
        event = record(stream)
        names[event] = stream.name
        return event

    monkeypatch.setattr(runtime, "record_event", record_event)
    monkeypatch.setattr(runtime, "synchronize", lambda event: (log.append(names[event]), synchronize(event)))
    monkeypatch.setattr(runtime, "copy", lambda *args: (log.append("copy"), copy(*args)))
    measure_link(runtime, CPU, seconds=0.2)
    assert log[0] == "compute"


def test_without_a_process_group_there_is_one_rank():
    runtime = Counting(link_gb_per_s=0.5)
    [rates] = measure_links(runtime, CPU, seconds=0.4).values()
    assert isinstance(rates, LinkRates)
    assert 0.02 < min(rates_of(rates.shared)) <= max(rates_of(rates.shared)) < 0.53
    assert not runtime.pinned


def test_nothing_stays_on_the_device():
    gc.collect()
    runtime = HostRuntime(link_gb_per_s=0.5)
    alive = []
    empty = runtime.empty

    def spy(num_bytes, device):
        buffer = empty(num_bytes, device)
        alive.append(weakref.ref(buffer.untyped_storage()))
        return buffer

    runtime.empty = spy
    measure_link(runtime, CPU, seconds=0.3)
    assert len(alive) == 4
    assert [ref() for ref in alive] == [None] * 4
