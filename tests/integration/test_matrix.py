"""Every way to parallelise, trained with and without offload: every number of every step is the same, to the last
digit, and what should move moves, comes back in time and leaves nothing."""

import pytest
from rows import ROWS
from save_rows import REGISTERED

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first test trains for all


def marked(row):
    return pytest.param(row, marks=pytest.mark.slow) if ROWS[row].is_slow else row


ALL_ROWS = [marked(row) for row in ROWS]


@pytest.mark.parametrize("row", ALL_ROWS)
def test_numbers_are_identical(results, row):
    learned = []
    for rank in range(ROWS[row].ranks):
        curves = {variant: results[row][variant][rank]["metrics"] for variant in ROWS[row].variants}
        assert curves == dict.fromkeys(curves, curves["off"])
        (_, *first), second, (_, *last) = (step[:3] for step in curves["off"] if step[1] != "None")  # else: validation
        assert not {"nan", "inf"} & {*first, *second, *last}
        learned.append(all(before != after for before, after in zip(first, last, strict=True)))
    assert any(learned) if ROWS[row].is_pipeline else all(learned)  # of a pipeline, the rank of the last stage knows


@pytest.mark.parametrize("row", ALL_ROWS)
def test_what_should_move_moves_and_comes_back(results, row):
    for variant in ROWS[row].variants[1:]:
        for rank in range(ROWS[row].ranks):
            report = results[row][variant][rank]["report"]
            last = report["last_step"]
            num_moved = ROWS[row].num_saved(rank) if variant == "all, no AC" else ROWS[row].num_inputs(rank)
            assert last["num_offloads"] == num_moved or (num_moved == 0 < last["num_offloads"])
            assert last["num_reloads"] + last["num_resident"] >= last["num_offloads"]
            assert last["pinned_in_use_bytes"] == 0
            assert last["num_slabs_made"] == 0 or num_moved == 0  # sizes that depend on the data: new ones any step
            assert report["num_steps"] == 3


@pytest.mark.parametrize("row", ALL_ROWS)
def test_reloads_are_ahead_of_backward(results, row):
    """All but those of a backward of weights alone: it comes when the tensors that the backward of inputs had are gone,
    and nothing says when it will. It asks for the block's input, to run it again, or without AC for what its linears
    and norms multiply with weights: six tensors. What has not left the device by then is no miss."""
    for variant in ROWS[row].variants[1:]:
        num_asked = 6 if variant == "all, no AC" else 1
        for rank in range(ROWS[row].ranks):
            result = results[row][variant][rank]
            assert result["report"]["last_step"]["num_misses"] <= num_asked * result["num_weight_backwards"]
            assert (result["num_weight_backwards"] > 0) == ROWS[row].splits_backward


@pytest.mark.parametrize("row", ALL_ROWS)
def test_model_looks_the_same(results, row):
    for rank in range(ROWS[row].ranks):
        off = results[row]["off"][rank]
        if row in REGISTERED:  # what is registered is saved all the same, and nothing is moved
            assert off["report"]["last_step"]["saved"].keys() == REGISTERED[row].keys()
            assert (off["report"]["num_blocks"], off["report"]["pinned_total_bytes"]) == (0, 0)
            assert off["report"]["last_step"]["num_offloads"] == 0
        else:
            assert off["report"] is None
        for variant in ROWS[row].variants[1:]:
            on = results[row][variant][rank]
            assert on["report"] is not None
            assert (off["keys"], off["classes"]) == (on["keys"], on["classes"])
            if variant != "all, no AC":  # the checkpointing is modules, too
                assert off["modules"] == on["modules"]


@pytest.mark.parametrize("row", ALL_ROWS)
def test_a_training_leaves_nothing_in_the_process(results, row):
    for variant, ranks in results[row].items():
        assert [rank["is_freed"] for rank in ranks] == [True] * len(ranks), variant
