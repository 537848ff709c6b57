"""How each table of `gpu_check.py` is shown: on a terminal, and as Markdown for ``docs/results``.

Rows stay as the parts made them in the JSON document; here are only titles, columns and units. A row that has a
``left_out`` or a ``problem`` shows that in its last column.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from titan_offload.config import GIB, MIB

Row = Mapping[str, Any]
Cell = Callable[[Any], str]

WIDTH = 170


def number(digits: int) -> Cell:
    return lambda value: f"{value:,.{digits}f}"


def mib(value: float) -> str:
    return f"{value / MIB:,.2f}"


def gib(value: float) -> str:
    return f"{value / GIB:,.2f}"


def percent(value: float) -> str:
    return f"{value * 100:.1f}"


def kind(value: float) -> str:
    """Of a ratio to 1."""
    return f"{value:.3f}"


def tokens(value: int) -> str:
    return f"{value // 1024}K" if value % 1024 == 0 else str(value)


def listed(value: Sequence[str]) -> str:
    return ", ".join(value)


@dataclass(frozen=True)
class Shape:
    """Title of a table; for each column its heading, the key of its value in a row, and how that is written."""

    title: str
    columns: tuple[tuple[str, str, Cell], ...]


SHAPES = {
    "gradients": Shape(
        "Gradients against activation checkpointing (AC) alone",
        (
            ("round", "round", str),
            ("way", "way", str),
            ("steps", "num_steps", str),
            ("gradients", "num_gradients", str),
            ("different", "num_different", str),
            ("first", "first_different", str),
            ("largest noise", "max_noise", number(5)),
            ("offloads", "num_offloads", str),
            ("misses", "num_misses", str),
        ),
    ),
    "device tests": Shape(
        "Tests that need a device",
        (
            ("passed", "passed", str),
            ("failed", "failed", str),
            ("errors", "error", str),
            ("skipped", "skipped", str),
            ("which failed", "failures", listed),
            ("s", "seconds", number(1)),
        ),
    ),
    "device memory": Shape(
        "Memory of a step, by depth, in MiB",
        (
            ("blocks", "num_blocks", str),
            ("way", "way", str),
            ("one input", "input_bytes", mib),
            ("the step's", "step_bytes", mib),
            ("peak allocated", "allocated_bytes", mib),
            ("reserved", "reserved_bytes", mib),
            ("pinned", "pinned_bytes", mib),
            ("in use", "pinned_peak_bytes", mib),
            ("RssAnon", "rss_anon_bytes", mib),
            ("RssFile", "rss_file_bytes", mib),
            ("RssShmem", "rss_shmem_bytes", mib),
        ),
    ),
    "pinning": Shape(
        "Pinning host memory",
        (
            ("how", "how", str),
            ("GiB", "num_bytes", gib),
            ("s", "pin_s", number(3)),
            ("GiB/s", "gib_per_s", number(2)),
            ("to give back, s", "free_s", number(3)),
        ),
    ),
    "link": Shape(
        "Link in GB/s, by size of the copies, on an idle device",
        (
            ("copy, MiB", "copy_bytes", mib),
            ("D2H", "d2h_gb_per_s", number(2)),
            ("H2D", "h2d_gb_per_s", number(2)),
            ("D2H, both at once", "both_d2h_gb_per_s", number(2)),
            ("H2D, both at once", "both_h2d_gb_per_s", number(2)),
        ),
    ),
    "link at start": Shape(
        "Link in GB/s, as measured before step 1",
        (
            ("D2H", "alone_d2h_gb_per_s", number(2)),
            ("H2D", "alone_h2d_gb_per_s", number(2)),
            ("D2H, both at once", "alone_both_d2h_gb_per_s", number(2)),
            ("H2D, both at once", "alone_both_h2d_gb_per_s", number(2)),
        ),
    ),
    "link in steps": Shape(
        "What copies reach while the device computes, in GB/s",
        (
            ("model", "model", str),
            ("tokens", "seq_len", tokens),
            ("copy, MiB", "copy_bytes", mib),
            ("direction", "direction", str),
            ("in steps", "gb_per_s", number(2)),
            ("on an idle device", "idle_gb_per_s", number(2)),
            ("%", "reached_fraction", percent),
        ),
    ),
    "step time": Shape(
        "Forward and backward of a step, against activation checkpointing (AC) alone, and as planned",
        (
            ("model", "model", str),
            ("tokens", "seq_len", tokens),
            ("blocks", "num_blocks", str),
            ("way", "way", str),
            ("ms", "step_ms", number(1)),
            ("to AC", "ratio_to_ac", kind),
            ("planned ms", "planned_ms", number(1)),
            ("planned to AC", "planned_ratio", kind),
            ("plan off, %", "planner_error_percent", number(1)),
            ("copy / forward", "copy_over_forward", number(2)),
            ("misses", "num_misses", str),
            ("D2H wait, ms", "d2h_wait_ms", number(1)),
            ("H2D wait, ms", "h2d_wait_ms", number(1)),
            ("steps", "num_steps", str),
        ),
    ),
    "timeline": Shape(
        "One step on the device",
        (
            ("way", "way", str),
            ("step, ms", "step_ms", number(2)),
            ("computes, ms", "compute_ms", number(2)),
            ("idle, ms", "idle_ms", number(2)),
            ("D2H, ms", "d2h_ms", number(2)),
            ("of it hidden, %", "d2h_overlap_fraction", percent),
            ("GB/s", "d2h_gb_per_s", number(2)),
            ("H2D, ms", "h2d_ms", number(2)),
            ("of it hidden, %", "h2d_overlap_fraction", percent),
            ("GB/s", "h2d_gb_per_s", number(2)),
        ),
    ),
    "gaps": Shape(
        "Where the device did not compute",
        (
            ("way", "way", str),
            ("us", "gap_us", number(1)),
            ("cause", "cause", str),
            ("after", "before", lambda name: name[:40]),
            ("before", "after", lambda name: name[:40]),
        ),
    ),
    "sanitizer": Shape(
        "A small case under compute-sanitizer",
        (("tool", "tool", str), ("result", "result", str), ("s", "seconds", number(1))),
    ),
    "parts": Shape(
        "Parts of this check",
        (("part", "part", str), ("s", "seconds", number(1)), ("of, s", "box_s", number(1)), ("ended", "ended", str)),
    ),
    "targets": Shape(
        "Targets",
        (
            ("target", "target", str),
            ("cases", "num_cases", str),
            ("met by", "num_met", str),
            ("missed", "misses", lambda misses: "; ".join(misses)),
        ),
    ),
}
"""By name, in the order in which they are shown."""


def cells(name: str, rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of a table. A column that no row has is left out."""
    rows = list(rows)
    columns = [column for column in SHAPES[name].columns if any(column[1] in row for row in rows)]
    lines = [[_text(cell, row.get(key)) for _, key, cell in columns] for row in rows]
    headings = [heading for heading, _, _ in columns]
    remarks = [row.get("problem") or row.get("left_out") or "" for row in rows]
    if any(remarks):
        headings.append("remark")
        lines = [[*line, remark] for line, remark in zip(lines, remarks, strict=True)]
    return headings, lines


def _text(cell: Cell, value: Any) -> str:
    try:
        return "" if value is None else cell(value)
    except (TypeError, ValueError):
        return str(value)  # a row that looks odd is worth more than one that stops all that come after it


def print_tables(tables: Mapping[str, Sequence[Row]], console: Console | None = None) -> None:
    """All tables that have rows, for people."""
    console = console or Console(width=WIDTH)
    for name in SHAPES:
        if tables.get(name):
            headings, lines = cells(name, tables[name])
            table = Table(title=SHAPES[name].title, title_justify="left")
            for heading in headings:
                table.add_column(heading, overflow="fold")
            for line in lines:
                table.add_row(*line)
            console.print(table)


def markdown(heading: str, about: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]) -> str:
    """The same as a page.

    Args:
        heading: its title.
        about: what the results are of.
        tables: rows by table.
    """
    lines = [f"# {heading}", "", *(f"- {key}: {value}" for key, value in about.items())]
    for name in SHAPES:
        if tables.get(name):
            headings, body = cells(name, tables[name])
            lines += ["", f"## {SHAPES[name].title}", "", _line(headings), _line(["---"] * len(headings))]
            lines += [_line(cells_of_row) for cells_of_row in body]
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"
