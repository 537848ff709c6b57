"""Division of host memory: by hand, against one that goes byte by byte, and its laws; what stops a run."""

import random
import re
from dataclasses import replace

import hypothesis
import pytest
from budget_toy import GIB, limit, make_facts
from hypothesis import strategies as st

from titan_offload.budget import Limit, check, check_budgets, divide, limits_of, num_kept, share
from titan_offload.host_memory import HostMemory

OFFLOAD = "activation_offload"


def on(members, num_bytes, is_local=False):
    return Limit(frozenset(members), num_bytes, is_local)


def shares_of(budgets):
    return [budget.share_bytes for budget in budgets]


def budgets_of(budgets):
    return [budget.budget_bytes for budget in budgets]


# Division, by hand

NEEDS = dict(enumerate([50, 100, 150, 300, 20, 20, 400, 400]))
NODES = [on(range(4), 400, is_local=True), on(range(4, 8), 400, is_local=True)]


@pytest.mark.parametrize(
    "total, expected",
    [
        (0, [0, 0, 0, 0, 0, 0, 0, 0]),
        (11, [2, 2, 2, 1, 1, 1, 1, 1]),  # a remainder goes by rank
        (160, [20, 20, 20, 20, 20, 20, 20, 20]),
        (340, [50, 50, 50, 50, 20, 20, 50, 50]),
        (700, [50, 100, 125, 125, 20, 20, 130, 130]),  # node 0 is full at 125
        (800, [50, 100, 125, 125, 20, 20, 180, 180]),  # node 1 is full at 180
        (1000, [50, 100, 150, 220, 20, 20, 220, 220]),  # 200 more of other nodes, to those that have least
        (1440, [50, 100, 150, 300, 20, 20, 400, 400]),
        (9999, [50, 100, 150, 300, 20, 20, 400, 400]),  # nobody gets more than it needs
    ],
)
def test_eight_ranks_on_two_nodes(total, expected):
    """Guards: fill in rounds, the step to the next need and limit, the remainder, and both phases of `divide`."""
    assert list(divide(NEEDS, [on(range(8), total), *NODES]).values()) == expected


@pytest.mark.parametrize("total, expected", [(1000, [100, 200, 300, 400]), (700, [100, 200, 200, 200])])
def test_containers_with_limits_of_their_own(total, expected):
    limits = [on(range(4), total), on([0], 100), on([1], 200), on([2], 300)]
    assert list(divide(dict.fromkeys(range(4), 400), limits).values()) == expected


def test_limit_on_a_grandparent_group():
    """Two containers of 300 in a pod of 400, beside a rank that is not in it."""
    limits = [on(range(4), 900), on([0, 1, 2], 400), on([0, 1], 300), on([2], 300)]
    assert list(divide(dict.fromkeys(range(4), 500), limits).values()) == [134, 133, 133, 500]


def test_a_need_that_is_not_known_has_no_end():
    assert divide({0: 10, 1: None, 2: None}, [on(range(3), 101)]) == {0: 10, 1: 46, 2: 45}
    assert divide({0: 10}, []) == {0: 10}
    with pytest.raises(AssertionError, match="rank 1, whose need is not known, has no limit"):
        divide({0: 10, 1: None}, [on([0], 100)])


def test_two_ranks_with_a_whole_node_each_do_not_meet():
    """What one leaves on its node goes to the other, but only that."""
    limits = [on([0, 1], 1000), on([0], 600, is_local=True), on([1], 400, is_local=True)]
    assert divide({0: 900, 1: 400}, limits) == {0: 600, 1: 400}
    assert divide({0: 900, 1: 300}, limits) == {0: 700, 1: 300}


# Division, its laws


@st.composite
def hosts(draw, has_containers=True):
    """Needs, and limits: the host first, then containers, then NUMA nodes."""
    ranks = draw(st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True))
    sizes = st.one_of(st.integers(0, 60), st.integers(0, 10**13))
    needs = {rank: draw(st.one_of(sizes, st.none())) for rank in ranks}
    limits = [on(ranks, draw(sizes))]
    for is_local in (False, True)[not has_containers :]:
        group = {rank: draw(st.integers(-1, 2)) for rank in ranks}  # -1: none
        members = [[rank for rank in ranks if group[rank] == number] for number in range(3)]
        limits += [on(ranks, draw(sizes), is_local) for ranks in members if ranks]
    return needs, limits


def laws(*strategies):
    settings = hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
    return lambda test: settings(hypothesis.given(*strategies)(test))


def enough(need, got):
    return need is not None and got == need


def one_byte_at_a_time(needs, limits):
    """The definition: always the rank that has least, of equals the lowest, until it cannot."""
    got = dict.fromkeys(needs, 0)
    for phase in (limits, [each for each in limits if not each.is_local]):
        growing = set(needs)
        while growing:
            rank = min(growing, key=lambda rank: (got[rank], rank))
            own = [each for each in phase if rank in each.members]
            is_full = any(sum(got[r] for r in each.members) >= each.num_bytes for each in own)
            if is_full or enough(needs[rank], got[rank]):
                growing.remove(rank)
            else:
                got[rank] += 1
    return got


@laws(hosts())
def test_it_is_as_if_bytes_were_handed_out_one_by_one(host):
    needs, limits = host
    small = {rank: need and need % 61 for rank, need in needs.items()}
    limits = [replace(limit, num_bytes=limit.num_bytes % 200) for limit in limits]
    assert divide(small, limits) == one_byte_at_a_time(small, limits)


@laws(hosts())
def test_never_more_than_any_limit_nor_than_the_need(host):
    needs, limits = host
    got = divide(needs, limits)
    assert all(need is None or got[rank] <= need for rank, need in needs.items())
    assert all(sum(got[r] for r in limit.members) <= limit.num_bytes for limit in limits if not limit.is_local)
    assert all(isinstance(num_bytes, int) and num_bytes >= 0 for num_bytes in got.values())


@laws(hosts(has_containers=False))
def test_everything_is_used_when_needs_exceed_the_total(host):
    needs, limits = host
    need = sum(limits[0].num_bytes if need is None else need for need in needs.values())
    assert sum(divide(needs, limits).values()) == min(need, limits[0].num_bytes)


@laws(hosts())
def test_who_gets_less_than_it_needs_is_under_a_limit_that_is_full(host):
    needs, limits = host
    got = divide(needs, limits)
    full = [limit for limit in limits if sum(got[r] for r in limit.members) == limit.num_bytes and not limit.is_local]
    for rank, need in needs.items():
        assert enough(need, got[rank]) or any(rank in limit.members for limit in full)


@laws(hosts(), st.integers(1, 10**13))
def test_with_more_memory_on_the_host_nobody_gets_less(host, more):
    needs, (total, *others) = host
    less = divide(needs, [total, *others])
    for num_bytes in (total.num_bytes + 1, total.num_bytes + more):
        got = divide(needs, [replace(total, num_bytes=num_bytes), *others])
        assert all(got[rank] >= less[rank] for rank in needs)


@laws(hosts(), st.randoms(use_true_random=False))
def test_order_does_not_matter(host, rng: random.Random):
    needs, limits = host
    ranks = rng.sample(list(needs), len(needs))
    assert divide({rank: needs[rank] for rank in ranks}, rng.sample(limits, len(limits))) == divide(needs, limits)


@laws(hosts())
def test_ranks_under_the_same_limits_differ_by_one_byte_unless_one_has_its_need(host):
    needs, limits = host
    got = divide(needs, limits)
    under = {rank: [limit for limit in limits if rank in limit.members] for rank in needs}
    for rank, need in needs.items():
        for other in needs:
            assert under[rank] != under[other] or enough(need, got[rank]) or got[other] <= got[rank] + 1


@laws(hosts(has_containers=False))
def test_nobody_takes_memory_of_a_node_that_its_own_ranks_need(host):
    """Where the host has what the nodes have, each rank gets at least what its node alone would give it; what goes
    beyond that is what is left on the host once all have taken from their own."""
    needs, (total, *nodes) = host
    local = {}
    for node in nodes:
        local |= divide({rank: needs[rank] for rank in node.members}, [replace(node, is_local=False)])
    total = replace(total, num_bytes=total.num_bytes + sum(local.values()))
    got = divide({rank: needs[rank] for rank in local}, [replace(total, members=frozenset(local)), *nodes])
    assert all(got[rank] >= local[rank] for rank in local)
    assert sum(got[rank] - local[rank] for rank in local) <= total.num_bytes - sum(local.values())


# From facts to limits


def limit_bytes(facts, fraction=1.0):
    return {limit.record.group: (sorted(limit.members), limit.num_bytes) for limit in limits_of(facts, fraction)}


def test_least_of_the_snapshots_times_fraction_less_what_else_is_taken():
    facts = [make_facts(0, need=0, host=1000, others=100), make_facts(1, need=0, host=900, others=50)]
    assert limit_bytes(facts, 0.8) == {"meminfo": ([0, 1], 570)}
    (joined,) = limits_of(facts, 0.8)
    assert (joined.record.free_bytes, joined.other_bytes) == (900, 150)
    assert limit_bytes([make_facts(0, need=0, others=1001)]) == {"meminfo": ([0], 0)}
    assert limit_bytes([make_facts(0, host=100)], 0.29) == {"meminfo": ([0], 29)}  # in floats: 28.999999999999996


def test_use_of_each_process_is_taken_off_what_slurm_gave():
    facts = [make_facts(rank, limits=[limit("slurm", "job", 1000, own_bytes=rank * 50)]) for rank in range(4)]
    assert limit_bytes(facts, 0.8)["job"] == ([0, 1, 2, 3], 560)
    facts = [make_facts(0, limits=[limit("slurm", "job", 100, own_bytes=200)])]
    assert limit_bytes(facts)["job"] == ([0], 0)


def test_a_rank_is_bound_to_the_node_of_its_device_only():
    nodes = [limit("numa", "numa:0", 300), limit("numa", "numa:1", 200)]
    facts = [make_facts(rank, limits=nodes, numa_node=node) for rank, node in enumerate([0, 0, 1, -1, 7])]
    limits = {limit.record.group: (sorted(limit.members), limit.is_local) for limit in limits_of(facts)}
    assert limits == {"meminfo": ([0, 1, 2, 3, 4], False), "numa:0": ([0, 1], True), "numa:1": ([2], True)}


def test_hosts_with_the_same_names_of_groups_share_nothing():
    """Each host divides its own, though both have a cgroup and NUMA nodes of the same names."""
    limits = [limit("cgroup", "/job", 600), limit("numa", "numa:0", 100)]
    facts = [make_facts(rank, 500, host=800, host_id="a", limits=limits, numa_node=0) for rank in range(2)]
    facts += [make_facts(rank, 500, host=400, host_id="b", limits=limits, numa_node=0) for rank in range(2, 4)]
    budgets = share(facts, 0.5)
    assert shares_of(budgets) == [150, 150, 100, 100]
    assert [budget.limited_by for budget in budgets] == ["/job", "/job", "meminfo", "meminfo"]


def test_limits_of_different_hosts_are_not_joined():
    facts = [make_facts(0, host=800, host_id="a"), make_facts(1, host=400, host_id="b"), make_facts(2, host_id="a")]
    assert [(sorted(each.members), each.num_bytes) for each in limits_of(facts)] == [([0, 2], 800), ([1], 400)]


def test_containers_of_one_host_share_the_host_and_nothing_else():
    facts = [make_facts(r, 400, limits=[limit("cgroup", f"/pod{r}", 100 * (r + 1))]) for r in range(4)]
    budgets = share(facts, 1.0)
    assert shares_of(budgets) == [100, 200, 300, 400]
    assert [budget.limited_by for budget in budgets] == ["/pod0", "/pod1", "/pod2", None]
    assert shares_of(share(facts, 0.5)) == [50, 100, 150, 200]
    facts = [
        replace(rank, memory=HostMemory((limit("host", "meminfo", 700), *rank.memory.limits[1:]))) for rank in facts
    ]
    assert [budget.limited_by for budget in share(facts, 1.0)] == ["/pod0", "/pod1", "meminfo", "meminfo"]


def test_the_smaller_of_two_limits_that_are_full_is_named():
    """Two containers fill the host: the one that is full says what keeps it from more."""
    facts = [make_facts(r, 500, host=400, limits=[limit("cgroup", f"/pod{r}", 300 - r * 200)]) for r in range(2)]
    assert [budget.limited_by for budget in share(facts, 1.0)] == ["/pod0", "/pod1"]


# Shares to budgets


def stage_of(*ranks, slot=100, stage="s", **kwargs):
    return [replace(rank, slot_bytes=slot, num_slots=10, stage=stage, **kwargs) for rank in ranks]


def test_a_stage_moves_what_the_rank_with_least_room_moves():
    """Rank 2 has room for 3 of 10 tensors, so ranks 0 and 1 of its stage move 3; rank 3, of another, all."""
    facts = stage_of(
        make_facts(0, 1000, host_id="a", host=5000),
        make_facts(1, 1000, host_id="b", host=550),
        make_facts(2, 1000, host_id="c", host=399),
    )
    facts += stage_of(make_facts(3, 1000, host_id="a", host=5000), stage="other")
    budgets = share(facts, 1.0)
    assert shares_of(budgets) == [1000, 550, 399, 1000]
    assert budgets_of(budgets) == [300, 300, 300, 1000]
    assert [budget.limited_by_rank for budget in budgets] == [2, 2, 2, None]
    assert [budget.limited_by for budget in budgets] == [None, "meminfo", "meminfo", None]
    assert [num_kept(budget) for budget in budgets] == [(7, 700), (7, 700), (7, 700), (0, 0)]
    assert share(facts[::-1], 1.0) == budgets[::-1]


def test_a_need_that_is_met_is_not_cut_to_whole_slots():
    """10 block inputs and something smaller: 1050 bytes."""
    facts = stage_of(make_facts(0, 1050, host=2100), make_facts(1, 1050, host=2100))
    assert budgets_of(share(facts, 1.0)) == [1050, 1050]
    short = share(facts, 0.99)
    assert shares_of(short) == [1040, 1039]
    assert budgets_of(short) == [1000, 1000]
    assert num_kept(short[0]) == (1, 100)


def test_slots_of_a_stage_are_counted_each_in_its_own_size():
    """Uneven shards: rank 0 moves 10 x 120 bytes, rank 1 has room for 7 x 100."""
    facts = stage_of(make_facts(0, 1200, host=9000, host_id="a"), slot=120)
    facts += stage_of(make_facts(1, 1000, host=777, host_id="b"))
    budgets = share(facts, 1.0)
    assert budgets_of(budgets) == [840, 700]
    assert [num_kept(budget) for budget in budgets] == [(3, 360), (3, 300)]


def test_a_rank_of_a_stage_that_needs_less_gets_no_more_than_its_share():
    facts = stage_of(make_facts(0, 300, host=9000, host_id="a"), make_facts(1, 1000, host=777, host_id="b"))
    budgets = share(facts, 1.0)
    assert budgets_of(budgets) == [300, 700]
    assert [budget.limited_by_rank for budget in budgets] == [None, 1]


def test_ranks_that_know_no_need_share_equally_and_alike():
    facts = [make_facts(r, host=1000 if r < 2 else 500, host_id="ab"[r // 2], stage="s") for r in range(4)]
    budgets = share(facts, 0.8)
    assert shares_of(budgets) == [400, 400, 200, 200]
    assert budgets_of(budgets) == [200, 200, 200, 200]
    assert [budget.limited_by_rank for budget in budgets] == [2, 2, None, None]
    assert [num_kept(budget) for budget in budgets] == [(0, 0)] * 4
    assert not any(budget.is_short for budget in budgets)


@pytest.mark.parametrize(
    "need, budget, slot, expected",
    [
        (3600, 3600, 100, (0, 0)),
        (3600, 3300, 100, (3, 300)),
        (3600, 3599, 100, (1, 100)),
        (3600, 0, 100, (36, 3600)),
        (3610, 0, 100, (36, 3610)),  # some are smaller
        (3600, 3000, 0, (0, 600)),  # no slot is known
    ],
)
def test_number_and_bytes_that_stay_on_the_device(need, budget, slot, expected):
    facts = replace(make_facts(0, need, host=budget), slot_bytes=slot, num_slots=36 if slot else 0)
    (got,) = share([facts], 1.0)
    assert num_kept(replace(got, budget_bytes=budget)) == expected


# What to change


def satisfied(facts, *args):
    return all(not budget.is_short for budget in share(facts, *args))


def test_the_fraction_that_is_named_is_the_least_that_does():
    facts = [make_facts(rank, 41 * GIB + rank, host=200 * GIB, others=GIB) for rank in range(4)]
    budgets = share(facts, 0.8)
    assert all(budget.is_short for budget in budgets)
    (fraction,) = {re.search(r"host_memory_fraction to (\d\.\d\d), or", budget.repair)[1] for budget in budgets}
    assert fraction == "0.85"  # 168 GiB and 6 bytes of 200
    assert satisfied(facts, 0.85)
    assert not satisfied(facts, 0.84)


@pytest.mark.parametrize(
    "kind, expected",
    [("slurm", r"^start the job with --mem >= 316G$"), ("cgroup", r"to 316 GiB \(of a SLURM job: --mem=316G\)$")],
)
def test_the_memory_that_is_named_is_the_least_that_does(kind, expected):
    """4 x 60 GiB at a fraction of 0.8 take 300 GiB free; 16 of the limit are in use."""

    def facts(limit_gib):
        job = limit(kind, "job", (limit_gib - 16) * GIB, limit_bytes=limit_gib * GIB)
        return [make_facts(rank, 60 * GIB, host=2000 * GIB, limits=[job]) for rank in range(4)]

    (repair,) = {budget.repair for budget in share(facts(200), 0.8)}
    assert re.search(expected, repair)
    assert "fraction" not in repair  # none would do
    assert satisfied(facts(316), 0.8)
    assert not satisfied(facts(315), 0.8)


def test_a_host_that_is_too_small_is_said_to_be():
    facts = [make_facts(rank, 60 * GIB, host=100 * GIB) for rank in range(4)]
    assert share(facts, 0.8)[0].repair == "run it on hosts with 300 GiB of memory, or with fewer ranks on each"


# A budget that the user chose


def test_an_explicit_budget_is_what_each_rank_gets():
    facts = stage_of(make_facts(0, 1000, host=3000), make_facts(1, 1300, host=3000), make_facts(2, 1500, host=3000))
    budgets = share(facts[:2], 0.1, 1400)
    assert budgets_of(budgets) == shares_of(budgets) == [1400, 1400]
    assert [budget.limited_by for budget in budgets] == [None, None]
    budgets = share(facts, 0.1, 1000)
    assert budgets_of(budgets) == [1000, 1000, 1000]
    assert [budget.limited_by for budget in budgets] == [None, *[f"{OFFLOAD}.pinned_budget_gib"] * 2]
    (budget,) = share([make_facts(0, 3 * GIB // 2, host=2 * GIB)], 0.1, GIB)
    assert budget.repair == f"raise {OFFLOAD}.pinned_budget_gib to 1.5"


def test_an_explicit_budget_may_be_more_than_a_node_has():
    facts = [make_facts(0, 500, host=1000, limits=[limit("numa", "numa:0", 300)], numa_node=0)]
    assert budgets_of(share(facts, 0.1, 500)) == [500]


def test_explicit_budget_where_the_hosts_memory_is_not_known():
    """Where /proc/meminfo says nothing, a budget that the user names is all there is to go by."""
    unknown = HostMemory((limit("host", "host", 0),))
    facts = [replace(make_facts(rank, 100), memory=unknown) for rank in range(2)]
    assert [budget.budget_bytes for budget in share(facts, 0.8, 60)] == [60, 60]
    assert [budget.budget_bytes for budget in share(facts, 0.8)] == [0, 0]


def test_what_nobody_needs_is_spare_unless_a_stage_is_short():
    """Host a has 800 bytes for needs of 100 and 300; on host b a rank of the stage of rank 1 is short."""
    facts = [
        make_facts(0, 100, stage="x"),
        make_facts(1, 300, stage="y", slot_bytes=1),
        make_facts(2, 300, host=250, stage="y", slot_bytes=1, host_id="b"),
    ]
    budgets = share(facts, 0.8)
    assert [budget.budget_bytes for budget in budgets] == [100, 200, 200]
    assert [budget.spare_bytes for budget in budgets] == [300, 0, 0]  # up to 400 each on host a


def test_explicit_budgets_above_what_a_host_has_are_refused():
    pod = limit("cgroup", "/pod", 100 * GIB)
    facts = [make_facts(0, GIB, host=900 * GIB, host_id="a")]
    facts += [make_facts(r, GIB, host=900 * GIB, host_id="b", limits=[pod], others=5 * GIB) for r in (1, 2, 3)]
    with pytest.raises(ValueError) as error:
        share(facts, 0.8, 30 * GIB)
    assert str(error.value) == (
        "activation_offload.pinned_budget_gib = 30 for each of 3 ranks of host b is 90 GiB, but 100 GiB are "
        "free there, 15 GiB of it for other parts of the run (/pod): set it to at most 28.33, or to 0 to divide "
        "what is free"
    )
    assert shares_of(share(facts, 0.8, int(28.33 * GIB))) == [int(28.33 * GIB)] * 4


# What stops a run


def test_an_error_of_any_rank_stops_all():
    facts = [make_facts(rank, host_id="ab"[rank // 2]) for rank in range(4)]
    check(facts)
    facts[2] = replace(facts[2], error="/proc/meminfo has no MemAvailable")
    facts[0] = replace(facts[0], error="no")
    for order in (facts, facts[::-1]):
        with pytest.raises(ValueError) as error:
            check(order)
        assert str(error.value) == (
            "activation offload cannot start: rank 0 on a: no; rank 2 on b: /proc/meminfo has no MemAvailable"
        )


def test_settings_that_differ_are_named_with_the_ranks_that_have_them():
    same = {f"{OFFLOAD}.keep_last": 1}
    facts = [make_facts(r, config={**same, f"{OFFLOAD}.host_memory_fraction": 0.8}) for r in range(7)]
    check(facts)
    facts[1] = replace(facts[1], config={**same, f"{OFFLOAD}.host_memory_fraction": 0.5})
    facts[3] = replace(facts[3], hostname="b", config=same)
    with pytest.raises(ValueError) as error:
        check(facts)
    assert str(error.value) == (
        "ranks have different settings: activation_offload.host_memory_fraction = 0.8 on ranks 0 (a), 2 (a), 4 (a), "
        "5 (a) and 1 more, 0.5 on rank 1 (a), (not set) on rank 3 (b): start all of them with the same train config"
    )


def test_many_errors_are_counted():
    with pytest.raises(ValueError, match=r"; rank 3 on a: no and 96 more$"):
        check([make_facts(rank, error="no") for rank in range(100)])


def test_too_small_a_budget_stops_all_where_asked_for():
    def facts(on_exhausted):
        config = {f"{OFFLOAD}.on_exhausted": on_exhausted}
        hosts = {"a": 100 * GIB, "b": 50 * GIB}
        ranks = [make_facts(r, 45 * GIB, host=free, host_id=name) for r, (name, free) in enumerate(hosts.items())]
        return stage_of(*ranks, slot=GIB, config=config)

    check_budgets(share(facts("keep"), 0.8))
    check_budgets(share(facts("error"), 0.9))
    with pytest.raises(ValueError) as error:
        check_budgets(share(facts("error"), 0.8))
    assert str(error.value) == (
        'activation_offload.on_exhausted = "error", and 2 of 2 ranks get less pinned memory than they need: rank 1 on '
        "b needs 45 GiB and gets 40 GiB, limited by meminfo; rank 0 on a needs 45 GiB and gets 40 GiB, to "
        "move the same as rank 1 of its stage: raise activation_offload.host_memory_fraction to 0.90, or run it on "
        'hosts with 57 GiB of memory, or with fewer ranks on each, or set on_exhausted to "keep", which leaves on the '
        "device what has no room"
    )
