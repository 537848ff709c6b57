"""What the benchmarks share: a table for people, and one JSON document as the last line of stdout for programs."""

import contextlib
import gc
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 100


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    table = Table(title=title, caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=TABLE_WIDTH).print(table)


def print_json(benchmark: str, device: str, parameters: dict[str, Any], results: dict[str, Any]) -> None:
    """The last line: what was run, where, with which settings, and what came out."""
    document = {"benchmark": benchmark, "device": device, "torch": torch.__version__, "commit": commit()}
    print(json.dumps(document | {"parameters": parameters} | results), flush=True)


def commit() -> str | None:
    """Short hash of the checked-out commit; None where there is no git or no commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


@contextlib.contextmanager
def garbage_collector_off() -> Iterator[None]:
    """As TorchTitan trains: a collection would fall on one variant or another by chance."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
