"""What a device has to show, judged from the rows of `gpu_check.py`; what was missed, with what the rows say of why."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]

MAX_OVERLAP_RATIO = 1.01
MIN_REACHED_FRACTION = 0.95
MAX_GROWTH_FRACTION = 0.01
MAX_PLANNER_ERROR_PERCENT = 10.0


def judge(tables: Tables, parts: Collection[str]) -> list[dict[str, Any]]:
    """A row per target of the parts that were asked for: how many cases there were, how many met it, and the others. A
    target without cases is not met: nothing was seen."""
    verdicts = [
        verdict(
            "right", "gradients are those without offload", tables.get("gradients", ()), _is_same, _where_different
        ),
        verdict("device_tests", "tests of a device pass", tables.get("device tests", ()), _have_passed, _what_failed),
        verdict(
            "step_time",
            f"overlap takes at most {MAX_OVERLAP_RATIO:g} times AC alone where a copy is shorter than a forward",
            [row for row in _timed(tables) if row["way"] == "overlap" and row["copy_over_forward"] < 1],
            lambda row: row["ratio_to_ac"] <= MAX_OVERLAP_RATIO,
            _why_slow,
        ),
        verdict(
            "link",
            f"copies in steps reach {MIN_REACHED_FRACTION:.0%} of what the link carries on an idle device",
            tables.get("link in steps", ()),
            lambda row: row["reached_fraction"] >= MIN_REACHED_FRACTION,
            lambda row: f"{row['model']}, {row['seq_len']} tokens, {row['direction']}: {row['reached_fraction']:.1%}",
        ),
        verdict(
            "memory",
            f"device memory grows by at most {MAX_GROWTH_FRACTION:.0%} of an input per block",
            growth(tables.get("device memory", ())),
            lambda row: row["growth_fraction"] <= MAX_GROWTH_FRACTION,
            lambda row: f"{row['way']}: {row['growth_fraction']:.1%} of an input per block",
        ),
        verdict(
            "step_time",
            f"a plan is off by at most {MAX_PLANNER_ERROR_PERCENT:g} %",
            [row for row in _timed(tables) if row["way"] != "ac" and "planner_error_percent" in row],
            lambda row: abs(row["planner_error_percent"]) <= MAX_PLANNER_ERROR_PERCENT,
            lambda row: f"{_case(row)}: {row['planner_error_percent']:+.1f} %",
        ),
    ]
    return [row for row in verdicts if row["part"] in parts]


def verdict(
    part: str, target: str, cases: Iterable[Row], is_met: Callable[[Row], bool], say: Callable[[Row], str]
) -> dict[str, Any]:
    """The row of one target.

    Args:
        part: that makes the cases.
        target: for people.
        cases: what is judged.
        is_met: by a case.
        say: of a case that has missed it, which one and what is known of the cause.
    """
    cases = list(cases)
    missed = [case for case in cases if not is_met(case)]
    return {
        "part": part,
        "target": target,
        "num_cases": len(cases),
        "num_met": len(cases) - len(missed),
        "is_met": bool(cases) and not missed,
        "misses": [say(case) for case in missed] if cases else ["nothing was seen"],
    }


def growth(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By how much the step's device memory grows per block, as a fraction of an input, with offload."""
    offloaded = sorted((row for row in rows if row["num_offloads"]), key=lambda row: row["num_blocks"])
    if len(offloaded) < 2:
        return []
    first, last = offloaded[0], offloaded[-1]
    per_block = (last["step_bytes"] - first["step_bytes"]) / (last["num_blocks"] - first["num_blocks"])
    return [{"way": last["way"], "growth_fraction": per_block / last["input_bytes"]}]


def find_faults(tables: Tables, parts: Collection[str]) -> list[str]:
    """What is wrong and no matter of speed: gradients that differ, tests that fail, parts and rows that failed."""
    rights = judge(tables, {"right", "device_tests"} & set(parts))
    faults = [f"{row['target']}: {miss}" for row in rights for miss in row["misses"]]
    faults += [f"{row['part']}: {row['problem']}" for row in tables.get("parts", ()) if row.get("problem")]
    for name in ("step time", "timeline", "sanitizer"):
        faults += [f"{name}: {row['problem']}" for row in tables.get(name, ()) if row.get("problem")]
    return faults


def _timed(tables: Tables) -> list[Row]:
    return [row for row in tables.get("step time", ()) if "ratio_to_ac" in row]


def _case(row: Row) -> str:
    return f"{row['model']}, {row['seq_len']} tokens, {row['way']}"


def _is_same(row: Row) -> bool:
    return row["num_gradients"] > 0 and row["num_different"] == 0


def _where_different(row: Row) -> str:
    where = f"{row['round']}, {row['way']}"
    if row.get("problem"):
        return f"{where}: {row['problem']}"
    return f"{where}: {row['num_different']} of {row['num_gradients']}, {row['first_different']}"


def _have_passed(row: Row) -> bool:
    return row["passed"] > 0 and not row["failed"] and not row["error"] and not row["problem"]


def _what_failed(row: Row) -> str:
    return ", ".join(row["failures"]) or row["problem"] or "none passed"


def _why_slow(row: Row) -> str:
    """How slow, and how much of it the compute stream stood still for copies."""
    excess_ms = row["step_ms"] - row["step_ms"] / row["ratio_to_ac"]
    waits = f"{row['h2d_wait_ms']:.1f} ms were waits for reloads, {row['d2h_wait_ms']:.1f} ms for offloads"
    return f"{_case(row)}: {row['ratio_to_ac']:.3f}, of {excess_ms:.1f} ms more {waits}"
