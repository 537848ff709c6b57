"""scripts/gpu_check.py --emulate: every part of it, from the command line to the last line."""

import gzip
import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(420)]

TABLES = {
    *("gradients", "device tests", "device memory", "pinning", "link", "link at start", "link in steps", "step time"),
    *("timeline", "gaps", "sanitizer", "parts", "targets"),
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory, request):
    """The folder, and what it printed."""
    folder = tmp_path_factory.mktemp("gpu_check")
    command = [sys.executable, "scripts/gpu_check.py", "--emulate", "--minutes", "6", "--out", str(folder)]
    env = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(command, cwd=request.config.rootpath, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{(folder / 'gpu_check.log').read_text()[-3000:]}"
    return folder, done.stdout


def test_every_part_runs_and_fills_its_tables(checked):
    folder, output = checked
    document = json.loads(output.splitlines()[-1])
    assert document["faults"] == []
    assert set(document["tables"]) == TABLES
    assert [row["ended"] for row in document["tables"]["parts"]] == ["as it should"] * 7
    assert (document["benchmark"], document["device"]) == ("gpu_check", "emulated on a CPU")
    written = json.loads((folder / "gpu_check.json").read_text())
    assert written["tables"] == document["tables"]


def test_gradients_are_right_in_every_way_and_round(checked):
    rows = json.loads(checked[1].splitlines()[-1])["tables"]["gradients"]
    assert len(rows) == 4 * 8
    assert all(row["num_gradients"] > 0 and row["num_different"] == 0 for row in rows)
    moving = [row for row in rows if row["way"] not in ("ac_again", "no_ac")]
    assert all(row["num_offloads"] >= 3 * row["num_steps"] for row in moving)


def test_no_row_failed(checked):
    tables = json.loads(checked[1].splitlines()[-1])["tables"]
    assert not any(row.get("problem") for name in TABLES for row in tables[name])


def test_the_page_and_the_trace_are_written(checked):
    folder, _ = checked
    page = (folder / "gpu_check.md").read_text()
    assert page.count("\n## ") == len(TABLES)
    assert "- command: python scripts/gpu_check.py --emulate" in page
    with gzip.open(folder / "trace_overlap.json.gz", "rt") as file:
        assert json.load(file)["traceEvents"]
