"""What `gpu_check.py` gives each part: a folder, how long it may take, and where its rows go."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class TimeBox:
    """A bound on time.

    Args:
        seconds: how long from now.
    """

    seconds: float
    _start: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        """Seconds until it is over, never below 0."""
        return max(0.0, self._start + self.seconds - time.perf_counter())


@dataclass(frozen=True)
class Task:
    """One part's.

    Attributes:
        folder: for files; it exists.
        box: when the part should have ended. It is stopped soon after.
        emit: adds a row to a table, see `tables`. It is written down at once: what comes after it may fail.
    """

    folder: Path
    box: TimeBox
    emit: Callable[[str, dict[str, Any]], None]
