"""Stash: the device tensors whose copy to the host is under way, and when each is dropped.

Owns the bound on them. Relies on the runtime for order: a tensor is dropped once the compute stream has waited for its
copy, so that its memory is free for what that stream does next, however far the host runs ahead. Whoever calls holds
the engine's lock.
"""

from collections import deque
from collections.abc import Iterator

from titan_offload.runtime import Runtime
from titan_offload.saved_tensor import version_of
from titan_offload.stats import StepCounter
from titan_offload.tape import Region, StashEntry, State


class Stash:
    """First in, first out.

    Args:
        max_inflight_offloads: see `OffloadConfig`; 0: no limit.
        runtime: the device.
        counter: what the compute stream waits for copies is counted there.
    """

    def __init__(self, max_inflight_offloads: int, runtime: Runtime, counter: StepCounter) -> None:
        self._max_inflight_offloads = max_inflight_offloads
        self._runtime = runtime
        self._counter = counter
        self._entries: deque[StashEntry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[StashEntry]:
        return iter(self._entries)

    def add(self, entry: StashEntry) -> None:
        self._entries.append(entry)

    def reap(self) -> None:
        """Drops what the host sees to have arrived already."""
        while self._entries and self._runtime.query(self._entries[0].event):
            self.drop_oldest()

    def drop_arrived(self, region: Region) -> None:
        """Before ``region`` runs, drops what has arrived by then if copies and blocks take the time that they took when
        the link's limit was chosen. The host need not have seen it arrive: it runs ahead of the device."""
        part, serial = region.tape.part, region.tape.serial
        if part.num_arrived is None or not self._max_inflight_offloads:
            return
        while self._entries and self._entries[0].place < (serial, part.num_arrived[region.index]):
            self.drop_oldest()

    def make_room(self, region: Region) -> None:
        """Before a copy of ``region`` starts, drops what is too much: tensors, or where each region has many, regions,
        this one included."""
        limit = self._max_inflight_offloads if region.tape.part.num_arrived is None else 0
        if not limit or not self._entries:
            return
        if region.is_checkpointed:
            while len(self._entries) >= limit:
                self.drop_oldest()
        elif self._entries[-1].place != region.place:
            places = [*dict.fromkeys(entry.place for entry in self._entries), region.place]
            while self._entries and self._entries[0].place < places[-limit:][0]:
                self.drop_oldest()

    def drop_oldest(self) -> None:
        """Ends the device copy of the oldest tensor, in the order of the compute stream.

        One that was changed in place meanwhile has no other copy: it stays with its payload, whose unpack raises.
        """
        entry = self._entries[0]
        self._counter.wait("d2h", self._runtime.timed_wait(entry.stream, entry.event))
        self._entries.popleft()
        payload = entry.payload()
        if payload is not None and version_of(entry.packed) == payload.version:
            payload.move_to(State.ON_HOST, State.D2H_IN_FLIGHT)
            payload.stashed = None

    def drop_dead(self) -> None:
        """Drops what has arrived and nobody will ask for; newest first, as backward goes. What has not arrived stays:
        to wait for it here would make backward wait for copies whose tensors it is done with."""
        while self._entries and self._entries[-1].payload() is None and self._runtime.query(self._entries[-1].event):
            self._entries.pop()
