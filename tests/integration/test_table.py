"""The table at the end of a pytest run, and which rows are trained for it."""

import re
from pathlib import Path

import pytest
import results
from all_rows import all_names, group_of, trainings_of
from rows import ROWS
from save_rows import SAVES
from table import as_text, result_lines, result_table

MIB = 2**20


def rank(metrics, moved_bytes=None, num_misses=0):
    last_step = {"offloaded_bytes": moved_bytes, "num_misses": num_misses}
    return {"metrics": metrics, "report": None if moved_bytes is None else {"last_step": last_step}}


CURVE, OTHER = [[1, "8.25", "0.5", "None"]], [[1, "8.250000001", "0.5", "None"]]
TRAINED = {
    "off": [rank(CURVE), rank(OTHER)],
    "block_inputs": [rank(CURVE, 3 * MIB, 1), rank(OTHER, MIB // 2)],
    "all": [rank(CURVE, MIB), rank(CURVE, MIB)],
    "no AC": [rank(CURVE), rank(OTHER)],
}


def test_all_ranks_are_summed_and_compared():
    assert result_lines("a row", TRAINED, "off") == [
        ("a row", "2", "block_inputs", "3.50", "1", "yes"),
        ("a row", "2", "all", "2.00", "0", "NO"),
        ("a row", "2", "no AC", "0.00", "0", "yes"),
    ]


def test_lines_of_a_file_are_plain_and_never_broken():
    name = "a row with " + "many words " * 30
    text = as_text(result_table(result_lines(name, TRAINED, "off")), has_colors=False)
    assert "\x1b" not in text
    assert [line.split("│")[1:3] for line in text.splitlines() if name in line] == [[f" {name} ", "     2 "]] * 3
    assert "\x1b" in as_text(result_table([]), has_colors=True)


def test_summary_compares_with_what_the_row_is_compared_with():
    runs = {"plain": [rank(CURVE)], "off": [rank(OTHER, 0)], "attention": [rank(CURVE, 0)]}
    text = results.summary({"llama3 DDP": TRAINED, "deepseek_v3 FSDP2": runs}, has_colors=False)
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "2 │" in line or "1 │" in line
    ]
    assert [(row, mode, verdict) for row, _, mode, _, _, verdict in cells] == [
        ("llama3 DDP", "block_inputs", "yes"),
        ("llama3 DDP", "all", "NO"),
        ("llama3 DDP", "no AC", "yes"),
        ("deepseek_v3 FSDP2", "off", "NO"),
        ("deepseek_v3 FSDP2", "attention", "yes"),
    ]


def test_what_selected_tests_name_is_trained_in_groups(monkeypatch, tmp_path):
    started = []

    def train_rows(flags, folder, ranks):
        started.append((len(flags), ranks))
        return [[number] for number in range(len(flags))]

    monkeypatch.setattr(results, "train_rows", train_rows)
    trained = {}
    names = {"llama3 DDP", "llama3 FSDP2, bfloat16", "llama3 HSDP", "deepseek_v3 FSDP2"}
    made = results.Results(names, trained, tmp_path)
    assert list(made["llama3 DDP"].items()) == [(v, [i]) for i, v in enumerate(ROWS["llama3 DDP"].variants, start=5)]
    assert list(trained) == ["llama3 FSDP2, bfloat16", "llama3 DDP"]
    assert started == [(5 + 3, 2)]
    assert list(made["llama3 HSDP"]) == list(ROWS["llama3 HSDP"].variants)
    assert made["llama3 FSDP2, bfloat16"]["off"] == [0]
    assert started == [(5 + 3, 2), (4, 4)]


def test_a_group_that_failed_is_not_started_again(monkeypatch, tmp_path):
    started = []

    def fail(flags, folder, ranks):
        started.append(flags)
        raise AssertionError("torchrun failed")

    monkeypatch.setattr(results, "train_rows", fail)
    made = results.Results({"llama3 DDP", "llama3 FSDP2"}, {}, tmp_path)
    for name in ("llama3 DDP", "llama3 FSDP2"):
        with pytest.raises(AssertionError, match="torchrun failed"):
            made[name]
    assert len(started) == 1


def test_every_row_says_what_it_is():
    """Flags that two rows share would compare the same training twice."""
    assert set(all_names()) >= {*ROWS, *SAVES}
    flags = [(group_of(name)[0], flags) for name in all_names() for flags in trainings_of(name).values()]
    assert len(set(flags)) == len(flags)


def test_rows_that_the_support_page_names_exist():
    """Of the matrix and of selective saves; the end of a name, or its start and dots, stand for all that match."""
    text = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
    groups = re.findall(r"(?:test_matrix|test_saves)\.py`, rows? ((?:`[^`]+`(?:, )?)+)", text)
    assert len(groups) >= 10
    for name in re.findall(r"`([^`]+)`", " ".join(groups)):
        pattern = re.escape(name).replace(r"\.\.\.", ".*")
        assert any(re.search(f"{pattern}$", known) for known in all_names()), name
