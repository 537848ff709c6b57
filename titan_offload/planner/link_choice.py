"""Which block inputs the link can move for nothing: the choice of ``limit = "link"``.

Owns the choice alone; when it is made and by whom: `link_limit`. Relies on times and rates that others measured, and on
`simulation`; no torch.

How it works: for each number of earliest blocks, from all down, a step on the virtual clock tells whether their copies
end in time. Price: blocks x blocks x lookahead steps of arithmetic, once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titan_offload.planner.simulation import BACKWARD, ROUNDING, Clock, simulate_step

TOLERANCE = 0.01
"""By what fraction a step may be longer than with AC alone and still count as no longer."""


@dataclass(frozen=True)
class PartCosts:
    """What one rank measured of a model part.

    Attributes:
        forward_s: of each block, the time of its forward on the compute stream, waits for copies taken off.
        num_bytes: of each block, what it moves: its input and its saved outputs.
        d2h_bytes_per_s, h2d_bytes_per_s: what the link carries while the other ranks of the host copy too.
    """

    forward_s: tuple[float, ...]
    num_bytes: tuple[int, ...]
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float


@dataclass(frozen=True)
class LinkChoice:
    """Which blocks of a model part go on moving with ``limit = "link"``.

    Attributes:
        costs: what it was chosen from.
        num_moved: the earliest blocks, this many.
        num_arrived: for each block, how many of the earliest ones must have left the device when its forward starts.
            So the stash is as large as it must be for compute not to wait, and no larger.
        max_inflight_offloads: most blocks that are in the stash at once then.
        hidden_bytes: what moves to the host in each forward, and back in each backward.
        ac_step_s: forward and backward of the blocks with AC alone.
        stall_s: how much longer that gets by the blocks that move.
        stall_s_if_all: and with ``limit = "memory"``.
    """

    costs: PartCosts
    num_moved: int
    num_arrived: tuple[int, ...]
    max_inflight_offloads: int
    hidden_bytes: int
    ac_step_s: float
    stall_s: float
    stall_s_if_all: float


def choose_link_limit(
    forward_s: Sequence[float],
    num_bytes: Sequence[int],
    d2h_bytes_per_s: float,
    h2d_bytes_per_s: float,
    *,
    keep_last: int = 1,
    prefetch_lookahead: int = 1,
    max_inflight_offloads: int = 2,
    tolerance: float = TOLERANCE,
) -> LinkChoice:
    """The largest number of earliest blocks whose copies all hide behind compute.

    They hide if the last copy to the host has ended when forward ends, and if backward with all of them copied back is
    no longer than with AC alone. A copy to the host that ended later would cost no time either, but its tensor would be
    on the device when most is there, so to move it would be of no use.

    A copy may take longer than a forward, if enough blocks stay in whose time the copies catch up. Until then the stash
    holds more than ``max_inflight_offloads``. That does not raise the peak: as copies arrive, the inputs of the blocks
    that stay take the place of those in the stash. If a copy takes r > 1 forwards, n = N / r of N blocks move and the
    stash holds at most n (1 - 1 / r), less than the N - n = n (r - 1) that stay.

    Args:
        forward_s, num_bytes, d2h_bytes_per_s, h2d_bytes_per_s: see `PartCosts`.
        keep_last, prefetch_lookahead: see `OffloadConfig`.
        max_inflight_offloads: of ``limit = "memory"``, for ``stall_s_if_all``.
        tolerance: fraction of the step with AC alone by which copies back may lengthen it.
    """
    costs = PartCosts(tuple(forward_s), tuple(num_bytes), d2h_bytes_per_s, h2d_bytes_per_s)
    d2h = [size / d2h_bytes_per_s for size in num_bytes]
    h2d = [size / h2d_bytes_per_s for size in num_bytes]
    ac_step_s = (1 + BACKWARD) * sum(forward_s)
    for num_moved in range(len(forward_s) - keep_last, -1, -1):
        step = Clock(forward_s, [BACKWARD * forward for forward in forward_s], d2h, h2d, num_moved)
        step.run_forward(0, [0] * len(forward_s))
        is_out = max(step.on_host, default=0.0) <= sum(forward_s) * (1 + ROUNDING)
        step.run_backward(prefetch_lookahead, resident=set())
        if is_out and step.now <= (1 + tolerance) * ac_step_s:
            break
    num_arrived = _num_arrived(forward_s, step.on_host)
    as_all = simulate_step(
        len(forward_s),
        *(forward_s, d2h, h2d),
        keep_last=keep_last,
        prefetch_lookahead=prefetch_lookahead,
        max_inflight_offloads=max_inflight_offloads,
    )
    return LinkChoice(
        costs=costs,
        num_moved=num_moved,
        num_arrived=num_arrived,
        max_inflight_offloads=max((k + 1 - arrived for k, arrived in enumerate(num_arrived[:num_moved])), default=0),
        hidden_bytes=sum(num_bytes[:num_moved]),
        ac_step_s=ac_step_s,
        stall_s=max(0.0, step.now - ac_step_s),
        stall_s_if_all=max(0.0, as_all.step - ac_step_s),
    )


def agree_on_link_limit(costs: Sequence[PartCosts], **settings: int) -> LinkChoice:
    """The choice of the slowest of the ranks that do the same work: all of them wait for it in each step anyway.

    Args:
        costs: of each of these ranks, in the same order on all of them.
        settings: those of `choose_link_limit`.
    """
    choices = [
        choose_link_limit(c.forward_s, c.num_bytes, c.d2h_bytes_per_s, c.h2d_bytes_per_s, **settings) for c in costs
    ]
    return min(choices, key=lambda choice: (choice.num_moved, -choice.stall_s_if_all))


def _num_arrived(forward_s: Sequence[float], on_host: Sequence[float]) -> tuple[int, ...]:
    """For each block, the copies that have ended one block earlier: one block of slack for times that vary."""
    starts, now = [-math.inf], 0.0
    for forward in forward_s[:-1]:
        starts.append(now)
        now += forward
    return tuple(sum(end <= start for end in on_host) for start in starts)
