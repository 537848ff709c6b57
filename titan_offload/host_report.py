"""Host memory for people: the table of all ranks, what is off and how to repair it, and what a run left on the disk.

Owns the form of ``budget.json``, which is written before any memory is pinned, so that a run that is killed leaves it
behind, and all texts made from it. The records are plain data: the run itself and ``titan-offload report`` read the
same.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from titan_offload.budget import Limit, RankBudget, RankFacts, limits_of, num_kept
from titan_offload.config import OFFLOAD, OffloadConfig
from titan_offload.link import LinkRates
from titan_offload.report import gib
from titan_offload.stats import OffloadStats, Stay
from titan_offload.topology import switch_groups

Record = dict[str, Any]

FORMAT = 1

NEED_TOLERANCE = 0.05
"""By what fraction the first step may miss the need that was foretold."""

HEADINGS = (
    *("rank", "host", "device", "PCI address", "switch group", "NUMA", "link GB/s\nalone", "link GB/s\nshared"),
    *("need", "budget", "pinned\nnow", "pinned\npeak", "kept on\ndevice", "status"),
)


# Records


def budget_record(
    budgets: Sequence[RankBudget], config: OffloadConfig, links: Mapping[int, LinkRates] | None = None
) -> Record:
    """``budget.json``: what was found and settled, of all ranks. ``started`` names the run."""
    ranks = [_rank_record(rank_budget) for rank_budget in budgets]
    groups = _ranks_on_one_link(budgets)
    for record in ranks:
        record["shares_link_with"] = groups[record["rank"]]
        if links:
            record["link_rates"] = asdict(links[record["rank"]])
    limits = [_limit_record(limit) for limit in limits_of(budget.facts for budget in budgets) if not limit.is_local]
    started = budgets[0].facts.time
    return {"format": FORMAT, "started": started, "config": asdict(config), "ranks": ranks, "limits": limits}


def _limit_record(limit: Limit) -> Record:
    return {**asdict(limit.record), "ranks": sorted(limit.members)}


def _rank_record(rank_budget: RankBudget) -> Record:
    facts = rank_budget.facts
    kept, kept_bytes = num_kept(rank_budget)
    return {
        "rank": facts.rank,
        "host": facts.host,
        "hostname": facts.hostname,
        "device_name": facts.device_name,
        "device": asdict(facts.device),
        "memory": asdict(facts.memory),
        "claims": None if facts.claims is None else [asdict(claim) for claim in facts.claims],
        "slot_bytes": facts.slot_bytes,
        "num_slots": facts.num_slots,
        "other_bytes": facts.other_bytes,
        "need_bytes": rank_budget.need_bytes,
        "share_bytes": rank_budget.share_bytes,
        "budget_bytes": rank_budget.budget_bytes,
        "spare_bytes": rank_budget.spare_bytes,
        "limited_by": rank_budget.limited_by,
        "limited_by_rank": rank_budget.limited_by_rank,
        "repair": rank_budget.repair,
        "num_kept": kept,
        "kept_bytes": kept_bytes,
    }


def _ranks_on_one_link(budgets: Sequence[RankBudget]) -> dict[int, list[int]]:
    """For each rank, those of its host whose devices hang on the same link to the host, itself included."""
    hosts: dict[str, list[RankFacts]] = {}
    for budget in budgets:
        hosts.setdefault(budget.facts.host, []).append(budget.facts)
    groups = {}
    for ranks in hosts.values():
        for facts, indices in zip(ranks, switch_groups([facts.device for facts in ranks]), strict=True):
            groups[facts.rank] = [ranks[index].rank for index in indices]
    return groups


# Table


def rank_rows(record: Record, states: Mapping[int, Record] | None = None) -> list[list[str]]:
    """A row per rank, in the order of `HEADINGS`.

    Args:
        record: see `budget_record`.
        states: by rank, what it reported last, see `run_folder`.
    """
    return [_row(rank, (states or {}).get(rank["rank"])) for rank in record["ranks"]]


def _row(rank: Record, state: Record | None) -> list[str]:
    device, rates = rank["device"], rank.get("link_rates")
    return [
        str(rank["rank"]),
        rank["hostname"],
        rank["device_name"],
        device["pci_address"] or "-",
        _group_text(rank),
        _numa_text(device),
        _rates_text(rates, "alone"),
        _rates_text(rates, "shared"),
        "?" if rank["need_bytes"] is None else gib(rank["need_bytes"]),
        gib(rank["budget_bytes"]),
        "-" if state is None else gib(state["pinned_bytes"]),
        "-" if state is None else gib(state["peak_pinned_bytes"]),
        gib(rank["kept_bytes"]) if state is None else gib(state["kept_bytes"]),
        _status(rank),
    ]


def _group_text(rank: Record) -> str:
    if rank["device"]["root_port"] is None:
        return "-"
    group = rank["shares_link_with"]
    return "alone" if group == [rank["rank"]] else ranks_text(group)


def _numa_text(device: Record) -> str:
    if device["numa_node"] < 0:
        return "unknown"
    lies = {device["cpu_affinity"], device["memory_affinity"]}
    word = next((word for word in ("remote", "partly", "unknown") if word in lies), "local")
    return f"{device['numa_node']} {word}"


def _rates_text(rates: Record | None, which: str) -> str:
    return "-" if rates is None else "{d2h_gb_per_s:.1f} / {h2d_gb_per_s:.1f}".format(**rates[which])


def _status(rank: Record) -> str:
    if not rank["num_kept"]:
        return "fits" if rank["need_bytes"] is not None else "need not known"
    return f"{rank['num_kept']} of {rank['num_slots']} stay on the device"


def rank_table(record: Record, states: Mapping[int, Record] | None = None) -> Table:
    """All ranks, for a terminal."""
    table = Table(title="Host memory and links per rank (GiB; link: D2H / H2D)")
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True, justify="left" if heading in HEADINGS[:6] else "right")
    for row in rank_rows(record, states):
        table.add_row(*row)
    return table


def host_lines(record: Record) -> list[str]:
    """For each host: what is free, by each limit that counts, and what its ranks need and get together."""
    lines = []
    for ranks in _by_host(record["ranks"]):
        needs = [rank["need_bytes"] for rank in ranks]
        others = sum(rank["other_bytes"] for rank in ranks)
        line = f"host {ranks[0]['hostname']}, {_ranks_words([rank['rank'] for rank in ranks])}: needed "
        line += f"{'?' if None in needs else gib(sum(needs))} GiB, budgets "
        line += f"{gib(sum(rank['budget_bytes'] for rank in ranks))} GiB"
        line += f", other host memory of the run {gib(others)} GiB" if others else ""
        for members, limit in _tightest_limits(record["limits"], ranks).items():
            of = "" if len(members) == len(ranks) else f" for {_ranks_words(members)}"
            line += f"; free{of} {gib(limit['free_bytes'])} of {gib(limit['limit_bytes'])} GiB ({limit['source']})"
        lines.append(line)
    return lines


def _tightest_limits(limits: Sequence[Record], ranks: Sequence[Record]) -> dict[tuple[int, ...], Record]:
    """Of the limits on the same ranks of a host, the one that has least free; by these ranks."""
    tightest: dict[tuple[int, ...], Record] = {}
    for limit in limits:
        members = tuple(limit["ranks"])
        if members[0] in {rank["rank"] for rank in ranks}:
            tightest[members] = min(tightest.get(members, limit), limit, key=lambda limit: limit["free_bytes"])
    return tightest


# Advice


def advice(record: Record) -> list[str]:
    """One line for each thing that is off: what, and how to repair it. Ranks with the same line are one."""
    lines: dict[str, list[int]] = {}
    for rank in record["ranks"]:
        for line in [*_budget_advice(rank), *_device_advice(rank)]:
            lines.setdefault(line, []).append(rank["rank"])
    return [f"{_ranks_words(ranks)}: {line}" for line, ranks in lines.items()]


def _budget_advice(rank: Record) -> Iterator[str]:
    if not rank["num_kept"]:
        return
    what = (
        f"pinned budget {gib(rank['budget_bytes'])} of {gib(rank['need_bytes'])} GiB needed: {rank['num_kept']} of "
        f"{rank['num_slots']} {_moved(rank)} stay on the device ({gib(rank['kept_bytes'])} GiB)"
    )
    if rank["share_bytes"] - rank["budget_bytes"] >= rank["slot_bytes"]:
        what += f", as many as on rank {rank['limited_by_rank']}, which does the same work"
    else:
        what += f"; limited by {rank['limited_by']}"
    yield f"{what}; {rank['repair']}"


def _moved(rank: Record) -> str:
    """What moves: of activations, which differ in size, the largest are counted."""
    claims = {claim["name"] for claim in rank["claims"] or ()}
    return "saved activations, if the largest do," if "saved activations" in claims else "block inputs"


def _device_advice(rank: Record) -> Iterator[str]:
    device, link = rank["device"], rank["device"]["link"]
    if "remote" in (device["cpu_affinity"], device["memory_affinity"]):
        yield (
            f"runs off NUMA node {device['numa_node']} of its device, where copies are slower: start it with torchrun "
            "--numa-binding=node or numactl"
        )
    if 0 < link["width"] < link["max_width"]:
        yield f"its device has {link['width']} of {link['max_width']} PCIe lanes: reseat it, or take another node"
    yield from rank["memory"]["problems"]
    yield from device["problems"]


def kept_for_lack_of_memory(stats: OffloadStats) -> int:
    """Bytes of one step that stayed on the device because the pinned budget was full."""
    return stats.kept.get(Stay.EXHAUSTED.value, (0, 0))[1]


def need_warning(rank: Record, stats: OffloadStats) -> str | None:
    """Whether the first step took another amount of pinned memory than was expected before it.

    Args:
        rank: the rank's record, see `budget_record`.
        stats: of that step.
    """
    need, real = rank["need_bytes"], stats.pinned_peak_bytes
    if need is None or kept_for_lack_of_memory(stats) or abs(real - need) <= NEED_TOLERANCE * need:
        return None
    claims = ", ".join(f"{claim['name']} {gib(claim['num_bytes'])}" for claim in rank["claims"] if claim["is_offload"])
    return (
        f"the first step had {gib(real)} GiB in pinned host memory at once, expected were {gib(need)} GiB ({claims}): "
        f"the host was divided by the wrong figure; if memory runs short, set {OFFLOAD}.pinned_budget_gib"
    )


def _by_host(ranks: Sequence[Record]) -> list[list[Record]]:
    hosts: dict[str, list[Record]] = {}
    for rank in ranks:
        hosts.setdefault(rank["host"], []).append(rank)
    return list(hosts.values())


# Words


def ranks_text(ranks: Iterable[int]) -> str:
    """``0-3, 6`` of 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _ranks_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


# After the run


def markdown(record: Record, states: Mapping[int, Record], verdict: Sequence[str], foretold: Sequence[str] = ()) -> str:
    """A run's record as one page.

    Args:
        record: see `budget_record`.
        states: by rank, what it reported last.
        verdict: how the run ended, see `run_folder.verdict`.
        foretold: what a plan foretold, see `foretold.foretold_lines`.
    """
    rows = [[heading.replace("\n", " ") for heading in HEADINGS], ["---"] * len(HEADINGS), *rank_rows(record, states)]
    parts = [
        "# Activation offload: host memory",
        "\n".join(verdict),
        "## Ranks (GiB; link: D2H / H2D)",
        "\n".join("| " + " | ".join(row) + " |" for row in rows),
        "## Hosts",
        "\n".join(f"- {line}" for line in host_lines(record)),
    ]
    if foretold:
        parts += ["## Foretold and measured", "\n".join(foretold)]
    if lines := advice(record):
        parts += ["## Advice", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(parts) + "\n"
