"""Ranks tell each other what they have, and take turns: 8 gloo processes on two hosts that are not there."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from budget_toy import GIB, limit, make_facts

from titan_offload.budget import check, check_budgets, share
from titan_offload.exchange import exchange, take_turns, turn_of

NEED_GIB = [20, 20, 25, 25] * 2
FREE_GIB = {"a": {"host": 300, "numa:0": 150, "numa:1": 150}, "b": {"host": 60, "numa:0": 10, "numa:1": 60}}


def own_facts(rank, **kwargs):
    """Ranks 0 to 3 on host a, 4 to 7 on host b, two on each NUMA node; nodes have the same names on both."""
    name, need = "ab"[rank // 4], NEED_GIB[rank] * GIB
    host, *nodes = FREE_GIB[name].values()
    limits = [limit("numa", f"numa:{number}", free * GIB) for number, free in enumerate(nodes)]
    facts = make_facts(rank, need, host=host * GIB, host_id=name, limits=limits, numa_node=rank % 4 // 2)
    config = {"activation_offload.on_exhausted": "keep", "activation_offload.keep_last": 1}
    return replace(facts, **{"config": config, "slot_bytes": GIB, "num_slots": NEED_GIB[rank]} | kwargs)


def same_on_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [value] * len(values)
    return value


def error_of(call, *args):
    """The text of the error that all ranks get."""
    try:
        call(*args)
    except (ValueError, RuntimeError) as error:
        return same_on_all_ranks(f"{type(error).__name__}: {error}")
    return same_on_all_ranks(None)


def check_tables(rank):
    time.sleep(0.05 * (rank * 3 % 8))  # they come at different times
    facts = exchange(own_facts(rank))
    assert facts == [own_facts(other) for other in range(8)]
    budgets = same_on_all_ranks(share(facts, 0.5))
    # Of host a's 150 GiB all get the 90 that they need. On host b node 0 has 5 for ranks 4 and 5, the rest of 30 is for
    # 6 and 7; in slots of 1 GiB.
    assert [budget.share_bytes / GIB for budget in budgets] == [20, 20, 25, 25, 2.5, 2.5, 12.5, 12.5]
    assert [budget.budget_bytes / GIB for budget in budgets] == [20, 20, 25, 25, 2, 2, 12, 12]
    for host, total in (("a", 150), ("b", 30)):
        on_host = [budget for budget in budgets if budget.facts.hostname == host]
        assert len(on_host) == 4
        assert sum(budget.budget_bytes for budget in on_host) <= total * GIB

    facts = exchange(own_facts(rank, stage=f"stage {rank % 4}"))
    budgets = same_on_all_ranks(share(facts, 0.5))
    assert [budget.budget_bytes / GIB for budget in budgets] == [2, 2, 12, 12, 2, 2, 12, 12]
    assert [budget.limited_by_rank for budget in budgets] == [4, 5, 6, 7, 4, 5, 6, 7]

    half = dist.new_group([4, 5, 6, 7])
    if rank >= 4:
        assert exchange(own_facts(rank), half) == [own_facts(other) for other in range(4, 8)]
    dist.barrier()


def check_refusals(rank):
    facts = exchange(own_facts(rank, error="memory.max is not a number" if rank == 6 else None))
    expected = "ValueError: activation offload cannot start: rank 6 on b: memory.max is not a number"
    assert error_of(check, facts) == expected

    facts = exchange(own_facts(rank, config={"activation_offload.keep_last": 1 + (rank == 5)}))
    assert error_of(check, facts) == (
        "ValueError: ranks have different settings: activation_offload.keep_last = 1 on ranks 0 (a), 1 (a), 2 (a), 3 "
        "(a) and 3 more, 2 on rank 5 (b): start all of them with the same train config"
    )

    facts = exchange(own_facts(rank, config={"activation_offload.on_exhausted": "error"}))
    assert error_of(check, facts) is None
    text = error_of(check_budgets, share(facts, 0.5))
    assert text.startswith('ValueError: activation_offload.on_exhausted = "error", and 4 of 8 ranks get less')
    assert "rank 4 on b needs 20 GiB and gets 2 GiB, limited by meminfo; rank 5 on b" in text
    assert "run it on hosts with 180 GiB of memory" in text

    text = error_of(share, exchange(own_facts(rank)), 0.5, 16 * GIB)
    assert "pinned_budget_gib = 16 for each of 4 ranks of host b is 64 GiB, but 60 GiB are free there" in text


def check_two_hosts(rank):
    check_tables(rank)
    check_refusals(rank)


def test_two_hosts_come_to_one_table_or_to_one_error(on_gloo):
    """Issue 4, points 3 and 4. Guards: `exchange`, that hosts are told apart, and that nothing depends on the rank that
    does the arithmetic."""
    on_gloo(check_two_hosts, world_size=8)


HOSTS = "aaaaabbb"
"""Of the ranks that take turns."""


def record(folder, rank, what):
    (folder / f"{time.monotonic_ns():020}_{rank}_{what}").touch()


def wait_for(folder, rank, what):
    deadline = time.monotonic() + 20
    while not list(folder.glob(f"*_{rank}_{what}")):
        assert time.monotonic() < deadline, f"{what} of rank {rank} did not come"
        time.sleep(0.001)


def check_turns(rank, folder):
    facts = exchange(make_facts(rank, host_id=HOSTS[rank]))
    position, num_turns = turn_of([other.host for other in facts], rank)
    assert (position, num_turns) == (rank if rank < 5 else rank - 5, 5)

    def work():
        record(folder, rank, "start")
        if position < 3:  # both hosts are at it: neither ends before the other has begun
            wait_for(folder, rank + 5 if rank < 5 else rank - 5, "start")
        time.sleep(0.01)
        record(folder, rank, "end")
        return rank * 10

    assert take_turns(None, position, num_turns, work) == rank * 10
    done = [name.name.split("_")[1:] for name in sorted(folder.iterdir())]
    for host in "ab":
        ranks = [str(other) for other in range(8) if HOSTS[other] == host]
        expected = [[other, what] for other in ranks for what in ("start", "end")]
        assert [event for event in done if event[0] in ranks] == expected
    dist.barrier()


def check_failing_turn(rank, folder):
    """Rank 6 fails in the second turn: nobody has a third."""
    position, num_turns = turn_of(HOSTS, rank)
    folder = folder / "failing"
    folder.mkdir(exist_ok=True)

    def work():
        record(folder, rank, "start")
        if rank == 6:
            raise OSError("no more memory to pin")

    text = error_of(take_turns, None, position, num_turns, work)
    assert text == "RuntimeError: rank 6: OSError: no more memory to pin"
    assert sorted(name.name.split("_")[1] for name in folder.iterdir()) == ["0", "1", "5", "6"]


def check_all_turns(rank, folder):
    check_turns(rank, Path(folder))
    check_failing_turn(rank, Path(folder))


def test_ranks_of_a_host_take_turns_and_hosts_go_in_parallel(on_gloo):
    """A failure reaches all. Guards: `take_turns`, `turn_of`."""
    with tempfile.TemporaryDirectory() as folder:
        on_gloo(lambda rank: check_all_turns(rank, folder), world_size=8)


def test_without_a_process_group_a_rank_is_alone():
    own = make_facts(0)
    assert exchange(own) == [own]
    assert turn_of(["a"], 0) == (0, 1)
    assert take_turns(None, 0, 1, lambda: 5) == 5
    with pytest.raises(RuntimeError, match=r"^rank 0: ZeroDivisionError: ") as error:
        take_turns(None, 0, 1, lambda: 1 / 0)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
