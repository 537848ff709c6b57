"""HostRuntime: the runtime seam on a CPU, strict where a device would only be wrong now and then.

The caller's thread is the compute stream, one thread per direction is a side stream, and a CPU tensor plays the device
tensor. Copies run in order, arrive late (a settable link speed, seeded jitter) and into memory that was filled with a
pattern before, so that a wait that was forgotten shows as wrong numbers. Two more nets catch what timing would hide:

- *happens-before*: each stream carries a vector clock, events carry it from stream to stream, and a copy that is not
  ordered after what it depends on raises at once, whether or not it would have gone well this time;
- *liveness*: a copy holds its device tensor weakly. If the engine frees it before the copy was done, the copy raises.

Freed slots are overwritten. Price: one fill per reload, one per freed slot, and a few microseconds per copy.
"""

import atexit
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Container

import torch

from titan_offload.config import GIB
from titan_offload.runtime import Runtime, Wait

PATTERN = 0xFF
"""Byte that fills device memory before a reload and freed slots: a NaN in every floating-point type."""


class HostEvent:
    """A point in a stream's order: done or not, and all that happened before it."""

    def __init__(self, clock: dict[str, int]) -> None:
        self.clock = clock
        self.done = threading.Event()
        self.time = 0.0  # when it was done, in seconds of `time.perf_counter`

    def finish(self) -> None:
        self.time = time.perf_counter()
        self.done.set()


class HostStream:
    """Work done in order: by a thread of its own, or (the compute stream) by whoever gives it."""

    def __init__(self, name: str, threaded: bool) -> None:
        self.name = name
        self.clock: dict[str, int] = {name: 0}
        self.tasks: queue.SimpleQueue | None = queue.SimpleQueue() if threaded else None

    def tick(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]

    def join(self, clock: dict[str, int]) -> None:
        for name, moment in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), moment)

    def is_after(self, moment: tuple[str, int] | None) -> bool:
        """Whether all that this stream does from now on comes after ``moment`` (stream name, its time)."""
        return moment is None or self.clock.get(moment[0], 0) >= moment[1]


class HostLink:
    """An emulated port, which host runtimes of any threads of the process may share.

    Each direction is on its own; while n copies of one are under way, each has 1/n of its speed. What they have had is
    reckoned from the clock, not from when a thread woke: lateness neither adds up within a copy nor slows the others.

    Args:
        gb_per_s: speed of each direction in 1e9 bytes per second.

    Raises:
        ValueError: the speed is not above 0.
    """

    def __init__(self, gb_per_s: float) -> None:
        if not gb_per_s > 0:
            raise ValueError(f"gb_per_s = {gb_per_s!r} is not allowed: set it to a number above 0")
        self.gb_per_s = gb_per_s
        self._lanes = {"d2h": Lane(), "h2d": Lane()}

    def carry(self, direction: str, num_bytes: int, spent_s: float = 0.0) -> None:
        """Blocks for as long as ``num_bytes`` take in ``direction`` (``"d2h"`` or ``"h2d"``).

        Args:
            spent_s: how much of that, were it alone, the caller spends elsewhere.
        """
        lane = self._lanes[direction]
        copy, pause_s = lane.start(num_bytes / (self.gb_per_s * 1e9) - spent_s, time.perf_counter())
        while pause_s > 0:
            time.sleep(pause_s)
            pause_s = lane.pause(copy, time.perf_counter())


class Lane:
    """One direction of a link, divided equally among its copies. All times are in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[object, float] = {}  # by copy, what it still needs of the whole lane
        self._now = 0.0

    def start(self, needed: float, now: float) -> tuple[object, float]:
        """Lets a copy on that would take ``needed`` alone. Returns it, and its first `pause`."""
        copy = object()
        with self._lock:
            self._advance(now)
            self._left[copy] = max(0.0, needed)
        return copy, self.pause(copy, now)

    def pause(self, copy: object, now: float) -> float:
        """When to ask again: the earliest that any copy can end. 0: ``copy`` has ended, and is no longer known."""
        with self._lock:
            self._advance(now)
            if self._left[copy] == 0:
                del self._left[copy]
                return 0.0
            active = self._active()
            return min(active.values()) * len(active)

    def _active(self) -> dict[object, float]:
        return {copy: left for copy, left in self._left.items() if left > 0}

    def _advance(self, now: float) -> None:
        elapsed, self._now = max(0.0, now - self._now), max(now, self._now)
        while elapsed > 0 and (active := self._active()):
            share = min(elapsed / len(active), min(active.values()))
            self._left |= {copy: left - share for copy, left in active.items()}
            elapsed = 0.0 if share == elapsed / len(active) else elapsed - share * len(active)


class HostRuntime(Runtime):
    """Offload between two regions of host memory, for machines without an accelerator and for tests.

    Args:
        link_gb_per_s: speed of each direction in 1e9 bytes per second. None: as fast as the memory copies.
        link: a link that other runtimes use too, in place of ``link_gb_per_s``.
        jitter_ms: each copy arrives up to this many milliseconds late. Default 0.
        seed: of the jitter.
        strict: fill patterns and check the order of every copy. Default True; off for measurements of host time.

    Attributes:
        num_pinned_allocations: calls of `allocate_pinned` so far.
        fail_pinned_at: numbers of the calls, from 1, that fail as a driver's would. Default: none.

    Raises:
        ValueError: both ``link`` and ``link_gb_per_s`` are given.
        AssertionError: (strict) a copy is not ordered after what it depends on, or its tensor was freed too early.
    """

    device_type = "cpu"

    def __init__(
        self,
        *,
        link_gb_per_s: float | None = None,
        link: HostLink | None = None,
        jitter_ms: float = 0.0,
        seed: int = 0,
        strict: bool = True,
    ) -> None:
        if link is not None and link_gb_per_s is not None:
            raise ValueError(f"link_gb_per_s = {link_gb_per_s!r} and link are both given: the link has a speed already")
        self.link = HostLink(link_gb_per_s) if link_gb_per_s is not None else link
        self.jitter_ms = jitter_ms
        self.strict = strict
        self.num_pinned_allocations = 0
        self.fail_pinned_at: Container[int] = ()
        self._random = random.Random(seed)
        self._compute = HostStream("compute", threaded=False)
        self._d2h = self._start_stream("d2h")
        self._h2d = self._start_stream("h2d")
        self._scrubber = self._start_stream("scrub")
        self._pinned: set[int] = set()
        self._last_write: dict[int, tuple[str, int]] = {}
        self._last_read: dict[int, tuple[str, int]] = {}
        self._errors: list[BaseException] = []
        self._memcpy_s_per_byte = 0.0

    def _start_stream(self, name: str) -> HostStream:
        stream = HostStream(name, threaded=True)
        thread = threading.Thread(target=_run, args=(stream.tasks,), name=f"offload-{name}", daemon=True)
        thread.start()
        weakref.finalize(self, stream.tasks.put, None)  # the thread ends with its runtime
        _threads[thread] = stream.tasks
        return stream

    def compute_stream(self, device: torch.device) -> HostStream:
        self._compute.tick()  # the caller may have computed since the last call
        return self._compute

    def d2h_stream(self, device: torch.device) -> HostStream:
        return self._d2h

    def h2d_stream(self, device: torch.device) -> HostStream:
        return self._h2d

    def record_event(self, stream: HostStream) -> HostEvent:
        stream.tick()
        event = HostEvent(dict(stream.clock))
        self._submit(stream, event.finish)
        return event

    def wait_event(self, stream: HostStream, event: HostEvent) -> None:
        self._submit(stream, event.done.wait)
        stream.join(event.clock)
        self.check()

    def timed_wait(self, stream: HostStream, event: HostEvent) -> Wait:
        start = time.perf_counter()
        self.wait_event(stream, event)
        waited_ms = (time.perf_counter() - start) * 1e3
        return lambda: waited_ms

    def record_timed_event(self, stream: HostStream) -> HostEvent:
        return self.record_event(stream)

    def elapsed_ms(self, start: HostEvent, end: HostEvent) -> float | None:
        return (end.time - start.time) * 1e3 if end.done.is_set() else None

    def query(self, event: HostEvent) -> bool:
        if event.done.is_set():
            self.synchronize(event)
            return True
        return False

    def synchronize(self, event: HostEvent) -> None:
        event.done.wait()
        for stream in (self._compute, self._d2h, self._h2d, self._scrubber):
            stream.join(event.clock)  # the host has seen it: all that it gives to any stream from now on comes after

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: HostStream) -> None:
        if self.strict:
            self._check_order(dst, src, stream)
        get_dst, get_src = self._hold(dst), self._hold(src)
        num_bytes, extra_s = src.numel(), self._random.uniform(0, self.jitter_ms) / 1e3
        direction = "d2h" if dst.untyped_storage()._cdata in self._pinned else "h2d"

        def arrive() -> None:
            if self.link is not None:
                self.link.carry(direction, num_bytes, spent_s=num_bytes * self._memcpy_s_per_byte)
            time.sleep(extra_s)
            start = time.perf_counter()
            get_dst().copy_(get_src())
            if num_bytes >= 1024**2:  # of a smaller copy most is the call
                self._memcpy_s_per_byte = (time.perf_counter() - start) / num_bytes

        self._submit(stream, arrive)

    def empty(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self._compute.tick()
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer.fill_(PATTERN) if self.strict else buffer

    def lend(self, buffer: torch.Tensor, stream: HostStream) -> None:
        pass  # there is one compute stream

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        self.num_pinned_allocations += 1
        if self.num_pinned_allocations in self.fail_pinned_at:
            raise RuntimeError(f"no {num_bytes / GIB:.2f} GiB of pinned host memory: refused by fail_pinned_at")
        buffer = torch.full((num_bytes,), PATTERN, dtype=torch.uint8)
        self._pinned.add(buffer.untyped_storage()._cdata)
        return buffer

    def free_pinned(self, buffer: torch.Tensor) -> None:
        self._pinned.discard(buffer.untyped_storage()._cdata)

    def scrub(self, buffer: torch.Tensor, event: HostEvent) -> HostEvent:
        if not self.strict:
            return event
        slot, scrubber = buffer.data_ptr(), self._scrubber
        self.wait_event(scrubber, event)
        assert scrubber.is_after(self._last_write.get(slot)), "a slot was freed before it was written"
        assert scrubber.is_after(self._last_read.pop(slot, None)), "a slot was freed while it was still being read"
        self._submit(scrubber, lambda: buffer.fill_(PATTERN))
        done = self.record_event(scrubber)
        self._last_write[slot] = (scrubber.name, scrubber.clock[scrubber.name])
        return done

    def check(self) -> None:
        """Raises what went wrong on a side stream since the last call."""
        if self._errors:
            raise self._errors.pop(0)

    def _submit(self, stream: HostStream, task: Callable[[], object]) -> None:
        if stream.tasks is None:
            task()
        else:
            stream.tasks.put((task, self._errors))

    def _hold(self, buffer: torch.Tensor) -> Callable[[], torch.Tensor]:
        """How a copy that comes later gets at ``buffer``: pinned memory is the pool's, device memory the engine's."""
        if not self.strict or buffer.untyped_storage()._cdata in self._pinned:
            return lambda: buffer
        storage = weakref.ref(buffer.untyped_storage())
        size, stride, offset = buffer.size(), buffer.stride(), buffer.storage_offset()

        def revive() -> torch.Tensor:
            alive = storage()
            assert alive is not None, "device memory was freed while a copy on it was under way"
            return torch.empty(0, dtype=torch.uint8).set_(alive, offset, size, stride)

        return revive

    def _check_order(self, dst: torch.Tensor, src: torch.Tensor, stream: HostStream) -> None:
        computed = ("compute", self._compute.clock["compute"])
        assert stream.is_after(computed), f"{stream.name} copies memory that compute may still be using"
        for host, is_write in ((dst, True), (src, False)):
            if host.untyped_storage()._cdata not in self._pinned:
                continue
            slot = host.data_ptr()
            assert stream.is_after(self._last_write.get(slot)), f"{stream.name} comes before the slot was written"
            if is_write:
                assert stream.is_after(self._last_read.get(slot)), f"{stream.name} overwrites a slot still being read"
            # The copy ends before the next event that is recorded on its stream.
            moment = (stream.name, stream.clock[stream.name] + 1)
            (self._last_write if is_write else self._last_read)[slot] = moment


_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """A daemon thread that the interpreter stops inside torch aborts the process."""
    threads = list(_threads.items())
    for _, tasks in threads:
        tasks.put(None)
    for thread, _ in threads:
        thread.join(timeout=10)


def _run(tasks: queue.SimpleQueue) -> None:
    while (item := tasks.get()) is not None:
        task, errors = item
        try:
            task()
        except BaseException as error:  # kept for the thread that waits: a side stream has nobody to raise to
            errors.append(error)
        del item, task, errors
