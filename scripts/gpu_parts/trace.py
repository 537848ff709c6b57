"""What a profiler's trace tells of a step on a CUDA device: how much of our copies' time computing hides, and what the
device waited for where it did not compute.

Relies on the file that ``export_chrome_trace`` of a ``torch.profiler.profile`` of activities CPU and CUDA writes, and
on nothing but the standard library. How it works:

- *Device work* is a complete event ("ph": "X") of category kernel, gpu_memcpy or gpu_memset. Rows of category
  gpu_user_annotation lie over the same work and are left out.
- *The call* that gave the device this work is the host's event of category cuda_runtime or cuda_driver with the same
  correlation. A driver call inside a runtime call may have the same one: the first begun is taken.
- *What the host was doing* is found by time, thread by thread: the events of category cpu_op and user_annotation that
  the call began in. A copy is one of ours if one of them is the engine's ``Offload::d2h (...)`` or
  ``Offload::h2d (...)``, whatever its category, and the copy goes that way.
- *Compute streams* are those with at least one kernel that is not NCCL's. FSDP2's own streams are among them where they
  pack or reduce; these kernels are short.

All sums are over unions of intervals: time in which two kernels run counts once. Everything is one sort and one sweep.
"""

import bisect
import gzip
import heapq
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

MIN_GAP_US = 2.0
"""What a device needs from one kernel to the next that it has already: no gap."""

LATE_US = 3.0
"""A launch this long after the device fell idle is late. The clocks of host and device agree about as well as that."""

NEAR_US = 20.0
"""Between what a kernel waits for and its start: an event's way from stream to stream, or a launch's to the device."""

SKEW_US = 1.0
"""A copy may seem to end this long after the start of a kernel that waited for it."""

Event = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """Work of the device, from ``start_us`` to ``end_us``.

    Attributes:
        kind: ``"compute"``; ``"d2h"`` or ``"h2d"``, a copy of ours; ``"other"``: collectives and other copies.
        name: of the kernel, or such as ``"Memcpy DtoH (Device -> Pinned)"``.
        stream: where it ran.
        start_us, end_us: in microseconds, on the trace's clock.
        num_bytes: of a copy or memset.
        label: of a copy of ours, such as ``"Offload::d2h (layers.3)"``.
        launch_us: when the host began the call that launched it, on the same clock. None: the trace does not say.
        launched_in: innermost op or annotation that the host was in then; empty: none.
    """

    kind: str
    name: str
    stream: int | str
    start_us: float
    end_us: float
    num_bytes: int = 0
    label: str = ""
    launch_us: float | None = None
    launched_in: str = ""


@dataclass(frozen=True)
class Gap:
    """No compute stream computes from ``start_us`` to ``end_us``.

    Attributes:
        start_us, end_us: in microseconds, on the trace's clock.
        cause: see `analyse`.
        before, after: names of the last span of kind compute that ended, and of the first to start.
    """

    start_us: float
    end_us: float
    cause: str
    before: str
    after: str


@dataclass(frozen=True)
class Timeline:
    """A step on the device.

    Attributes:
        step_ms: from the start of the first to the end of the last span of kind compute, in milliseconds.
        compute_ms, d2h_ms, h2d_ms: in which at least one span of that kind ran. Copies count whole, those that began
            before the step or ended after it too.
        d2h_bytes, h2d_bytes: of our copies.
        d2h_gb_per_s, h2d_gb_per_s: bytes over time, in 1e9 bytes per second. 0: no copies.
        d2h_overlap_fraction, h2d_overlap_fraction: part of the copies' time in which something was computed. 0 also
            where there are no copies.
        gaps: the largest, largest first.
        idle_ms: of the step, without computing.
    """

    step_ms: float
    compute_ms: float
    d2h_ms: float
    h2d_ms: float
    d2h_bytes: int
    h2d_bytes: int
    d2h_gb_per_s: float
    h2d_gb_per_s: float
    d2h_overlap_fraction: float
    h2d_overlap_fraction: float
    gaps: tuple[Gap, ...]
    idle_ms: float


# The file

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
RANGES = ("cpu_op", "user_annotation")
DIRECTIONS = {"DtoH": "d2h", "HtoD": "h2d"}
LABELS = ("Offload::d2h ", "Offload::h2d ")


def read_spans(path: str | os.PathLike[str]) -> list[Span]:
    """The device's work in a trace, in the order of its starts.

    Kernels other than NCCL's, memsets and copies within the device are of kind compute where they ran on a compute
    stream; copies between host and device that carry our label are of kind d2h or h2d; all else is of kind other.

    Args:
        path: of a ``.json`` or ``.json.gz`` file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no trace, holds no work of a device, or that of several.
    """
    events = _read_events(path)
    work = [event for event in events if event.get("cat") in WORK]
    if not work:
        raise ValueError(
            f"{path} holds no work of a device (no event of category {', '.join(WORK)}): profile on a machine that has "
            "one, with ProfilerActivity.CUDA among the activities"
        )
    devices = sorted({str(_arg(event, "device", "pid")) for event in work})
    if len(devices) > 1:
        raise ValueError(f"{path} holds work of devices {', '.join(devices)}: a timeline is that of one device")
    calls = _find_calls(events, {_arg(event, "correlation") for event in work} - {None})
    computing = {_arg(event, "stream", "tid") for event in work if event["cat"] == "kernel" and not _is_nccl(event)}
    spans = [_to_span(event, calls.get(_arg(event, "correlation"), Call()), computing) for event in work]
    return sorted(spans, key=attrgetter("start_us"))


def _read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The complete events."""
    open_text = gzip.open if str(path).endswith(".gz") else open
    with open_text(path, "rt", encoding="utf-8", errors="replace") as file:
        try:
            document = json.load(file, strict=False)
        except (json.JSONDecodeError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is no trace: {error}") from error
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise ValueError(f'{path} is no trace: it has no list "traceEvents"')
    return [event for event in events if event.get("ph") == "X"]


def _arg(event: Event, key: str, otherwise: str = "") -> Any:
    """An argument of an event, or where it lacks that, the row that it is drawn in."""
    value = event.get("args", {}).get(key)
    return event.get(otherwise) if value is None else value


def _interval(event: Event) -> Interval:
    start = float(event["ts"])
    return start, start + max(0.0, float(event.get("dur", 0)))


def _is_nccl(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def _to_span(event: Event, call: "Call", computing: set[Any]) -> Span:
    name, stream, num_bytes = event["name"], _arg(event, "stream", "tid"), int(_arg(event, "bytes") or 0)
    kind, label = "other", ""
    direction = _direction(event)
    if direction in DIRECTIONS.values():
        if call.label.startswith(f"Offload::{direction} "):
            kind, label = direction, call.label
    elif stream in computing and direction in ("", "DtoD") and not _is_nccl(event):
        kind = "compute"
    return Span(kind, name, stream, *_interval(event), num_bytes, label, call.start_us, call.launched_in)


def _direction(event: Event) -> str:
    """Of a copy, such as ``"d2h"``, ``"DtoD"``, ``"PtoP"``; empty: no copy."""
    if event["cat"] != "gpu_memcpy":
        return ""
    words = event["name"].split()
    direction = words[1] if len(words) > 1 else "unknown"
    return DIRECTIONS.get(direction, direction)


# The host's side


class Call(NamedTuple):
    """A call of the host that gave the device work."""

    start_us: float | None = None
    label: str = ""
    launched_in: str = ""


class Open(NamedTuple):
    """A range of the host, while it is open. ``label`` is the innermost of ours among it and those around it."""

    end_us: float
    name: str
    label: str
    label_end_us: float


def _find_calls(events: Iterable[Event], wanted: set[Any]) -> dict[Any, Call]:
    """By correlation, of those ``wanted``."""
    calls: dict[Any, list[tuple[float, Any]]] = defaultdict(list)  # both by thread
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        category = event.get("cat")
        if category in RANGES:
            start, end = _interval(event)
            ranges[event.get("tid")].append((start, -end, event["name"]))
        elif category in CALLS and (correlation := _arg(event, "correlation")) in wanted:
            calls[event.get("tid")].append((_interval(event)[0], correlation))
    found: dict[Any, Call] = {}
    for thread, of_thread in calls.items():
        for correlation, call in _place(sorted(of_thread), sorted(ranges[thread])):
            if correlation not in found or call.start_us < found[correlation].start_us:
                found[correlation] = call
    return found


def _place(
    calls: Sequence[tuple[float, Any]], ranges: Sequence[tuple[float, float, str]]
) -> Iterator[tuple[Any, Call]]:
    """What is around the calls of one thread, both sorted by start. Of ranges that start at once, the longest comes
    first, for it is around the others: their second member is minus the end."""
    stack: list[Open] = []
    upcoming = 0
    for start, correlation in calls:
        while upcoming < len(ranges) and ranges[upcoming][0] <= start:
            _push(stack, *ranges[upcoming])
            upcoming += 1
        _pop_closed(stack, start)
        inner = stack[-1] if stack else Open(start, "", "", start)
        yield correlation, Call(start, inner.label if inner.label_end_us >= start else "", inner.name)


def _push(stack: list[Open], start: float, minus_end: float, name: str) -> None:
    _pop_closed(stack, start)
    end = -minus_end
    if name.startswith(LABELS) or not stack:
        label, label_end = (name if name.startswith(LABELS) else ""), end
    else:
        label, label_end = stack[-1].label, stack[-1].label_end_us
    stack.append(Open(end, name, label, label_end))


def _pop_closed(stack: list[Open], now: float) -> None:
    while stack and stack[-1].end_us < now:
        stack.pop()


# The timeline


def analyse(spans: Iterable[Span], num_gaps: int = 5) -> Timeline:
    """How a step went on the device.

    The cause of a gap is what the span that ends it waited for last, by the first rule that fits:

    1. ``"host: launched late, in aten::mm"``: the host launched that span more than `LATE_US` after the gap began, and
       at most `NEAR_US` before the gap ended.
    2. ``"reload: waits for Offload::h2d (layers.3)"``: a reload of ours ended in the gap, at most `NEAR_US` before the
       gap did.
    3. ``"offload: waits for Offload::d2h (layers.3)"``: likewise an offload of ours. The engine waits for one where
       more would be under way than ``max_inflight_offloads``.
    4. ``"other stream: ncclDevKernel..."``, or ``"same stream: ..."``: likewise a span of kind other.
    5. As 1, but launched earlier in the gap: the call itself took long. Where 2 to 4 fit, that span had been launched
       when what it waited for ended, so that the host is not named.
    6. ``"unknown"``.

    In 2 to 4 a span that was launched later than the one that ends the gap cannot be what it waited for, and is passed
    over; of several that fit, the one that ended last is named.

    Args:
        spans: of one device, in any order.
        num_gaps: how many of the gaps of at least `MIN_GAP_US` to return, at most.

    Raises:
        ValueError: there is no span of kind compute.
    """
    by_kind: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span)
    if not by_kind["compute"]:
        held = ", ".join(f"{len(of_kind)} {kind}" for kind, of_kind in by_kind.items() if of_kind) or "none at all"
        raise ValueError(f"there is no step to analyse: no span of kind compute among the spans ({held})")
    busy, d2h, h2d = (_union(by_kind[kind]) for kind in ("compute", "d2h", "h2d"))
    step_us, compute_us, d2h_us, h2d_us = busy[-1][1] - busy[0][0], _length(busy), _length(d2h), _length(h2d)
    d2h_bytes, h2d_bytes = (sum(span.num_bytes for span in by_kind[kind]) for kind in ("d2h", "h2d"))
    return Timeline(
        step_ms=step_us / 1e3,
        compute_ms=compute_us / 1e3,
        d2h_ms=d2h_us / 1e3,
        h2d_ms=h2d_us / 1e3,
        d2h_bytes=d2h_bytes,
        h2d_bytes=h2d_bytes,
        d2h_gb_per_s=_ratio(d2h_bytes, d2h_us * 1e3),
        h2d_gb_per_s=_ratio(h2d_bytes, h2d_us * 1e3),
        d2h_overlap_fraction=_ratio(_overlap(d2h, busy), d2h_us),
        h2d_overlap_fraction=_ratio(_overlap(h2d, busy), h2d_us),
        gaps=_largest_gaps(by_kind, num_gaps),
        idle_ms=(step_us - compute_us) / 1e3,
    )


def _union(spans: Iterable[Span]) -> list[Interval]:
    """Intervals that do not touch, in order, in which at least one of ``spans`` runs."""
    union: list[Interval] = []
    for start, end in sorted((span.start_us, span.end_us) for span in spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _length(union: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union)


def _overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Time in both unions."""
    shared, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        shared += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# Gaps


def _largest_gaps(by_kind: dict[str, list[Span]], num_gaps: int) -> tuple[Gap, ...]:
    gaps = heapq.nlargest(num_gaps, _gaps(by_kind["compute"]), key=lambda gap: gap[1].start_us - gap[0].end_us)
    ended = {kind: sorted(by_kind[kind], key=attrgetter("end_us")) for kind in ("h2d", "d2h", "other")}
    return tuple(
        Gap(before.end_us, after.start_us, _cause(before.end_us, after, ended), before.name, after.name)
        for before, after in gaps
    )


def _gaps(compute: Iterable[Span]) -> Iterator[tuple[Span, Span]]:
    """The spans before and after each gap."""
    in_order = iter(sorted(compute, key=attrgetter("start_us")))
    last = next(in_order)
    for span in in_order:
        if span.start_us - last.end_us >= MIN_GAP_US:
            yield last, span
        if span.end_us > last.end_us:
            last = span


def _cause(gap_start_us: float, after: Span, ended: dict[str, list[Span]]) -> str:
    """See `analyse`."""
    is_late = after.launch_us is not None and after.launch_us > gap_start_us + LATE_US
    late = "host: launched late" + (f", in {after.launched_in}" if after.launched_in else "")
    if is_late and after.start_us - after.launch_us <= NEAR_US:
        return late
    for kind, words in (("h2d", "reload: waits for"), ("d2h", "offload: waits for")):
        if (copy := _awaited(gap_start_us, after, ended[kind])) is not None:
            return f"{words} {copy.label}"
    if (other := _awaited(gap_start_us, after, ended["other"])) is not None:
        return f"{'same' if other.stream == after.stream else 'other'} stream: {other.name}"
    return late if is_late else "unknown"


def _awaited(gap_start_us: float, after: Span, ended: Sequence[Span]) -> Span | None:
    """The last of ``ended``, sorted by end, that the span ``after`` a gap may have waited for."""
    end_of = attrgetter("end_us")
    first = max(
        bisect.bisect_right(ended, gap_start_us, key=end_of),
        bisect.bisect_left(ended, after.start_us - NEAR_US, key=end_of),
    )
    behind = bisect.bisect_right(ended, after.start_us + SKEW_US, key=end_of)
    for i in reversed(range(first, behind)):
        launches = (ended[i].launch_us, after.launch_us)
        if None in launches or launches[0] <= launches[1]:
            return ended[i]
    return None
