"""The table of all trainings that were compared: row, ranks, mode, bytes moved, misses, identical or not."""

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from titan_offload.config import MIB

HEADINGS = ("row", "ranks", "mode", "moved a step (MiB)", "misses a step", "identical")
WIDTH = 1000
"""Lines are never broken: a table takes what it needs."""


def result_lines(name: str, trained: dict[str, list[dict[str, Any]]], reference: str) -> list[tuple[str, ...]]:
    """The lines of one row.

    Args:
        trained: variant -> what `runs.train_rows` returned of each rank.
        reference: the variant with which all others are compared. It has no line.
    """
    expected = [rank["metrics"] for rank in trained[reference]]
    lines = []
    for variant, ranks in trained.items():
        if variant == reference:
            continue
        steps = [rank["report"]["last_step"] for rank in ranks if rank["report"] is not None]
        moved_bytes = sum(step["offloaded_bytes"] for step in steps)
        num_misses = sum(step["num_misses"] for step in steps)
        verdict = "yes" if [rank["metrics"] for rank in ranks] == expected else "NO"
        lines.append((name, str(len(ranks)), variant, f"{moved_bytes / MIB:.2f}", str(num_misses), verdict))
    return lines


def result_table(lines: Iterable[tuple[str, ...]]) -> Table:
    """Of the last step, summed over all ranks."""
    table = Table(title="trainings with and without offload", title_justify="left")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index in (1, 3, 4) else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def as_text(table: Table, has_colors: bool) -> str:
    """The table as a terminal, or a file, shows it."""
    file = io.StringIO()
    Console(file=file, force_terminal=has_colors, width=WIDTH).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
