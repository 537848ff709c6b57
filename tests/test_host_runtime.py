"""Runtimes: what every one must do (`TestConformance`), the nets of HostRuntime, each shown to catch its fault, and the
edges of AcceleratorRuntime against a torch that records instead of acting."""

import os
import subprocess
import sys
import threading
import time
import types
import weakref
from pathlib import Path

import pytest
import torch

import titan_offload.host_runtime
import titan_offload.runtime
from titan_offload.host_runtime import PATTERN, HostLink, HostRuntime, Lane
from titan_offload.runtime import AcceleratorRuntime

CPU = torch.device("cpu")
NUM_BYTES = 4096
SLOW = NUM_BYTES / 20e-3 / 1e9  # GB/s: a copy takes 20 ms


def random_bytes(seed: int = 0, device: torch.device = CPU) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8, generator=generator).to(device)


def copy_to_host(runtime, slot, source, stream=None):
    """As the engine does it. Returns the copy's event."""
    compute = runtime.compute_stream(source.device)
    d2h = stream or runtime.d2h_stream(source.device)
    runtime.wait_event(d2h, runtime.record_event(compute))
    runtime.copy(slot, source, d2h)
    return runtime.record_event(d2h)


def copy_to_device(runtime, slot, device, after, stream=None):
    """As the engine does it. Returns the memory and the copy's event."""
    compute = runtime.compute_stream(device)
    reload = runtime.empty(slot.numel(), device)
    h2d = stream or runtime.h2d_stream(device)
    for event in (runtime.record_event(compute), after):
        runtime.wait_event(h2d, event)
    runtime.copy(reload, slot, h2d)
    return reload, runtime.record_event(h2d)


# What every runtime must do


def make_host() -> tuple[HostRuntime, torch.device]:
    return HostRuntime(link_gb_per_s=SLOW, jitter_ms=2.0, seed=1), CPU


def make_lenient_host() -> tuple[HostRuntime, torch.device]:
    return HostRuntime(strict=False), CPU


def make_accelerator() -> tuple[AcceleratorRuntime, torch.device]:
    runtime = AcceleratorRuntime()
    return runtime, torch.device(runtime.device_type, torch.accelerator.current_device_index())


NEEDS_ACCELERATOR = pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")


@pytest.fixture(
    params=[
        make_host,
        make_lenient_host,
        pytest.param(make_accelerator, marks=[pytest.mark.gpu, NEEDS_ACCELERATOR]),
    ],
    ids=["host", "host, not strict", "accelerator"],
)
def machine(request):
    return request.param()


class TestConformance:
    """The seam's contract. A new runtime is done when it passes."""

    def test_owns_what_lives_on_its_device(self, machine):
        runtime, device = machine
        assert runtime.owns(torch.empty(1, device=device))
        assert not runtime.owns(torch.empty(1, device="meta"))

    def test_memory_has_the_shape_asked_for(self, machine):
        runtime, device = machine
        pinned = runtime.allocate_pinned(NUM_BYTES)
        for buffer, kind in ((pinned, "cpu"), (runtime.empty(NUM_BYTES, device), device.type)):
            assert (buffer.dtype, buffer.shape, buffer.device.type) == (torch.uint8, (NUM_BYTES,), kind)
        assert pinned.is_pinned() == (device.type != "cpu")
        assert runtime.pinned_bytes(NUM_BYTES) >= NUM_BYTES
        pinned.fill_(7)
        assert int(pinned[-1]) == 7
        runtime.free_pinned(pinned)

    def test_a_caller_may_say_where_pinned_memory_comes_from(self, machine):
        runtime, _ = machine
        assert runtime.numa_node == -1
        runtime.numa_node = 0
        assert runtime.max_pinned_bytes in (64 * 1024**3, 2_000_000_000)
        runtime.free_pinned(runtime.allocate_pinned(NUM_BYTES))

    def test_copies_arrive(self, machine):
        runtime, device = machine
        source = random_bytes(device=device)
        slab = runtime.allocate_pinned(3 * NUM_BYTES)
        slot = slab[NUM_BYTES : 2 * NUM_BYTES]
        stored = copy_to_host(runtime, slot, source)
        runtime.synchronize(stored)
        assert torch.equal(slot, source.cpu())
        reload, loaded = copy_to_device(runtime, slot, device, stored)
        runtime.wait_event(runtime.compute_stream(device), loaded)
        assert torch.equal(reload, source)
        runtime.free_pinned(slab)

    def test_copies_on_the_compute_stream_need_no_wait(self, machine):
        runtime, device = machine
        source = random_bytes(device=device)
        slot = runtime.allocate_pinned(NUM_BYTES)
        stored = copy_to_host(runtime, slot, source, runtime.compute_stream(device))
        reload, loaded = copy_to_device(runtime, slot, device, stored, runtime.compute_stream(device))
        assert torch.equal(reload, source)
        runtime.synchronize(loaded)
        assert runtime.query(stored)
        assert runtime.query(loaded)

    def test_a_stream_works_in_order(self, machine):
        """The last copy's event is done after all others; the last write to a slot is what it holds."""
        runtime, device = machine
        sources = [random_bytes(seed, device) for seed in range(4)]
        slab = runtime.allocate_pinned(2 * NUM_BYTES)
        slots = [slab[:NUM_BYTES], slab[NUM_BYTES:]]
        events = [copy_to_host(runtime, slots[i % 2], source) for i, source in enumerate(sources)]
        runtime.synchronize(events[-1])
        assert [runtime.query(event) for event in events] == [True] * 4
        assert torch.equal(slots[0], sources[2].cpu())
        assert torch.equal(slots[1], sources[3].cpu())

    def test_a_stream_waits_for_another(self, machine):
        """The host waits for nothing in between: h2d after d2h, compute after h2d."""
        runtime, device = machine
        slot = runtime.allocate_pinned(NUM_BYTES)
        source = random_bytes(3, device)
        reload, loaded = copy_to_device(runtime, slot, device, copy_to_host(runtime, slot, source))
        runtime.wait_event(runtime.compute_stream(device), loaded)
        assert torch.equal(reload, source)

    def test_an_event_is_what_its_stream_was_given_before(self, machine):
        runtime, device = machine
        slot = runtime.allocate_pinned(NUM_BYTES)
        before = runtime.record_event(runtime.d2h_stream(device))
        runtime.synchronize(before)
        stored = copy_to_host(runtime, slot, random_bytes(device=device))
        assert runtime.query(before)
        runtime.synchronize(stored)
        assert runtime.query(stored)

    def test_timed_wait_orders_and_measures(self, machine):
        runtime, device = machine
        slot = runtime.allocate_pinned(NUM_BYTES)
        source = random_bytes(4, device)
        reload, loaded = copy_to_device(runtime, slot, device, copy_to_host(runtime, slot, source))
        waits = [runtime.timed_wait(runtime.compute_stream(device), loaded) for _ in range(2)]
        assert torch.equal(reload, source)
        runtime.synchronize(runtime.record_event(runtime.compute_stream(device)))
        assert all(isinstance(wait(), float) and 0 <= wait() < 60e3 for wait in waits)

    def test_timed_events_order_and_measure(self, machine):
        """They are events like others, and tell how far apart they were: of one stream, and of two."""
        runtime, device = machine
        slot, source = runtime.allocate_pinned(NUM_BYTES), random_bytes(5, device)
        start = runtime.record_timed_event(runtime.compute_stream(device))
        events = []
        for _ in range(2):
            copy_to_host(runtime, slot, source)
            events.append(runtime.record_timed_event(runtime.d2h_stream(device)))
        reload, _ = copy_to_device(runtime, slot, device, after=events[-1])
        runtime.wait_event(runtime.compute_stream(device), runtime.record_event(runtime.h2d_stream(device)))
        runtime.synchronize(runtime.record_event(runtime.compute_stream(device)))
        assert torch.equal(reload, source)
        assert all(map(runtime.query, events))
        first, last = (runtime.elapsed_ms(start, event) for event in events)
        assert 0 < first < last < 60e3
        assert runtime.elapsed_ms(*events) == pytest.approx(last - first, abs=0.01)

    def test_a_scrubbed_slot_can_be_used_again_after_its_event(self, machine):
        runtime, device = machine
        slot = runtime.allocate_pinned(NUM_BYTES)
        free = runtime.scrub(slot, copy_to_host(runtime, slot, random_bytes(0, device)))
        runtime.wait_event(runtime.d2h_stream(device), free)
        source = random_bytes(1, device)
        runtime.synchronize(copy_to_host(runtime, slot, source))
        assert torch.equal(slot, source.cpu())

    @pytest.mark.parametrize("direction", ["d2h", "h2d"])
    def test_a_side_stream_is_one_per_direction(self, machine, direction):
        runtime, device = machine
        stream = getattr(runtime, f"{direction}_stream")
        assert stream(device) is stream(device)
        assert runtime.d2h_stream(device) != runtime.h2d_stream(device)


def test_timed_wait_tells_how_long_the_link_took():
    runtime = HostRuntime(link_gb_per_s=SLOW)
    slot = runtime.allocate_pinned(NUM_BYTES)
    source = random_bytes()
    event = copy_to_host(runtime, slot, source)
    assert not runtime.query(event)
    assert 10 < runtime.timed_wait(runtime.compute_stream(CPU), event)() < 200
    assert runtime.query(event)
    assert runtime.timed_wait(runtime.compute_stream(CPU), event)() < 10


# HostRuntime's nets, each with the fault that it is there for


@pytest.fixture
def host():
    return HostRuntime(link_gb_per_s=SLOW)


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_net_catches_a_copy_that_does_not_wait_for_compute(host, direction):
    """Into freed memory that compute still uses, or out of memory that compute has not written yet."""
    slot, tensor = host.allocate_pinned(NUM_BYTES), random_bytes()
    if direction == "h2d":
        host.synchronize(copy_to_host(host, slot, tensor))
    host.compute_stream(CPU)
    dst, src = (slot, tensor) if direction == "d2h" else (tensor, slot)
    with pytest.raises(AssertionError, match=f"{direction} copies memory that compute may still be using"):
        host.copy(dst, src, getattr(host, f"{direction}_stream")(CPU))


@pytest.mark.parametrize("later", ["compute_stream", "empty"])
def test_net_catches_a_stale_event_of_compute(host, later):
    """Recorded before the compute stream was asked for again: it may have computed since."""
    slot = host.allocate_pinned(NUM_BYTES)
    event = host.record_event(host.compute_stream(CPU))
    tensor = host.empty(NUM_BYTES, CPU) if later == "empty" else random_bytes()
    if later == "compute_stream":
        host.compute_stream(CPU)
    host.wait_event(host.d2h_stream(CPU), event)
    with pytest.raises(AssertionError, match="compute may still be using"):
        host.copy(slot, tensor, host.d2h_stream(CPU))


def test_net_catches_a_reload_before_the_slot_was_written(host):
    slot, source = host.allocate_pinned(NUM_BYTES), random_bytes()
    copy_to_host(host, slot, source)
    unrelated = host.record_event(host.compute_stream(CPU))
    with pytest.raises(AssertionError, match="h2d comes before the slot was written"):
        copy_to_device(host, slot, CPU, after=unrelated)


def test_net_catches_an_event_that_was_recorded_before_the_copy(host):
    slot, source = host.allocate_pinned(NUM_BYTES), random_bytes()
    before = host.record_event(host.d2h_stream(CPU))
    copy_to_host(host, slot, source)
    with pytest.raises(AssertionError, match="h2d comes before the slot was written"):
        copy_to_device(host, slot, CPU, after=before)


@pytest.mark.parametrize("waits_for_read", [True, False])
def test_net_catches_a_slot_overwritten_while_it_is_read(host, waits_for_read):
    slot, source, other = host.allocate_pinned(NUM_BYTES), random_bytes(), random_bytes(1)
    stored = copy_to_host(host, slot, source)
    reload, loaded = copy_to_device(host, slot, CPU, after=stored)
    if waits_for_read:
        host.wait_event(host.d2h_stream(CPU), loaded)
        host.synchronize(copy_to_host(host, slot, other))
        assert torch.equal(reload, source)
    else:
        with pytest.raises(AssertionError, match="d2h overwrites a slot still being read"):
            copy_to_host(host, slot, other)


def test_net_catches_a_slot_freed_while_it_is_read(host):
    slot, source = host.allocate_pinned(NUM_BYTES), random_bytes()
    stored = copy_to_host(host, slot, source)
    reload, loaded = copy_to_device(host, slot, CPU, after=stored)
    with pytest.raises(AssertionError, match="freed while it was still being read"):
        host.scrub(slot, stored)
    host.synchronize(loaded)
    assert torch.equal(reload, source)


def test_net_catches_a_slot_freed_before_it_was_written(host):
    slot, source = host.allocate_pinned(NUM_BYTES), random_bytes()
    before = host.record_event(host.d2h_stream(CPU))
    stored = copy_to_host(host, slot, source)
    with pytest.raises(AssertionError, match="freed before it was written"):
        host.scrub(slot, before)
    host.synchronize(stored)


def test_net_catches_a_slot_used_again_before_it_was_scrubbed(host):
    slot = host.allocate_pinned(NUM_BYTES)
    source = random_bytes()
    host.scrub(slot, copy_to_host(host, slot, source))
    with pytest.raises(AssertionError, match="d2h comes before the slot was written"):
        copy_to_host(host, slot, source)


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_net_catches_device_memory_freed_during_its_copy(host, direction):
    """At the next wait of any stream: nobody waits for the very copy."""
    slot, tensor = host.allocate_pinned(NUM_BYTES), random_bytes()
    event = copy_to_host(host, slot, tensor)
    if direction == "h2d":
        host.synchronize(event)
        tensor, event = copy_to_device(host, slot, CPU, after=event)
    del tensor
    event.done.wait()
    with pytest.raises(AssertionError, match="freed while a copy on it was under way"):
        host.wait_event(host.d2h_stream(CPU), host.record_event(host.compute_stream(CPU)))
    host.check()  # once


def test_device_memory_is_the_pattern_until_the_copy_has_arrived(host):
    slot, source = host.allocate_pinned(NUM_BYTES), random_bytes()
    pattern = torch.full((NUM_BYTES,), PATTERN, dtype=torch.uint8)
    assert torch.equal(slot, pattern)
    stored = copy_to_host(host, slot, source)
    assert torch.equal(slot, pattern)
    host.synchronize(stored)
    reload, loaded = copy_to_device(host, slot, CPU, after=stored)
    assert torch.equal(reload, pattern)
    assert torch.isnan(reload.view(torch.bfloat16)).all()
    host.synchronize(loaded)
    assert torch.equal(reload, source)


def test_freed_slot_becomes_the_pattern(host):
    slab = host.allocate_pinned(2 * NUM_BYTES)
    slots, sources = slab.chunk(2), [random_bytes(0), random_bytes(1)]
    events = [copy_to_host(host, slot, source) for slot, source in zip(slots, sources, strict=True)]
    host.synchronize(host.scrub(slots[0], events[0]))
    assert bool((slots[0] == PATTERN).all())
    host.synchronize(events[1])
    assert torch.equal(slots[1], sources[1])


@pytest.mark.parametrize("numbers", [{2, 4}, range(2, 5, 2)])
def test_pinned_allocations_fail_where_they_are_told_to(host, numbers):
    host.fail_pinned_at = numbers
    buffers, refused = {}, {}
    for number in range(1, 6):
        try:
            buffers[number] = host.allocate_pinned(NUM_BYTES)
        except RuntimeError as error:
            refused[number] = str(error)
    assert (list(buffers), list(refused)) == ([1, 3, 5], [2, 4])
    assert set(refused.values()) == {"no 0.00 GiB of pinned host memory: refused by fail_pinned_at"}
    assert (host.num_pinned_allocations, len(host._pinned)) == (5, 3)


def test_without_strict_nothing_is_checked_or_filled():
    """For measurements of host time."""
    host = HostRuntime(strict=False)
    slot, source = host.allocate_pinned(NUM_BYTES), random_bytes()
    host.copy(slot, source, host.d2h_stream(CPU))
    event = host.record_event(host.d2h_stream(CPU))
    assert host.scrub(slot, event) is event
    host.synchronize(event)
    assert torch.equal(slot, source)


def seconds_of_copy(host: HostRuntime, num_bytes: int) -> float:
    slot, source = host.allocate_pinned(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
    start = time.perf_counter()
    host.synchronize(copy_to_host(host, slot, source))
    return time.perf_counter() - start


def test_link_speed_is_kept():
    host = HostRuntime(link_gb_per_s=0.1)
    seconds = [seconds_of_copy(host, 1_000_000) for _ in range(3)]
    assert min(seconds) >= 9e-3
    assert min(seconds) < 60e-3


def test_link_speed_is_kept_after_a_tiny_copy():
    """What a tiny copy costs per byte says nothing about a large one."""
    host = HostRuntime(link_gb_per_s=0.1)
    seconds_of_copy(host, 1_000_000)
    seconds_of_copy(host, 1)
    assert seconds_of_copy(host, 1_000_000) >= 9e-3


def test_directions_do_not_share_the_link():
    """Full duplex: a copy each way takes as long as one."""
    host = HostRuntime(link_gb_per_s=0.01)
    slots = host.allocate_pinned(1_000_000).chunk(2)
    source, target = torch.zeros(500_000, dtype=torch.uint8), torch.zeros(500_000, dtype=torch.uint8)
    host.synchronize(copy_to_host(host, slots[1], source))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        stored = copy_to_host(host, slots[0], source)
        host.wait_event(host.h2d_stream(CPU), host.record_event(host.compute_stream(CPU)))
        host.copy(target, slots[1], host.h2d_stream(CPU))
        for event in (stored, host.record_event(host.h2d_stream(CPU))):
            host.synchronize(event)
        seconds.append(time.perf_counter() - start)
    assert 45e-3 < min(seconds) < 90e-3


def test_timed_event_is_not_told_before_it_is_done():
    host = HostRuntime(link_gb_per_s=SLOW)
    start = host.record_timed_event(host.compute_stream(CPU))
    source = random_bytes()
    copy_to_host(host, host.allocate_pinned(NUM_BYTES), source)
    end = host.record_timed_event(host.d2h_stream(CPU))
    assert host.elapsed_ms(start, end) is None
    host.synchronize(end)
    assert 19 < host.elapsed_ms(start, end) < 200


# A link that several share


def test_a_lane_is_divided_among_its_copies():
    """Exact: one copy of 4 alone until 1; two share until the shorter one, of 1, ends at 3; then three share."""
    lane = Lane()
    long, pause = lane.start(4.0, 0.0)
    assert pause == 4.0
    short, pause = lane.start(1.0, 1.0)
    assert pause == 2.0  # both get half
    assert lane.pause(long, 2.0) == 1.0  # the short one ends first
    assert lane.pause(short, 3.0) == 0.0
    _, pause = lane.start(1.0, 4.0)
    assert pause == 2.0  # the long one has 1 left, as this one
    assert lane.pause(long, 6.0) == 0.0


def test_lateness_on_a_lane_slows_nobody():
    """Two copies of 2 and 3 share until 4; the long one has 1 left and ends at 5, whoever asks when."""
    lane = Lane()
    late, _ = lane.start(2.0, 0.0)
    other, _ = lane.start(3.0, 0.0)
    assert lane.pause(other, 4.5) == 0.5
    assert lane.pause(late, 100.0) == lane.pause(other, 5.0) == 0.0


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_ranks_that_share_a_port_get_equal_parts(num_ranks, direction):
    """A copy of 40 ms alone: two ranks that copy at once take 80 ms each, three 120 ms."""
    tries = [seconds_of_copies_at_once(num_ranks, direction) for _ in range(4)]
    # Who starts late leaves the others more, and a busy machine wakes threads late: not each time.
    assert all(max(seconds) > 0.9 * 40e-3 * num_ranks for seconds in tries)
    assert any(min(seconds) > 0.7 * 40e-3 * num_ranks for seconds in tries)
    assert min(map(max, tries)) < 40e-3 * (num_ranks + 0.9)


def seconds_of_copies_at_once(num_ranks, direction):
    """Of each rank, how long its copy took."""
    link = HostLink(NUM_BYTES / 40e-3 / 1e9)
    hosts = [HostRuntime(link=link) for _ in range(num_ranks)]
    start_line = threading.Barrier(num_ranks)
    seconds = []

    def rank(host):
        slot, source = host.allocate_pinned(NUM_BYTES), random_bytes()
        ready = host.record_event(host.compute_stream(CPU))
        stream = getattr(host, f"{direction}_stream")(CPU)
        host.wait_event(stream, ready)
        start_line.wait()
        start = time.perf_counter()
        host.copy(*((slot, source) if direction == "d2h" else (source, slot)), stream)
        host.synchronize(host.record_event(stream))
        seconds.append(time.perf_counter() - start)

    threads = [threading.Thread(target=rank, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(seconds) == num_ranks
    return seconds


def test_a_link_is_given_once():
    with pytest.raises(ValueError, match=r"link_gb_per_s = 1\.0 and link are both given"):
        HostRuntime(link_gb_per_s=1.0, link=HostLink(1.0))
    with pytest.raises(ValueError, match="gb_per_s = 0 is not allowed"):
        HostLink(0)


@pytest.mark.parametrize("has_copies", [False, True])
def test_threads_end_when_the_runtime_is_dropped(has_copies):
    before = set(threading.enumerate())
    host = HostRuntime(link_gb_per_s=SLOW)
    threads = set(threading.enumerate()) - before
    assert sorted(thread.name for thread in threads) == ["offload-d2h", "offload-h2d", "offload-scrub"]
    source = random_bytes()
    if has_copies:
        slot = host.allocate_pinned(NUM_BYTES)
        host.scrub(slot, copy_to_host(host, slot, source))
    gone = weakref.ref(host)
    del host
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert gone() is None


def test_process_ends_well_while_side_streams_are_at_work():
    """A daemon thread that the interpreter stops inside torch aborts the process."""
    script = (
        "from titan_offload import HostRuntime\n"
        "host = HostRuntime()\n"
        "slot = host.allocate_pinned(10_000_000)\n"
        "for _ in range(200):\n"
        "    host.scrub(slot, host.record_event(host.compute_stream(None)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(titan_offload.host_runtime.__file__).parent.parent)}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_same_seed_same_jitter(monkeypatch):
    def sleeps(seed):
        seen = []
        clock = types.SimpleNamespace(sleep=seen.append, perf_counter=time.perf_counter)
        monkeypatch.setattr(titan_offload.host_runtime, "time", clock)
        host = HostRuntime(jitter_ms=5.0, seed=seed)
        slot, source = host.allocate_pinned(NUM_BYTES), random_bytes()
        for _ in range(20):
            event = copy_to_host(host, slot, source)
        host.synchronize(event)
        return seen

    first = sleeps(7)
    assert len(set(first)) == 20
    assert all(0 <= seconds <= 5e-3 for seconds in first)
    assert sleeps(7) == first
    assert sleeps(8) != first


# AcceleratorRuntime on a torch that records


class FakeStream:
    """A stream that tells when it is entered, and what it was given."""

    def __init__(self, log: list, device: torch.device, name: str) -> None:
        self.log, self.device, self.name = log, device, name

    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"exit {self.name}")

    def record_event(self, event: object = None) -> object:
        self.log.append(f"record on {self.name}")
        return event or types.SimpleNamespace(query=lambda: True)

    def wait_event(self, event: object) -> None:
        self.log.append(f"wait on {self.name}")


class FakeTorch:
    """torch with an accelerator of two devices, as far as `titan_offload.runtime` sees it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = FakeStream(self.log, torch.device("cuda", 0), "compute")
        self.num_streams = 0
        self.events: list[types.SimpleNamespace] = []
        self.accelerator = types.SimpleNamespace(
            current_accelerator=lambda check_available: torch.device("cuda"), current_stream=lambda device: self.current
        )

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def Stream(self, device: torch.device) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self.log, device, f"side {self.num_streams}")

    def Event(self, device: torch.device, enable_timing: bool) -> types.SimpleNamespace:
        assert enable_timing
        event = types.SimpleNamespace(device=device, is_done=False, elapsed_time=lambda end: 2.5)
        event.query = lambda: event.is_done
        self.events.append(event)
        return event


@pytest.fixture
def fake(monkeypatch):
    fake = FakeTorch()
    monkeypatch.setattr(titan_offload.runtime, "torch", fake)
    return fake


class FakeTensor:
    """A tensor that tells when it is written."""

    def __init__(self, log: list, device: str) -> None:
        self.log, self.device = log, torch.device(device)

    def copy_(self, source: "FakeTensor", non_blocking: bool) -> None:
        self.log.append(f"copy {source.device} -> {self.device}, non_blocking={non_blocking}")


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_copy_enters_the_side_stream(fake, direction):
    runtime = AcceleratorRuntime()
    dst, src = ("cpu", "cuda:0") if direction == "d2h" else ("cuda:0", "cpu")
    stream = getattr(runtime, f"{direction}_stream")(torch.device("cuda", 0))
    runtime.copy(FakeTensor(fake.log, dst), FakeTensor(fake.log, src), stream)
    assert fake.log == ["enter side 1", f"copy {src} -> {dst}, non_blocking=True", "exit side 1"]


def test_copy_does_not_enter_the_stream_that_is_current(fake):
    """prime-rl#3458. Guards: the null context in `AcceleratorRuntime.copy`."""
    runtime = AcceleratorRuntime()
    stream = runtime.compute_stream(torch.device("cuda", 0))
    runtime.copy(FakeTensor(fake.log, "cpu"), FakeTensor(fake.log, "cuda:0"), stream)
    assert fake.log == ["copy cuda:0 -> cpu, non_blocking=True"]


def test_compute_stream_is_asked_for_anew(fake):
    runtime = AcceleratorRuntime()
    device = torch.device("cuda", 0)
    first = runtime.compute_stream(device)
    fake.current = FakeStream(fake.log, device, "another")
    assert first.name == "compute"
    assert runtime.compute_stream(device) is fake.current


def test_one_side_stream_per_device_and_direction(fake):
    runtime = AcceleratorRuntime()
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    streams = [
        getattr(runtime, f"{way}_stream")(device) for _ in range(3) for device in devices for way in ("d2h", "h2d")
    ]
    assert fake.num_streams == 4
    assert len(set(map(id, streams[:4]))) == 4
    assert [stream.device for stream in streams[:4]] == [devices[0], devices[0], devices[1], devices[1]]
    assert streams[4:8] == streams[8:] == streams[:4]


def test_accelerator_timed_wait_measures_with_two_events(fake):
    runtime = AcceleratorRuntime()
    stream = runtime.compute_stream(torch.device("cuda", 0))
    wait = runtime.timed_wait(stream, types.SimpleNamespace(query=lambda: False))
    assert fake.log == ["record on compute", "wait on compute", "record on compute"]
    assert wait() is None
    fake.events[1].is_done = True
    assert wait() == 2.5


def test_accelerator_timed_wait_for_what_is_done_takes_no_events(fake):
    """It must still order the streams: done for the host is not done for what the driver may reorder."""
    runtime = AcceleratorRuntime()
    wait = runtime.timed_wait(
        runtime.compute_stream(torch.device("cuda", 0)), types.SimpleNamespace(query=lambda: True)
    )
    assert (wait(), fake.log, fake.events) == (0.0, ["wait on compute"], [])


def test_no_accelerator_is_said(fake):
    fake.accelerator.current_accelerator = lambda check_available: None
    with pytest.raises(RuntimeError, match="no accelerator on this machine; use HostRuntime"):
        AcceleratorRuntime()
