"""A runtime on the device: pinned memory by registration, streams and events, the speed of the link, and what the
strict one adds. "Guards" names the line whose loss makes the test fail."""

import mmap

import pytest
import torch
from gpu_parts.strict_runtime import PIECE_BYTES, StrictAcceleratorRuntime, cycles_per_ms

from titan_offload import pinned_memory
from titan_offload.host_runtime import PATTERN
from titan_offload.link import PortRates, measure_link
from titan_offload.pool import PinnedPool

pytestmark = pytest.mark.gpu

BUSY_MS = 100.0
"""Longer than the host needs to give a stream what a test gives it."""


def some_bytes(machine, num_bytes, seed=0):
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.to(machine.device)


def odd_size(machine):
    """No power of two, nor a whole number of pages."""
    return machine.pick(3 * 2**24 + 4097, 2**17 + 4097)


def copy(runtime, dst, src, stream, *after):
    """Copies after events. Returns the event of the copy."""
    for event in after:
        runtime.wait_event(stream, event)
    runtime.copy(dst, src, stream)
    return runtime.record_event(stream)


def there_and_back(machine, runtime, data, pinned):
    """``data`` by way of ``pinned``, on the side streams."""
    ready = runtime.record_event(runtime.compute_stream(machine.device))
    written = copy(runtime, pinned, data, runtime.d2h_stream(machine.device), ready)
    back = runtime.empty(data.numel(), machine.device)
    allocated = runtime.record_event(runtime.compute_stream(machine.device))
    read = copy(runtime, back, pinned, runtime.h2d_stream(machine.device), allocated, written)
    runtime.wait_event(runtime.compute_stream(machine.device), read)
    runtime.synchronize(read)
    return back


def kernels_work(machine):
    """torch raises an error that a call before has left behind."""
    return int(torch.ones(8, device=machine.device).sum()) == 8


# Pinned memory


def test_pinned_memory_has_its_exact_size(machine):
    """torch's own pinned allocator rounds up to a power of two."""
    runtime, num_bytes = machine.runtime(), odd_size(machine)
    assert runtime.pinned_bytes(num_bytes) == num_bytes
    buffer = runtime.allocate_pinned(num_bytes)
    assert (buffer.dtype, buffer.shape, buffer.device.type) == (torch.uint8, (num_bytes,), "cpu")
    runtime.free_pinned(buffer)
    pool = PinnedPool(runtime)
    pool.reserve([(num_bytes // 512 * 512, 3)])
    assert (pool.bytes_pinned, pool.num_slabs) == (3 * (num_bytes // 512 * 512), 1)
    pool.retire()
    assert pool.bytes_pinned == 0


def test_the_driver_knows_pinned_memory_until_it_is_freed(machine):
    machine.needs_device("a driver registers the pages")
    runtime, num_bytes = machine.runtime(), odd_size(machine)
    buffer = runtime.allocate_pinned(num_bytes)
    assert buffer.is_pinned()
    assert buffer[num_bytes - 1 :].is_pinned()
    runtime.free_pinned(buffer)
    assert not buffer.is_pinned()
    assert int(buffer.sum()) == 0  # it is still mapped


def test_memory_that_is_dropped_stays_until_the_copies_on_it_have_ended(machine):
    """An offloader that is dropped with its model, in the middle of a step. Guards: the wait of the finalizer."""
    machine.needs_device("on a CPU a copy holds its memory")
    runtime = machine.runtime()
    data = some_bytes(machine, odd_size(machine))
    pinned = runtime.allocate_pinned(data.numel())
    ready, stream = runtime.record_event(runtime.compute_stream(machine.device)), runtime.d2h_stream(machine.device)
    machine.keep_busy(runtime, stream, BUSY_MS)
    done = copy(runtime, pinned, data, stream, ready)
    assert not runtime.query(done)
    del pinned
    assert runtime.query(done)
    assert kernels_work(machine)


@pytest.mark.parametrize("num_bytes", [1, 4097, None])
def test_copies_both_ways_are_right(machine, num_bytes):
    runtime = machine.runtime()
    data = some_bytes(machine, num_bytes or odd_size(machine))
    pinned = runtime.allocate_pinned(data.numel())
    assert torch.equal(there_and_back(machine, runtime, data, pinned), data)
    assert torch.equal(pinned, data.cpu())
    runtime.free_pinned(pinned)


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_a_copy_returns_before_its_stream_has_come_to_it(machine, direction):
    """It would not with memory that the driver does not know."""
    runtime = machine.runtime()
    data = some_bytes(machine, machine.pick(2**24, 2**12))
    pinned = runtime.allocate_pinned(data.numel())
    there_and_back(machine, runtime, data, pinned)
    other = runtime.empty(data.numel(), machine.device)
    if direction == "d2h":
        pinned.zero_()
    ready = runtime.record_event(runtime.compute_stream(machine.device))
    stream = getattr(runtime, f"{direction}_stream")(machine.device)
    machine.keep_busy(runtime, stream, BUSY_MS)
    is_busy = runtime.record_event(stream)
    done = copy(runtime, *((pinned, data) if direction == "d2h" else (other, pinned)), stream, ready)
    assert not runtime.query(is_busy)
    assert not runtime.query(done)
    runtime.synchronize(done)
    assert torch.equal(pinned if direction == "d2h" else other.cpu(), data.cpu())
    runtime.free_pinned(pinned)


def test_the_same_pages_can_be_registered_again_once_they_are_free(machine):
    """Guards: `cudaHostUnregister` in `free_pinned`; and `_clear_last_error`."""
    machine.needs_device("a driver registers the pages")
    runtime = machine.runtime()
    buffer = runtime.allocate_pinned(odd_size(machine))
    with pytest.raises(RuntimeError, match=r"\(712\)"):  # cudaErrorHostMemoryAlreadyRegistered
        pinned_memory._register(buffer)
    assert kernels_work(machine)
    runtime.free_pinned(buffer)
    pinned_memory._register(buffer)
    assert buffer.is_pinned()
    pinned_memory._unregister(torch.cuda.cudart(), buffer.data_ptr())
    assert not buffer.is_pinned()


class Kept(mmap.mmap):
    """Pages that outlive a refusal, so that a test can take its own lock off them."""

    def close(self):
        pass


def test_a_refusal_names_pinned_memory_and_leaves_no_error_behind(machine, monkeypatch):
    """The pages are registered already when the runtime comes to it. Guards: `_clear_last_error`."""
    runtime, num_bytes = machine.runtime(), odd_size(machine)
    kept, registered = [], []
    with monkeypatch.context() as patch:
        if machine.is_emulated:
            runtime.fail_pinned_at = {1}
        else:
            cudart = torch.cuda.cudart()
            patch.setattr(
                pinned_memory.mmap, "mmap", lambda *args, **kwargs: (kept.append(Kept(*args, **kwargs)), kept[-1])[1]
            )
            patch.setattr(
                runtime,
                "_bind",
                lambda address, size: registered.append(
                    (address, int(cudart.cudaHostRegister(address, size, pinned_memory.PORTABLE)))
                ),
            )
        with pytest.raises(RuntimeError, match="of pinned host memory"):
            runtime.allocate_pinned(num_bytes)
    assert kernels_work(machine)
    for address, error in registered:
        assert error == 0
        pinned_memory._unregister(torch.cuda.cudart(), address)
    assert len(registered) == len(kept) == machine.pick(1, 0)
    data, pinned = some_bytes(machine, num_bytes), runtime.allocate_pinned(num_bytes)
    assert torch.equal(there_and_back(machine, runtime, data, pinned), data)
    runtime.free_pinned(pinned)


# Streams and events


def test_streams_go_their_own_ways_and_events_order_them(machine):
    """The copy to the device comes first in time, unless it waits."""
    runtime = machine.runtime(is_strict=True)
    data = some_bytes(machine, 2**12)
    pinned = runtime.allocate_pinned(data.numel())
    d2h, h2d = runtime.d2h_stream(machine.device), runtime.h2d_stream(machine.device)
    machine.keep_busy(runtime, d2h, BUSY_MS)
    is_busy = runtime.record_event(d2h)
    free = runtime.record_event(h2d)
    runtime.synchronize(free)
    assert not runtime.query(is_busy)
    assert torch.equal(there_and_back(machine, runtime, data, pinned), data)
    assert runtime.query(is_busy)
    runtime.free_pinned(pinned)


def test_a_wait_is_as_long_as_what_is_waited_for(machine):
    """Guards: the two events in `timed_wait`, and `elapsed_ms`."""
    runtime = machine.runtime()
    compute, side = runtime.compute_stream(machine.device), runtime.d2h_stream(machine.device)
    machine.synchronize()
    start = runtime.record_timed_event(side)
    machine.keep_busy(runtime, side, BUSY_MS)
    end = runtime.record_timed_event(side)
    assert runtime.elapsed_ms(start, end) is None
    wait = runtime.timed_wait(compute, end)
    if not machine.is_emulated:  # there the host itself has waited
        assert wait() is None
    runtime.synchronize(runtime.record_event(compute))
    busy_ms = runtime.elapsed_ms(start, end)
    assert BUSY_MS / 4 < busy_ms < 4 * BUSY_MS  # clocks vary
    assert 0.7 * busy_ms - 5 < wait() < 1.1 * busy_ms + 5
    assert runtime.timed_wait(compute, end)() < 5


def test_the_compute_stream_is_the_callers(machine):
    """Guards: that it is asked for anew, and that each side stream is one of its own."""
    machine.needs_device("a CPU has one compute stream")
    runtime, own = machine.runtime(), torch.cuda.Stream()
    default = runtime.compute_stream(machine.device)
    with torch.cuda.stream(own):
        assert runtime.compute_stream(machine.device).stream_id == own.stream_id
    assert runtime.compute_stream(machine.device) == default
    sides = [runtime.d2h_stream(machine.device), runtime.h2d_stream(machine.device)]
    assert len({stream.stream_id for stream in (default, own, *sides)}) == 4
    assert sides == [runtime.d2h_stream(machine.device), runtime.h2d_stream(machine.device)]


# The strict runtime


def test_strict_memory_for_a_reload_is_a_pattern(machine):
    runtime = machine.runtime(is_strict=True)
    assert bool((runtime.empty(4097, machine.device) == PATTERN).all())


def test_strict_slots_are_overwritten_after_their_last_copy(machine):
    """Not before it, and the host waits for neither."""
    runtime = machine.runtime(is_strict=True)
    num_bytes = machine.pick(2 * PIECE_BYTES + 4097, 4097)
    data, slab = (
        torch.zeros(num_bytes, dtype=torch.uint8, device=machine.device),
        runtime.allocate_pinned(2 * num_bytes),
    )
    slot = slab[:num_bytes]
    ready, side = runtime.record_event(runtime.compute_stream(machine.device)), runtime.d2h_stream(machine.device)
    runtime.synchronize(copy(runtime, slot, data, side, ready))
    rest = slab[num_bytes:].clone()
    machine.keep_busy(runtime, side, BUSY_MS)
    last = runtime.record_event(side)
    done = runtime.scrub(slot, last)
    assert int(slot.sum()) == 0
    assert not runtime.query(last)
    runtime.synchronize(done)
    assert runtime.query(last)
    assert bool((slot == PATTERN).all())
    assert torch.equal(slab[num_bytes:], rest)
    runtime.free_pinned(slab)


def test_strict_copies_are_late_by_seed_and_the_host_does_not_wait(machine, monkeypatch):
    machine.needs_device("the emulated link has a lateness of its own, with tests of its own")
    cycles_per_ms(machine.device)  # sleeps to measure, once
    sleep, slept = torch.cuda._sleep, []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (slept[-1].append(cycles), sleep(cycles)))
    data = some_bytes(machine, 4096)
    for seed in (1, 1, 2):
        slept.append([])
        runtime = StrictAcceleratorRuntime(max_late_ms=30.0, seed=seed)
        pinned, side = runtime.allocate_pinned(4096), runtime.d2h_stream(machine.device)
        start = runtime.record_timed_event(side)
        for _ in range(4):
            runtime.copy(pinned, data, side)
        end = runtime.record_timed_event(side)
        assert not runtime.query(end)
        runtime.synchronize(end)
        assert runtime.elapsed_ms(start, end) > 10
        runtime.free_pinned(pinned)
    assert slept[0] == slept[1] != slept[2]
    assert [len(set(cycles)) for cycles in slept] == [4, 4, 4]


# The link


def test_the_link_is_measured_both_ways_and_leaves_nothing_behind(machine):
    runtime = machine.runtime()
    rates = measure_link(runtime, machine.device, seconds=0.6)
    slowest = machine.pick(1.0, 0.0)  # GB/s
    for port in (rates.alone, rates.shared):
        assert isinstance(port, PortRates)
        assert min(port.bytes_per_s(both_ways=False) + port.bytes_per_s(both_ways=True)) > slowest * 1e9
    assert not (runtime._pinned if machine.is_emulated else runtime._unregister)
