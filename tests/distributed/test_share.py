"""share_host: what ranks settle before step 1, on hosts that are not there."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
import toy
from budget_toy import GIB, limit

from titan_offload import HostRuntime, OffloadConfig, SelectiveConfig, apply_offload
from titan_offload.budget import Claim
from titan_offload.config import MIB
from titan_offload.host_memory import HostMemory
from titan_offload.pool import PinnedPool
from titan_offload.share import Need, check_settings, share_host
from titan_offload.topology import Host

CPU = torch.device("cpu")


def settle(rank, config=None, *, need=None, free_mib=100, host="a", get_need=None, selective=None, **kwargs):
    """What `share_host` comes to for a rank that needs eight block inputs of 1 MiB; and its pool and runtime."""
    runtime = HostRuntime(strict=False)
    pool = PinnedPool(runtime)
    need = need or Need(inputs=[(MIB, 8)], stage="all")
    share = share_host(
        config or OffloadConfig(host_memory_fraction=0.5),
        selective,
        runtime,
        pool,
        CPU,
        get_need or (lambda: need),
        host=Host(f"node-{host}", host, "test"),
        memory=HostMemory((limit("host", "host", free_mib * MIB),)),
        **kwargs,
    )
    return share, pool, runtime


def test_one_rank_gets_its_need_pinned_and_the_rest_to_spare():
    seen, progress = [], []
    config = OffloadConfig(host_memory_fraction=0.5)
    share, pool, runtime = settle(
        0, config, on_budget=lambda share: seen.append(share), on_progress=lambda *done: progress.append(done)
    )
    assert seen == [share]
    assert (share.own.budget_bytes, share.own.spare_bytes) == (8 * MIB, 42 * MIB)
    assert pool.budget_bytes == 50 * MIB
    assert pool.bytes_pinned == 8 * MIB
    assert progress[-1] == (8 * MIB, 8 * MIB)
    assert share.links == {}
    slots = [pool.allocate(MIB) for _ in range(8)]
    assert None not in slots
    assert pool.num_grown == runtime.num_pinned_allocations == len(progress)


def test_activations_are_pinned_with_what_else_moves():
    """The largest tensor of inputs and activations is what less of a budget is of no use for."""
    need = Need(inputs=[(MIB, 2)], activations=[(2 * MIB, 3), (MIB // 2, 4)], saves=[(MIB // 4, 4)], stage="all")
    share, pool, _ = settle(0, need=need)
    assert {claim.name: claim.num_bytes // MIB for claim in share.own.facts.claims} == {
        "block inputs": 2,
        "saved activations": 8,
        "selective saves": 1,
    }
    assert (share.own.facts.slot_bytes, share.own.facts.num_slots) == (2 * MIB, 2 + 3 + 4)
    assert share.own.budget_bytes == pool.bytes_pinned == 11 * MIB
    sizes = [MIB] * 2 + [2 * MIB] * 3 + [MIB // 2] * 4 + [MIB // 4] * 4
    slots = [pool.allocate(size) for size in sizes]
    assert None not in slots and pool.bytes_pinned == 11 * MIB


def test_what_else_the_run_takes_is_taken_off():
    others = [Claim("data loader workers", 46 * MIB, is_offload=False)]
    need = Need(inputs=[(MIB, 8)], saves=[(MIB // 2, 4)], others=others, stage="all")
    share, pool, _ = settle(0, need=need)
    assert [claim.name for claim in share.own.facts.claims] == [
        "block inputs",
        "selective saves",
        "data loader workers",
    ]
    assert share.own.need_bytes == 10 * MIB
    assert share.own.budget_bytes == pool.budget_bytes == 4 * MIB
    assert pool.bytes_pinned == 4 * MIB


def test_nothing_is_pinned_ahead_where_the_need_is_not_known():
    runtime = HostRuntime()
    pool = PinnedPool(runtime)
    memory = HostMemory((limit("host", "host", 100 * MIB),))
    share = share_host(OffloadConfig(), None, runtime, pool, CPU, memory=memory)
    assert (share.own.need_bytes, pool.budget_bytes, pool.bytes_pinned) == (None, 80 * MIB, 0)


def test_the_budget_is_known_before_anything_is_pinned():
    def look(share):
        assert pools[0].bytes_pinned == 0
        raise KeyError("seen")

    pools = []

    class Pool(PinnedPool):
        def __init__(self, runtime):
            super().__init__(runtime)
            pools.append(self)

    runtime = HostRuntime()
    with pytest.raises(KeyError, match="seen"):
        share_host(OffloadConfig(), None, runtime, Pool(runtime), CPU, lambda: Need([(MIB, 1)]), on_budget=look)
    assert runtime.num_pinned_allocations == 0


@pytest.mark.parametrize("gib", [10_000.0, None])
def test_more_than_the_host_has_is_refused_before_the_model_is_touched(gib):
    model = toy.make_model()
    forwards = [block.forward for block in model.layers.values()]
    config = OffloadConfig(min_offload_mib=0.0, pinned_budget_gib=gib or 0.0)
    if gib is None:
        assert apply_offload(model, config).engine.pool.budget_bytes > 0
        return
    with pytest.raises(ValueError, match=r"pinned_budget_gib = 10000 for each of 1 ranks .* set it to at most"):
        apply_offload(model, config)
    assert [block.forward for block in model.layers.values()] == forwards


def test_budget_of_the_caller_is_taken_as_it_is():
    offloader = apply_offload(toy.make_model(), OffloadConfig(min_offload_mib=0.0), budget_bytes=10_000 * GIB)
    assert offloader.engine.pool.budget_bytes == 10_000 * GIB
    assert offloader.share is None


# On several ranks


def same_on_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [value] * len(values), values
    return value


def error_of(rank, *args, **kwargs):
    """The error that all ranks get; none has pinned anything by then."""
    pinned = []
    try:
        settle(rank, *args, on_progress=lambda done, total: pinned.append(done), **kwargs)
    except ValueError as error:
        assert pinned == []
        return same_on_all_ranks(str(error))
    raise AssertionError("no error")


def check_two_hosts(rank):
    """Two hosts with two ranks each, which come at different times; host b has room for six inputs each."""
    time.sleep(0.05 * (3 - rank))
    need, free_mib = Need(inputs=[(MIB, 8)], stage=str(rank % 2)), 100 if rank < 2 else 24
    share, pool, _ = settle(rank, host="ab"[rank // 2], free_mib=free_mib, need=need)
    budgets = same_on_all_ranks([budget.budget_bytes for budget in share.budgets])
    assert budgets == [6 * MIB] * 4
    assert pool.bytes_pinned == 6 * MIB


def check_turns(rank):
    """The ranks of a host pin one after the other: three slabs each, which take a while."""
    stamps = []

    def on_progress(done, total):
        time.sleep(0.03)
        stamps.append(time.monotonic())

    need = Need(inputs=[(MIB, 1), (2 * MIB, 1), (3 * MIB, 1)], stage="all")
    settle(rank, host="ab"[rank // 2], need=need, on_progress=on_progress)
    assert len(stamps) == 3
    all_stamps = [None] * 4
    dist.all_gather_object(all_stamps, stamps)
    assert all_stamps[0][-1] < all_stamps[1][0]
    assert all_stamps[2][-1] < all_stamps[3][0]


def check_errors(rank):
    config = OffloadConfig(on_exhausted="error")
    text = error_of(rank, config, free_mib=16)
    assert text.startswith('activation_offload.on_exhausted = "error", and 4 of 4 ranks get less pinned memory')
    text = error_of(rank, OffloadConfig(keep_last=1 + (rank == 2)))
    assert "activation_offload.keep_last = 1 on ranks 0 (node-a), 1 (node-a), 3 (node-a), 2 on rank 2 (node-a)" in text
    text = error_of(rank, selective=SelectiveConfig(offload=rank == 1))
    assert "selective_checkpoint.offload = False on ranks 0 (node-a), 2 (node-a), 3 (node-a), True on rank 1" in text
    text = error_of(rank, OffloadConfig(pinned_budget_gib=1.0))
    assert text.startswith("activation_offload.pinned_budget_gib = 1 for each of 4 ranks of host node-a is 4 GiB")

    def get_need():
        if rank == 3:
            raise ValueError("no such layer")
        return Need(inputs=[(MIB, 8)])

    assert error_of(rank, get_need=get_need) == (
        "activation offload cannot start: rank 3 on node-a: ValueError: no such layer"
    )


def check_different_modes(rank):
    """One rank would offload nothing and never come to `share_host`."""
    with pytest.raises(ValueError, match=r"activation_offload\.mode = 'block_inputs' on ranks .*, 'none' on rank 3"):
        check_settings(OffloadConfig(mode="none" if rank == 3 else "block_inputs"), None)
    check_settings(OffloadConfig(), None)


def check_our_own_fault(rank):
    """It keeps its type and traceback where it happened; the others stop too."""

    def get_need():
        if rank == 1:
            raise KeyError("a fault")
        return Need()

    with pytest.raises(KeyError if rank == 1 else ValueError, match="a fault"):
        settle(rank, get_need=get_need)


def check_failing_pin(rank):
    """A machine that refuses pinned memory stops nobody; a fault while pinning stops all."""

    def fail(done, total):
        if rank == 2:
            raise ZeroDivisionError("while pinning")

    with pytest.raises(RuntimeError, match=r"^rank 2: ZeroDivisionError: while pinning$"):
        settle(rank, on_progress=fail)


def check_links(rank):
    """Alone in turns, then together; all ranks know all speeds."""
    start = time.monotonic()
    share, _, _ = settle(rank, OffloadConfig(measure_link=True))
    assert time.monotonic() - start < 4  # 2 seconds, on a machine with fewer cores than there are copies
    assert sorted(share.links) == [0, 1, 2, 3]
    same_on_all_ranks([dataclasses.astuple(rates) for rates in share.links.values()])
    assert all(rates.alone.d2h_gb_per_s > 0 for rates in share.links.values())


def check_apply(rank):
    """Without a known need, and through `apply_offload`: equal shares of what this machine has."""
    offloader = apply_offload(toy.make_model(), OffloadConfig(min_offload_mib=0.0))
    budgets = same_on_all_ranks([budget.budget_bytes for budget in offloader.share.budgets])
    assert max(budgets) - min(budgets) <= 1
    assert offloader.engine.pool.budget_bytes == budgets[rank]


def check_all(rank):
    for check in (
        check_two_hosts,
        check_turns,
        check_errors,
        check_different_modes,
        check_our_own_fault,
        check_failing_pin,
        check_links,
        check_apply,
    ):
        check(rank)
        dist.barrier()


def test_on_four_ranks(on_gloo):
    """Guards: `share_host`, `measure_links`, and the order of what they do."""
    on_gloo(check_all, world_size=4)
