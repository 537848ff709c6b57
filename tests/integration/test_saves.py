"""Trainings with selective saves on two gloo ranks: no number changes, and what is saved and moved is what the rules
say."""

import pytest
from all_rows import reference_of
from rows import ROWS
from save_rows import ATTENTION, REGISTERED, SAVES, SPLIT_BACKWARD

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first test trains for all


@pytest.mark.parametrize("row", SAVES)
def test_saves_change_no_number(results, row):
    for rank in range(2):
        curves = {variant: ranks[rank]["metrics"] for variant, ranks in results[row].items()}
        plain = curves[reference_of(row)]
        assert len(plain) == 3
        assert curves == dict.fromkeys(curves, plain)
    assert plain[0][1:3] != plain[2][1:3]
    assert "nan" not in plain[2]


RUNS_OF_SAVES = [(row, variant) for row, (_, runs) in SAVES.items() for variant in runs]


@pytest.mark.parametrize(("row", "variant"), RUNS_OF_SAVES)
def test_what_is_saved_and_moved(results, row, variant):
    _, num_saved, num_moved = SAVES[row][1][variant]
    for rank in range(2):
        last = results[row][variant][rank]["report"]["last_step"]
        assert {rule: num for rule, (num, _) in last["saved"].items()} == num_saved
        assert all(last["saved"][rule][1] > 0 for rule in num_saved if "_local_scalar_dense" not in rule)
        assert (last["pinned_in_use_bytes"], last["num_slabs_made"]) == (0, 0)
    last = results[row][variant][0]["report"]["last_step"]
    assert last["num_offloads"] == num_moved
    # Prefetch follows the order of regions; a part of a backward that comes later finds them gone.
    assert (last["num_misses"] == 0) == (row != SPLIT_BACKWARD)


@pytest.mark.parametrize("row", REGISTERED)
def test_registered_saves_apply_without_being_asked_for(results, row):
    for variant in set(ROWS[row].variants) - {"all, no AC"}:
        for rank in range(2):
            saved = results[row][variant][rank]["report"]["last_step"]["saved"]
            assert {rule: num for rule, (num, _) in saved.items()} == REGISTERED[row]


@pytest.mark.parametrize(
    ("row", "variant", "num_bytes"),
    [
        # Output and log-sum-exp, of 4 sequences of 64 tokens with 16 heads of 16
        ("llama3 FSDP2", "attention", 6 * (4 * 64 * 256 * 4 + 4 * 64 * 16 * 4)),
        ("llama3 FSDP2, bfloat16", "all saved", 6 * (4 * 64 * 256 * 2 + 4 * 64 * 16 * 4)),
        ("llama3 TP, stock Trainer", "all saved", 6 * (4 * 64 * 256 * 4 + 4 * 64 * 16 * 4) // 2),
        ("llama3 PP 1F1B", "all saved", 3 * (4 * 64 * 256 * 4 + 4 * 64 * 16 * 4)),
        # Output, log-sum-exp and maxima, with 8 heads of 64
        ("gpt_oss FSDP2", "attention", 2 * (4 * 64 * 512 * 4 + 2 * 4 * 64 * 8 * 4)),
    ],
)
def test_bytes_of_saved_attention(results, row, variant, num_bytes):
    for rank in range(2):
        assert results[row][variant][rank]["report"]["last_step"]["saved"][ATTENTION][1] == num_bytes


@pytest.mark.parametrize(
    ("row", "variant", "layers"),
    [
        ("deepseek_v3 FSDP2", "all saved", range(1, 6)),
        ("deepseek_v3 FSDP2, expert parallel", "all saved", range(1, 6)),
        ("llama4 FSDP2", "attention", (1, 3, 5)),
        ("llama4 FSDP2", "all saved", (1, 3, 5)),
        ("gpt_oss FSDP2", "all saved", range(4)),
    ],
)
def test_a_healthy_router_would_re_route_nothing(results, row, variant, layers):
    for rank in range(2):
        num_rerouted = results[row][variant][rank]["report"]["last_step"]["num_rerouted"]
        assert num_rerouted == {f"layers.{i}": 0 for i in layers}


@pytest.mark.parametrize("row", SAVES)
def test_model_with_saves_looks_the_same(results, row):
    plain = reference_of(row)
    variants = [variant for variant in results[row] if "no AC" not in variant]  # the checkpointing is modules, too
    for rank in range(2):
        assert results[row][plain][rank]["report"] is None
        assert results[row]["no AC"][rank]["report"] is None
        for key in ("modules", "keys", "classes"):
            seen = {variant: results[row][variant][rank][key] for variant in variants}
            assert seen == dict.fromkeys(variants, seen[plain])
