"""A plan beside what a run measured."""

import json

import pytest

from titan_offload.cli import main
from titan_offload.config import GIB
from titan_offload.planner.foretold import Comparison, compare, foretold_lines

PLAN = {
    "variant": "overlap",
    "memory": {"pinned_gib": 8.0},
    "steps": {"overlap": {"moved_gib": 16.0, "step_ms": 900.0}, "ac": {"moved_gib": 0.0, "step_ms": 1.0}},
    "machine": {"tflops": 500.0, "d2h_gb_per_s": 55.43, "h2d_gb_per_s": 31.0, "devices_per_link": 2},
}


def make_rank(pinned_gib, moved_gib, num_steps, step_ms):
    moved = int(moved_gib * GIB)
    return {
        "pinned_peak_bytes": int(pinned_gib * GIB),
        "offloaded_bytes": moved,
        "num_steps": num_steps,
        "step_ms": step_ms,
    }


SUMMARY = {"ranks": [make_rank(8, 160, 10, 1000.0), make_rank(6.4, 100, 10, 1100.0), make_rank(4, 50, 10, 1010.0)]}


def test_of_the_rank_that_has_most_and_of_the_median_step():
    assert compare(PLAN, SUMMARY) == [
        Comparison("pinned memory (GiB)", 8.0, 8.0),
        Comparison("moved to the host per step (GiB)", 16.0, 16.0),
        Comparison("step (ms)", 900.0, 1010.0),
    ]


def test_errors_are_those_of_the_plan():
    assert Comparison("x", 9.0, 10.0).error_percent == pytest.approx(-10)
    assert Comparison("x", 11.0, 10.0).error_percent == pytest.approx(10)
    assert Comparison("x", 11.0, 0.0).error_percent is None


def test_lines():
    lines = foretold_lines(PLAN, SUMMARY)
    assert lines[2] == "| pinned memory (GiB) | 8 | 8 | +0.0 % |"
    assert lines[4] == "| step (ms) | 900 | 1010 | -10.9 % |"
    assert lines[-1].startswith("Foretold for 500 TFLOP/s and a link of 55.43 GB/s out and 31 back, shared by 2;")


def test_a_run_of_one_step_has_no_step_time():
    summary = {"ranks": [make_rank(8, 16, 1, 0.0)]}
    assert [row.what for row in compare(PLAN, summary)] == ["pinned memory (GiB)", "moved to the host per step (GiB)"]


def test_a_stored_plan_is_what_report_compares_with(tmp_path, capsys, request):
    """The user's own plan, of the machine that it was made for, goes before the run's."""
    config = (request.config.rootpath / "train_configs" / "debug_cpu.toml").read_text()
    train_config, dump_folder = tmp_path / "x.toml", tmp_path / "run"
    train_config.write_text(config.replace('"outputs/debug_cpu"', json.dumps(str(dump_folder))))
    folder = dump_folder / "offload"
    assert main(["plan", str(train_config), "--gpus-per-node", "2", "--tflops", "0.02", "--store"]) == 0
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["machine"]["tflops"] == 0.02
    ranks = [make_rank(plan["memory"]["pinned_gib"], 0.01, 1, plan["steps"]["overlap"]["step_ms"])]
    record = {"format": 1, "started": 1.0, "config": {}, "ranks": [], "limits": [], "plan": PLAN}
    (folder / "budget.json").write_text(json.dumps(record))
    (folder / "summary.json").write_text(json.dumps({"started": 1.0, "step": 5, "finished": True, "ranks": ranks}))
    capsys.readouterr()
    assert main(["report", str(dump_folder)]) == 0
    page = capsys.readouterr().out
    assert "## Foretold and measured" in page
    assert "| +0.0 % |" in page
    assert "Foretold for 0.02 TFLOP/s" in page
    (folder / "plan.json").unlink()
    assert main(["report", str(dump_folder)]) == 0
    assert "Foretold for 500 TFLOP/s and a link of 55.43 GB/s out and 31 back" in capsys.readouterr().out
