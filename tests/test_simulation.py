"""A step on the virtual clock: by hand, against the closed forms, and against a real engine on virtual time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import VirtualRuntime, run_engine

from titan_offload.planner.simulation import Interval, SimulatedStep, overlap_slowdown, simulate_step, sync_slowdown

OF_STEADY_STATE = 1000  # blocks: what is different at both ends of forward and backward no longer counts


# The simulated step, by hand. Forward takes 1 everywhere.


def test_a_copy_as_long_as_a_forward_costs_nothing():
    step = simulate_step(8, 1, 1, 1)
    assert step == SimulatedStep(
        32, d2h_wait=0, h2d_wait=0, num_reloads=7, num_misses=0, num_resident=0, max_in_stash=1
    )


def test_copies_of_two_forwards():
    """Copies to the host end at 2, 4 ... 14. Blocks 3 to 6 wait 1 each for the stash, so forward ends at 12, with block
    6 still in the stash; its copy is done when it dies at 18. Copies back take less than a block's backward."""
    step = simulate_step(8, 1, 2, 2)
    assert step == SimulatedStep(
        36, d2h_wait=4, h2d_wait=0, num_reloads=6, num_misses=0, num_resident=1, max_in_stash=2
    )


def test_copies_of_four_forwards():
    """Copies to the host end at 4, 8 ... 28. Block 2 waits 2, blocks 3 to 6 wait 3 each, so forward ends at 22 with
    blocks 5 and 6 in the stash. The copy back of block 4 starts when block 5 is reached, at 28; from then on each is 1
    longer than the backward that it hides behind: blocks 4 to 0 wait."""
    step = simulate_step(8, 1, 4, 4)
    assert step == SimulatedStep(
        51, d2h_wait=14, h2d_wait=5, num_reloads=5, num_misses=0, num_resident=2, max_in_stash=2
    )


def test_copies_of_four_forwards_without_a_limit():
    """Forward ends at 8 with only blocks 0 and 1 on the host; blocks 6 to 2 are resident, and nobody waits for their
    copies. The copies back of 1 and 0 take 1 longer than the backward that they hide behind."""
    step = simulate_step(8, 1, 4, 4, max_inflight_offloads=0)
    assert step == SimulatedStep(
        34, d2h_wait=0, h2d_wait=2, num_reloads=2, num_misses=0, num_resident=5, max_in_stash=6
    )


def test_without_prefetch_each_copy_back_is_waited_for():
    step = simulate_step(4, 1, 1, 2, keep_last=0, prefetch_lookahead=0)
    assert step == SimulatedStep(
        24, d2h_wait=0, h2d_wait=8, num_reloads=4, num_misses=4, num_resident=0, max_in_stash=1
    )


def test_a_host_that_runs_ahead_sees_no_copy_end():
    """What is in the stash at the end of forward is found there, although it is on the host by then."""
    step = simulate_step(8, 1, 1, 1, max_inflight_offloads=3, host_runs_ahead=True)
    assert (step.step, step.num_resident, step.num_reloads) == (32, 3, 4)


@pytest.mark.parametrize("copy", [0.5, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("limit", [2, 4])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_many_blocks_come_to_the_closed_form(copy, limit, lookahead):
    step = simulate_step(OF_STEADY_STATE, 1, copy, copy, max_inflight_offloads=limit, prefetch_lookahead=lookahead)
    expected = overlap_slowdown(copy, limit)
    assert step.step / (4 * OF_STEADY_STATE) - 1 == pytest.approx(expected, abs=0.02)


def test_closed_forms():
    assert [sync_slowdown(ratio) for ratio in (0.2, 1, 4)] == [0.1, 0.5, 2]
    assert [overlap_slowdown(ratio, 2) for ratio in (1, 2, 4)] == [0, 0.25, 1]
    assert [overlap_slowdown(ratio, 0) for ratio in (1, 2, 4)] == [0, 0, 0.25]
    assert sync_slowdown(1, 3, backward=2) == 4 / 3
    assert overlap_slowdown(1.5, 2, 3, backward=2) == 1.5 / 3


# The simulated step against the engine


@st.composite
def settings_of_a_step(draw):
    num_blocks = draw(st.integers(1, 9))
    times = [draw(st.integers(1, 3)), draw(st.integers(0, 15)), draw(st.integers(0, 15))]
    config = {
        "keep_last": draw(st.integers(0, num_blocks - 1)),
        "prefetch_lookahead": draw(st.integers(0, 3)),
        "max_inflight_offloads": draw(st.integers(0, 4)),
    }
    return num_blocks, times, config, draw(st.booleans())


@settings(deadline=None, max_examples=200, derandomize=True)
@given(settings_of_a_step())
def test_the_engine_does_what_is_simulated(case):
    num_blocks, (forward, d2h, h2d), config, host_runs_ahead = case
    step, stats = run_engine(num_blocks, forward, VirtualRuntime(d2h, h2d, host_runs_ahead), **config)
    simulated = simulate_step(num_blocks, forward, d2h, h2d, **config, host_runs_ahead=host_runs_ahead)
    measured = (stats.num_reloads, stats.num_misses, stats.num_resident)
    assert (step, stats.d2h_wait_ms, stats.h2d_wait_ms, *measured) == (
        simulated.step,
        simulated.d2h_wait,
        simulated.h2d_wait,
        simulated.num_reloads,
        simulated.num_misses,
        simulated.num_resident,
    )


def test_the_engine_with_schedule_sync_takes_the_closed_form():
    runtime = VirtualRuntime(0, 0, host_runs_ahead=False)
    runtime.compute.copy_time = 3
    step, _ = run_engine(8, 2, runtime, schedule="sync", keep_last=2)
    assert step / (4 * 8 * 2) - 1 == sync_slowdown(3 / 2) * 6 / 8
    simulated = simulate_step(8, 2, 3, 3, schedule="sync", keep_last=2)
    assert simulated == SimulatedStep(
        step, d2h_wait=18, h2d_wait=18, num_reloads=6, num_misses=6, num_resident=0, max_in_stash=0
    )


# Blocks that differ, and blocks that stay


def test_each_block_has_its_own_times():
    """Block 0's copy to the host ends at 2, for which block 1 waits from 1 on. Its own ends at 3, and it at 4, when
    block 2 starts, whose copy is under way until 9. Forward ends at 7."""
    step = simulate_step(3, [1, 2, 3], [2, 1, 5], [4, 1, 1], keep_last=0, max_inflight_offloads=1)
    # Backward: block 2 is resident, 9 long; block 1 comes back meanwhile, and block 0 while block 1 works, 6 long.
    assert step == SimulatedStep(7 + 9 + 6 + 3, 1, 0, num_reloads=2, num_misses=0, num_resident=1, max_in_stash=1)


def test_backward_that_recomputes_less():
    """2.5 forwards hide less than 3: copies back of 2.75 make the three blocks behind wait 0.25 each."""
    step = simulate_step(4, 1, 1, 2.75, backward=2.5)
    assert (step.step, step.h2d_wait) == (4 + 10 + 0.75, 0.75)
    assert simulate_step(2, 1, 1, 1, backward=[2, 7], keep_last=2).step == 2 + 9


def test_all_stay_where_more_are_kept_than_there_are():
    for schedule in ("overlap", "sync"):
        step = simulate_step(3, 1, 1, 1, keep_last=5, schedule=schedule)
        assert (step.step, step.num_reloads, step.num_resident) == (12, 0, 0)


def test_backward_that_comes_later_finds_all_on_the_host():
    """Of `test_copies_of_four_forwards`: forward ends at 22; then the copies back of 6 to 0 follow each other from 22
    on, each started with the block before. The first hides behind 3, so all seven wait 1."""
    step = simulate_step(8, 1, 4, 4, is_backward_later=True)
    assert step == SimulatedStep(
        53, d2h_wait=14, h2d_wait=7, num_reloads=7, num_misses=0, num_resident=0, max_in_stash=2
    )


def test_reloading_all_waits_for_copies_that_are_under_way():
    """Of the same: the last copy to the host ends at 28, three after block 6 could go on, and its copy back at 32; that
    of block 5 starts then, and hides but for 1 behind block 6's backward until 35, and so on: 7 + 6."""
    step = simulate_step(8, 1, 4, 4, reloads_all=True)
    assert (step.step, step.h2d_wait, step.num_resident) == (22 + 24 + 7 + 6, 13, 0)


def test_what_is_recorded():
    """Two blocks; the copy back of the first starts with the recompute of the second and takes as long as its
    backward."""
    step = simulate_step(2, 1, 0.5, 3, is_recorded=True)
    assert step.intervals == (
        Interval("d2h", "offload 0", 0, 0.5),
        Interval("compute", "forward 0", 0, 1),
        Interval("compute", "forward 1", 1, 2),
        Interval("h2d", "reload 0", 2, 5),
        Interval("compute", "recompute 1", 2, 3),
        Interval("compute", "backward 1", 3, 5),
        Interval("compute", "recompute 0", 5, 6),
        Interval("compute", "backward 0", 6, 8),
    )
    assert simulate_step(2, 1, 0.5, 3).intervals == ()
    without = simulate_step(1, 1, 0, 0, backward=2, is_recorded=True)
    assert [interval.name for interval in without.intervals] == ["forward 0", "backward 0"]


def test_only_the_earliest_move():
    """Of copies of two forwards, four are on the host when the eighth forward ends."""
    step = simulate_step(8, 1, 2, 2, num_moved=4, max_inflight_offloads=0)
    assert step == SimulatedStep(32, 0, 0, num_reloads=4, num_misses=0, num_resident=0, max_in_stash=3)
    assert simulate_step(8, 1, 2, 2, num_moved=8) == simulate_step(8, 1, 2, 2)


def test_what_must_have_arrived_is_waited_for():
    """Block 2 may start when block 1's copy, which ends at 4, has ended; it would have started at 2."""
    step = simulate_step(4, 1, 2, 0, num_moved=2, num_arrived=[0, 0, 2, 2])
    assert (step.step, step.d2h_wait, step.num_resident) == (18, 2, 0)
    in_step, ahead = (
        simulate_step(4, 1, 2, 0, num_moved=2, num_arrived=[0, 0, 0, 1], host_runs_ahead=ahead)
        for ahead in (False, True)
    )
    assert (in_step.num_resident, ahead.num_resident, ahead.d2h_wait) == (0, 1, 0)
