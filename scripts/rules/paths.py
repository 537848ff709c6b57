"""The rules of pipelines and soak runs, for `break_rules`: arguments of its `rule`."""

M, S, K = "distributed/test_pipeline_memory::test_", "distributed/test_schedules::test_", "test_soak::test_"

RULES = [
    (
        "the stash does not grow with the microbatches in flight",
        "stash",
        "        limit = self._max_inflight_offloads if region.tape.part.num_arrived is None else 0\n",
        "        limit = 0\n",
        f"{M}what_is_held_is_what_the_settings_say",
    ),
    (
        "the tape that a schedule takes next is learned",
        "tape_order",
        "            self._next_tape = dict(itertools.pairwise(self._order))\n",
        "            self._next_tape = {}\n",
        f"{S}schedule[Interleaved1F1B]",
    ),
    (
        "a soak counts pinned memory apart",
        "scripts/soak_samples.py",
        "        device=sum(storages.values()) - pinned,\n",
        "        device=sum(storages.values()),\n",
        f"{K}a_graph_that_is_left_shows_as_handles_and_slots_and_not_as_device_memory",
    ),
    (
        "a storage counts once in a soak",
        "scripts/soak_samples.py",
        "        storage._cdata: storage.nbytes()\n",
        "        id(tensor): storage.nbytes()\n",
        f"{K}tensors_count_once_and_pinned_memory_does_not",
    ),
    (
        "between steps a soak allows no handle",
        "scripts/soak_samples.py",
        '        allowed = 0 if name in ("handles", "slots") else getattr(first, name) + SLACK.get(name, 0)\n',
        "        allowed = getattr(first, name) + SLACK.get(name, 0)\n",
        f"{K}no_graph_may_be_left_from_the_start",
    ),
    (
        "a soak looks at every sample",
        "scripts/soak_samples.py",
        "        worst = max(samples, key=lambda sample: getattr(sample, name))\n",
        "        worst = samples[-1]\n",
        f"{K}what_grows_by_more_than_its_slack_is_a_problem",
    ),
]
