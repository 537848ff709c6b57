"""PinnedPool: slabs of pinned host memory, cut into slots.

Owns every byte of host memory that the engine writes to. Relies on the runtime to make slabs of the exact size, and on
its caller for locking and for the order of copies: a slot carries the events that must be done before it is written.

How it works: free space is a set of *extents*, found by exact size first (constant shapes: O(1)), then by best fit,
which splits. Extents are not joined again when they come back, so that next step finds the same sizes; a slab that is
wholly free is joined when nothing fits. Only then does the pool grow, by one slab of the size asked for, or 1/64 of
what it has, if that is more: at most 1.6 % is idle, and the number of slabs grows with the logarithm of the size.
Before it grows it gives back free slabs that were too small, so that changing shapes cost the largest, not the sum.
"""

import bisect
from dataclasses import dataclass, field

import torch

from titan_offload.runtime import Event, Runtime

ALIGNMENT = 512
"""Slots start and end at multiples of this many bytes."""

MAX_SLAB_BYTES = 64 * 1024**3
"""One registration of 512 GiB or more fails on current drivers."""


@dataclass(eq=False)
class Slab:
    """One piece of pinned memory."""

    buffer: torch.Tensor
    pinned_bytes: int
    num_used: int = 0
    free: set["Extent"] = field(default_factory=set)


@dataclass(eq=False)
class Extent:
    """A piece of a slab, free or in use, in bytes from the slab's start."""

    slab: Slab
    start: int
    size: int
    events: tuple[Event, ...] = ()


class Slot:
    """Host memory for one tensor: ``buffer`` (uint8, its exact bytes), to be written only after ``events``."""

    def __init__(self, extent: Extent, num_bytes: int) -> None:
        self.extent = extent
        self.events = extent.events
        self.buffer = extent.slab.buffer[extent.start : extent.start + num_bytes]


class PinnedPool:
    """Allocates slots from pinned slabs, within a budget.

    Args:
        runtime: makes and frees the slabs.
        budget_bytes: pinned bytes that all slabs together may take. None: no limit.

    Attributes:
        bytes_in_use: bytes of slots that are allocated now, rounded up to `ALIGNMENT`.
        peak_bytes_in_use: their maximum since `reset_peak`.
        bytes_pinned: what the slabs take of the host's memory.
        peak_bytes_pinned: their maximum ever.
        num_grown: slabs made so far.
    """

    def __init__(self, runtime: Runtime, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.bytes_in_use = 0
        self.peak_bytes_in_use = 0
        self.bytes_pinned = 0
        self.peak_bytes_pinned = 0
        self.num_grown = 0
        self._runtime = runtime
        self._is_retired = False
        self._slabs: list[Slab] = []
        self._sizes: list[int] = []  # sorted; keys of _free that have extents
        self._free: dict[int, list[Extent]] = {}

    @property
    def num_slots_in_use(self) -> int:
        return sum(slab.num_used for slab in self._slabs)

    @property
    def num_slabs(self) -> int:
        return len(self._slabs)

    def reset_peak(self) -> None:
        self.peak_bytes_in_use = self.bytes_in_use

    def allocate(self, num_bytes: int) -> Slot | None:
        """A slot of ``num_bytes``, or None where the budget has no room for it.

        Raises:
            RuntimeError: the host or the driver refuses more pinned memory.
        """
        size = _align(num_bytes)
        extent = self._take(size)
        if extent is None and self._join_free_slabs():
            extent = self._take(size)
        if extent is None and self._grow(size):
            extent = self._take(size)
        if extent is None:
            return None
        extent.slab.num_used += 1
        self.bytes_in_use += size
        self.peak_bytes_in_use = max(self.peak_bytes_in_use, self.bytes_in_use)
        return Slot(extent, num_bytes)

    def free(self, slot: Slot, event: Event | None) -> None:
        """Takes ``slot`` back, to be written again only after ``event``: its last copy, in or out; None: no copy."""
        extent = slot.extent
        if event is not None:
            extent.events = (self._runtime.scrub(slot.buffer, event),)
        extent.slab.num_used -= 1
        self.bytes_in_use -= extent.size
        self._put(extent)
        if self._is_retired:
            self._release_free_slabs()

    def _take(self, size: int) -> Extent | None:
        """The smallest free extent that holds ``size`` bytes, cut to it."""
        if size not in self._free:
            fits = bisect.bisect_left(self._sizes, size)
            if fits == len(self._sizes):
                return None
            extent = self._pop(self._sizes[fits])
            self._put(Extent(extent.slab, extent.start + size, extent.size - size, extent.events))
            extent.size = size
            return extent
        return self._pop(size)

    def _pop(self, size: int) -> Extent:
        extents = self._free[size]
        extent = extents.pop()
        extent.slab.free.remove(extent)
        self._forget_if_empty(size)
        return extent

    def _put(self, extent: Extent) -> None:
        if extent.size not in self._free:
            self._free[extent.size] = []
            bisect.insort(self._sizes, extent.size)
        self._free[extent.size].append(extent)
        extent.slab.free.add(extent)

    def _forget_if_empty(self, size: int) -> None:
        if not self._free[size]:
            del self._free[size]
            self._sizes.remove(size)

    def _join_free_slabs(self) -> bool:
        """Makes each slab that is wholly free one extent again. Returns whether any was in pieces."""
        joined = False
        for slab in self._slabs:
            if slab.num_used == 0 and len(slab.free) > 1:
                events = self._clear(slab)
                self._put(Extent(slab, 0, slab.buffer.numel(), events))
                joined = True
        return joined

    def _clear(self, slab: Slab) -> tuple[Event, ...]:
        """Takes all of a free slab's extents out of the free set. Returns the events still to wait for."""
        events = []
        for extent in slab.free:
            self._free[extent.size].remove(extent)
            self._forget_if_empty(extent.size)
            events += [event for event in extent.events if not self._runtime.query(event)]
        slab.free.clear()
        return tuple(events)

    def _grow(self, size: int) -> bool:
        """Makes a slab of at least ``size`` bytes. Returns False where the budget has no room for it."""
        idle = [slab for slab in self._slabs if slab.num_used == 0]  # all smaller than size, or one would fit
        if not self._has_room(size, freed=sum(slab.pinned_bytes for slab in idle)):
            return False
        released = 0
        while idle and (released < size or not self._has_room(size)):
            released += idle[-1].pinned_bytes
            self._release(idle.pop())
        spare = size * min(self.bytes_pinned // 64 // size, MAX_SLAB_BYTES // size)
        num_bytes = spare if spare > size and self._has_room(spare) else size
        slab = Slab(self._runtime.allocate_pinned(num_bytes), self._runtime.pinned_bytes(num_bytes))
        self._slabs.append(slab)
        self._put(Extent(slab, 0, num_bytes))
        self.bytes_pinned += slab.pinned_bytes
        self.peak_bytes_pinned = max(self.peak_bytes_pinned, self.bytes_pinned)
        self.num_grown += 1
        return True

    def _has_room(self, num_bytes: int, freed: int = 0) -> bool:
        needed = self.bytes_pinned - freed + self._runtime.pinned_bytes(num_bytes)
        return self.budget_bytes is None or needed <= self.budget_bytes

    def _release(self, slab: Slab) -> None:
        for event in self._clear(slab):
            self._runtime.synchronize(event)
        self._slabs.remove(slab)
        self._runtime.free_pinned(slab.buffer)
        self.bytes_pinned -= slab.pinned_bytes

    def retire(self) -> None:
        """Gives each slab back as soon as no slot is in it: now, or when its last slot is freed."""
        self._is_retired = True
        self._release_free_slabs()

    def _release_free_slabs(self) -> None:
        for slab in [slab for slab in self._slabs if slab.num_used == 0]:
            self._release(slab)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
