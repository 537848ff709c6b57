"""PinnedPool: slabs of pinned host memory, cut into slots.

Owns every byte of host memory that the engine writes to. Relies on the runtime to make slabs of the exact size, and on
its caller for locking and for the order of copies: a slot carries the events that must be done before it is written.

How it works: free space is a set of *extents*, found by exact size first (constant shapes: O(1)), then by best fit,
which splits. A slab is made for slots of one size, and once it is wholly free it is cut into these again: next step
finds the same sizes, and what had room once has it again whatever smaller shapes came in between. A slab that is wholly
free is joined when nothing fits. Only then does the pool grow, by one slab of the size asked for, or 1/64 of what it
has, if that is more: at most 1.6 % is idle, and the number of slabs grows with the logarithm of the size. Before it
grows it gives back free slabs that were too small, so that changing shapes cost the largest, not the sum.

Who knows the shapes beforehand has `reserve` make few, large slabs, and growth is then for what nobody foresaw.

The machine may refuse a slab though the budget has room. The pool then asks once more, for an eighth of it, and goes on
with slabs of that size; refused again, it stays at what it has, says so once, and never asks again: a driver that was
refused memory once may fail at each later attempt (https://github.com/vllm-project/vllm-omni/issues/2748).
"""

import bisect
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from titan_offload.config import GIB
from titan_offload.runtime import Event, Runtime

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""Slots start and end at multiples of this many bytes."""

SMALLER = 8
"""A slab that the machine refuses is asked for once more, this many times smaller."""


@dataclass(eq=False)
class Slab:
    """One piece of pinned memory. It is cut into slots of ``slot_bytes``, unless ``is_recut``."""

    buffer: torch.Tensor
    pinned_bytes: int
    slot_bytes: int
    is_recut: bool = False
    num_used: int = 0
    free: set["Extent"] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel()


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
        budget_bytes: as given; if None and the machine refuses more, what is pinned then.
        refusal: why the pool takes no more memory, whatever its budget: the last words of the machine. None: it does.
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
        self.refusal: str | None = None
        self._refused_bytes = 0  # by the first refusal
        self._max_slab_bytes = runtime.max_pinned_bytes
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

    def why_full(self) -> str:
        """Why there is no room, and what to change."""
        in_use = f"{self.bytes_in_use / GIB:.6g} of "
        if self.refusal is not None:
            has = f"{in_use}{self.bytes_pinned / GIB:.6g} GiB are in use"
            return f"{has}, and the machine refuses more ({self.refusal}); free host memory"
        return (
            f"{in_use}{self.budget_bytes / GIB:.6g} GiB are in use; raise activation_offload.host_memory_fraction or "
            "activation_offload.pinned_budget_gib"
        )

    def reserve(self, slots: Sequence[tuple[int, int]], on_progress: Callable[[int, int], None] | None = None) -> int:
        """Makes the slabs that steps of known shapes need, so that these make none. Call it before the first step.

        Slots that are free already count. Where the budget has no room for all, the first shapes go first; what the
        pool holds already counts against it.

        Args:
            slots: for each shape, the bytes of its tensor and how many are in host memory at once.
            on_progress: called after each slab with the bytes done and the bytes that the budget has room for.

        Returns:
            Bytes of those slots that are free now: all of them, unless the budget or the machine has less.
        """
        counts: Counter[int] = Counter()
        for num_bytes, count in slots:
            counts[_align(num_bytes)] += count
        plan = deque(self._plan(counts))
        done, all_bytes = 0, sum(size * num for size, num in plan)
        while plan:
            size, num = plan.popleft()
            if not self._make_slab(size, num):
                plan = deque(self._plan(counts))
                continue
            done += size * num
            if on_progress is not None:
                on_progress(done, all_bytes)
        return sum(size * min(count, self._num_free(size)) for size, count in counts.items())

    def _plan(self, counts: Counter[int]) -> list[tuple[int, int]]:
        """The slabs still to be made, as size of a slot and number of slots."""
        plan, pinned = [], self.bytes_pinned
        for size, count in counts.items():
            missing = count - self._num_free(size)
            while num := self._num_that_fit(size, missing, pinned):
                plan.append((size, num))
                pinned += self._runtime.pinned_bytes(size * num)
                missing -= num
        return plan

    def _num_that_fit(self, size: int, missing: int, pinned: int) -> int:
        """How many of the ``missing`` slots the next slab has, if ``pinned`` bytes are taken before. Where the runtime
        rounds up, only as many as do not make it pin more than all of them need, if that is any."""
        if missing <= 0 or self.refusal is not None:
            return 0
        room = missing * self._runtime.pinned_bytes(size) if self.budget_bytes is None else self.budget_bytes - pinned
        most = min(missing, self._max_slab_bytes // size)
        limit = min(room, most * size)
        num = bisect.bisect_right(range(1, most + 1), limit, key=lambda num: self._runtime.pinned_bytes(num * size))
        return num or int(self._runtime.pinned_bytes(size) <= room)

    def _num_free(self, size: int) -> int:
        return len(self._free.get(size, ()))

    def allocate(self, num_bytes: int) -> Slot | None:
        """A slot of ``num_bytes``, or None where neither budget nor machine has room for it."""
        try:
            return self._allocate(num_bytes)
        except BaseException:
            self._index()
            raise

    def _allocate(self, num_bytes: int) -> Slot | None:
        size = _align(num_bytes)
        extent = self._take(size)
        if extent is None and self._join_free_slab(size):
            extent = self._take(size)
        if extent is None and self._grow(size):
            extent = self._take(size)
        if extent is None:
            return None
        slot = Slot(extent, num_bytes)
        extent.slab.num_used += 1
        extent.slab.free.remove(extent)  # until here an error leaves it free, with its events
        self.bytes_in_use += size
        self.peak_bytes_in_use = max(self.peak_bytes_in_use, self.bytes_in_use)
        return slot

    def free(self, slot: Slot, event: Event | None) -> None:
        """Takes ``slot`` back, to be written again only after ``event``: its last copy, in or out; None: no copy."""
        try:
            self._free_slot(slot, event)
        except BaseException:
            self._index()
            raise

    def _free_slot(self, slot: Slot, event: Event | None) -> None:
        extent = slot.extent
        if event is not None:
            extent.events = (self._runtime.scrub(slot.buffer, event),)
        self._put(extent)
        extent.slab.num_used -= 1
        self.bytes_in_use -= extent.size
        if extent.slab.is_recut and extent.slab.num_used == 0:
            self._cut(extent.slab)
        if self._is_retired:
            self._release_free_slabs()

    def _index(self) -> None:
        """After an error, which may have come between any two lines (an interrupt does): what is free is what the slabs
        say. A slot may count as in use that is not; none is handed out twice, nor before its events."""
        self._free = {}
        for slab in self._slabs:
            for extent in slab.free:
                self._free.setdefault(extent.size, []).append(extent)
        self._sizes = sorted(self._free)

    def _take(self, size: int) -> Extent | None:
        """The smallest free extent that holds ``size`` bytes, cut to it."""
        if size not in self._free:
            fits = bisect.bisect_left(self._sizes, size)
            if fits == len(self._sizes):
                return None
            extent = self._pop(self._sizes[fits])
            extent.slab.is_recut = True
            rest = Extent(extent.slab, extent.start + size, extent.size - size, extent.events)
            extent.size = size
            self._put(rest)
            return extent
        return self._pop(size)

    def _pop(self, size: int) -> Extent:
        extents = self._free[size]
        extent = extents.pop()
        self._forget_if_empty(size)
        return extent

    def _put(self, extent: Extent) -> None:
        extent.slab.free.add(extent)
        if extent.size not in self._free:
            self._free[extent.size] = []
            bisect.insort(self._sizes, extent.size)
        self._free[extent.size].append(extent)

    def _forget_if_empty(self, size: int) -> None:
        if not self._free[size]:
            del self._free[size]
            self._sizes.remove(size)

    def _join_free_slab(self, size: int) -> bool:
        """Makes one extent again of the smallest slab that is wholly free, in pieces, and large enough for ``size``.
        Returns whether there is one."""
        fits = [slab for slab in self._slabs if not slab.num_used and len(slab.free) > 1 and slab.num_bytes >= size]
        if not fits:
            return False
        slab = min(fits, key=lambda slab: slab.num_bytes)
        self._recut(slab, slab.num_bytes)
        slab.is_recut = True
        return True

    def _cut(self, slab: Slab) -> None:
        """Cuts a slab that is free into its slots."""
        self._recut(slab, slab.slot_bytes)
        slab.is_recut = False

    def _recut(self, slab: Slab, size: int) -> None:
        events = self._pending(slab)
        self._unlist(slab)
        extents = [Extent(slab, start, size, events) for start in range(0, slab.num_bytes, size)]
        slab.free = set(extents)  # at once: until here an error leaves it as it was
        for extent in extents:
            self._put(extent)

    def _pending(self, slab: Slab) -> tuple[Event, ...]:
        """What is still to be waited for before a free slab is written."""
        events = dict.fromkeys(event for extent in slab.free for event in extent.events)
        return tuple(event for event in events if not self._runtime.query(event))

    def _unlist(self, slab: Slab) -> None:
        """Nothing of the slab is found any more."""
        for size in {extent.size for extent in slab.free}:
            self._free[size] = [extent for extent in self._free[size] if extent.slab is not slab]
            self._forget_if_empty(size)

    def _grow(self, size: int) -> bool:
        """Makes a slab of at least ``size`` bytes. Returns False where there is no room for it."""
        idle = [slab for slab in self._slabs if slab.num_used == 0]  # all smaller than size, or one would fit
        if self.refusal is not None or not self._has_room(size, freed=sum(slab.pinned_bytes for slab in idle)):
            return False
        released = 0
        while idle and (released < size or not self._has_room(size)):
            released += idle[-1].pinned_bytes
            self._release(idle.pop())
        while self.refusal is None:
            spare = min(self.bytes_pinned // 64 // size, self._max_slab_bytes // size)
            num = spare if spare > 1 and self._has_room(spare * size) else 1
            if self._make_slab(size, num):
                return True
        return False

    def _make_slab(self, size: int, num: int) -> bool:
        """Makes a slab for ``num`` slots. Returns False where the machine refuses."""
        num_bytes = size * num
        try:
            buffer = self._runtime.allocate_pinned(num_bytes)
        except RuntimeError as error:
            self._note_refusal(size, num, error)
            return False
        slab = Slab(buffer, self._runtime.pinned_bytes(num_bytes), size)
        self._slabs.append(slab)
        self._cut(slab)
        self.bytes_pinned += slab.pinned_bytes
        self.peak_bytes_pinned = max(self.peak_bytes_pinned, self.bytes_pinned)
        self.num_grown += 1
        return True

    def _note_refusal(self, size: int, num: int, error: RuntimeError) -> None:
        """After the first one slabs are smaller; after the second, or if there is no smaller one, there are no more."""
        smaller = max(1, num // SMALLER)
        if self._refused_bytes == 0 and smaller < num:
            self._refused_bytes, self._max_slab_bytes = size * num, size * smaller
            logger.info(f"a slab of {size * num / GIB:.3f} GiB was refused, trying {size * smaller / GIB:.3f}: {error}")
            return
        self.refusal = str(error)
        if self.budget_bytes is None:
            self.budget_bytes = self.bytes_pinned
        self._warn_of_refusal(size * num)

    def _warn_of_refusal(self, num_bytes: int) -> None:
        before = f", and {self._refused_bytes / GIB:.3f} GiB at once before" if self._refused_bytes else ""
        setting = (
            f"activation_offload.pinned_budget_gib to at most {self.bytes_pinned / GIB:.3f}"
            if self.bytes_pinned
            else 'activation_offload.mode to "none"'
        )
        logger.warning(
            f"the machine refuses pinned host memory, which is not device memory: {self.refusal}. The pool asked for "
            f"{num_bytes / GIB:.3f} GiB{before}; it has {self.bytes_pinned / GIB:.3f} GiB, keeps them and asks for no "
            "more: tensors that find no room there stay on the device, as with an exhausted budget. Free host memory, "
            f"or raise the memory limit of the container or job; to start without this attempt, set {setting}"
        )

    def _has_room(self, num_bytes: int, freed: int = 0) -> bool:
        needed = self.bytes_pinned - freed + self._runtime.pinned_bytes(num_bytes)
        return self.budget_bytes is None or needed <= self.budget_bytes

    def _release(self, slab: Slab) -> None:
        for event in self._pending(slab):
            self._runtime.synchronize(event)
        self._unlist(slab)
        self._slabs.remove(slab)
        slab.free.clear()  # they refer to the slab, and its memory must go now
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
