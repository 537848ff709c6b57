"""A plan as a picture: copies against compute, once synchronous and once overlapped.

Owns the drawing of `Plan.timelines`. Relies on matplotlib, and on the plan for every figure; nothing is computed here
but where a label has room.

How it works: both schedules have the same time axis, so that what one waits for and the other does not is seen as
length. A label stands in its bar, else right of it, else it is left out: labels never overlap. Price: a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from titan_offload.planner.plan import Plan
from titan_offload.planner.simulation import Interval

SUFFIXES = (".png", ".svg", ".pdf")

LANES = {"compute": "compute", "d2h": "D2H copies", "h2d": "H2D copies"}
"""What a lane is called, from top to bottom."""

SCHEDULES = {"sync": "synchronous", "overlap": "overlapped"}
"""What a schedule is called, from top to bottom."""

COLORS = {
    "forward": "#0072B2",
    "recompute": "#56B4E9",
    "backward": "#E69F00",
    "offload": "#D55E00",
    "reload": "#009E73",
    "wait": "none",
}
"""By the first word of an interval's name. Source: M. Okabe, K. Ito, Color Universal Design, 2008, whose colors people
with any color vision tell apart."""

LEGEND = {"offload": "offload (D2H)", "reload": "reload (H2D)", "wait": "compute waits for a copy"}

BAR_HEIGHT = 0.7
LABEL_GAP_PX = 3
DPI = 150


def write_plot(plan: Plan, path: Path | str) -> None:
    """Draws the two timelines of ``plan``.

    Args:
        plan: see `planner.make_plan`.
        path: ends in one of `SUFFIXES`, which sets the format.

    Raises:
        ValueError: the suffix is another one, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        choices = ", ".join(SUFFIXES)
        raise ValueError(f"--plot {path} is not allowed: let the name end in one of {choices}")
    figure = draw(plan)
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise ValueError(
            f"--plot {path} cannot be written ({error.strerror}): name a file in a folder that is there and may be "
            "written"
        ) from None


def draw(plan: Plan) -> Figure:
    """The picture, not yet written."""
    figure = Figure(figsize=(12, 6.2), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(title(plan)), x=0.01, ha="left", fontsize=11)
    rows = figure.subplots(len(SCHEDULES), sharex=True)
    for axes, (schedule, words) in zip(rows, SCHEDULES.items(), strict=True):
        _draw_lanes(axes, plan.timelines[schedule])
        passes = f"forward and backward of {_num_blocks(plan)}: {_ms(_pass_ms(plan.timelines[schedule]))} ms"
        axes.set_title(f"{words}, {passes}", loc="left", fontsize=10)
        axes.set_xlabel("time (ms)")
    rows[-1].set_xlim(0, 1.02 * max(i.end_ms for line in plan.timelines.values() for i in line))
    handles = [_patch(kind) for kind in COLORS]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    figure.canvas.draw()  # places everything, so that lengths in pixels are known
    for axes, schedule in zip(rows, SCHEDULES, strict=True):
        _label(axes, plan.timelines[schedule])
    return figure


def title(plan: Plan) -> tuple[str, str]:
    """What was planned, and what it costs."""
    machine, job = plan.machine, plan.job
    link = f"{machine.d2h_gb_per_s:.4g} GB/s"
    if machine.h2d_gb_per_s != machine.d2h_gb_per_s:
        link = f"{machine.d2h_gb_per_s:.4g} out, {machine.h2d_gb_per_s:.4g} back, GB/s"
    share = f", shared by {machine.devices_per_link} devices" if machine.devices_per_link > 1 else ""
    cut = "" if job.tokens == job.seq_len else f" ({job.tokens:,} on a device)"
    what = f"{plan.model.name}, {job.seq_len:,} tokens{cut}, link {link}{share}, {machine.tflops:g} TFLOP/s"
    all_blocks = f"a step of all {len(plan.model.layers)} blocks"
    if plan.variant == "all_without_ac":
        percent = plan.steps[plan.variant].vs_ac_percent
        longer = f"{abs(percent):.2f} % {'less' if percent < 0 else 'more'}"
        return what, f"{all_blocks} that move all they save, not recomputed, takes {longer} than with recompute alone"
    sync, overlap = (plan.steps[schedule].vs_ac_percent for schedule in SCHEDULES)
    return what, (
        f"slow-down of {all_blocks} against recompute alone: {sync:.2f} % synchronous, {overlap:.2f} % overlapped"
    )


@dataclass(frozen=True)
class _Bar:
    kind: str
    block: str
    start: float
    length: float


def _draw_lanes(axes: Axes, line: Sequence[Interval]) -> None:
    for row, lane in enumerate(LANES):
        for bar in _bars(line, lane):
            axes.broken_barh([(bar.start, bar.length)], (row - BAR_HEIGHT / 2, BAR_HEIGHT), **_look(bar.kind))
    axes.set_yticks(range(len(LANES)), LANES.values())
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.grid(axis="x", color="#D9D9D9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelbottom=True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bars(line: Sequence[Interval], lane: str) -> list[_Bar]:
    """What one lane does, in order; of compute the waits too."""
    bars: list[_Bar] = []
    for interval in sorted((i for i in line if i.lane == lane), key=lambda i: i.start_ms):
        end = bars[-1].start + bars[-1].length if bars else 0.0
        if lane == "compute" and interval.start_ms - end > 1e-9 * interval.end_ms:
            bars.append(_Bar("wait", "", end, interval.start_ms - end))
        kind, block = interval.name.split()
        bars.append(_Bar(kind, block, interval.start_ms, interval.end_ms - interval.start_ms))
    return bars


def _label(axes: Axes, line: Sequence[Interval]) -> None:
    """Writes a block's number in its bar or right of it, if it has room there."""
    for row, lane in enumerate(LANES):
        bars = [bar for bar in _bars(line, lane) if bar.block]
        for bar, after in zip_longest(bars, bars[1:]):
            text = axes.text(0, row, bar.block, fontsize=8, va="center", ha="center")
            width = text.get_window_extent().width + 2 * LABEL_GAP_PX
            left, right = _pixel(axes, bar.start), _pixel(axes, bar.start + bar.length)
            limit = _pixel(axes, after.start) if after else _pixel(axes, axes.get_xlim()[1])
            if width <= right - left:
                text.set_position((bar.start + bar.length / 2, row))
                text.set_color("white" if bar.kind == "forward" else "black")
            elif width <= limit - right and lane != "compute":
                text.set_position((axes.transData.inverted().transform((right + width / 2, 0))[0], row))
            else:
                text.remove()


def _pixel(axes: Axes, time: float) -> float:
    return axes.transData.transform((time, 0))[0]


def _look(kind: str) -> dict[str, Any]:
    if kind == "wait":
        return {"facecolor": "none", "edgecolor": "#767676", "hatch": "////", "linewidth": 0}
    # Bars of compute touch each other. A copy may be thinner than a line, and shows by its edge alone.
    edge = "white" if kind in ("forward", "recompute", "backward") else COLORS[kind]
    return {"facecolor": COLORS[kind], "edgecolor": edge, "linewidth": 0.4}


def _patch(kind: str) -> Patch:
    return Patch(label=LEGEND.get(kind, kind), **_look(kind))


def _num_blocks(plan: Plan) -> str:
    drawn = {i.name.split()[1] for line in plan.timelines.values() for i in line}
    total = len(plan.model.layers)
    return f"{total} blocks" if len(drawn) == total else f"{len(drawn)} of the {total} blocks"


def _pass_ms(line: Sequence[Interval]) -> float:
    """Copies to the host that nobody waits for may end later."""
    return max(interval.end_ms for interval in line if interval.lane == "compute")


def _ms(time: float) -> str:
    """With four digits or all before the point."""
    return f"{time:,.0f}" if time >= 1000 else f"{time:.4g}"
