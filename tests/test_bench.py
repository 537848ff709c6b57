"""The benchmarks run and tell what they promise."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from titan_offload.planner.simulation import simulate_step

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
bench_all = importlib.import_module("bench_all")
bench_hooks = importlib.import_module("bench_hooks")
bench_overlap = importlib.import_module("bench_overlap")
bench_paced = importlib.import_module("bench_paced")
bench_selective = importlib.import_module("bench_selective")
bench_share = importlib.import_module("bench_share")


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# The scripts


def test_bench_overlap_prints_a_row_per_variant(capsys):
    arguments = ["--part", "paced", "--blocks", "3", "--rounds", "1", "--forward-ms", "2", "--ratios", "0.5", "4"]
    assert bench_overlap.main([*arguments, "--keep-last", "0", "--lookahead", "2", "--max-inflight", "1"]) == 0
    document = last_line(capsys)
    assert document["benchmark"] == "overlap" and document["device"] == "cpu (HostRuntime)"
    assert document["torch"] == torch.__version__ and "commit" in document
    assert document["gradients"] == "bitwise equal"
    parameters = {"blocks": 3, "rounds": 1, "keep_last": 0, "lookahead": 2, "max_inflight": 1, "ratios": [0.5, 4.0]}
    assert parameters.items() <= document["parameters"].items()
    schedules = [(row["schedule"], row.get("copy_over_forward")) for row in document["rows"]]
    assert schedules == [(None, None), ("sync", 0.5), ("overlap", 0.5), ("sync", 4.0), ("overlap", 4.0)]
    for row in document["rows"]:
        assert row["step_ms"] > 2 * 4 * 3  # sleeps are never shorter than asked for
        told = {"slowdown_percent", "closed_form_percent", "planned_percent", "num_reloads"}
        assert row["schedule"] is None or told <= row.keys()


def test_plans_of_the_bench_are_the_steps_by_hand():
    """Of 8 blocks, copies of 2 and 4 forwards; see `test_simulation`. Sync: two copies of 7 blocks over 32 forwards."""
    args = bench_overlap.parse([])
    plans = {ratio: bench_overlap.plan_step(ratio, args) for ratio in (0.5, 2.0, 4.0)}
    assert [plan["overlap"].simulated_percent for plan in plans.values()] == pytest.approx([0, 12.5, 59.375])
    assert [plan["sync"].simulated_percent for plan in plans.values()] == pytest.approx([21.875, 87.5, 175])
    assert plans[2.0]["overlap"].compute_ms == pytest.approx(8 * 4 * 20)


def test_the_planner_foretells_what_is_measured():
    """Within 5 percentage points, for copies that hide, copies that do not, and both schedules. A busy machine may
    spoil a run, not three."""
    sizes = ["--part", "paced", "--blocks", "5", "--rounds", "3", "--forward-ms", "12", "--ratios", "0.5", "2.5"]
    args = bench_overlap.parse(sizes)
    for is_last_try in (False, False, True):
        variants = bench_overlap.make_variants(args)
        assert not bench_overlap.run_rounds(variants, bench_paced.make_input(), args.rounds)
        rows = bench_overlap.make_rows(variants, args)[1:]
        pairs = [(row["planned_percent"], row["slowdown_percent"]) for row in rows]
        if all(abs(planned - measured) < 5 for planned, measured in pairs):
            break
        assert not is_last_try, f"planned and measured slow-down: {pairs}"
    assert [planned > 5 for planned, _ in pairs] == [True, False, True, True]


def test_bench_overlap_fails_where_a_gradient_differs(capsys, monkeypatch):
    equal = iter([True, True, False])
    monkeypatch.setattr(bench_overlap.torch, "equal", lambda a, b: next(equal, True))
    arguments = ["--part", "paced", "--blocks", "2", "--rounds", "1", "--forward-ms", "1", "--ratios", "1"]
    assert bench_overlap.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "gradients differ" in captured.err


@pytest.mark.parametrize(
    "bad",
    [
        ["--blocks", "1"],
        ["--keep-last", "8"],
        ["--forward-ms", "0"],
        ["--ratios", "0"],
        ["--max-inflight", "-1"],
        ["--part", "none"],
        ["--tokens", "0"],
        ["--attention-blocks", "1"],
        ["--attention-rounds", "0"],
        ["--share", "0"],
        ["--share", "2", "--part", "attention"],
    ],
)
def test_bench_overlap_refuses_bad_input(bad):
    with pytest.raises(SystemExit, match="2"):
        bench_overlap.main(bad)


def test_ranks_that_share_a_port_stall_with_limit_memory_and_not_with_limit_link(capsys):
    """A copy takes 1.2 forwards alone, 2.4 while both ranks copy: blocks 2 to 4 wait for the stash with limit "memory",
    and two of six are what hides. A busy machine may spoil a run, not three."""
    stall = simulate_step(6, 12, 2.4 * 12, 2.4 * 12).step - 4 * 6 * 12
    for is_last_try in (False, False, True):
        document = run_shared(capsys)
        ac, memory, link = document["shared_rows"]
        stalls = [row["step_ms"] - ac["step_ms"] for row in (memory, link)]
        waits = [row["wait_ms"] for row in (memory, link)]
        is_seen = min(stalls[0], waits[0]) > 0.7 * stall and stalls[1] < 0.5 * stalls[0] and waits[1] < 0.1 * stall
        if is_seen and max(link["num_moved"]) < 5:
            break
        assert not is_last_try, f"expected a stall of {stall} ms with memory alone, got {stalls}, waits {waits}"


def run_shared(capsys):
    sizes = ["--blocks", "6", "--rounds", "2", "--forward-ms", "12", "--ratios", "1.2"]
    assert bench_overlap.main(["--part", "paced", "--share", "2", *sizes]) == 0
    document = last_line(capsys)
    assert document["gradients"] == "bitwise equal" and "rows" not in document
    assert document["parameters"]["share"] == 2
    ac, memory, link = document["shared_rows"]
    assert [row["limit"] for row in (ac, memory, link)] == [None, "memory", "link"]
    full_speed = bench_paced.INPUT_BYTES / (1.2 * 12e-3) / 1e9
    assert max(link["rates"]["alone"].values()) < 1.1 * full_speed
    # The slower rank's, so no more than half of the port, but for what it copies while the other one has not begun.
    assert max(link["rates"]["shared"].values()) < 0.7 * full_speed
    assert memory["num_moved"] == [5, 5]
    assert memory["simulated_percent"] > 10 and link["simulated_percent"] < 1
    return document


def test_a_wrong_shared_step_is_a_problem():
    args = bench_overlap.parse(["--share", "2", "--blocks", "3", "--forward-ms", "1"])
    with bench_share.make_variants(0.5, args) as variants:
        x = bench_paced.make_input()
        expected, grads = variants[0].run(x), variants[1].run(x)
        assert len(expected) == 2 * (1 + 3)
        assert variants[0].find_problems(expected, expected) == variants[1].find_problems(grads, expected) == []
        wrong = [*grads[:-1], grads[-1] + 1]
        assert variants[1].find_problems(wrong, expected) == [
            "limit memory, copy / forward 0.5: gradients differ from those of AC alone"
        ]
        variants[1].num_expected = [2, 1]
        assert variants[1].find_problems(grads, expected) == [
            "limit memory, copy / forward 0.5: moved [2, 2] block inputs, expected [2, 1]"
        ]


def test_bench_overlap_prints_both_parts_as_one_document(capsys):
    paced = ["--blocks", "2", "--rounds", "1", "--forward-ms", "1", "--ratios", "1"]
    assert bench_overlap.main([*paced, "--tokens", "16", "--attention-blocks", "2", "--attention-rounds", "1"]) == 0
    document = last_line(capsys)
    assert (len(document["rows"]), len(document["attention_rows"])) == (3, 5)


def test_attention_rows_say_what_was_saved_and_moved(capsys):
    sizes = ["--tokens", "48", "64", "--attention-blocks", "3", "--attention-rounds", "1"]
    assert bench_overlap.main(["--part", "attention", *sizes]) == 0
    document = last_line(capsys)
    assert document["gradients"] == "bitwise equal" and "rows" not in document
    parameters = {"tokens": [48, 64], "attention_blocks": 3, "attention_dim": 128, "attention_heads": 4}
    assert parameters.items() <= document["parameters"].items() and document["parameters"]["threads"] > 0
    names = ("tokens", "variant", "saved_bytes_per_block", "to_host_bytes", "attention_forwards_in_backward")
    expected = []
    for tokens in (48, 64):
        block_input, saved = tokens * 128 * 4, tokens * 128 * 4 + tokens * 4 * 4
        expected += [
            (tokens, "AC", 0, 0, 3),
            (tokens, "+ saved on device", saved, 0, 0),
            (tokens, "+ saved on host", saved, 2 * saved, 0),
            (tokens, "+ inputs on host", saved, 2 * (saved + block_input), 0),
            (tokens, "attention alone", None, None, None),
        ]
    assert [tuple(row.get(name) for name in names) for row in document["attention_rows"]] == expected
    ac_ms = {row["tokens"]: row["step_ms"] for row in document["attention_rows"] if row["variant"] == "AC"}
    for row in document["attention_rows"]:
        assert row["recompute_spared_percent"] == pytest.approx(row["recompute_spared_ms"] / ac_ms[row["tokens"]] * 100)
        if "step_ms" in row:
            assert row["recompute_spared_ms"] == ac_ms[row["tokens"]] - row["step_ms"]
            assert row["step_ms"] > row["backward_ms"] > 0


def test_a_wrong_attention_step_is_a_problem():
    x = bench_selective.make_input(16)
    ac, _, on_host, *_ = bench_selective.make_variants(16, 2)
    expected, grads = ac.run(x), on_host.run(x)
    assert ac.find_problems(expected, expected) == on_host.find_problems(grads, expected) == []
    wrong = [*grads[:-1], grads[-1] + 1]
    assert on_host.find_problems(wrong, expected) == [
        "16 tokens, + saved on host: gradients differ from those of AC alone"
    ]
    on_host.num_attention_forwards = 1
    on_host.stats[-1] = dataclasses.replace(on_host.stats[-1], saved={"rule": (2, 5)}, offloaded_bytes=7)
    saved = 16 * 128 * 4 + 16 * 4 * 4
    assert on_host.find_problems(grads, expected) == [
        f"16 tokens, + saved on host: bytes saved 5, expected {2 * saved}",
        f"16 tokens, + saved on host: bytes moved to the host 7, expected {saved}",
        "16 tokens, + saved on host: attention forwards in backward 1, expected 0",
    ]


def test_bench_overlap_fails_where_attention_saves_other_than_it_must(capsys, monkeypatch):
    monkeypatch.setattr(bench_selective, "saved_bytes", bench_selective.input_bytes)
    sizes = ["--tokens", "16", "--attention-blocks", "2", "--attention-rounds", "1"]
    assert bench_overlap.main(["--part", "attention", *sizes]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "round 1: 16 tokens, + saved on device: bytes saved 16896, expected" in captured.err


def test_bench_hooks_prints_a_row_per_model(capsys):
    assert bench_hooks.main(["--regions", "6", "3", "--rounds", "2"]) == 0
    document = last_line(capsys)
    assert document["benchmark"] == "hooks" and document["device"] == "cpu (HostRuntime)"
    assert document["torch"] == torch.__version__ and "commit" in document
    assert document["parameters"]["regions"] == [3, 6] == [row["regions"] for row in document["rows"]]
    for row in document["rows"]:
        assert row["pack_us"] > 0 and row["unpack_us"] > 0
        assert row["pair_us"] == row["pack_us"] + row["unpack_us"]
    assert document["pair_us_ratio"] > 0 and "added_us_per_region_ratio" in document


def test_bench_all_moves_all_and_tells_what_was_planned(capsys):
    """Copies of half a forward hide behind it, those of 4 do not."""
    arguments = ["--blocks", "6", "--ops", "4", "--rounds", "1", "--forward-ms", "4", "--ratios", "0.5", "4"]
    assert bench_all.main(arguments) == 0
    document = last_line(capsys)
    assert (document["benchmark"], document["gradients"]) == ("all", "bitwise equal")
    without, hidden, slow = document["rows"]
    assert without["planned_ms"] == hidden["planned_ms"] == pytest.approx(6 * 3 * 4)
    assert slow["planned_ms"] > 1.2 * hidden["planned_ms"]
    assert all(row["step_ms"] > 6 * 3 * 4 for row in document["rows"])  # sleeps are never shorter than asked for


def test_bench_all_fails_where_a_tensor_did_not_move(capsys, monkeypatch):
    monkeypatch.setattr(bench_all.Variant, "forget_steps", lambda self: setattr(self, "num_moved", 1))
    assert bench_all.main(["--blocks", "2", "--ops", "1", "--rounds", "1", "--forward-ms", "1", "--ratios", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "expected 1" in captured.err
