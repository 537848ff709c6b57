"""Starts TorchTitan trainings on gloo ranks, for the tests of this folder.

All rows that are given together share one start of torchrun, see `trainings`.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
START_LIMIT_S, ROW_LIMIT_S = 120, 20
"""Time limits: of a start, and of each row; on two free cores it is a tenth."""

DEFAULTS = {
    "--training.steps": "3",
    "--training.seq_len": "64",
    "--metrics.log_freq": "1",
    "--debug.deterministic": "",
}
"""Flags of a row that does not give them itself."""


@functools.cache
def make_corpus() -> None:
    """The text and the tokenizer that the train configs name."""
    command = [sys.executable, "scripts/make_corpus.py", "--out", "data/corpus"]
    subprocess.run(command, cwd=REPO, check=True, timeout=300)


def train_rows(rows: list[str], folder: Path, *, ranks: int = 2) -> list[list[dict[str, Any]]]:
    """Trains ``rows`` one after the other.

    Args:
        rows: of each the flags of TorchTitan, with `DEFAULTS` and a dump folder for those that it does not give; before
            them, ``stock`` or ``plain`` as `trainings` says.
        folder: for files of this call.
        ranks: number of processes.

    Returns:
        For each row and rank what `trainings.train` returns.

    Raises:
        AssertionError: torchrun failed; the text is the end of what it wrote.
        subprocess.TimeoutExpired: it took longer than `START_LIMIT_S`, and `ROW_LIMIT_S` for each row.
    """
    make_corpus()
    defaults = {**DEFAULTS, "--job.dump_folder": str(folder / "run")}
    lists = [flags.split() for flags in rows]
    lists = [[*flags, *(x for k, v in defaults.items() if k not in flags for x in (k, v) if x)] for flags in lists]
    (folder / "rows.json").write_text(json.dumps(lists))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
    command += [str(Path(__file__).parent / "trainings.py"), str(folder / "rows.json"), str(folder / "out.json")]
    _run(command, START_LIMIT_S + ROW_LIMIT_S * len(rows))
    return json.loads((folder / "out.json").read_text())


def _run(command: list[str], limit_s: float) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"}
    env["HF_HUB_OFFLINE"] = "1"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=REPO, env=env, text=True, **pipes) as torchrun:
        try:
            out, _ = torchrun.communicate(timeout=limit_s)
        finally:
            torchrun.terminate()  # then it ends its workers, which a kill would leave behind
    assert torchrun.returncode == 0, out[-8000:]
