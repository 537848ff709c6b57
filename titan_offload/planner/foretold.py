"""What a plan foretold of a run, beside what the run measured.

Owns this comparison. Relies on a plan as JSON (`plan.Plan.to_json`) and on the run's ``summary.json``; pure data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from titan_offload.config import GIB


@dataclass(frozen=True)
class Comparison:
    """One figure.

    Attributes:
        what: which, with its unit.
        foretold, measured: in that unit.
    """

    what: str
    foretold: float
    measured: float

    @property
    def error_percent(self) -> float | None:
        """By how much the plan is above what was measured; None: nothing was."""
        return None if self.measured == 0 else (self.foretold / self.measured - 1) * 100


def compare(plan: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Comparison]:
    """Pinned memory and bytes moved, each of the rank that has most, and the time of a step.

    Args:
        plan: as JSON. Its step leaves out embedding, head, loss, optimizer and collectives, and holds for the link and
            the TFLOP/s that it names.
        summary: of a run that had at least one step on every rank that reported.
    """
    step, ranks = plan["steps"][plan["variant"]], summary["ranks"]
    moved = max(rank["offloaded_bytes"] / max(1, rank["num_steps"]) for rank in ranks)
    rows = [
        Comparison(
            "pinned memory (GiB)", plan["memory"]["pinned_gib"], max(r["pinned_peak_bytes"] for r in ranks) / GIB
        ),
        Comparison("moved to the host per step (GiB)", step["moved_gib"], moved / GIB),
    ]
    if measured := [rank["step_ms"] for rank in ranks if rank["step_ms"]]:
        rows.append(Comparison("step (ms)", step["step_ms"], median(measured)))
    return rows


def foretold_lines(plan: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """The comparison as a Markdown table, and what the plan took for granted."""
    machine = plan["machine"]
    lines = ["| | foretold | measured | error |", "| --- | --- | --- | --- |"]
    for row in compare(plan, summary):
        error = "" if row.error_percent is None else f"{row.error_percent:+.1f} %"
        lines.append(f"| {row.what} | {row.foretold:.6g} | {row.measured:.6g} | {error} |")
    lines += [
        "",
        f"Foretold for {machine['tflops']:g} TFLOP/s and a link of {machine['d2h_gb_per_s']:g} GB/s out and "
        f"{machine['h2d_gb_per_s']:g} back, shared by {machine['devices_per_link']}; embedding, head, loss, optimizer "
        "and collectives left out.",
    ]
    return lines
