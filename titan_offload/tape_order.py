"""TapeOrder: which forward passes are alive, and in which order backward takes them.

Owns that order, as it is learned from step to step, and with it what is reloaded next. Relies on its caller for
locking. Holds tapes weakly: autograd's graph owns them.
"""

import itertools
import weakref

from titan_offload.tape import DEAD, ModelPart, Region, Tape, living


class TapeOrder:
    """The tapes of one rank, of all its model parts.

    Attributes:
        num_opened: tapes so far.
        max_alive: largest number of tapes that were alive at once so far.
    """

    def __init__(self) -> None:
        self.num_opened = 0
        self.max_alive = 0
        self._current: dict[ModelPart, weakref.ref[Tape]] = {}
        self._tapes: dict[int, weakref.ref[Tape]] = {}  # by serial number, oldest first
        self._first_serial = 0  # of this step
        self._order: list[int] = []  # this step's tapes, numbered from 0, as backward reached them
        self._next_tape: dict[int, int] = {}  # learned from the step before

    def alive(self) -> list[Tape]:
        """Oldest first."""
        return list(living(self._tapes.values()))

    def open_region(self, part: ModelPart, index: int) -> Region:
        """Forward comes to block ``index``: in the pass that is under way, or if that is past it, in a new one."""
        current = self._current.get(part)
        tape = current() if current is not None else None
        if tape is None or index <= tape.last_index:
            tape = self._open_tape(part)
        region = Region(tape, index)
        tape.last_index = index
        tape.regions.append(weakref.ref(region))
        return region

    def _open_tape(self, part: ModelPart) -> Tape:
        tape = Tape(part, serial=self.num_opened)
        self.num_opened += 1
        self._current[part] = weakref.ref(tape)
        self._tapes = {serial: ref for serial, ref in self._tapes.items() if ref() is not None}
        self._tapes[tape.serial] = weakref.ref(tape)
        self.max_alive = max(self.max_alive, len(self._tapes))
        return tape

    def start_backward(self, tape: Tape) -> None:
        """Backward has come to ``tape``."""
        tape.is_started = True
        if tape.serial >= self._first_serial:
            self._order.append(tape.serial - self._first_serial)

    def regions_after(self, region: Region, num: int) -> list[Region]:
        """At most ``num`` regions that backward takes next: of the same tape, then of the one that follows."""
        found = _last_regions(region.tape, region.position, num)
        if len(found) < num and (tape := self._tape_after(region.tape)) is not None:
            found += _last_regions(tape, len(tape.regions), num - len(found))
        return found

    def _tape_after(self, tape: Tape) -> Tape | None:
        """The tape that backward takes next: as in the step before, else last in, first out."""
        number = self._next_tape.get(tape.serial - self._first_serial)
        if number is not None:
            candidates = [self._tapes.get(self._first_serial + number, DEAD)]
        else:
            candidates = [ref for serial, ref in reversed(self._tapes.items()) if serial < tape.serial]
        return next((tape for tape in living(candidates) if not tape.is_started), None)

    def step_end(self) -> bool:
        """Ends a step, and learns from it. Returns whether it had a backward."""
        has_backward = bool(self._order)
        if has_backward:
            self._next_tape = dict(itertools.pairwise(self._order))
        self._order = []
        self._first_serial = self.num_opened
        return has_backward


def _last_regions(tape: Tape, stop: int, num: int) -> list[Region]:
    """At most ``num`` live regions of ``tape`` before position ``stop``, last first."""
    return list(itertools.islice(living(tape.regions[i] for i in range(stop - 1, -1, -1)), num))
