"""gpu_check: a part that fails, hangs or is cut off costs its own rest alone; what is judged, and how it is told."""

import argparse
import json
import os
import sys
import time

import gpu_check
import pytest
from gpu_parts import targets
from gpu_parts.tables import SHAPES, cells, markdown, print_tables

SAME = {"round": "plain", "way": "overlap", "num_steps": 20, "num_gradients": 100, "num_different": 0}
PASSED = {"passed": 5, "failed": 0, "error": 0, "skipped": 0, "failures": [], "problem": ""}


class Check(gpu_check.Check):
    """Its parts are programs of a few lines."""

    programs: dict[str, str]

    def command_of(self, name, seconds):
        return [sys.executable, "-c", "import json, os, sys, time\n" + self.programs[name]]


def make_check(tmp_path, minutes=1.0, **programs) -> Check:
    args = argparse.Namespace(out=tmp_path, minutes=minutes, emulate=True, parts=list(programs), commit="abc123")
    check = Check(args)
    check.programs = programs
    return check


def emit(row, table="gradients") -> str:
    return f"print(json.dumps([{table!r}, {row!r}]), flush=True)\n"


def parts_of(check) -> dict[str, dict]:
    return {row["part"]: row for row in check.tables["parts"]}


# Parts


def test_rows_of_a_part_that_fails_are_kept_and_the_next_part_runs(tmp_path):
    check = make_check(tmp_path, right=emit(SAME) + "sys.exit(3)", link=emit({"copy_bytes": 1}, "link"))
    check.run()
    assert check.tables["gradients"] == [SAME]
    assert check.tables["link"] == [{"copy_bytes": 1}]
    assert "exit code 3" in parts_of(check)["right"]["problem"]
    assert "problem" not in parts_of(check)["link"]
    assert any(
        fault.startswith("right: failed with exit code 3")
        for fault in targets.find_faults(check.tables, check.args.parts)
    )


def test_a_part_that_hangs_is_stopped_and_its_rows_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.0)
    monkeypatch.setattr(gpu_check, "SHARES", {"right": 1, "link": 20})
    monkeypatch.setattr(gpu_check, "END_S", 0.0)
    check = make_check(tmp_path, 0.3, right=emit(SAME) + "time.sleep(100)", link=emit({"copy_bytes": 1}, "link"))
    start = time.perf_counter()
    check.run()
    assert time.perf_counter() - start < 15
    assert check.tables["gradients"] == [SAME]
    assert check.tables["link"]
    assert parts_of(check)["right"]["ended"] == "stopped: its time was over"


def test_all_ends_in_time_though_every_part_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "END_S", 0.0)
    check = make_check(tmp_path, 0.05, **dict.fromkeys(gpu_check.SHARES, "time.sleep(100)"))
    start = time.perf_counter()
    check.run()
    assert time.perf_counter() - start < 0.05 * 60 + 2
    assert set(parts_of(check)) == set(gpu_check.SHARES)


def test_what_a_part_leaves_over_goes_to_those_after_it(tmp_path):
    check = make_check(tmp_path, right="pass", memory="pass")
    check.run()
    first, second = parts_of(check)["right"]["box_s"], parts_of(check)["memory"]["box_s"]
    assert first == pytest.approx((60 - gpu_check.END_S) * 110 / 155, rel=0.05)
    assert second > 60 - gpu_check.END_S - 5


def test_what_a_part_has_started_ends_with_it(tmp_path):
    program = (
        "import subprocess\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], **quiet)\n"
        "print(json.dumps(['link', {'pid': child.pid}]), flush=True)\n"
    )
    check = make_check(tmp_path, link=program)
    check.run()
    assert parts_of(check)["link"]["ended"] == "as it should"
    assert is_gone(check.tables["link"][0]["pid"])


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().split()[2] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_a_part_that_has_told_all_may_still_end(tmp_path):
    """Guards: a part that is stopped between its last row and its end, and then looks as if it had failed."""
    check = make_check(
        tmp_path, link=emit({"copy_bytes": 1}, "link") + "sys.stdout.close()\nos.close(1)\ntime.sleep(1)"
    )
    check.run()
    assert parts_of(check)["link"]["ended"] == "as it should"


def test_rows_are_on_the_disk_before_the_part_ends(tmp_path):
    wait = (
        "for _ in range(200):\n"
        f"    text = open({str(tmp_path / 'gpu_check.json')!r}).read()\n"
        "    if '987654' in text: break\n"
        "    time.sleep(0.05)\n"
        "else: sys.exit(1)\n"
    )
    check = make_check(tmp_path, link=emit({"copy_bytes": 987654}, "link") + wait)
    check.write()
    check.run()
    assert parts_of(check)["link"]["ended"] == "as it should"
    assert json.loads((tmp_path / "gpu_check.json").read_text())["tables"]["parts"]
    assert not list(tmp_path.glob("*.draft"))


def test_a_row_that_was_cut_off_is_left_out(tmp_path):
    check = make_check(tmp_path, link='print(\'["link", {"copy\', flush=True)\n' + emit({"copy_bytes": 2}, "link"))
    check.run()
    assert check.tables["link"] == [{"copy_bytes": 2}]


def test_what_parts_print_is_in_the_log(tmp_path):
    check = make_check(tmp_path, link="print('a word', file=sys.stderr)")
    check.run()
    assert (tmp_path / "gpu_check.log").read_text() == "==== link\na word\n"


def test_right_computes_the_same_twice_and_the_others_use_expandable_segments():
    alone = {"NCCL_SOCKET_IFNAME": "lo"}
    assert gpu_check.environment_of("right") == alone | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert gpu_check.environment_of("step_time") == alone | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert gpu_check.environment_of("sanitizer")["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


# The command line


def test_the_last_line_is_the_whole_document(tmp_path, monkeypatch, capsys):
    facts = {"device": "a device", "driver": "1.2", "torch": "2", "cuda": None}
    programs = {"right": emit(facts, "facts") + emit(SAME) + emit(PASSED, "device tests")}
    monkeypatch.setattr(gpu_check, "Check", lambda args: make_check(tmp_path, **programs))
    assert gpu_check.main(["--emulate", "--parts", "right", "--out", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["device"], document["driver"], document["benchmark"]) == ("a device", "1.2", "gpu_check")
    assert document["tables"]["gradients"] == [SAME]
    assert document["commit"] == "abc123"
    assert document["parameters"] == {"minutes": 9.0, "parts": ["right"], "is_emulated": True}
    assert "- device: a device" in (tmp_path / "gpu_check.md").read_text()


def test_a_wrong_gradient_is_exit_code_1(tmp_path, monkeypatch, capsys):
    wrong = SAME | {"num_different": 1, "first_different": "step 3: layers.1.w"}
    programs = {"right": emit(wrong) + emit(PASSED, "device tests")}
    monkeypatch.setattr(gpu_check, "Check", lambda args: make_check(tmp_path, **programs))
    assert gpu_check.main(["--emulate", "--parts", "right", "--out", str(tmp_path)]) == 1
    assert "wrong: gradients are those without offload: plain, overlap: 1 of 100, step 3: layers.1.w" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--minutes", "0", "--emulate"], "--minutes 0 is not allowed: set it to a number above 0"),
        (["--parts", "speed", "--emulate"], "invalid choice: 'speed'"),
        (["--emulate", "--out", "/dev/null/x"], "Not a directory"),
        ([], "there is no CUDA device on this machine"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(argv, text, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        gpu_check.main(argv)
    assert exit_info.value.code == 2
    assert text in capsys.readouterr().err.splitlines()[-1]


# Targets


def test_targets_without_a_case_are_not_met():
    assert [(row["num_cases"], row["is_met"]) for row in targets.judge({}, gpu_check.SHARES)] == [(0, False)] * 6


def test_parts_that_were_not_asked_for_are_not_judged():
    """Guards: a run of some parts that ends as if gradients were wrong."""
    assert targets.judge({}, ["timeline"]) == []
    assert [row["part"] for row in targets.judge({}, ["step_time", "right"])] == ["right", "step_time", "step_time"]
    assert targets.find_faults({}, ["step_time", "link"]) == []
    assert targets.find_faults({}, ["right"]) == ["gradients are those without offload: nothing was seen"]


def test_gradients_are_judged_by_every_row():
    [verdict, *_] = targets.judge(
        {"gradients": [SAME, SAME | {"num_different": 2, "first_different": "step 0: w"}]}, ["right"]
    )
    assert (verdict["num_cases"], verdict["num_met"], verdict["is_met"]) == (2, 1, False)
    assert verdict["misses"] == ["plain, overlap: 2 of 100, step 0: w"]
    [verdict, *_] = targets.judge({"gradients": [SAME | {"num_gradients": 0, "first_different": ""}]}, ["right"])
    assert not verdict["is_met"]  # nothing was compared
    failed = SAME | {"way": "all ways", "num_gradients": 0, "problem": "RuntimeError: lost"}
    assert targets.judge({"gradients": [failed]}, ["right"])[0]["misses"] == ["plain, all ways: RuntimeError: lost"]


def step(way="overlap", ratio=1.0, copy=0.5, error=0.0, **more):
    timed = {"model": "8B", "seq_len": 4096, "way": way, "step_ms": 110.0, "ratio_to_ac": ratio}
    waits = {"h2d_wait_ms": 4.0, "d2h_wait_ms": 1.0}
    return timed | {"copy_over_forward": copy, "planner_error_percent": error} | waits | more


def verdict_of(number: int, **tables) -> dict:
    return targets.judge({name.replace("_", " "): rows for name, rows in tables.items()}, gpu_check.SHARES)[number]


def test_overlap_is_judged_where_a_copy_is_shorter_than_a_forward():
    rows = [step(ratio=1.01), step(ratio=1.1), step(ratio=1.5, copy=1.2), step(way="sync", ratio=2.0)]
    verdict = verdict_of(2, step_time=rows)
    assert (verdict["num_cases"], verdict["num_met"]) == (2, 1)
    assert verdict["misses"] == [
        "8B, 4096 tokens, overlap: 1.100, of 10.0 ms more 4.0 ms were waits for reloads, 1.0 ms for offloads"
    ]


def test_rows_that_were_left_out_are_not_judged():
    assert verdict_of(2, step_time=[{"model": "8B", "way": "overlap", "left_out": "no room"}])["num_cases"] == 0


def test_copies_are_judged_by_what_an_idle_device_reaches():
    row = {"model": "8B", "seq_len": 4096, "direction": "d2h"}
    verdict = verdict_of(3, link_in_steps=[row | {"reached_fraction": f} for f in (0.95, 0.9)])
    assert (verdict["num_met"], verdict["misses"]) == (1, ["8B, 4096 tokens, d2h: 90.0%"])


@pytest.mark.parametrize(("per_block", "is_met"), [(0, True), (9, True), (11, False), (1000, False)])
def test_memory_is_judged_by_its_growth_with_depth(per_block, is_met):
    rows = [
        {"way": way, "num_blocks": n, "input_bytes": 1000, "step_bytes": 5000 + each * n, "num_offloads": moved}
        for way, each, moved in (("ac", 1000, 0), ("overlap", per_block, 7))
        for n in (8, 16, 32)
    ]
    assert verdict_of(4, device_memory=rows)["is_met"] is is_met


def test_plans_are_judged_both_ways_and_not_of_what_they_were_made_from():
    rows = [step(error=10.0), step(error=-10.5), step(way="ac", error=50.0)]
    verdict = verdict_of(5, step_time=rows)
    assert (verdict["num_cases"], verdict["misses"]) == (2, ["8B, 4096 tokens, overlap: -10.5 %"])


def test_failures_of_tests_and_rows_are_faults():
    tables = {"gradients": [SAME], "device tests": [PASSED]}
    assert targets.find_faults(tables, gpu_check.SHARES) == []
    failed = PASSED | {"failed": 1, "failures": ["tests/gpu/a.py::b"]}
    assert targets.find_faults(tables | {"device tests": [failed]}, gpu_check.SHARES) == [
        "tests of a device pass: tests/gpu/a.py::b"
    ]
    for name in ("step time", "timeline", "sanitizer"):
        assert targets.find_faults(tables | {name: [{"problem": "it broke"}]}, gpu_check.SHARES) == [
            f"{name}: it broke"
        ]


# What is told


def test_tables_show_what_rows_have():
    rows = [step(num_misses=0), {"model": "8B", "seq_len": 100, "way": "no_ac", "left_out": "out of device memory"}]
    headings, lines = cells("step time", rows)
    assert headings[:5] == ["model", "tokens", "way", "ms", "to AC"]
    assert lines[0][:5] == ["8B", "4K", "overlap", "110.0", "1.000"]
    assert lines[1][:4] == ["8B", "100", "no_ac", ""]
    assert [line[-1] for line in lines] == ["", "out of device memory"]


def test_every_table_of_the_parts_has_a_shape():
    """Guards: a table that is measured and never shown."""
    folder = os.path.dirname(targets.__file__)
    names = set()
    for name in os.listdir(folder):
        if name.endswith(".py"):
            with open(os.path.join(folder, name)) as file:
                names |= {text.split('"')[1] for text in file.read().split("task.emit(")[1:]}
    assert names | {"parts", "targets"} == set(SHAPES)


def test_a_value_that_does_not_fit_its_column_is_shown_as_it_is():
    """Guards: rows that are lost because one of them cannot be shown."""
    assert cells("link", [{"copy_bytes": "many"}])[1] == [["many"]]


def test_markdown_has_a_table_per_table_and_no_broken_cell(capsys):
    tables = {"gradients": [SAME | {"first_different": "a|b"}], "parts": [{"part": "right", "seconds": 1.0}]}
    page = markdown("Results", {"device": "d"}, tables)
    assert page.count("\n## ") == 2
    rows = [line for line in page.splitlines() if line.startswith("| plain")]
    assert rows == ["| plain | overlap | 20 | 100 | 0 | a/b |"]
    print_tables(tables)
    assert "a|b" in capsys.readouterr().out
