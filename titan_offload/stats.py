"""What a step did: counted by the engine as it goes, handed out as `OffloadStats`, and said aloud where it matters."""

import logging
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from titan_offload.config import GIB
from titan_offload.forward_watch import ForwardRecord
from titan_offload.pool import PinnedPool
from titan_offload.runtime import Wait

logger = logging.getLogger(__name__)


class Stay(Enum):
    """Why a tensor stays on the device."""

    NOT_OURS = "nothing that the mode moves, or not on the device"
    KEEP_LAST = "keep_last"
    HEAD = "after the last block"
    LINK = "the copy would not hide behind compute"
    TOO_SMALL = "smaller than min_offload_mib"
    LAYOUT = "expanded, overlapping, conjugate, sparse or a tensor subclass"
    EXHAUSTED = "pinned budget exhausted"


@dataclass(frozen=True)
class OffloadStats:
    """What one step did. Bytes are of this rank; times are of the compute stream.

    Attributes:
        num_offloads, offloaded_bytes: storages moved to the host.
        num_reloads, reloaded_bytes: storages moved back. A second backward counts again.
        kept: for each reason, number and bytes of what could have moved (see ``mode``) and stayed on the device.
        num_prefetch_hits: reloads that had been started before backward asked.
        num_misses: reloads that started only when backward had reached their region; not counted with schedule "sync",
            where all do.
        num_resident: unpacks served from the device: copy to the host not done yet, or reloaded before and still alive.
        h2d_wait_ms: how long backward stood still for reloads.
        d2h_wait_ms: how long forward stood still because of max_inflight_offloads. Waits that the device has not come
            past when the step ends count in the next one.
        pinned_in_use_bytes, pinned_peak_bytes: slots in use at the end of the step, and at most within it.
        pinned_total_bytes: what the pool's slabs take of the host.
        num_slabs_made: pinned allocations within the step.
        saved: for each rule of selective saves, number of calls of ops whose outputs it saved, and their bytes, on the
            device or not. In a compiled block: those that were traced in the step, and no bytes.
        num_rerouted: for each block with a router, the tokens that its recomputes would have sent to other experts;
            only with ``check_routing``.
    """

    num_offloads: int = 0
    offloaded_bytes: int = 0
    num_reloads: int = 0
    reloaded_bytes: int = 0
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_prefetch_hits: int = 0
    num_misses: int = 0
    num_resident: int = 0
    h2d_wait_ms: float = 0.0
    d2h_wait_ms: float = 0.0
    pinned_in_use_bytes: int = 0
    pinned_peak_bytes: int = 0
    pinned_total_bytes: int = 0
    num_slabs_made: int = 0
    saved: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_rerouted: dict[str, int] = field(default_factory=dict)

    @property
    def kept_bytes(self) -> int:
        """Bytes that stayed on the device, for any reason."""
        return sum(num_bytes for _, num_bytes in self.kept.values())


@dataclass(frozen=True)
class SaveList:
    """What is saved instead of recomputed, for people to read.

    Attributes:
        fqns: the blocks.
        rules: in the order in which they are asked: name, the modules within a block that it is limited to, and why.
            Registered saves that have all of that in common are one.
        recomputed_attention: by layer type, the blocks whose attention is recomputed all the same.
        has_own: whether the blocks have selective checkpointing of their own, which is asked last.
        offloads: whether what is saved goes to the host.
    """

    fqns: list[str]
    rules: list[tuple[str, list[str], str]]
    recomputed_attention: dict[str, list[str]]
    has_own: bool
    offloads: bool


MOVED = {"none": "saved outputs", "block_inputs": "block inputs", "all": "saved activations"}
"""By ``activation_offload.mode``, what moves, for people."""


class StepCounter:
    """Counts one step after the other.

    Args:
        pool: whose memory is reported.
        mode: of offload.

    Attributes:
        num: events of this step by name: regions, offloads, reloads, prefetch_hits, misses, resident.
        num_bytes: bytes of this step by name: offloads, reloads.
        has_moved: whether anything was ever offloaded.
        watched: the forward that runs now, if it is timed.
    """

    def __init__(self, pool: PinnedPool, mode: str = "block_inputs") -> None:
        self.num: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.has_moved = False
        self.watched: ForwardRecord | None = None
        self._pool = pool
        self._mode = mode
        self._num_kept: Counter[Stay] = Counter()
        self._kept_bytes: Counter[Stay] = Counter()
        self._exhausted: dict[str, None] = {}  # names of blocks, in order
        self._waits: dict[str, list[Wait]] = {"h2d": [], "d2h": []}
        self._num_slabs_before = 0
        self._has_warned_of_no_op = False

    def move(self, name: str, num_bytes: int) -> None:
        self.num[name] += 1
        self.num_bytes[name] += num_bytes
        self.has_moved = True
        if self.watched is not None and name == "offloads":
            self.watched.num_bytes += num_bytes

    def keep(self, fqn: str, reason: Stay, num_bytes: int) -> None:
        if reason is Stay.NOT_OURS:
            return
        self._num_kept[reason] += 1
        self._kept_bytes[reason] += num_bytes
        if reason is Stay.EXHAUSTED:
            self._exhausted[fqn] = None

    def wait(self, direction: str, wait: Wait) -> None:
        self._waits[direction].append(wait)
        if self.watched is not None:
            self.watched.waits.append(wait)

    def step_end(self) -> OffloadStats:
        """Ends the step. Warns of an exhausted budget, and once if nothing was moved in the first step."""
        stats = self._take()
        has_said_why = self._pool.refusal is not None  # the pool, once
        if self._exhausted and not has_said_why:
            self._warn_of_exhausted_budget(stats)
        if not self.has_moved and not self._has_warned_of_no_op and not has_said_why:
            self._has_warned_of_no_op = True
            logger.warning(f"activation offload is on, but nothing was moved in the first step: {self._why_no_op()}")
        for counter in (self.num, self.num_bytes, self._num_kept, self._kept_bytes, self._exhausted):
            counter.clear()
        self._num_slabs_before = self._pool.num_grown
        self._pool.reset_peak()
        return stats

    def _take(self) -> OffloadStats:
        return OffloadStats(
            num_offloads=self.num["offloads"],
            offloaded_bytes=self.num_bytes["offloads"],
            num_reloads=self.num["reloads"],
            reloaded_bytes=self.num_bytes["reloads"],
            kept={reason.value: (num, self._kept_bytes[reason]) for reason, num in self._num_kept.items()},
            num_prefetch_hits=self.num["prefetch_hits"],
            num_misses=self.num["misses"],
            num_resident=self.num["resident"],
            h2d_wait_ms=self._take_waits("h2d"),
            d2h_wait_ms=self._take_waits("d2h"),
            pinned_in_use_bytes=self._pool.bytes_in_use,
            pinned_peak_bytes=self._pool.peak_bytes_in_use,
            pinned_total_bytes=self._pool.bytes_pinned,
            num_slabs_made=self._pool.num_grown - self._num_slabs_before,
        )

    def _take_waits(self, direction: str) -> float:
        times = [(wait, wait()) for wait in self._waits[direction]]
        self._waits[direction] = [wait for wait, ms in times if ms is None]
        return sum(ms for _, ms in times if ms is not None)

    def _warn_of_exhausted_budget(self, stats: OffloadStats) -> None:
        num, num_bytes = stats.kept[Stay.EXHAUSTED.value]
        logger.warning(
            f"pinned budget of {self._pool.budget_bytes / GIB:.3f} GiB exhausted: {num} {MOVED[self._mode]} "
            f"({num_bytes / GIB:.3f} GiB) stayed on the device this step: {', '.join(self._exhausted)}; raise "
            "activation_offload.host_memory_fraction or activation_offload.pinned_budget_gib"
        )

    def _why_no_op(self) -> str:
        if not self.num["regions"]:
            return "no block ran in training mode with gradients enabled"
        if not self._num_kept and self._mode == "all":
            return "autograd saved no tensor of the blocks but parameters and buffers"
        if not self._num_kept:
            return (
                "no block was given, as a positional tensor, an input that needs a gradient (keyword tensors are not "
                "seen by saved-tensor hooks)"
            )
        reasons = (f"{num} x {reason.value}" for reason, num in self._num_kept.items())
        return f"all {MOVED[self._mode]} stayed on the device: {', '.join(reasons)}"
