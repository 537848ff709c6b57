"""`limit = "link"` on gloo: the link is measured by all ranks together, and all come to the same choice."""

import torch
import torch.distributed as dist
import toy

from titan_offload import HostRuntime, OffloadConfig, share
from titan_offload.apply import make_offloader
from titan_offload.exchange import gather
from titan_offload.link import LinkRates, PortRates
from titan_offload.share import measure_links

CPU = torch.device("cpu")


def with_times(offloader, forward_s):
    """Lets the blocks take a known time each."""
    watch = offloader.engine.watch
    measured = watch.costs

    def costs(part, num_blocks):
        times_and_sizes = measured(part, num_blocks)
        return times_and_sizes and ((forward_s,) * num_blocks, times_and_sizes[1])

    watch.costs = costs


def set_speed(offloader, copies_per_forward):
    speed = toy.INPUT_BYTES / copies_per_forward / 1e9
    offloader.set_link(LinkRates(*[PortRates(*[speed] * 4)] * 2))


def step(model, offloader, seed):
    model.zero_grad()
    model.loss(toy.make_tokens(seed)).backward()
    return offloader.step_end()


def check_slower_decides(rank):
    """Rank 0's link hides all five, rank 1's three."""
    model = toy.make_model()
    offloader = toy.offload(model, limit="link")
    with_times(offloader, 1.0)
    set_speed(offloader, [0.5, 2.0][rank])
    moved = []
    for seed in range(5):
        expected = toy.make_model()
        expected.loss(toy.make_tokens(seed)).backward()
        moved.append(step(model, offloader, seed).num_offloads)
        toy.assert_same_grads(model, expected)
    assert moved == [5, 5, 5, 3, 3]
    [choice] = offloader.link_choices
    assert gather(choice) == [choice] * 2
    assert choice.costs.d2h_bytes_per_s == toy.INPUT_BYTES / 2


def test_the_slower_rank_decides(on_gloo):
    on_gloo(check_slower_decides)


def check_stages(rank):
    """Rank 0 has six blocks, rank 1 four others. A third rank has none, and none of them waits for another in vain."""
    offloader = make_offloader(OffloadConfig(min_offload_mib=0.0, limit="link"), runtime=toy.slow_link())
    with_times(offloader, 1.0)
    set_speed(offloader, 2.0)
    if rank == 2:
        for _ in range(4):
            offloader.step_end()
        assert offloader.link_choices == []
        return
    model = toy.make_model(num_blocks=[6, 4][rank])
    offloader.attach(model)
    moved = [step(model, offloader, seed).num_offloads for seed in range(4)]
    assert moved == [[5, 5, 5, 3], [3, 3, 3, 2]][rank]


def test_each_stage_has_its_own_choice(on_gloo):
    on_gloo(check_stages, 3)


def check_late(rank):
    """Rank 1 has no backward in its second step: rank 0 waits with its choice, and both make it after the fourth."""
    model = toy.make_model()
    offloader = toy.offload(model, limit="link")
    with_times(offloader, 1.0)
    set_speed(offloader, 2.0)
    has_choice = []
    for seed in range(4):
        if rank == 1 and seed < 2:
            offloader.step_end()
        else:
            step(model, offloader, seed)
        has_choice.append(bool(offloader.link_choices))
    assert has_choice == [False, False, False, True]


def test_a_choice_waits_for_the_last_rank(on_gloo):
    on_gloo(check_late)


def check_measures(rank):
    """Only rank 1 was told its link: all measure."""
    model = toy.make_model()
    offloader = toy.offload(model, limit="link", runtime=HostRuntime(link_gb_per_s=[0.2, 0.05][rank]))
    offloader.set_link(None)
    if rank == 1:
        set_speed(offloader, 1.0)
    step(model, offloader, 0)
    low, high = [(0.1, 0.21), (0.025, 0.053)][rank]
    assert low < offloader.link.alone.d2h_gb_per_s < high
    assert low < offloader.link.shared.d2h_gb_per_s < high


def test_all_ranks_measure_if_one_was_not_told(on_gloo):
    on_gloo(check_measures)


def check_turns(rank):
    """Ranks of one host take turns, in order; turns are as many as the host with most has."""
    share.measure_link = lambda *args, position, num_turns, **kwargs: (position, num_turns)
    assert measure_links(HostRuntime(), CPU, "abb"[rank]) == {0: (0, 2), 1: (0, 2), 2: (1, 2)}


def test_ranks_of_a_host_take_turns(on_gloo):
    on_gloo(check_turns, 3)


def check_failure(rank):
    """Rank 1 cannot pin memory, or cannot copy in the middle: both ranks raise, none waits."""
    for name in ("allocate_pinned", "copy"):
        runtime = HostRuntime(link_gb_per_s=0.5)
        whole, calls = getattr(runtime, name), []

        def failing(*args, whole=whole, calls=calls, name=name):
            calls.append(args)
            if name == "allocate_pinned" or len(calls) > 8:
                raise RuntimeError("the driver refused")
            return whole(*args)

        if rank == 1:
            setattr(runtime, name, failing)
        try:
            measure_links(runtime, CPU, seconds=0.4)
        except RuntimeError as error:
            assert "the driver refused" in str(error)
            assert ("rank 1: RuntimeError" in str(error)) == (rank == 0)
        else:
            raise AssertionError("a failure on rank 1 went unnoticed")
        assert torch.equal(torch.tensor(gather(rank)), torch.tensor([0, 1]))  # the group is in step
    dist.barrier()


def test_a_rank_that_fails_takes_the_others_along(on_gloo):
    on_gloo(check_failure)
