"""The rules of links and of ``limit = "link"`` (docs/engine.md), for `break_rules`: arguments of its ``rule``."""

E, R, L, P, S, D = (
    "test_engine::test_",
    "test_host_runtime::test_",
    "test_link::test_",
    "test_link_choice::test_",
    "test_simulation::test_",
    "distributed/test_link_ranks::test_",
)
LIMIT = f"{E}link_limit_moves_all_first_and_then_what_hides"
STASH = f"{E}link_limit_raises_that_of_the_stash"
CHOSEN = f"{P}the_engine_does_what_was_chosen"
BY_HAND = f"{P}choice_by_hand"

PORT = [
    (
        "a direction is divided among its copies",
        "host_runtime",
        "            share = min(elapsed / len(active), min(active.values()))\n",
        "            share = min(elapsed, min(active.values()))\n",
        f"{R}a_lane_is_divided_among_its_copies",
    ),
    (
        "lateness slows no other copy",
        "host_runtime",
        "elapsed = 0.0 if share == elapsed / len(active) else elapsed - share * len(active)",
        "elapsed = 0.0",
        f"{R}lateness_on_a_lane_slows_nobody",
    ),
    (
        "ranks share the port that they are given",
        "host_runtime",
        "self.link = HostLink(link_gb_per_s) if link_gb_per_s is not None else link",
        "self.link = HostLink(link_gb_per_s or link.gb_per_s) if link_gb_per_s or link else None",
        f"{R}ranks_that_share_a_port_get_equal_parts[d2h-2]",
    ),
    (
        "each direction is on its own",
        "host_runtime",
        'direction = "d2h" if dst.untyped_storage()._cdata in self._pinned else "h2d"',
        'direction = "d2h"',
        f"{R}directions_do_not_share_the_link",
    ),
    (
        "a speed is given once",
        "host_runtime",
        "if link is not None and link_gb_per_s is not None:",
        "if False:",
        f"{R}a_link_is_given_once",
    ),
    (
        "no time of an event that is not done",
        "host_runtime",
        "return (end.time - start.time) * 1e3 if end.done.is_set() else None",
        "return (end.time - start.time) * 1e3",
        f"{R}timed_event_is_not_told_before_it_is_done",
    ),
    (
        "no time of an event that the device has not come past",
        "runtime",
        "return start.elapsed_time(end) if end.query() else None",
        "return start.elapsed_time(end)",
        f"{R}accelerator_timed_wait_measures_with_two_events",
    ),
]

MEASUREMENT = [
    (
        "ranks measure alone one after the other",
        "link",
        "            if turn == position:\n",
        "            if turn == 0:\n",
        f"{L}ranks_take_turns_alone_and_then_share",
    ),
    (
        "all ranks measure the shared link together",
        "link",
        "        shared = port.measure_all(box_s, barrier)\n",
        "        shared = alone\n        [barrier() for _ in range(3)]\n",
        f"{L}ranks_take_turns_alone_and_then_share",
    ),
    (
        "both directions are measured at once",
        "link",
        'for directions in (("d2h",), ("h2d",), ("d2h", "h2d")):',
        'for directions in (("d2h",), ("h2d",), ("d2h",)):',
        f"{L}both_ways_are_measured_together",
    ),
    (
        "copies get smaller on a slow link",
        "link",
        "    copy_bytes = int(min(max(copy_bytes, MIN_COPY_BYTES), MAX_COPY_BYTES)) // 512 * 512\n",
        "    copy_bytes = MAX_COPY_BYTES\n",
        f"{L}rates_are_those_of_the_link_within_the_time",
    ),
    (
        "the time is a bound",
        "link",
        "    box_s = (1 - SETUP_FRACTION) * seconds / (3 * (num_turns + 1))\n",
        "    box_s = seconds / 3\n",
        f"{L}rates_are_those_of_the_link_within_the_time",
    ),
    (
        "the first copy is not counted",
        "link",
        "        return self._copy_bytes * len(rest) / max(rest[-1] - first, 1e-6) / 1e6\n",
        "        return self._copy_bytes * (1 + len(rest)) / max(rest[-1] - first, 1e-6) / 1e6\n",
        f"{L}a_slow_link_gets_small_copies",
    ),
    (
        "pinned memory goes back when a rank fails",
        "link",
        "    finally:\n        port.close()\n    return LinkRates(alone, shared)\n",
        "    finally:\n        pass\n    port.close()\n    return LinkRates(alone, shared)\n",
        f"{L}pinned_memory_goes_back_when_the_measurement_fails",
    ),
    (
        "compute is drained before anything is measured",
        "link",
        "        runtime.synchronize(ready)\n",
        "        pass\n",
        f"{L}compute_is_drained_first",
    ),
    (
        "a rank that fails takes the others along",
        "share",
        '            gather(f"{type(error).__name__}: {error}")\n',
        "            gather(None)\n",
        f"{D}a_rank_that_fails_takes_the_others_along",
    ),
    (
        "turns are those of a host",
        "exchange",
        "return hosts[:rank].count(hosts[rank]), ",
        "return rank, ",
        f"{D}ranks_of_a_host_take_turns",
    ),
    (
        "turns are as many as the host with most ranks has",
        "exchange",
        "max(Counter(hosts).values())",
        "hosts.count(hosts[rank])",
        f"{D}ranks_of_a_host_take_turns",
    ),
]

ARITHMETIC = [
    (
        "each block has its own times",
        "planner/simulation",
        "self.now + self.backward[k]",
        "self.now + self.backward[0]",
        f"{S}each_block_has_its_own_times",
    ),
    (
        "the earliest blocks move",
        "planner/simulation",
        "num_moved = most if num_moved is None else min(num_moved, most)",
        "num_moved = most",
        f"{S}only_the_earliest_move",
    ),
    (
        "a copy that ends after forward is of no use",
        "planner/link_choice",
        "        if is_out and step.now",
        "        if step.now",
        BY_HAND,
    ),
    (
        "a copy back that backward would wait for does not hide",
        "planner/link_choice",
        " and step.now <= (1 + tolerance) * ac_step_s:",
        ":",
        f"{P}a_slow_way_back_limits_too",
    ),
    (
        "small stalls are tolerated",
        "planner/link_choice",
        "(1 + tolerance) * ac_step_s",
        "(1 + ROUNDING) * ac_step_s",
        f"{P}small_stalls_are_tolerated_up_to_a_hundredth_of_the_step",
    ),
    (
        "all that stay on the device at the end of forward come back",
        "planner/link_choice",
        "step.run_backward(prefetch_lookahead, resident=set())",
        "step.run_backward(prefetch_lookahead, resident=set(range(num_moved)))",
        f"{P}a_slow_way_back_limits_too",
    ),
    (
        "one block of slack for what must have arrived",
        "planner/link_choice",
        "    for forward in forward_s[:-1]:\n        starts.append(now)\n        now += forward\n",
        "    for forward in forward_s[:-1]:\n        now += forward\n        starts.append(now)\n",
        BY_HAND,
    ),
    (
        "the slowest rank decides",
        "planner/link_choice",
        "    return min(choices, key=",
        "    return max(choices, key=",
        f"{P}the_slowest_rank_decides",
        f"{D}the_slower_rank_decides",
    ),
]

CHOICE = [
    (
        "regions past the choice stay",
        "engine",
        "        if region.index >= region.tape.part.num_moved:\n            return Stay.LINK\n",
        "",
        LIMIT,
    ),
    (
        "regions past the choice stay for a reason of their own",
        "engine",
        "            return Stay.LINK\n",
        "            return Stay.KEEP_LAST\n",
        LIMIT,
    ),
    (
        "the stash may hold more than before",
        "stash",
        "limit = self._max_inflight_offloads if region.tape.part.num_arrived is None else 0",
        "limit = self._max_inflight_offloads",
        STASH,
        CHOSEN,
    ),
    (
        "what must have arrived leaves the stash",
        "stash",
        "        while self._entries and self._entries[0].place < (serial, part.num_arrived[region.index]):\n"
        "            self.drop_oldest()\n",
        "",
        STASH,
    ),
    (
        "a stash without limit stays so",
        "stash",
        "if part.num_arrived is None or not self._max_inflight_offloads:",
        "if part.num_arrived is None:",
        f"{E}no_limit_on_the_stash_stays_none",
    ),
    (
        "waits are taken off a forward's time",
        "stats",
        "            self.watched.waits.append(wait)\n",
        "            pass\n",
        f"{E}forwards_are_timed_without_their_waits",
        CHOSEN,
    ),
    (
        "a region's saved outputs count in its bytes",
        "stats",
        "            self.watched.num_bytes += num_bytes\n",
        "            self.watched.num_bytes = num_bytes\n",
        f"{E}saved_outputs_count_and_stay_with_their_region",
    ),
    (
        "a forward that raises is not timed",
        "engine",
        "        finally:\n            self._counter.watched = None\n        watch.end(",
        "        finally:\n            self._counter.watched = None\n            watch.end(",
        f"{E}a_forward_that_raises_is_not_timed",
    ),
    (
        "nothing is timed with limit memory",
        "engine",
        'ForwardWatch(runtime) if config.limit == "link" else None',
        "ForwardWatch(runtime)",
        f"{E}with_limit_memory_nothing_is_timed",
    ),
    (
        "the first step is not timed",
        "forward_watch",
        "        if has_backward and self._is_warm:\n",
        "        if has_backward:\n",
        f"{E}steps_without_backward_are_no_ground_for_a_choice",
    ),
    (
        "steps without backward are not timed",
        "forward_watch",
        "        if has_backward and self._is_warm:\n",
        "        if self._is_warm:\n",
        f"{E}steps_without_backward_are_no_ground_for_a_choice",
    ),
    (
        "the choice is made after three steps",
        "link_limit",
        "        if self._num_steps < NUM_WATCHED_STEPS:\n            return\n",
        "",
        LIMIT,
    ),
    (
        "no choice before all ranks have timed something",
        "link_limit",
        "if any(costs is None for rank in ranks for costs in rank.values()):",
        "if not all(ranks):",
        f"{D}each_stage_has_its_own_choice",
        f"{D}a_choice_waits_for_the_last_rank",
    ),
    (
        "ranks with the same blocks come to the same",
        "link_limit",
        "[rank[tuple(part.fqns)] for rank in ranks if tuple(part.fqns) in rank]",
        "[rank[tuple(part.fqns)] for rank in ranks[:1] if tuple(part.fqns) in rank]",
        f"{D}the_slower_rank_decides",
    ),
    (
        "all ranks measure if one does not know its link",
        "link_limit",
        "if self._num_steps == 1 and None in gather(self.rates):",
        "if self._num_steps == 1 and self.rates is None:",
        f"{D}all_ranks_measure_if_one_was_not_told",
    ),
    (
        "several forwards alive reckon with both ways",
        "link_limit",
        "both_ways=self._engine.tapes.max_alive > 1",
        "both_ways=False",
        f"{E}microbatches_alive_at_once_reckon_with_both_ways",
    ),
    (
        "the shared rates count",
        "link_limit",
        "self.rates.shared.bytes_per_s(",
        "self.rates.alone.bytes_per_s(",
        LIMIT,
    ),
]

RULES = PORT + MEASUREMENT + ARITHMETIC + CHOICE
