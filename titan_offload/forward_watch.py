"""Times the forwards of blocks, for whoever must know what hides behind them.

Owns these records for as long as somebody wants them. Relies on the runtime's clock: on a device two events per
forward, which are read later and block nothing until then.
"""

from dataclasses import dataclass, field
from statistics import median

from titan_offload.runtime import Event, Runtime, Stream, Wait


@dataclass(eq=False)
class ForwardRecord:
    """One forward of one block.

    Attributes:
        start, end: on the compute stream.
        waits: what of the time between compute stood still for copies.
        num_bytes: what was moved of it.
    """

    index: int
    start: Event
    end: Event = None
    waits: list[Wait] = field(default_factory=list)
    num_bytes: int = 0


class ForwardWatch:
    """Times the forwards of blocks, and what they move, over some steps.

    The first step with a backward is left out: in it blocks are compiled, kernels are tuned and pinned memory is made.
    So are steps without backward.

    Args:
        runtime: whose clock is used.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._is_warm = False
        self._of_step: dict[object, list[ForwardRecord]] = {}  # by model part
        self._records: dict[object, list[ForwardRecord]] = {}

    def start(self, index: int, stream: Stream) -> ForwardRecord:
        """The forward of block ``index`` starts on ``stream``."""
        return ForwardRecord(index, self._runtime.record_timed_event(stream))

    def end(self, part: object, record: ForwardRecord, stream: Stream) -> None:
        record.end = self._runtime.record_timed_event(stream)
        self._of_step.setdefault(part, []).append(record)

    def step_end(self, has_backward: bool) -> None:
        if has_backward and self._is_warm:
            for part, records in self._of_step.items():
                self._records.setdefault(part, []).extend(records)
        self._is_warm |= has_backward
        self._of_step = {}

    def costs(self, part: object, num_blocks: int) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
        """For each block of ``part``, the seconds of its forward, waits taken off, and the bytes that it moved: the
        medians. None: nothing was timed. Blocks the host until the last of these forwards is done."""
        records = self._records.get(part)
        if not records:
            return None
        times: list[list[float]] = [[] for _ in range(num_blocks)]
        sizes: list[list[int]] = [[] for _ in range(num_blocks)]
        for record in records:
            self._runtime.synchronize(record.end)
            waited_ms = sum(wait() for wait in record.waits)
            times[record.index].append(max(0.0, self._runtime.elapsed_ms(record.start, record.end) - waited_ms) / 1e3)
            sizes[record.index].append(record.num_bytes)
        return tuple(median(of or [0.0]) for of in times), tuple(int(median(of or [0])) for of in sizes)
