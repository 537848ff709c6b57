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
from collections.abc import Callable

import torch

from titan_offload.runtime import Runtime, Wait

PATTERN = 0xFF
"""Byte that fills device memory before a reload and freed slots: a NaN in every floating-point type."""


class HostEvent:
    """A point in a stream's order: done or not, and all that happened before it."""

    def __init__(self, clock: dict[str, int]) -> None:
        self.clock = clock
        self.done = threading.Event()


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


class HostRuntime(Runtime):
    """Offload between two regions of host memory, for machines without an accelerator and for tests.

    Args:
        link_gb_per_s: speed of each direction in 1e9 bytes per second. None: as fast as the memory copies.
        jitter_ms: each copy arrives up to this many milliseconds late. Default 0.
        seed: of the jitter.
        strict: fill patterns and check the order of every copy. Default True; off for measurements of host time.

    Raises:
        AssertionError: (strict) a copy is not ordered after what it depends on, or its tensor was freed too early.
    """

    device_type = "cpu"

    def __init__(
        self, *, link_gb_per_s: float | None = None, jitter_ms: float = 0.0, seed: int = 0, strict: bool = True
    ) -> None:
        self.link_gb_per_s = link_gb_per_s
        self.jitter_ms = jitter_ms
        self.strict = strict
        self.num_pinned_allocations = 0
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
        self._submit(stream, event.done.set)
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

        def arrive() -> None:
            if self.link_gb_per_s is not None:
                link_s = num_bytes / (self.link_gb_per_s * 1e9)
                time.sleep(max(0.0, link_s - num_bytes * self._memcpy_s_per_byte))
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
