"""The rules of what ranks settle before step 1, and of what a run leaves on the disk, for `break_rules`."""

S, H, F = "distributed/test_share::test_", "test_host_report::test_", "test_run_folder::test_"
RANKS = f"{S}on_four_ranks"
ONE, OTHERS = f"{S}one_rank_gets_its_need_pinned_and_the_rest_to_spare", f"{S}what_else_the_run_takes_is_taken_off"

SETTLE = [
    (
        "a rank that cannot go on tells the others",
        "share",
        "    except Exception as error:  # of this rank alone",
        "    except ZeroDivisionError as error:  # of this rank alone",
        RANKS,
    ),
    (
        "a fault of ours keeps its traceback",
        "share",
        "if failure is not None and not isinstance(failure, ValueError):",
        "if False:",
        RANKS,
    ),
    ("settings that differ stop all ranks", "share", "    budget.check(all_facts)\n", "", RANKS),
    (
        "settings of ranks that offload nothing count too",
        "share",
        'budget.check(exchange(_facts(config, selective, torch.device("cpu"), read_host(), HostMemory(()))))',
        "pass",
        RANKS,
    ),
    (
        "with on_exhausted error a shortage stops all ranks",
        "share",
        "    budget.check_budgets(budgets)\n",
        "",
        RANKS,
    ),
    (
        "the pool may grow into what nobody needs",
        "share",
        "share.own.budget_bytes + share.own.spare_bytes",
        "share.own.budget_bytes",
        ONE,
    ),
    (
        "the pool is held to the budget",
        "share",
        "    pool.budget_bytes = share.own",
        "    assert share.own",
        OTHERS,
        f"{S}nothing_is_pinned_ahead_where_the_need_is_not_known",
    ),
    (
        "the table is out before anything is pinned",
        "share",
        "    if on_budget is not None:\n        on_budget(share)\n",
        "",
        f"{S}the_budget_is_known_before_anything_is_pinned",
    ),
    (
        "ranks of a host pin in turn",
        "share",
        "*turn_of([facts.host for facts in all_facts], facts.rank),",
        "*(0, 1),",
        RANKS,
    ),
    (
        "measure_link measures",
        "share",
        'if config.measure_link or config.limit == "link":',
        "if False:",
        RANKS,
    ),
    (
        "a budget that the host has not is refused before the model is touched",
        "apply",
        "if offloader.moves and budget_bytes is None:",
        "if False:",
        f"{S}more_than_the_host_has_is_refused_before_the_model_is_touched",
    ),
    (
        "a need that was foretold too low does not exhaust the pool",
        "budget",
        "spare_bytes=most[rank.rank] - got",
        "spare_bytes=0",
        ONE,
    ),
    (
        "who is short has nothing to spare",
        "budget",
        "budget_bytes=num_bytes, spare_bytes=0)",
        "budget_bytes=num_bytes)",
        "test_budget::test_what_nobody_needs_is_spare_unless_a_stage_is_short",
    ),
    (
        "a host whose memory is unknown takes any explicit budget",
        "budget",
        "is_known = limit.record.limit_bytes > 0",
        "is_known = True",
        "test_budget::test_explicit_budget_where_the_hosts_memory_is_not_known",
    ),
]

TOLD = [
    (
        "the first step is compared with the need",
        "host_report",
        "or abs(real - need) <= NEED_TOLERANCE * need",
        "or real <= need",
        f"{H}first_step_may_miss_the_need_by_5_percent",
    ),
    (
        "a shortage is no wrong need",
        "host_report",
        "if need is None or kept_for_lack_of_memory(stats) or",
        "if need is None or",
        f"{H}no_warning_where_the_budget_was_too_small_or_the_need_unknown",
    ),
    (
        "the tightest limit is named",
        "host_report",
        'min(tightest.get(members, limit), limit, key=lambda limit: limit["free_bytes"])',
        "tightest.get(members, limit)",
        f"{H}of_the_limits_on_the_same_ranks_the_tightest_is_named",
    ),
    (
        "devices share links on one host only",
        "host_report",
        "hosts.setdefault(budget.facts.host, [])",
        'hosts.setdefault("", [])',
        f"{H}devices_share_a_link_below_one_root_port_of_one_host",
    ),
    (
        "kills before the run do not count",
        "run_folder",
        "now[source] - before[source] for source in now if now[source] > before[source]",
        "now[source] for source in now if now[source]",
        f"{F}kills_before_the_run_do_not_count",
    ),
    (
        "kills on another host do not count",
        "run_folder",
        'if rank["host"] == host:',
        "if True:",
        f"{F}another_host_cannot_tell",
    ),
    (
        "a kill somewhere on the host is no proof",
        "run_folder",
        "any(source != VMSTAT for source in killed)",
        "any(killed)",
        f"{F}only_the_host_counts_a_kill",
    ),
    (
        "a finished run was not killed",
        "run_folder",
        'if summary is not None and summary["finished"]:',
        "if False:",
        f"{F}finished_run",
    ),
    (
        "the summary of an earlier run is not this one's",
        "run_folder",
        'if summary and summary.get("started") == record["started"]',
        "if summary",
        f"{F}files_of_an_earlier_run_do_not_count",
    ),
    (
        "states of an earlier run are not this one's",
        "run_folder",
        'if state and state.get("started") == record["started"]',
        "if state",
        f"{F}files_of_an_earlier_run_do_not_count",
    ),
]

RULES = SETTLE + TOLD
