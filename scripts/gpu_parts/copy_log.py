"""Notes when each copy of a runtime began and ended, to see what a run reached of its link."""

from dataclasses import dataclass

import torch

from titan_offload import Runtime
from titan_offload.runtime import Event, Stream


@dataclass(frozen=True)
class Copy:
    """One copy: ``"d2h"`` or ``"h2d"``, its size, and timed events on its stream just before and after it."""

    direction: str
    num_bytes: int
    start: Event
    end: Event


class CopyLog:
    """The copies of a runtime's two side streams from now on.

    Args:
        runtime: of any kind. Its method ``copy`` is wrapped for good.
        device: whose streams.

    Attributes:
        copies: in the order in which they were queued. Whoever has read them clears them.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self.copies: list[Copy] = []
        self._runtime = runtime
        self._d2h_stream = runtime.d2h_stream(device)
        self._copy, runtime.copy = runtime.copy, self._noted_copy

    def _noted_copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        direction = "d2h" if stream == self._d2h_stream else "h2d"
        start = self._runtime.record_timed_event(stream)
        self._copy(dst, src, stream)
        self.copies.append(Copy(direction, dst.numel(), start, self._runtime.record_timed_event(stream)))

    def gb_per_s(self, direction: str) -> float:
        """What the copies of a direction reached while they were under way, in 1e9 bytes per second; 0: there are none.

        Waits for them.
        """
        copies = [copy for copy in self.copies if copy.direction == direction]
        for copy in copies[-1:]:
            self._runtime.synchronize(copy.end)
        busy_ms = sum(self._runtime.elapsed_ms(copy.start, copy.end) for copy in copies)
        return sum(copy.num_bytes for copy in copies) / busy_ms / 1e6 if copies else 0.0
