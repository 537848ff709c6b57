"""What the rows gave: trained when first asked for, and kept for the table."""

from pathlib import Path
from typing import Any

from all_rows import all_names, group_of, num_ranks, reference_of, trainings_of
from runs import train_rows
from table import as_text, result_lines, result_table

Trained = dict[str, dict[str, list[dict[str, Any]]]]
"""Row -> variant -> of each rank what `trainings.train` returned."""


class Results:
    """Results by row. A group of rows is trained when one of them is first asked for.

    Args:
        names: the rows to train: those that selected tests name.
        trained: where results are put.
        folder: for files of the trainings.
    """

    def __init__(self, names: set[str], trained: Trained, folder: Path) -> None:
        self._names = names
        self._trained = trained
        self._folder = folder
        self._failed: dict[object, BaseException] = {}

    def __getitem__(self, name: str) -> dict[str, list[dict[str, Any]]]:
        if name not in self._trained:
            self._train([other for other in all_names() if other in self._names and group_of(other) == group_of(name)])
        return self._trained[name]

    def _train(self, names: list[str]) -> None:
        group = group_of(names[0])
        if group in self._failed:  # once is enough
            raise self._failed[group]
        trainings = {(name, variant): flags for name in names for variant, flags in trainings_of(name).items()}
        folder = self._folder / "-".join(map(str, group))
        folder.mkdir()
        try:
            results = train_rows(list(trainings.values()), folder, ranks=num_ranks(names[0]))
        except Exception as error:
            self._failed[group] = error
            raise
        for (name, variant), result in zip(trainings, results, strict=True):
            self._trained.setdefault(name, {})[variant] = result


def summary(trained: Trained, has_colors: bool) -> str:
    """The table of all rows that were trained."""
    lines = [line for row, runs in trained.items() for line in result_lines(row, runs, reference_of(row))]
    return as_text(result_table(lines), has_colors)
