"""A step on a virtual clock: what the engine's rules make of times that others measured or foretold.

Owns the rules as arithmetic, event by event, and the closed forms that they come to with many blocks. No torch: it runs
on a laptop.

How it works: compute runs block by block, each direction of the link does its copies one after the other, in the order
given; what waits for what is what `engine` waits for. Price: blocks x lookahead steps of arithmetic.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

BACKWARD = 3
"""Time of a block's recompute and backward, in forwards: the recompute is one more forward, and backward takes two,
since it makes the gradients of inputs and of weights (Narayanan et al., arXiv 2104.04473, appendix "Floating-point
operations")."""

GRADIENTS = 2
"""Time of a block's backward alone, in forwards."""

ROUNDING = 1e-9  # sums of times that are equal may differ by it

Times = float | Sequence[float]
"""One for each block, or one for all."""


@dataclass(frozen=True)
class Interval:
    """What one lane of the device does for a while.

    Attributes:
        lane: ``"compute"``, ``"d2h"`` or ``"h2d"``.
        name: such as ``"forward 3"``, ``"recompute 3"``, ``"backward 3"``, ``"offload 3"``, ``"reload 3"``.
        start_ms, end_ms: since the step began; in milliseconds if the times given are.
    """

    lane: str
    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class SimulatedStep:
    """What `simulate_step` foretells. Times are in the unit of its arguments.

    Attributes:
        step: forward and backward.
        d2h_wait: how long compute stood still for copies to the host.
        h2d_wait: how long it stood still for copies back.
        num_reloads: block inputs copied back.
        num_misses: those whose copy back started only when backward asked.
        num_resident: block inputs that backward found still on the device, their copy to the host under way.
        max_in_stash: largest number of tensors that were on the device for the sake of their copy to the host.
        intervals: what was done when, without the waits; empty unless it was recorded.
    """

    step: float
    d2h_wait: float
    h2d_wait: float
    num_reloads: int
    num_misses: int
    num_resident: int
    max_in_stash: int
    intervals: tuple[Interval, ...] = ()


def simulate_step(
    num_blocks: int,
    forward: Times,
    d2h: Times,
    h2d: Times,
    *,
    backward: Times | None = None,
    schedule: str = "overlap",
    keep_last: int = 1,
    num_moved: int | None = None,
    prefetch_lookahead: int = 1,
    max_inflight_offloads: int = 2,
    num_arrived: Sequence[int] | None = None,
    host_runs_ahead: bool = False,
    is_backward_later: bool = False,
    reloads_all: bool = False,
    is_recorded: bool = False,
) -> SimulatedStep:
    """One forward pass and its backward by the engine's rules.

    Args:
        num_blocks: checkpointed blocks of the only model part.
        forward: time of a block's forward.
        d2h: time of one block's copies to the host. They start with its forward.
        h2d: time of its copies back.
        backward: time of a block's recompute and backward. Default: `BACKWARD` forwards.
        schedule: ``"overlap"``, or ``"sync"``, in which compute stands still for each copy.
        num_moved: blocks that move, the earliest ones; the others stay. Default: all but ``keep_last``.
        keep_last, prefetch_lookahead, max_inflight_offloads: see `OffloadConfig`.
        num_arrived: see `LinkChoice`; takes the place of ``max_inflight_offloads``.
        host_runs_ahead: whether the host has given the device the whole step before the first copy ends: then it never
            sees one ended, and the stash empties only by its limit. Default: host and device go in step, as with
            `HostRuntime`.
        is_backward_later: whether other passes run between the forward and its backward, as in a pipeline, so that all
            copies to the host have ended when backward begins.
        reloads_all: whether also inputs are copied back that backward would find on the device. The engine does not: so
            a slightly slower link can make a step shorter, since one more input is still there. With it a step is never
            shorter on a slower link, and never shorter than without.
        is_recorded: whether ``intervals`` are wanted.
    """
    forward, d2h, h2d = (_per_block(times, num_blocks) for times in (forward, d2h, h2d))
    backward = [BACKWARD * f for f in forward] if backward is None else _per_block(backward, num_blocks)
    most = max(0, num_blocks - keep_last)
    num_moved = most if num_moved is None else min(num_moved, most)
    clock = Clock(forward, backward, d2h, h2d, num_moved, host_runs_ahead, is_recorded)
    if schedule == "sync":
        clock.run_sync()
        return clock.result(resident=set(), num_misses=clock.num_moved)
    if num_arrived is None:
        clock.run_forward(max_inflight_offloads, [0] * num_blocks)
    else:
        clock.run_forward(0, num_arrived)
    if is_backward_later:
        clock.let_copies_end()
    resident = set() if reloads_all else set(clock.stash)
    return clock.result(resident, clock.run_backward(prefetch_lookahead, resident))


@dataclass
class Clock:
    """A step on its virtual clock. The fields without a default are `simulate_step`'s, a time for each block."""

    forward: Sequence[float]
    backward: Sequence[float]
    d2h: Sequence[float]
    h2d: Sequence[float]
    num_moved: int
    host_runs_ahead: bool = False
    is_recorded: bool = False
    now: float = 0.0
    d2h_wait: float = 0.0
    h2d_wait: float = 0.0
    max_in_stash: int = 0
    on_host: list[float] = field(default_factory=list)  # per moved block: when its copy to the host ends
    stash: deque[int] = field(default_factory=deque)
    intervals: list[Interval] = field(default_factory=list)

    def run_forward(self, max_inflight_offloads: int, num_arrived: Sequence[int]) -> None:
        """All forwards. A block waits until the stash has room, and until ``num_arrived`` of the earliest have left."""
        d2h_free = 0.0
        for k in range(len(self.forward)):
            while self.stash and self.stash[0] < num_arrived[k]:
                self._drop_oldest()
            self._reap()
            if k < self.num_moved:
                while max_inflight_offloads and len(self.stash) >= max_inflight_offloads:
                    self._drop_oldest()
                d2h_free = self._do("d2h", "offload", k, max(d2h_free, self.now), self.d2h[k])
                self.on_host.append(d2h_free)
                self.stash.append(k)
                self.max_in_stash = max(self.max_in_stash, len(self.stash))
            self._run_forward_of(k)
        self._reap()  # when backward starts, and then no more: what is in the stash now is there when it is reached

    def run_backward(self, prefetch_lookahead: int, resident: set[int]) -> int:
        """All backwards. Returns the number of misses."""
        h2d_free = 0.0
        ready: dict[int, float] = {}  # when the copy back ends
        num_misses = 0
        for k in reversed(range(len(self.forward))):
            num_misses += k < self.num_moved and k not in resident and k not in ready
            for j in range(k, max(-1, k - prefetch_lookahead - 1), -1):
                if j < self.num_moved and j not in resident and j not in ready:
                    start = max(h2d_free, self.now, self.on_host[j])
                    ready[j] = h2d_free = self._do("h2d", "reload", j, start, self.h2d[j])
            wait = max(0.0, ready.get(k, self.now) - self.now)
            self.now, self.h2d_wait = self.now + wait, self.h2d_wait + wait
            self._run_backward_of(k)
        return num_misses

    def run_sync(self) -> None:
        """Forwards and backwards, each copy on the compute stream."""
        for k in range(len(self.forward)):
            if k < self.num_moved:
                self.now = self._do("d2h", "offload", k, self.now, self.d2h[k])
            self._run_forward_of(k)
        for k in reversed(range(len(self.forward))):
            if k < self.num_moved:
                self.now = self._do("h2d", "reload", k, self.now, self.h2d[k])
            self._run_backward_of(k)
        self.d2h_wait, self.h2d_wait = sum(self.d2h[: self.num_moved]), sum(self.h2d[: self.num_moved])

    def let_copies_end(self) -> None:
        """Other passes run until all that moves is on the host. Their time is not in the step."""
        self.stash.clear()
        self.on_host = [min(end, self.now) for end in self.on_host]

    def result(self, resident: set[int], num_misses: int) -> SimulatedStep:
        counts = (self.num_moved - len(resident), num_misses, len(resident), self.max_in_stash)
        return SimulatedStep(self.now, self.d2h_wait, self.h2d_wait, *counts, tuple(self.intervals))

    def _run_forward_of(self, k: int) -> None:
        self.now = self._do("compute", "forward", k, self.now, self.forward[k])

    def _run_backward_of(self, k: int) -> None:
        recompute = max(0.0, self.backward[k] - GRADIENTS * self.forward[k])
        start, self.now = self.now, self.now + self.backward[k]
        if recompute:
            self._do("compute", "recompute", k, start, recompute)
        self._do("compute", "backward", k, start + recompute, self.now - start - recompute)

    def _reap(self) -> None:
        while not self.host_runs_ahead and self.stash and self.on_host[self.stash[0]] <= self.now:
            self.stash.popleft()

    def _drop_oldest(self) -> None:
        wait = max(0.0, self.on_host[self.stash.popleft()] - self.now)
        self.now, self.d2h_wait = self.now + wait, self.d2h_wait + wait

    def _do(self, lane: str, what: str, k: int, start: float, duration: float) -> float:
        """Returns when it ends."""
        if self.is_recorded:
            self.intervals.append(Interval(lane, f"{what} {k}", start, start + duration))
        return start + duration


def sync_slowdown(copy_over_forward: float, h2d_over_forward: float | None = None, backward: float = BACKWARD) -> float:
    """Of a step in which every block moves with schedule "sync", as a fraction: two copies over four forwards.

    Source: the article "Activation checkpoint offload: moving the last per-layer tensor off the GPU", section "When the
    copy is free".

    Args:
        copy_over_forward: time of a copy to the host over that of a forward.
        h2d_over_forward: and of a copy back. Default: the same.
        backward: time of recompute and backward, in forwards.
    """
    back = copy_over_forward if h2d_over_forward is None else h2d_over_forward
    return (copy_over_forward + back) / (1 + backward)


def overlap_slowdown(
    copy_over_forward: float,
    max_inflight_offloads: int,
    h2d_over_forward: float | None = None,
    backward: float = BACKWARD,
) -> float:
    """Steady state of a step in which every block moves with schedule "overlap", as a fraction: what a copy to the host
    outlasts a forward by, if ``max_inflight_offloads`` is finite (else it costs memory, not time), and what a copy back
    outlasts recompute and backward by, over four forwards.

    Source of the second term: as of `sync_slowdown`; the first is the rule of the stash (`engine`) when it is full.

    Args:
        copy_over_forward, h2d_over_forward, backward: see `sync_slowdown`.
        max_inflight_offloads: see `OffloadConfig`; 0: no limit.
    """
    back = copy_over_forward if h2d_over_forward is None else h2d_over_forward
    out = max(0.0, copy_over_forward - 1) if max_inflight_offloads else 0.0
    return (out + max(0.0, back - backward)) / (1 + backward)


def _per_block(times: Times, num_blocks: int) -> Sequence[float]:
    return [times] * num_blocks if isinstance(times, int | float) else times
