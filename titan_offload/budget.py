"""Who gets how much of the host's memory.

Owns how what is free is divided among the ranks of a host, the agreement among the ranks that do the same work, and
what stops a run before it allocates. Relies on `host_memory` and `topology` for facts; what a rank needs: `need`.

How it works: each rank takes its facts once, before anybody allocates, and `exchange` makes them known to all. All that
is done here is arithmetic on the facts of all ranks, so that every rank comes to the same budgets, or the same error.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from titan_offload.config import GIB, OFFLOAD
from titan_offload.host_memory import HostMemory, MemoryLimit
from titan_offload.topology import Device

MAX_NAMED = 4
"""Ranks, keys or values that one error names; the rest is counted."""


@dataclass(frozen=True)
class Claim:
    """Host memory that something will take.

    Attributes:
        name: what takes it, such as ``"block inputs"``.
        num_bytes: how much, on this rank.
        is_offload: whether it comes from the pool of pinned memory. Otherwise it is taken off what the pools share.
    """

    name: str
    num_bytes: int
    is_offload: bool = True


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells all others before any of them allocates.

    Attributes:
        rank: in the job.
        host: identity of its host, see `topology.Host`.
        hostname: for people.
        device_name: for people, such as ``"cuda:3"``.
        device: where it hangs.
        memory: what is free, and under which limits.
        claims: what will be taken. None: not known; then the rank takes an equal share.
        slot_bytes: largest tensor that moves, rounded to a slot: less is of no use. 0: not known.
        num_slots: tensors of that size that are in host memory at once.
        stage: ranks with the same one do the same work, so they move the same.
        config: settings by key, ``section.key``, that must be the same on all ranks.
        error: why this rank cannot go on; then none does.
        time: when they were taken, in seconds since 1970. That of rank 0 names the run.
    """

    rank: int
    host: str
    hostname: str
    device_name: str
    device: Device
    memory: HostMemory
    claims: tuple[Claim, ...] | None
    slot_bytes: int
    num_slots: int
    stage: str
    config: dict[str, object]
    error: str | None = None
    time: float = 0.0

    @property
    def need_bytes(self) -> int | None:
        """Pinned memory that the rank would use; None: not known."""
        if self.claims is None:
            return None
        return sum(claim.num_bytes for claim in self.claims if claim.is_offload)

    @property
    def other_bytes(self) -> int:
        """Host memory that the rank will take besides."""
        return sum(claim.num_bytes for claim in self.claims or () if not claim.is_offload)


@dataclass(frozen=True)
class RankBudget:
    """What a rank gets.

    Attributes:
        facts: what it told.
        need_bytes: pinned memory that it would use; None: not known.
        share_bytes: its share of what its host has: no more than it needs.
        budget_bytes: what it may pin: its share, or less where another rank of its stage gets less.
        spare_bytes: how much more it may pin if its need was foretold too low: an equal part of what no rank of its
            host needs. 0 where the budget is below the need, and of a budget that the user chose.
        limited_by: the limit that kept the share below the need; None: nothing did.
        limited_by_rank: where the budget is below the need, the rank of the stage whose share set it: this one or
            another.
        repair: what to change there for more, for people.
    """

    facts: RankFacts
    need_bytes: int | None
    share_bytes: int
    budget_bytes: int
    limited_by: str | None = None
    limited_by_rank: int | None = None
    repair: str = ""
    spare_bytes: int = 0

    @property
    def is_short(self) -> bool:
        """Whether it is known that the rank would need more than it may pin."""
        return self.need_bytes is not None and self.budget_bytes < self.need_bytes


@dataclass(frozen=True)
class Limit:
    """What several ranks may take together.

    Attributes:
        members: their ranks.
        num_bytes: what their pools may take.
        is_local: whether it is the memory of their NUMA node: what they should take first, not all they may.
        record: what was read; its ``free_bytes`` is the least of what the members saw, less their own use.
        other_bytes: what the members take besides, and what is taken off ``num_bytes``.
    """

    members: frozenset[int]
    num_bytes: int
    is_local: bool = False
    record: MemoryLimit | None = None
    other_bytes: int = 0


def limits_of(facts: Iterable[RankFacts], fraction: float = 1.0) -> list[Limit]:
    """What bounds the pools of these ranks, each with the ranks that share it.

    Args:
        facts: of any ranks; those of different hosts never share a limit.
        fraction: of what is free, how much the ranks may take.
    """
    groups: dict[tuple[str, str, str], list[tuple[RankFacts, MemoryLimit]]] = {}
    for rank in sorted(facts, key=lambda rank: rank.rank):
        for limit in rank.memory.limits:
            if limit.kind != "numa" or limit.group == f"numa:{rank.device.numa_node}":
                groups.setdefault((rank.host, limit.kind, limit.group), []).append((rank, limit))
    return [_join(views, fraction) for views in groups.values()]


def _join(views: list[tuple[RankFacts, MemoryLimit]], fraction: float) -> Limit:
    """One limit of what several ranks saw of it."""
    first = views[0][1]
    free = min(limit.free_bytes for _, limit in views) - sum(limit.own_bytes for _, limit in views)
    others = sum(rank.other_bytes for rank, _ in views)
    usable = int(Fraction(str(fraction)) * max(free, 0))  # 0.29 x 100 is 29
    return Limit(
        members=frozenset(rank.rank for rank, _ in views),
        num_bytes=max(usable - others, 0),
        is_local=first.kind == "numa",
        record=replace(first, free_bytes=max(free, 0)),
        other_bytes=others,
    )


def divide(needs: Mapping[int, int | None], limits: Sequence[Limit]) -> dict[int, int]:
    """Divides memory among ranks, to the byte: max-min fair, from each rank's own NUMA node first.

    Always the rank that has least takes the next byte (of equals, the lowest rank), until it has its need or one of
    its limits is full. First under all limits; then what is left, from other nodes, under those that are not local. So
    nobody gets more than it needs, what one leaves goes to the others, no limit is exceeded, nothing that a rank could
    use is left, and with more memory on a host no rank gets less.

    Args:
        needs: of each rank; None: not known, it takes what it gets.
        limits: on ranks of ``needs``; those that are not local must bound each rank whose need is not known.
    """
    needs = {rank: math.inf if need is None else need for rank, need in needs.items()}
    local = _fill(dict.fromkeys(needs, 0), needs, limits)
    return _fill(local, needs, [limit for limit in limits if not limit.is_local])


def _fill(start: dict[int, int], needs: Mapping[int, float], limits: Sequence[Limit]) -> dict[int, int]:
    taken, growing = dict(start), set(needs)

    def left(limit: Limit) -> int:
        return limit.num_bytes - sum(taken[rank] for rank in limit.members)

    while growing:
        level = min(taken[rank] for rank in growing)
        lowest = {rank for rank in growing if taken[rank] == level}
        steps = [taken[rank] - level for rank in growing - lowest]
        steps += [left(limit) // len(limit.members & lowest) for limit in limits if limit.members & lowest]
        step = max(min(steps, default=math.inf), 1)  # what each can have; else the next byte, for as many as it lasts
        for rank in sorted(lowest):
            rise = min(step, needs[rank] - taken[rank], *(left(limit) for limit in limits if rank in limit.members))
            assert rise < math.inf, f"rank {rank}, whose need is not known, has no limit"
            taken[rank] += rise
            if rise == 0:
                growing.remove(rank)
    return taken


def share(facts: Sequence[RankFacts], fraction: float, pinned_budget_bytes: int | None = None) -> list[RankBudget]:
    """What each rank may pin.

    Ranks of one stage have the same blocks, and one that keeps a block on the device gains nothing from another that
    moves it: where one of them is short, all move as many slots as the one that has room for fewest.

    Args:
        facts: of all ranks of the job, as `exchange` returns them.
        fraction: ``activation_offload.host_memory_fraction``.
        pinned_budget_bytes: ``activation_offload.pinned_budget_gib``, for each rank, in place of a share; None: divide.

    Raises:
        ValueError: ``pinned_budget_bytes``, for all ranks of a host, is more than is free there; the same on all ranks.
    """
    hosts: dict[str, list[RankFacts]] = {}
    for rank in sorted(facts, key=lambda rank: rank.rank):
        hosts.setdefault(rank.host, []).append(rank)
    stages: dict[str, list[RankBudget]] = {}
    for ranks in hosts.values():
        got = _divide(ranks, fraction) if pinned_budget_bytes is None else _take_budgets(ranks, pinned_budget_bytes)
        for budget in got:
            stages.setdefault(budget.facts.stage, []).append(budget)
    agreed = {budget.facts.rank: budget for stage in stages.values() for budget in _agree(stage)}
    return [agreed[rank.rank] for rank in facts]


def _divide(facts: list[RankFacts], fraction: float) -> list[RankBudget]:
    """Shares of one host's ranks."""
    limits = limits_of(facts, fraction)
    needs = {rank.rank: rank.need_bytes for rank in facts}
    shares = divide(needs, limits)
    most = _fill(shares, dict.fromkeys(shares, math.inf), [limit for limit in limits if not limit.is_local])
    budgets = []
    for rank in facts:
        need, got = needs[rank.rank], shares[rank.rank]
        budget = RankBudget(rank, need, got, got, spare_bytes=most[rank.rank] - got)
        if need is None or got < need:
            limit = _full_limit(rank.rank, shares, limits)
            repair = _repair(limit, [need for r, need in needs.items() if r in limit.members], fraction)
            budget = replace(budget, limited_by=limit.record.source, repair=repair)
        budgets.append(budget)
    return budgets


def _full_limit(rank: int, shares: Mapping[int, int], limits: Sequence[Limit]) -> Limit:
    """What keeps a rank from more: of its limits that are full, the one that fewest ranks share."""
    own = [limit for limit in limits if rank in limit.members and not limit.is_local]
    full = [limit for limit in own if sum(shares[member] for member in limit.members) == limit.num_bytes]
    return min(full, key=lambda limit: len(limit.members))


def _repair(limit: Limit, needs: list[int | None], fraction: float) -> str:
    """What to change so that all ranks under ``limit`` get what they need."""
    if None in needs:
        return f"raise {OFFLOAD}.host_memory_fraction, or give the job more host memory"
    record, wanted = limit.record, sum(needs) + limit.other_bytes
    more = math.ceil(wanted / Fraction(str(fraction))) - record.free_bytes
    gib = -(-(record.limit_bytes + more) // GIB)
    if record.kind == "host":
        memory = f"run it on hosts with {gib} GiB of memory, or with fewer ranks on each"
    elif record.kind == "slurm":
        memory = f"start the job with --mem >= {gib}G"
    else:
        memory = f"raise the limit in {record.source} to {gib} GiB (of a SLURM job: --mem={gib}G)"
    percent = -(-100 * wanted // max(record.free_bytes, 1))
    return f"raise {OFFLOAD}.host_memory_fraction to {percent / 100:.2f}, or {memory}" if percent <= 100 else memory


def _take_budgets(facts: list[RankFacts], pinned_budget_bytes: int) -> list[RankBudget]:
    """One host's ranks with a budget that the user chose."""
    key = f"{OFFLOAD}.pinned_budget_gib"
    for limit in limits_of(facts):
        num, total = len(limit.members), pinned_budget_bytes * len(limit.members)
        is_known = limit.record.limit_bytes > 0
        if is_known and not limit.is_local and total > limit.num_bytes:
            others = f", {_gib(limit.other_bytes)} of it for other parts of the run" if limit.other_bytes else ""
            raise ValueError(
                f"{key} = {pinned_budget_bytes / GIB:g} for each of {num} ranks of host {facts[0].hostname} is "
                f"{_gib(total)}, but {_gib(limit.record.free_bytes)} are free there{others} ({limit.record.source}): "
                f"set it to at most {limit.num_bytes // num * 100 // GIB / 100:g}, or to 0 to divide what is free"
            )
    budgets = []
    for rank in facts:
        need = rank.need_bytes
        budget = RankBudget(rank, need, pinned_budget_bytes, pinned_budget_bytes)
        if need is not None and need > pinned_budget_bytes:
            budget = replace(budget, limited_by=key, repair=f"raise {key} to {-(-need * 100 // GIB) / 100:g}")
        budgets.append(budget)
    return budgets


def _agree(stage: list[RankBudget]) -> list[RankBudget]:
    """Budgets of ranks that do the same work: as many slots on each as the rank with fewest has room for."""
    units = [max(budget.facts.slot_bytes, 1) for budget in stage]
    slots = [(budget.share_bytes // unit, budget) for budget, unit in zip(stage, units, strict=True)]
    limited = [pair for pair in slots if pair[1].limited_by]
    if not limited:
        return stage
    num_slots, least = min(limited, key=lambda pair: pair[0])
    agreed = []
    for budget, unit in zip(stage, units, strict=True):
        num_bytes = min(budget.share_bytes, num_slots * unit)
        if num_bytes < (budget.share_bytes if budget.need_bytes is None else budget.need_bytes):
            budget = replace(budget, limited_by_rank=least.facts.rank, repair=least.repair)
        agreed.append(replace(budget, budget_bytes=num_bytes, spare_bytes=0))
    return agreed


def num_kept(budget: RankBudget) -> tuple[int, int]:
    """How many of a rank's ``num_slots`` tensors stay on the device with this budget, and their bytes, at once.

    Exact for tensors of one size; else the fewest that make up what is missing.
    """
    if not budget.is_short:
        return 0, 0
    missing, size = budget.need_bytes - budget.budget_bytes, max(budget.facts.slot_bytes, 1)
    num = min(-(-missing // size), budget.facts.num_slots)
    return num, max(missing, num * budget.facts.slot_bytes)


def check(facts: Sequence[RankFacts]) -> None:
    """Refuses what any rank cannot go on with. Call it on what `exchange` returned, before anything is allocated.

    Raises:
        ValueError: a rank has an error, or ranks have different settings; the same text on all ranks.
    """
    facts = sorted(facts, key=lambda rank: rank.rank)
    if failed := [f"rank {rank.rank} on {rank.hostname}: {rank.error}" for rank in facts if rank.error is not None]:
        raise ValueError(f"activation offload cannot start: {_listed(failed, '; ')}")
    keys = sorted({key for rank in facts for key in rank.config})
    differences = [f"{key} = {_listed(values, ', ')}" for key in keys if len(values := _values(key, facts)) > 1]
    if differences:
        raise ValueError(
            f"ranks have different settings: {_listed(differences, '; ')}: start all of them with the same train config"
        )


def _values(key: str, facts: Sequence[RankFacts]) -> list[str]:
    """Each value that ranks have for a key, and which ranks."""
    ranks: dict[str, list[str]] = {}
    for rank in facts:
        value = repr(rank.config[key]) if key in rank.config else "(not set)"
        ranks.setdefault(value, []).append(f"{rank.rank} ({rank.hostname})")
    return [f"{value} on rank{'s' * (len(names) > 1)} {_listed(names, ', ')}" for value, names in ranks.items()]


def check_budgets(budgets: Sequence[RankBudget]) -> None:
    """Refuses budgets below the need where ``activation_offload.on_exhausted`` is ``"error"``. After `share`.

    Raises:
        ValueError: names ranks, their hosts, needs and budgets, and what to change; the same text on all ranks.
    """
    strict = [budget for budget in budgets if budget.facts.config.get(f"{OFFLOAD}.on_exhausted") == "error"]
    short = [budget for budget in strict if budget.is_short]
    if not short:
        return
    short.sort(key=lambda budget: (budget.limited_by_rank != budget.facts.rank, budget.facts.rank))
    raise ValueError(
        f'{OFFLOAD}.on_exhausted = "error", and {len(short)} of {len(budgets)} ranks get less pinned memory than they '
        f"need: {_listed([_shortage(budget) for budget in short], '; ')}: {short[0].repair}, or set on_exhausted to "
        '"keep", which leaves on the device what has no room'
    )


def _shortage(budget: RankBudget) -> str:
    by = f"limited by {budget.limited_by}"
    if budget.limited_by_rank != budget.facts.rank:
        by = f"to move the same as rank {budget.limited_by_rank} of its stage"
    return (
        f"rank {budget.facts.rank} on {budget.facts.hostname} needs {_gib(budget.need_bytes)} and gets "
        f"{_gib(budget.budget_bytes)}, {by}"
    )


def _listed(texts: Sequence[str], separator: str) -> str:
    more = len(texts) - MAX_NAMED
    return separator.join(texts[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.4g} GiB"
