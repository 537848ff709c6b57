"""StrictAcceleratorRuntime: a CUDA device on which a mistake of the engine shows, as on a CPU with `HostRuntime`.

Owns what makes mistakes visible: copies come late, by a seeded random time; memory for a reload is filled with a
pattern before, and a slot after it was freed. A NaN in every floating-point type, so that a read that is too early, or
of memory that is free already, makes gradients wrong instead of right by luck. Relies on `AcceleratorRuntime` for all
else. For checks: copies are slow on purpose.

How it works. Late is a kernel that counts device cycles, on the copy's own stream: the host never waits.
"""

import contextlib
import functools
import random

import torch

from titan_offload.config import MIB
from titan_offload.host_runtime import PATTERN
from titan_offload.runtime import AcceleratorRuntime

PIECE_BYTES = 4 * MIB
"""Device memory that holds the pattern. Larger slots are overwritten piece by piece."""

WARM_UP_CYCLES, MEASURED_CYCLES = 50_000_000, 20_000_000


@functools.cache
def cycles_per_ms(device: torch.device) -> float:
    """How many cycles of `torch.cuda._sleep` are a millisecond, roughly: clocks vary. Blocks the host, once."""
    with torch.cuda.device(device):
        torch.cuda._sleep(WARM_UP_CYCLES)  # a device that was idle runs at a fraction of its clock
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(MEASURED_CYCLES)
        end.record()
        end.synchronize()
    return MEASURED_CYCLES / start.elapsed_time(end)


class StrictAcceleratorRuntime(AcceleratorRuntime):
    """The current CUDA device, with late copies and patterns in memory that nobody may read.

    Args:
        max_late_ms: each copy, and each overwriting of a freed slot, starts up to so many milliseconds late.
        seed: of the lateness.

    Raises:
        RuntimeError: there is no accelerator.
    """

    def __init__(self, *, max_late_ms: float = 2.0, seed: int = 0) -> None:
        super().__init__()
        self.max_late_ms = max_late_ms
        if max_late_ms > 0:
            cycles_per_ms(torch.device("cuda", torch.cuda.current_device()))  # now, so that no step blocks for it
        self._random = random.Random(seed)
        self._patterns: dict[torch.device, torch.Tensor] = {}

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: torch.Stream) -> None:
        self._be_late(stream)
        super().copy(dst, src, stream)

    def empty(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return super().empty(num_bytes, device).fill_(PATTERN)

    def scrub(self, buffer: torch.Tensor, event: torch.Event) -> torch.Event:
        stream = self._side_stream("scrub", event.device)
        self.wait_event(stream, event)
        self._be_late(stream)
        pattern = self._pattern(stream)
        with stream:
            for piece in buffer.split(PIECE_BYTES):
                piece.copy_(pattern[: piece.numel()], non_blocking=True)
        return self.record_event(stream)

    def _pattern(self, stream: torch.Stream) -> torch.Tensor:
        """On the scrub stream's device, filled in that stream's order."""
        if stream.device not in self._patterns:
            with stream:
                self._patterns[stream.device] = torch.full(
                    (PIECE_BYTES,), PATTERN, dtype=torch.uint8, device=stream.device
                )
        return self._patterns[stream.device]

    def _be_late(self, stream: torch.Stream) -> None:
        if self.max_late_ms == 0:
            return
        cycles = int(self._random.uniform(0, self.max_late_ms) * cycles_per_ms(stream.device))
        # As in `AcceleratorRuntime.copy`: the current stream is not entered again.
        is_current = stream == self.compute_stream(stream.device)
        with contextlib.nullcontext() if is_current else stream:
            torch.cuda._sleep(cycles)
