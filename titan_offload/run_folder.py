"""What a run leaves in ``<dump_folder>/offload``, and what it tells of a run that did not end well.

    budget.json            what every rank found, needs and gets; written by rank 0 before any memory is pinned
    ranks/rank_00003.json  what a rank did last; replaced at the first step, at each logged one and while it pins
    summary.json           the whole run; written when it ends, well or not
    plan.json              what `titan-offload plan --store` foretold; else the run's own plan is in budget.json

A process that the kernel kills for memory writes nothing more, and leaves no traceback. That it was killed shows in
the kernel's counts, which are in ``budget.json`` as they were at start: they are read again and compared.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_offload.host_memory import VMSTAT, read_oom_kills_at
from titan_offload.host_report import Record, ranks_text
from titan_offload.report import gib
from titan_offload.topology import read_host


class RunFolder:
    """The files of one run.

    Args:
        path: ``<dump_folder>/offload``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_budget(self, record: Record) -> None:
        """Raises OSError."""
        self._write("budget.json", record)

    def write_state(self, record: Record, rank: int, state: Record) -> None:
        """What ``rank`` did until now in the run of ``record``. Raises OSError."""
        own = {"rank": rank, "started": record["started"], "time": time.time()}
        self._write(f"ranks/rank_{rank:05d}.json", own | state)

    def write_summary(self, summary: Record) -> None:
        """Raises OSError."""
        self._write("summary.json", summary)

    def write_plan(self, plan: Record) -> None:
        """What is foretold of runs in this folder. Raises OSError."""
        self._write("plan.json", plan)

    def plan(self, record: Record) -> Record | None:
        """What was foretold of the run of ``record``; None: nothing."""
        return _read(self.path / "plan.json") or record.get("plan")

    def _write(self, name: str, data: Record) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(path)  # whoever reads, or is killed, finds the old file or the new one, whole

    def budget(self) -> Record:
        """Raises ValueError: there is none, or it is not one."""
        path = self.path / "budget.json"
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(
                f"there is no {path}: give the dump_folder of a run with activation offload, or its folder offload"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path}: {error}") from None
        if not isinstance(record, dict) or not {"ranks", "started", "config"} <= set(record):
            raise ValueError(f"{path} is not a budget.json of this package: it lacks ranks, started or config")
        return record

    def states(self, record: Record) -> dict[int, Record]:
        """What each rank did last, of the run of ``record`` only."""
        found = (_read(path) for path in sorted((self.path / "ranks").glob("rank_*.json")))
        return {state["rank"]: state for state in found if state and state.get("started") == record["started"]}

    def summary(self, record: Record) -> Record | None:
        """The summary of the run of ``record``; None: it wrote none."""
        summary = _read(self.path / "summary.json")
        return summary if summary and summary.get("started") == record["started"] else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # being written, or cut off: as if it were not there
        return None


def verdict(folder: RunFolder, record: Record, root: Path | str = "/") -> list[str]:
    """How the run of ``record`` ended, as far as its folder and this machine tell.

    Args:
        folder, record: of the run.
        root: of the machine's files; for tests.
    """
    summary = folder.summary(record)
    states = folder.states(record)
    if summary is not None and summary["finished"]:
        return [f"The run finished, after step {summary['step']}."]
    if killed := _kills(record, root):
        sure = "was" if any(source != VMSTAT for source in killed) else "was probably"
        counts = (f"{source} counts {num} killed since it started" for source, num in killed.items())
        ending = f"The run {sure} killed for memory: {'; '.join(counts)}."
    elif summary is not None:
        ending = f"The run ended early, after step {summary['step']}, and not for memory: its log tells why."
    else:
        ending = f"The run left no summary: it still runs, or it was killed. {_no_sign_of_a_kill(record, root)}"
    return [ending, _last_seen(record, states)]


def was_killed_for_memory(record: Record, root: Path | str = "/") -> bool:
    """Whether the kernel killed a process below one of the run's memory limits, or elsewhere on its host, since the run
    started."""
    return bool(_kills(record, root))


def _kills(record: Record, root: Path | str) -> dict[str, int]:
    """By source, how many processes were killed since the run started."""
    before = _counts_at_start(record, root)
    now = read_oom_kills_at(before, root)
    return {source: now[source] - before[source] for source in now if now[source] > before[source]}


def _counts_at_start(record: Record, root: Path | str) -> Mapping[str, int]:
    """Of the host that this is read on: sources of other hosts are other files."""
    host, counts = read_host(root).identity, {}
    for rank in record["ranks"]:
        if rank["host"] == host:
            for source, count in (rank["memory"]["oom_kills"] or {}).items():
                counts[source] = min(count, counts.get(source, count))
    return counts


def _no_sign_of_a_kill(record: Record, root: Path | str) -> str:
    before = _counts_at_start(record, root)
    here = read_host(root)
    if not before:
        names = ", ".join(sorted({rank["hostname"] for rank in record["ranks"]}))
        return f"This host ({here.name}) is none of the run's as it was then ({names}): run this there to see."
    gone = sorted(set(before) - set(read_oom_kills_at(before, root)))
    seen = "The kernel counts no process killed for memory since it started"
    return f"{seen}, but {', '.join(gone)} is gone." if gone else f"{seen}."


def _last_seen(record: Record, states: Mapping[int, Record]) -> str:
    silent = [rank["rank"] for rank in record["ranks"] if rank["rank"] not in states]
    parts = []
    for phase in dict.fromkeys(state["phase"] for state in states.values()):
        of_phase = [state for state in states.values() if state["phase"] == phase]
        free = min(state["free_bytes"] for state in of_phase)
        parts.append(
            f"rank {ranks_text(state['rank'] for state in of_phase)} {phase}, with {gib(free)} GiB of host memory free"
        )
    if silent:
        parts.append(f"rank {ranks_text(silent)} before it pinned anything")
    return f"Last seen: {'; '.join(parts)}."
