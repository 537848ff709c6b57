"""What the documents name is there, and no cell of the support table is empty, where it would hide a gap."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
DOCUMENTS = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def test_support_table_has_no_empty_cell():
    lines = (REPO / "docs" / "support.md").read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    table = rows[: next(i for i, row in enumerate(rows) if row[0].strip() == "torch")]
    assert len(table) > 30
    assert {len(row) for row in table} == {5}
    assert all(cell.strip() for row in table for cell in row)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_tests_that_are_named_exist(document):
    named = r"`((?:tests|scripts|launch|train_configs|docs)/[\w./]+?)(?:::(\w+))?`"
    for path, test in re.findall(named, document.read_text()):
        assert (REPO / path).exists(), path
        assert not test or f"def {test}(" in (REPO / path).read_text(), f"{path}::{test}"
