"""How fast the link between a device and its host is: alone, and while all ranks of the host copy.

Owns the measurement, and nothing that follows from it. Relies on the runtime for streams, copies and clocks, and on the
caller for a barrier among the ranks of a host.

How it works. Each of three kinds (to the host, to the device, both at once) gets a box of time: first in turns, a rank
at a time, then on all ranks together. Within its box a rank copies the same memory again and again, with more copies
queued than one, and reads from the events when each was done; the first copy of a kind is not counted. Copies are of
32 MiB, or of less where the link is so slow that they would not fit their box.

Price: the time asked for, and while it lasts 64 MiB each of pinned host memory and of device memory.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from titan_offload.config import MIB
from titan_offload.runtime import Event, Runtime, Stream

MAX_COPY_BYTES, MIN_COPY_BYTES = 32 * MIB, MIB // 16
SETUP_FRACTION = 0.25  # of the time asked for: pinned memory, barriers, and copies that end after their box
FILL_FRACTION = 0.75  # of a box, after which no more copies are queued
DEPTH = 2  # copies in flight per direction: enough where one takes longer than POLL_S
POLL_S = 1e-4

Barrier = Callable[[], object]


@dataclass(frozen=True)
class PortRates:
    """Speed of a rank's link in GB/s, 1e9 bytes per second as links are quoted.

    Attributes:
        d2h_gb_per_s, h2d_gb_per_s: one direction at a time.
        both_d2h_gb_per_s, both_h2d_gb_per_s: each direction while the other one is busy too.
    """

    d2h_gb_per_s: float
    h2d_gb_per_s: float
    both_d2h_gb_per_s: float
    both_h2d_gb_per_s: float

    def bytes_per_s(self, both_ways: bool) -> tuple[float, float]:
        """To the host and to the device, in bytes per second."""
        if both_ways:
            return self.both_d2h_gb_per_s * 1e9, self.both_h2d_gb_per_s * 1e9
        return self.d2h_gb_per_s * 1e9, self.h2d_gb_per_s * 1e9


@dataclass(frozen=True)
class LinkRates:
    """What `measure_link` found.

    Attributes:
        alone: no other rank of the host copies.
        shared: all ranks of the host do the same at the same time.
    """

    alone: PortRates
    shared: PortRates


def measure_link(
    runtime: Runtime,
    device: torch.device,
    *,
    position: int = 0,
    num_turns: int = 1,
    barrier: Barrier | None = None,
    seconds: float = 2.0,
) -> LinkRates:
    """Measures the link of ``device`` alone and shared. Call it on all ranks of a host at once.

    Args:
        runtime: the machine. Its compute stream is drained first.
        device: whose link.
        position: this rank's turn alone, from 0.
        num_turns: ranks of the host; where barriers span hosts, of the host that has most.
        barrier: returns once all ranks have called it. It is called ``num_turns + 4`` times, by every rank. A rank
            that fails calls it no more, so it must carry errors: a rank that waits in it must raise when another one
            fails. Default: there is one rank.
        seconds: upper bound on the time that it all takes, waits for late ranks aside.

    Raises:
        RuntimeError: there is no pinned host memory for it.
    """
    barrier = barrier or _no_barrier
    box_s = (1 - SETUP_FRACTION) * seconds / (3 * (num_turns + 1))
    # Shared copies take up to num_turns times as long.
    copy_bytes = _probe(runtime, device) * box_s / (4 * num_turns + 4)
    copy_bytes = int(min(max(copy_bytes, MIN_COPY_BYTES), MAX_COPY_BYTES)) // 512 * 512
    port = Port(runtime, device, copy_bytes)
    try:
        barrier()
        for turn in range(num_turns):
            if turn == position:
                alone = port.measure_all(box_s, _no_barrier)
            barrier()
        shared = port.measure_all(box_s, barrier)
    finally:
        port.close()
    return LinkRates(alone, shared)


def _no_barrier() -> None:
    pass


def _probe(runtime: Runtime, device: torch.device) -> float:
    """About how many bytes per second the link carries."""
    port = Port(runtime, device, MIN_COPY_BYTES)
    try:
        rates = port.measure(("d2h",), 0.0)
    finally:
        port.close()
    return rates["d2h"] * 1e9


@dataclass
class _Row:
    """Copies of one direction, one after the other."""

    direction: str
    stream: Stream
    dst: torch.Tensor
    src: torch.Tensor
    ends: list[Event] = field(default_factory=list)
    in_flight: deque[Event] = field(default_factory=deque)

    def fill(self, runtime: Runtime, depth: int) -> None:
        while self.in_flight and runtime.query(self.in_flight[0]):
            self.in_flight.popleft()
        while len(self.in_flight) < depth:
            runtime.copy(self.dst, self.src, self.stream)
            self.ends.append(runtime.record_timed_event(self.stream))
            self.in_flight.append(self.ends[-1])


class Port:
    """Memory on both sides of a link, and the copies between. `close` gives it back.

    Args:
        runtime, device: see `measure_link`.
        copy_bytes: size of each copy, a multiple of 512.
        depth: copies in flight per direction.

    Raises:
        RuntimeError: there is no pinned host memory for it.
    """

    def __init__(self, runtime: Runtime, device: torch.device, copy_bytes: int, depth: int = DEPTH) -> None:
        self._runtime = runtime
        self._depth = depth
        self._copy_bytes = copy_bytes
        on_device = [runtime.empty(copy_bytes, device) for _ in range(2)]
        self._pinned = runtime.allocate_pinned(2 * copy_bytes)  # last: what fails before it has nothing to give back
        host = self._pinned.chunk(2)
        streams = {"d2h": runtime.d2h_stream(device), "h2d": runtime.h2d_stream(device)}
        ready = runtime.record_event(runtime.compute_stream(device))
        for stream in streams.values():
            runtime.wait_event(stream, ready)
        runtime.synchronize(ready)
        self._ends = {"d2h": (host[0], on_device[0]), "h2d": (on_device[1], host[1])}
        self._streams = streams

    def measure_all(self, box_s: float, barrier: Barrier) -> PortRates:
        """The three kinds, ``box_s`` seconds each, and ``barrier`` after each."""
        rates = []
        for directions in (("d2h",), ("h2d",), ("d2h", "h2d")):
            rates.append(self.measure(directions, box_s))
            barrier()
        one_way = rates[0] | rates[1]
        return PortRates(one_way["d2h"], one_way["h2d"], rates[2]["d2h"], rates[2]["h2d"])

    def measure(self, directions: tuple[str, ...], box_s: float) -> dict[str, float]:
        """GB/s of each of ``directions`` (``"d2h"``, ``"h2d"``), all of them busy at once, in ``box_s`` seconds."""
        end = time.perf_counter() + FILL_FRACTION * box_s
        rows = [_Row(direction, self._streams[direction], *self._ends[direction]) for direction in directions]
        start = self._runtime.record_timed_event(rows[0].stream)
        while True:
            for row in rows:
                row.fill(self._runtime, self._depth)
            if time.perf_counter() >= end:
                break
            time.sleep(POLL_S)
        for row in rows:
            self._runtime.synchronize(row.ends[-1])
        times = {row.direction: [self._runtime.elapsed_ms(start, event) for event in row.ends] for row in rows}
        until = min(ends[-1] for ends in times.values())  # from then on not all directions are busy
        return {direction: self._rate(ends, until) for direction, ends in times.items()}

    def _rate(self, ends_ms: list[float], until_ms: float) -> float:
        counted = [end for end in ends_ms if end <= until_ms]
        first, *rest = counted if len(counted) > 1 else ends_ms
        return self._copy_bytes * len(rest) / max(rest[-1] - first, 1e-6) / 1e6

    def close(self) -> None:
        """Gives the pinned memory back."""
        self._runtime.free_pinned(self._pinned)
