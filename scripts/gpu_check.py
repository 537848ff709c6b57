"""Checks and measures on a CUDA device all that a GPU decides about offload, in one command.

    python scripts/gpu_check.py                       # on the device, in 9 minutes at most
    python scripts/gpu_check.py --minutes 5 --out results
    python scripts/gpu_check.py --emulate             # every part on a CPU, small: whether the command works
    python scripts/gpu_check.py --parts right link

TorchTitan's Qwen3 under FSDP2 on one device, with a process group made on the fly; no data set and no tokenizer. The
parts, by worth, see their modules in `gpu_parts`:

    right          gradients with offload are those without, bit for bit
    device_tests   the tests in tests/gpu
    memory         device memory by depth; host memory; what pinning costs
    link           what the link carries, and what copies reach while the device computes
    step_time      step time in all ways, beside activation checkpointing alone and beside a plan
    timeline       a profiler's trace of a step: what of the copies is hidden, and what the device waits for
    sanitizer      a small case under compute-sanitizer

Each part is a process of its own, with a time of its own, and each row is written down as it is made: a part that
fails, hangs or loses the device costs its own rest and nothing else. In the folder: ``gpu_check.json``, all rows;
``gpu_check.md``, the same as tables; ``gpu_check.log``, what the parts printed; a trace.

Exit code: 0; 1 if a gradient differs, a test fails, or a part does not end well; 2 for a mistake on the command line.
A target that is missed is told, and is no failure.
"""

import argparse
import contextlib
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from bench_report import commit, garbage_collector_off, print_json
from gpu_parts import sanitizer
from gpu_parts.device import facts, find_device
from gpu_parts.part import Task, TimeBox
from gpu_parts.tables import markdown, print_tables
from gpu_parts.targets import find_faults, judge

SHARES = {
    **{"right": 110, "device_tests": 55, "memory": 45, "link": 35},
    **{"step_time": 240, "timeline": 40, "sanitizer": 35},
}
"""The parts in order, and how they share the time. What one leaves over goes to those after it."""

GRACE_S = 10.0
"""How long a part may go on after its time, to finish what it is in the middle of."""

END_S = 5.0
"""Kept for the tables at the end."""

FACTS = "facts"


# The parts' processes


def run_part(name: str, args: argparse.Namespace) -> None:
    """In a process of its own: runs a part. Its rows are lines of JSON on what was stdout; what is printed is log."""
    device = find_device(args.emulate)
    if device.is_emulated:
        torch.set_num_threads(1)  # more threads would take cores from the copies
    if name == sanitizer.CASE:
        sanitizer.run_case(device)
        return
    with os.fdopen(os.dup(1), "w") as rows, garbage_collector_off():
        os.dup2(2, 1)

        def emit(table: str, row: dict[str, Any]) -> None:
            print(json.dumps([table, row]), file=rows, flush=True)

        emit(FACTS, facts(device))
        importlib.import_module(f"gpu_parts.{name}").run(device, Task(args.out, TimeBox(args.seconds), emit))


class Check:
    """All parts, one after the other.

    Attributes:
        tables: rows by table, as far as they are known.
        about: what they are of.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.box = TimeBox(args.minutes * 60 - END_S)
        self.tables: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.about: dict[str, Any] = {
            "command": shlex.join(["python", "scripts/gpu_check.py", *sys.argv[1:]]),
            "commit": args.commit or commit(),
        }

    def run(self) -> None:
        parts = [name for name in SHARES if name in self.args.parts]
        with (self.args.out / "gpu_check.log").open("w") as log:
            for index, name in enumerate(parts):
                share = SHARES[name] / sum(SHARES[later] for later in parts[index:])
                self.run_part(name, share * self.box.left(), log)
        self.tables["targets"] = judge(self.tables, self.args.parts)
        self.write()

    def run_part(self, name: str, seconds: float, log: TextIO) -> None:
        """Runs a part for so long, and a little more at most."""
        print(f"{name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
        start, limit = time.perf_counter(), min(seconds + GRACE_S, self.box.left())
        log.write(f"==== {name}\n")
        log.flush()
        process = subprocess.Popen(
            self.command_of(name, seconds),
            env=os.environ | environment_of(name),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        is_stopped = threading.Event()
        timer = threading.Timer(limit, lambda: (is_stopped.set(), kill(process)))
        timer.start()
        try:
            for table, row in rows_of(process.stdout):
                self.add(table, row)
            process.wait()
        finally:
            timer.cancel()
            kill(process)  # what it has started, and where this process is told to end, itself
        row = {"part": name, "seconds": time.perf_counter() - start, "box_s": seconds}
        self.add("parts", row | how_it_ended(process.returncode, is_stopped.is_set(), name))

    def command_of(self, name: str, seconds: float) -> list[str]:
        """What runs a part."""
        command = [sys.executable, __file__, "--run", name, "--seconds", f"{seconds:.3f}", "--out", str(self.args.out)]
        return command + (["--emulate"] if self.args.emulate else [])

    def add(self, table: str, row: dict[str, Any]) -> None:
        if table == FACTS:
            self.about = row | self.about
        else:
            self.tables[table].append(row)
        self.write()

    def write(self) -> None:
        """Writes down what is known now; whoever reads meanwhile sees the state before."""
        self.replace("gpu_check.json", json.dumps(self.about | {"tables": self.tables}, indent=1))
        self.replace("gpu_check.md", markdown("Offload on a device", self.about, self.tables))

    def replace(self, name: str, text: str) -> None:
        draft = self.args.out / f"{name}.draft"
        draft.write_text(text)
        draft.replace(self.args.out / name)


def environment_of(name: str) -> dict[str, str]:
    """Variables of a part's process. Where gradients are compared, cuBLAS has to compute the same twice. TorchTitan's
    launcher has torch use expandable segments; part "right" runs without them, so that both allocators are seen. A
    process group of one needs no network."""
    own = {"right": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "sanitizer": sanitizer.ENVIRONMENT}
    return {"NCCL_SOCKET_IFNAME": "lo"} | own.get(name, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def rows_of(lines: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a part, as they come. The last line of one that was stopped may be cut off."""
    for line in lines:
        try:
            table, row = json.loads(line)
        except ValueError:
            continue
        yield table, row


def kill(process: subprocess.Popen) -> None:
    """Ends a process and all that it has started, if there is anything left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def how_it_ended(returncode: int, is_stopped: bool, name: str) -> dict[str, str]:
    """Columns of the table of parts. Only where not all would be seen it is a problem that time ended."""
    if is_stopped:
        ended = {"ended": "stopped: its time was over"}
        return ended | ({"problem": "not all was compared"} if name == "right" else {})
    if returncode == 0:
        return {"ended": "as it should"}
    return {"ended": f"exit code {returncode}", "problem": f"failed with exit code {returncode}: see gpu_check.log"}


# The command line


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_check"), help="folder (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it, at most (default: %(default)s)")
    parser.add_argument("--emulate", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES), help="default: all")
    parser.add_argument("--commit", help="what results are of, where there is no git (default: of the checkout)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not 0 < args.minutes <= 600:
        parser.error(f"--minutes {args.minutes:g} is not allowed: set it to a number above 0 and at most 600")
    try:
        find_device(args.emulate)
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.run:
        run_part(args.run, args)
        return 0
    check = Check(args)
    check.run()
    print_tables(check.tables)
    faults = find_faults(check.tables, args.parts)
    for fault in faults:
        print(f"wrong: {fault}")
    parameters = {"minutes": args.minutes, "parts": args.parts, "is_emulated": args.emulate}
    about = {key: value for key, value in check.about.items() if key not in ("device", "torch")}
    results = about | {"tables": check.tables, "faults": faults}
    print_json("gpu_check", check.about.get("device", "unknown"), parameters, results)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
