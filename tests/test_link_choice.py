"""Which blocks the link moves for nothing: by hand, against the simulated step, and against a real engine."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import INPUT_BYTES, VirtualModel, VirtualRuntime

from titan_offload.planner.link_choice import PartCosts, agree_on_link_limit, choose_link_limit
from titan_offload.planner.simulation import simulate_step

# The choice of `limit = "link"`


def test_choice_by_hand():
    """Copies to the host of 1.6 forwards end at 1.6, 3.2, 4.8, 6.4, 8.0: five in a forward of 8. The stash holds what
    has not ended a block before: blocks 1 to 4 while block 4 runs. With all of them and a stash of two, block 3 waits
    0.2 and blocks 4 to 6 wait 0.6 each."""
    choice = choose_link_limit([1.0] * 8, [16] * 8, 10.0, 8.0)
    assert (choice.num_moved, choice.hidden_bytes, choice.max_inflight_offloads) == (5, 80, 4)
    assert choice.num_arrived == (0, 0, 0, 1, 1, 2, 3, 3)
    assert (choice.ac_step_s, choice.stall_s) == (32.0, 0.0)
    assert choice.stall_s_if_all == pytest.approx(2.0)


def test_all_move_where_copies_hide():
    choice = choose_link_limit([1.0] * 8, [16] * 8, 16.0, 16 / 3)
    assert (choice.num_moved, choice.max_inflight_offloads, choice.stall_s_if_all) == (7, 2, 0.0)
    assert choose_link_limit([1.0] * 8, [16] * 8, 16.0, 16 / 3, keep_last=3).num_moved == 5


def test_a_slow_way_back_limits_too():
    """A copy back takes 6 forwards, a block's backward 3; block k is reached at 8 + 3 (7 - k). One ahead, the copy back
    of block 0 starts at 26 and ends at 32, which is too late by 3. Two ahead it starts at 23 and is in time, but not
    behind block 1's, which ends at 26. All at once, the n-th ends at 8 + 6 n, and block 0 is reached at 29."""
    assert choose_link_limit([1.0] * 8, [16] * 8, 1e9, 16 / 6).num_moved == 0
    assert choose_link_limit([1.0] * 8, [16] * 8, 1e9, 16 / 6, prefetch_lookahead=2).num_moved == 1
    assert choose_link_limit([1.0] * 8, [16] * 8, 1e9, 16 / 6, prefetch_lookahead=7).num_moved == 3


def test_without_prefetch_no_copy_hides():
    assert choose_link_limit([1.0] * 8, [16] * 8, 16.0, 16.0, prefetch_lookahead=0).num_moved == 0


def test_small_stalls_are_tolerated_up_to_a_hundredth_of_the_step():
    """Without kept blocks the copy back of the last one is waited for. 4 * 8 / 100 = 0.32."""
    assert choose_link_limit([1.0] * 8, [1] * 8, 1e9, 1 / 0.31, keep_last=0).num_moved == 8
    choice = choose_link_limit([1.0] * 8, [1] * 8, 1e9, 1 / 0.31, keep_last=0)
    assert choice.stall_s == pytest.approx(0.31)
    assert choose_link_limit([1.0] * 8, [1] * 8, 1e9, 1 / 0.33, keep_last=0).num_moved == 7


def test_blocks_that_move_nothing_are_free():
    """Such as those for which the budget has no room."""
    choice = choose_link_limit([1.0] * 8, [16] * 3 + [0] * 5, 8.0, 16.0)
    assert (choice.num_moved, choice.hidden_bytes) == (7, 48)


@st.composite
def parts(draw):
    num_blocks = draw(st.integers(1, 8))
    forward = draw(st.lists(st.integers(1, 4), min_size=num_blocks, max_size=num_blocks))
    num_bytes = draw(st.lists(st.integers(0, 20), min_size=num_blocks, max_size=num_blocks))
    config = {"keep_last": draw(st.integers(0, num_blocks - 1)), "prefetch_lookahead": draw(st.integers(0, 3))}
    return forward, num_bytes, config


RATES = st.sampled_from([0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 20.0, 1e3])


@settings(deadline=None, max_examples=300, derandomize=True)
@given(parts(), RATES, RATES, RATES, RATES)
def test_a_faster_link_never_moves_less(part, d2h, h2d, more_d2h, more_h2d):
    forward, num_bytes, config = part
    slow = choose_link_limit(forward, num_bytes, d2h, h2d, **config)
    fast = choose_link_limit(forward, num_bytes, d2h + more_d2h, h2d + more_h2d, **config)
    assert slow.num_moved <= fast.num_moved <= len(forward) - config["keep_last"]
    assert choose_link_limit(forward, num_bytes, 1e12, 1e12, **config).num_moved == len(forward) - config[
        "keep_last"
    ] or (0 in (config["prefetch_lookahead"], config["keep_last"]))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(parts(), RATES, RATES, st.booleans())
def test_the_choice_hides_and_one_more_would_not(part, d2h_rate, h2d_rate, host_runs_ahead):
    forward, num_bytes, config = part
    choice = choose_link_limit(forward, num_bytes, d2h_rate, h2d_rate, **config)
    d2h, h2d = [size / d2h_rate for size in num_bytes], [size / h2d_rate for size in num_bytes]
    lookahead = config["prefetch_lookahead"]
    step = simulate_step(
        len(forward),
        *(forward, d2h, h2d),
        **config,
        num_moved=choice.num_moved,
        num_arrived=choice.num_arrived,
        host_runs_ahead=host_runs_ahead,
    )
    assert step.d2h_wait == pytest.approx(0)
    assert step.step <= 1.01 * 4 * sum(forward) + 1e-9
    assert step.max_in_stash <= choice.max_inflight_offloads
    if choice.num_moved < len(forward) - config["keep_last"]:
        one_more = choice.num_moved + 1
        free = simulate_step(
            len(forward), forward, d2h, h2d, num_moved=one_more, **config | {"keep_last": 0}, max_inflight_offloads=0
        )
        waits_back = simulate_step(
            len(forward), forward, 0, h2d, num_moved=one_more, keep_last=0, prefetch_lookahead=lookahead
        ).h2d_wait
        assert free.num_resident > 0 or free.h2d_wait > 0 or waits_back > 0


@pytest.mark.parametrize("copy", [1.25, 1.5, 2.0, 3.75, 9.0])
@pytest.mark.parametrize("num_blocks", [8, 36, 80])
def test_the_larger_stash_is_no_more_than_the_blocks_that_stay(copy, num_blocks):
    """At no moment are more inputs on the device than when forward ends, but for one of slack and one that starts."""
    choice = choose_link_limit([1.0] * num_blocks, [1] * num_blocks, 1 / copy, 1e9)
    on_device = [k + 1 - choice.num_arrived[k] for k in range(num_blocks)]
    assert choice.num_moved == math.floor(num_blocks / copy)
    assert max(on_device) <= num_blocks - choice.num_moved + 2
    in_flight = [k + 1 - max(0, math.floor((k - 1) / copy)) for k in range(choice.num_moved)]
    assert choice.max_inflight_offloads == max(in_flight, default=0)


def test_the_slowest_rank_decides():
    costs = [PartCosts((1.0,) * 8, (16,) * 8, rate, 16.0) for rate in (16.0, 8.0, 10.0)]
    choices = [agree_on_link_limit(order, keep_last=1) for order in (costs, costs[::-1])]
    assert choices[0] == choices[1] == choose_link_limit([1.0] * 8, [16] * 8, 8.0, 16.0)
    assert choices[0].num_moved == 4


# The choice against the engine


@st.composite
def link_settings(draw):
    num_blocks = draw(st.integers(2, 9))
    forward = draw(st.lists(st.integers(1, 4), min_size=num_blocks, max_size=num_blocks))
    config = {
        "keep_last": draw(st.integers(0, num_blocks - 1)),
        "prefetch_lookahead": draw(st.integers(0, 3)),
        "max_inflight_offloads": draw(st.integers(1, 3)),
    }
    return forward, draw(st.integers(0, 12)), draw(st.integers(0, 12)), config, draw(st.booleans())


@settings(deadline=None, max_examples=100, derandomize=True)
@given(link_settings())
def test_the_engine_does_what_was_chosen(case):
    """Guards: that waits are taken off the forwards that are timed, `Stash.drop_arrived`, and that a step with the
    choice is as long as with AC alone."""
    forward, d2h, h2d, config, host_runs_ahead = case
    model = VirtualModel(forward, VirtualRuntime(d2h, h2d, host_runs_ahead), limit="link", **config)
    before = [model.step() for _ in range(3)]
    simulated = simulate_step(len(forward), forward, d2h, h2d, **config, host_runs_ahead=host_runs_ahead)
    assert before[1][0] == before[2][0] == simulated.step
    [choice] = model.offloader.link_choices
    assert choice.costs.forward_s == pytest.approx([ms / 1e3 for ms in forward])
    assert choice.costs.num_bytes == (INPUT_BYTES,) * (len(forward) - config["keep_last"]) + (0,) * config["keep_last"]
    sizes = []
    make_room = model.offloader.engine.stash.make_room
    model.offloader.engine.stash.make_room = lambda region: (
        make_room(region),
        sizes.append(len(model.offloader.engine.stash) + 1),
    )
    duration, stats = model.step()
    simulated = simulate_step(
        len(forward),
        *(forward, d2h, h2d),
        **config,
        num_moved=choice.num_moved,
        num_arrived=choice.num_arrived,
        host_runs_ahead=host_runs_ahead,
    )
    assert (duration, stats.num_offloads) == (simulated.step, choice.num_moved)
    assert (stats.num_reloads, stats.num_misses, stats.num_resident) == (
        simulated.num_reloads,
        simulated.num_misses,
        simulated.num_resident,
    )
    assert max(sizes, default=0) == simulated.max_in_stash <= choice.max_inflight_offloads
    assert duration <= 1.01 * 4 * sum(forward)
