"""What to set, and what comes first in a plan: whether it fits, what it costs, whether offload is of use.

Owns the verdict: which settings are tried, in which order, when one is good enough, and the sentences. Relies on
`steps` for what each of them would do.

How it works: the user's settings are tried first, then a deeper prefetch or a larger stash; the first with which copies
hide is taken, or else ``limit = "link"`` or the fastest. Then as many blocks stay as the host has no room for.
Where nothing is checkpointed and all moves, there is no ``limit = "link"`` to fall back on: if copies do not hide, the
advice is to recompute. Price: some ten steps on the virtual clock.
"""

from collections.abc import Iterator
from dataclasses import replace

from titan_offload.config import GIB, MIB, OFFLOAD, SELECTIVE, OffloadConfig
from titan_offload.planner.costs import input_bytes
from titan_offload.planner.plan import Moment, Setting, StepCost, Verdict
from titan_offload.planner.steps import Way

LARGEST_LOOKAHEAD, LARGEST_STASH = 4, 4
"""What is tried; each more is one more block input on the device."""

HIDES_PERCENT = 2.0
"""By how much a step may be longer for its copies to count as hidden: the first copy back hides behind nothing."""

ENOUGH_FRACTION = 0.5
"""Of what moving all blocks takes off the peak, how much ``limit = "link"`` must take off to be worth advising."""

LEAST_DROP_FRACTION = 0.01
"""Of the peak: to lower it by less is of no use."""

LEAST_SPEEDUP_FRACTION = 0.02
"""Of the step: what saving attention must spare to be worth its memory."""


def give_advice(way: Way, selective_ways: dict[str, Way], ac: Way, host_budget_bytes: int | None) -> Verdict:
    """The verdict on a job.

    Args:
        way: as asked about; where nothing was to move, as with ``mode = "block_inputs"``.
        selective_ways: ``"device"`` and ``"host"``: the same with attention saved there. Empty: the user has chosen.
        ac: AC alone.
        host_budget_bytes: what a node's ranks may pin; None: not known.
    """
    asked = way.offload
    way = _with(way, _best(way, ac))
    way = _with(way, replace(way.offload, keep_last=_keep_last_that_fits(way, host_budget_bytes)))
    ac_cost = ac.cost()
    without = _without_offload(way, ac)
    reason = _why_it_does_not_pay(way, without, way.cost(ac_cost.step_ms))
    place = None if reason is not None else _place_of_saves(way, selective_ways, host_budget_bytes)
    chosen = _with(selective_ways[place], way.offload) if place else way
    cost = chosen.cost(ac_cost.step_ms)
    slowdown = max(0.0, cost.vs_ac_percent)
    settings = _settings(asked, way, place) if reason is None else _settings_without(way, cost, reason)
    fits_device_ac = _fits_device(ac, without)
    return Verdict(
        pays=reason is None,
        fits_host=None if host_budget_bytes is None else cost.pinned_node_bytes <= host_budget_bytes,
        fits_device=_fits_device(chosen, cost),
        fits_device_ac=fits_device_ac,
        slowdown_percent=slowdown,
        freed_bytes=max(0, without.held_bytes - cost.held_bytes),
        peak_drop_bytes=max(0, without.peak.num_bytes - cost.peak.num_bytes),
        settings=settings,
        text=tuple(_sentences(chosen, without, cost, host_budget_bytes, reason, fits_device_ac is False)),
        unknown=tuple(_unknown(chosen)),
    )


def _without_offload(way: Way, ac: Way) -> StepCost:
    """What the device holds if nothing moves: of each block its input, or all activations."""
    if not way.moves_all:
        return ac.cost()
    return _with(way, replace(way.offload, keep_last=len(way.model.layers), schedule="overlap")).cost()


def _with(way: Way, offload: OffloadConfig) -> Way:
    return replace(way, offload=offload, schedule=offload.schedule)


# What is tried


def _candidates(offload: OffloadConfig) -> Iterator[OffloadConfig]:
    """In the order of preference: each costs more device memory than the one before."""
    overlap = replace(offload, schedule="overlap")
    yield from dict.fromkeys((offload, overlap))
    for lookahead in range(overlap.prefetch_lookahead + 1, LARGEST_LOOKAHEAD + 1):
        yield replace(overlap, prefetch_lookahead=lookahead)
    for num in range(overlap.max_inflight_offloads + 1, LARGEST_STASH + 1):
        yield replace(overlap, max_inflight_offloads=num)


def _best(way: Way, ac: Way) -> OffloadConfig:
    """The first with which copies hide. If none does, ``limit = "link"``, if that saves enough; else the fastest."""
    costs = {}
    for offload in _candidates(way.offload):
        costs[offload] = _with(way, offload).cost()
        if costs[offload].simulated_percent <= HIDES_PERCENT:
            return offload
    fastest = min(costs, key=lambda offload: costs[offload].step_ms)
    if way.offload.mode == "all":
        return fastest
    lookahead = max(1, fastest.prefetch_lookahead)
    link = replace(way.offload, schedule="overlap", limit="link", prefetch_lookahead=lookahead)
    saved, saved_by_link = (ac.peak.num_bytes - _with(way, o).peak.num_bytes for o in (fastest, link))
    return link if saved_by_link >= ENOUGH_FRACTION * saved else fastest


def _keep_last_that_fits(way: Way, host_budget_bytes: int | None) -> int:
    """Fewest block inputs of a part that must stay for the others to fit the host."""
    keep_last = way.offload.keep_last
    most = max(len(part.blocks) for part in way.parts)
    while host_budget_bytes is not None and keep_last < most:
        if _with(way, replace(way.offload, keep_last=keep_last)).pinned_node_bytes() <= host_budget_bytes:
            break
        keep_last += 1
    return keep_last


def _place_of_saves(way: Way, selective_ways: dict[str, Way], host_budget_bytes: int | None) -> str | None:
    """Where attention's outputs should be saved, if that makes the step shorter by enough: where they are known to have
    room; on the host if that takes no longer than on the device, whose memory it leaves alone."""
    costs = {place: _with(other, way.offload).cost() for place, other in selective_ways.items()}
    worth = (1 - LEAST_SPEEDUP_FRACTION) * way.cost().step_ms
    places = [place for place, cost in costs.items() if cost.step_ms <= worth]
    if "device" in places and not _fits_device(way, costs["device"]):
        places.remove("device")
    if "host" in places and (host_budget_bytes is None or costs["host"].pinned_node_bytes > host_budget_bytes):
        places.remove("host")
    slower = {"host": 1.0, "device": 1 + HIDES_PERCENT / 100}
    return min(places, key=lambda place: costs[place].step_ms * slower[place], default=None)


def _fits_device(way: Way, cost: StepCost) -> bool | None:
    memory = way.machine.device_memory_gib
    return None if memory is None else cost.peak.num_bytes <= memory * GIB


def _why_it_does_not_pay(way: Way, without: StepCost, cost: StepCost) -> str | None:
    """None: it pays.

    Args:
        without: the same without offload.
    """
    drop, peak = without.peak.num_bytes - cost.peak.num_bytes, without.peak.num_bytes
    if not cost.moved_bytes:
        if way.moves_all and not any(block.moved_bytes for block in way.blocks):
            return f"all that blocks save is below {OFFLOAD}.min_offload_mib = {way.offload.min_offload_mib:g}"
        size = input_bytes(way.model, way.job)
        if not way.moves_all and size < way.offload.min_offload_bytes:
            return (
                f"a block's input is {size / MIB:.3g} MiB, below {OFFLOAD}.min_offload_mib = "
                f"{way.offload.min_offload_mib:g}"
            )
        return "no block's copies hide behind compute, or the host has no room for one"
    if drop < LEAST_DROP_FRACTION * peak:
        return f"the peak would not fall: at it stands {_parts_text(cost.peak)} ({cost.peak.name})"
    slowdown = cost.vs_ac_percent
    if way.moves_all and slowdown > HIDES_PERCENT:
        return f"to recompute is faster than to copy everything over this link, by {slowdown:.1f} % of a step"
    if slowdown > drop / peak * 100:
        return (
            f"the step gets {slowdown:.1f} % slower for a peak that falls by {drop / peak * 100:.1f} %: the link is "
            "too slow"
        )
    return None


# What to set


def _settings(asked: OffloadConfig, way: Way, place: str | None) -> tuple[Setting, ...]:
    """Three keys, those that differ from what was asked about first; a fourth where saved outputs move."""
    best = way.offload
    keys = [
        _mode_or_limit(way),
        Setting(f"{OFFLOAD}.keep_last", best.keep_last, _why_keep_last(asked, best)),
        Setting(f"{OFFLOAD}.prefetch_lookahead", best.prefetch_lookahead, _why_lookahead(asked, way)),
        Setting(f"{OFFLOAD}.max_inflight_offloads", best.max_inflight_offloads, _why_stash(way)),
    ]
    if asked.schedule != best.schedule:
        keys.insert(1, Setting(f"{OFFLOAD}.schedule", best.schedule, "copies hide behind compute"))
    if place:
        keys.insert(1, Setting(f"{SELECTIVE}.enable", True, "attention's outputs are saved, not recomputed"))
    if place == "host":
        keys.insert(2, Setting(f"{SELECTIVE}.offload", True, "and wait in host memory, which has room for them"))
    changed = [key for key in keys if key.key.startswith(SELECTIVE) or _is_changed(key, asked)]
    first = [keys[0], *(key for key in changed if key is not keys[0])]
    rest = [key for key in keys if key not in first]
    return tuple([*first, *rest][: max(3, len(first))])


def _is_changed(setting: Setting, asked: OffloadConfig) -> bool:
    return getattr(asked, setting.key.removeprefix(f"{OFFLOAD}.")) != setting.value


def _mode_or_limit(way: Way) -> Setting:
    if way.offload.limit == "link":
        return Setting(f"{OFFLOAD}.limit", "link", "only as many blocks move as hide behind compute")
    if way.moves_all:
        return Setting(f"{OFFLOAD}.mode", "all", "nothing is recomputed, and copies take less time than that would")
    if way.offload.mode == "all":
        return Setting(f"{OFFLOAD}.mode", "all", "with block inputs moves what is saved outside the blocks")
    return Setting(f"{OFFLOAD}.mode", "block_inputs", "block inputs are part of the peak, and their copies hide")


def _why_keep_last(asked: OffloadConfig, best: OffloadConfig) -> str:
    if best.keep_last != asked.keep_last:
        return "the host has no room for more blocks"
    return "backward needs the newest first" if best.keep_last else "all that can move does"


def _why_lookahead(asked: OffloadConfig, way: Way) -> str:
    best = way.offload
    if way.moves_all:
        return "reloads run ahead of backward by the bytes of this many blocks"
    if best.prefetch_lookahead != asked.prefetch_lookahead:
        return "one block's recompute and backward are too short for a copy back"
    return "a copy back hides behind one block's recompute and backward" if best.prefetch_lookahead else "as asked"


def _why_stash(way: Way) -> str:
    num = way.offload.max_inflight_offloads
    if not num:
        return "forward never waits for a copy, which costs device memory"
    what = "activations of at most {} blocks wait" if way.moves_all else "at most {} inputs wait"
    return f"{what.format(num)} on the device for their copy"


def _settings_without(way: Way, cost: StepCost, reason: str) -> tuple[Setting, ...]:
    if way.moves_all and cost.vs_ac_percent > HIDES_PERCENT:
        return (
            Setting("activation_checkpoint.mode", "full", reason),
            Setting(f"{OFFLOAD}.mode", "block_inputs", "of each block its input moves, and nothing else"),
        )
    return (Setting(f"{OFFLOAD}.mode", "none", reason),)


# Sentences


def _sentences(
    way: Way, without: StepCost, cost: StepCost, host_budget_bytes: int | None, reason: str | None, needs_device: bool
) -> Iterator[str]:
    """``without``: the same without offload; ``needs_device``: whether that does not fit the device."""
    pinned = f"{_gib(cost.pinned_node_bytes)} of pinned memory per node, {_gib(cost.pinned_bytes)} per rank"
    slower = f"{abs(cost.vs_ac_percent):.1f} % {'less' if cost.vs_ac_percent < 0 else 'more'} than"
    if reason is not None:
        yield f"Do not {'move everything' if way.moves_all else 'offload'}: {reason}."
        against = "with activation checkpointing alone" if way.moves_all else "without"
        yield f"With offload the step would take {_time(cost.step_ms)}, {slower} {against}, and {pinned}."
    elif host_budget_bytes is None:
        yield f"It takes {pinned}; give the host's memory to see whether that fits."
    elif cost.pinned_node_bytes <= host_budget_bytes:
        yield f"It fits the host: {pinned}, of {_gib(host_budget_bytes)} that the node's ranks may take."
    else:
        yield f"It does not fit the host: {pinned}, of {_gib(host_budget_bytes)} that the node's ranks may take."
    if reason is None:
        freed = max(0, without.held_bytes - cost.held_bytes)
        drop = max(0, without.peak.num_bytes - cost.peak.num_bytes)
        yield f"The step takes {_time(cost.step_ms)}, {slower} with activation checkpointing alone."
        yield (
            f"It frees {_gib(freed)} after forward; the peak falls by {_gib(drop)}, to {_gib(cost.peak.num_bytes)} as "
            f"far as known: {_parts_text(cost.peak)} ({cost.peak.name})."
        )
    fits = _fits_device(way, cost)
    if fits is False:
        yield f"It does not fit the device's {way.machine.device_memory_gib:g} GiB."
    elif fits:
        without = "only with offload" if needs_device else "also without offload"
        yield f"It fits the device's {way.machine.device_memory_gib:g} GiB, {without}."


def _parts_text(moment: Moment) -> str:
    """The largest first."""
    parts = sorted(moment.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{_gib(num_bytes)} of {what}" for what, num_bytes in parts)


def _unknown(way: Way) -> Iterator[str]:
    if way.model.num_params is None:
        yield "parameters, gradients and optimizer states: the model's number of parameters is not known"
    if way.model.vocab_size is None:
        yield "logits: the vocabulary is not known"
    if way.job.is_checkpointed:
        yield "one block's recompute is a GPT block's, 34 bytes per element; gated MLPs and experts take more or less"
    yield "buffers of collectives, workspace of kernels, fragmentation"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.4g} GiB"


def _time(ms: float) -> str:
    return f"{ms:.4g} ms" if ms < 1000 else f"{ms / 1000:.4g} s"
