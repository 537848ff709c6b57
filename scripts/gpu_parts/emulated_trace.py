"""Adds to the trace of a CPU what a device's trace has: kernels, copies, and the calls that launched them.

So an emulated run comes past the reading of a trace, of which it has all but the device. A kernel is whatever op the
training thread runs, while it runs. A copy lasts as `copy_log` has noted it, and was launched in the engine's own
annotation.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_parts.copy_log import Copy

CLOCK = "gpu_check::clock"
"""Annotation that begins when the host's clock is read, so that both clocks can be told apart."""

COMPUTE_STREAM, STREAMS = 7, {"d2h": 13, "h2d": 14}
NAMES = {"d2h": "Memcpy DtoH (Device -> Pinned)", "h2d": "Memcpy HtoD (Pinned -> Device)"}


def add_device_work(path: Path, copies: Sequence[Copy], clock_s: float) -> None:
    """Adds work of an emulated device to a trace.

    Args:
        path: of the trace (``.json.gz``), which is written anew.
        copies: of the traced step, in order.
        clock_s: ``time.perf_counter()`` at the start of the annotation `CLOCK`.
    """
    with gzip.open(path, "rt") as file:
        document = json.load(file)
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    [clock] = [event for event in events if event["name"] == CLOCK]
    labels = sorted((event for event in events if event["name"].startswith("Offload::")), key=lambda event: event["ts"])
    assert len(labels) == len(copies), f"{len(labels)} annotations of {len(copies)} copies"
    thread = clock["tid"]
    document["traceEvents"] += [
        *_kernels([event for event in events if event.get("cat") == "cpu_op" and event["tid"] == thread]),
        *_copies(copies, labels, clock["ts"] - clock_s * 1e6),
    ]
    with gzip.open(path, "wt") as file:
        json.dump(document, file)


def _kernels(ops: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each op that is in no other one."""
    end = float("-inf")
    for number, op in enumerate(sorted(ops, key=lambda op: (op["ts"], -op["dur"]))):
        if op["ts"] >= end and not op["name"].startswith("Offload::"):
            end = op["ts"] + op["dur"]
            yield _work("kernel", op["name"], COMPUTE_STREAM, op["ts"], op["dur"], number)
            yield _call(op, number)


def _copies(copies: Sequence[Copy], labels: Sequence[dict[str, Any]], offset_us: float) -> Iterator[dict[str, Any]]:
    for number, (copy, label) in enumerate(zip(copies, labels, strict=True), start=1_000_000):
        start, end = (event.time * 1e6 + offset_us for event in (copy.start, copy.end))
        name, stream = NAMES[copy.direction], STREAMS[copy.direction]
        yield _work("gpu_memcpy", name, stream, start, end - start, number, bytes=copy.num_bytes)
        yield _call(label, number)


def _work(kind: str, name: str, stream: int, ts: float, dur: float, number: int, **args: int) -> dict[str, Any]:
    args |= {"device": 0, "stream": stream, "correlation": number}
    return {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def _call(around: dict[str, Any], number: int) -> dict[str, Any]:
    """The host's call, at the start of an op or annotation."""
    where = {key: around[key] for key in ("pid", "tid", "ts")}
    return {"ph": "X", "cat": "cuda_runtime", "name": "call", "dur": 0, "args": {"correlation": number}} | where
