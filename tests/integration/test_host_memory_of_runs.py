"""What was foretold of host memory and of bytes moved, against what the trainings did; and trainings that get too
little memory, or move only what the link can hide."""

import pytest
from all_rows import LIMITED_BY_LINK, is_slow, num_ranks, trainings_of
from rows import EIGHT_BLOCKS, ROWS
from save_rows import NEED_NOT_EXACT, SAVES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first test trains for all

# How many tokens an expert gets is up to its router; attention over several ranks saves what they send each other.
NOT_FORETOLD = [
    (row, "all, no AC")
    for row in ROWS
    if (row.startswith("deepseek_v3") or row.endswith("CP")) and "all, no AC" in ROWS[row].variants
]


def marked(row, variant):
    return pytest.param(row, variant, marks=[pytest.mark.slow] if is_slow(row) else [])


FORETOLD = [
    marked(row, variant)
    for row in ROWS | SAVES
    for variant in trainings_of(row)
    if variant != "short of host memory" and (row, variant) not in [*NEED_NOT_EXACT, *NOT_FORETOLD]
]


@pytest.mark.parametrize(("row", "variant"), FORETOLD)
def test_need_that_is_foretold_is_what_the_run_pins(results, row, variant):
    for rank in range(num_ranks(row)):
        report = results[row][variant][rank]["report"]
        if report is None or not report["num_blocks"]:
            continue
        assert report["need_bytes"] == report["pinned_peak_bytes"] == report["pinned_total_bytes"] > 0
        assert report["budget_bytes"] == report["need_bytes"]


@pytest.mark.parametrize(("row", "variant"), FORETOLD)
def test_what_was_planned_is_what_the_run_pins_and_moves(results, row, variant):
    ranks = [result["report"] for result in results[row][variant]]
    plan = results[row][variant][0]["plan"]
    if row == "llama3 FSDP2, every second block":
        pytest.skip("the planner plans for AC of every block, and says so")
    if row in ROWS and EIGHT_BLOCKS in ROWS[row].flags:
        pytest.skip("the planner reads TorchTitan's own flavors")
    if plan is None:
        assert not any(report and report["num_blocks"] for report in ranks)
        return
    assert plan["variant"] == "all_without_ac" or variant != "all, no AC"
    assert plan["memory"]["pinned_bytes"] == max(report["pinned_peak_bytes"] for report in ranks)
    moved = max(report["offloaded_bytes"] // report["num_steps"] for report in ranks)
    if "PP" not in row:  # of a pipeline's slowest rank, which need not be the one that moves most
        assert plan["steps"][plan["variant"]]["moved_bytes"] == moved


@pytest.mark.parametrize(("row", "variant"), [marked(*name) for name in NOT_FORETOLD])
def test_where_nobody_can_foretell_ranks_share_evenly_and_the_plan_is_near(results, row, variant):
    """Within a tenth: what is counted of attention is a fused kernel's, and here it is many ops."""
    ranks = [result["report"] for result in results[row][variant]]
    assert [report["need_bytes"] for report in ranks] == [None] * len(ranks)
    assert all("pinned budget exhausted" not in report["last_step"]["kept"] for report in ranks)
    planned = results[row][variant][0]["plan"]["memory"]["pinned_bytes"]
    assert planned == pytest.approx(max(report["pinned_peak_bytes"] for report in ranks), rel=0.1)


@pytest.mark.parametrize(("row", "variant"), sorted(NEED_NOT_EXACT))
def test_where_the_need_is_not_exact_the_pool_grows_into_what_nobody_needs(results, row, variant):
    for rank in range(2):
        report = results[row][variant][rank]["report"]
        assert report["need_bytes"] < report["pinned_peak_bytes"]
        assert "pinned budget exhausted" not in report["last_step"]["kept"]


@pytest.mark.parametrize("row", ["llama3 FSDP2"])
def test_what_has_no_room_stays_on_the_device(results, row):
    for rank in range(2):
        result = results[row]["short of host memory"][rank]
        report, kept = result["report"], result["report"]["last_step"]["kept"]
        assert result["metrics"] == results[row]["off"][rank]["metrics"]
        assert (report["need_bytes"], report["budget_bytes"]) == (5 * 2**18, 3 * 2**18)
        assert report["pinned_total_bytes"] == 3 * 2**18
        assert kept == {"keep_last": [1, 2**18], "pinned budget exhausted": [2, 2 * 2**18]}
        assert report["last_step"]["num_offloads"] == 3


@pytest.mark.parametrize("row", LIMITED_BY_LINK)
def test_limit_of_the_link_changes_no_number(results, row):
    """The choice is made after the third step. In this machine's memory all copies hide."""
    for rank in range(2):
        off, link = results[row]["off"][rank], results[row]["link"][rank]
        assert len(off["metrics"]) == 5
        assert off["metrics"] == link["metrics"]
        last = link["report"]["last_step"]
        assert (last["num_misses"], last["num_offloads"]) == (0, ROWS[LIMITED_BY_LINK[row]].num_inputs(rank))
