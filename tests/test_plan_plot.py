from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from plan_cases import plan_of_ratio

from titan_offload.planner import plan_plot
from titan_offload.planner.plan import Plan
from titan_offload.planner.shapes import Machine

RATIOS, NUM_LAYERS = (0.05, 0.3, 1.0, 4.0), (3, 80)
CASES = [(ratio, num, None) for ratio in RATIOS for num in NUM_LAYERS] + [(40.0, 80, None), (0.05, 80, 100.0)]
"""Copy over forward, layers, copy back over forward. In the last two there is little room for labels."""


@cache
def figure_of(ratio: float, num_layers: int, back: float | None = None) -> Figure:
    return plan_plot.draw(plan_of_ratio(ratio, num_layers, back))


def shown_texts(figure: Figure) -> list:
    """Everything written but the title, whose length depends on the model's name."""
    found = [text for axes in figure.axes for text in axes.texts]
    for axes in figure.axes:
        first, last = axes.get_xlim()
        found += [label for label in axes.get_xticklabels() if first <= label.get_position()[0] <= last]
        found += [*axes.get_yticklabels(), axes.xaxis.label, axes._left_title]
    found += [text for legend in figure.legends for text in legend.get_texts()]
    return [text for text in found if text.get_text() and text.get_visible()]


def bars_drawn(figure: Figure, schedule: str) -> set[tuple[float, float, int]]:
    """Start, end and row of each bar."""
    axes = figure.axes[list(plan_plot.SCHEDULES).index(schedule)]
    boxes = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    return {(round(box.x0, 9), round(box.x1, 9), round((box.y0 + box.y1) / 2)) for box in boxes}


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(("ratio", "num_layers", "back"), CASES)
def test_each_interval_is_a_bar_and_each_wait_a_hatched_one(ratio, num_layers, back, schedule):
    plan = plan_of_ratio(ratio, num_layers, back)
    row = {"compute": 0, "d2h": 1, "h2d": 2}
    line = plan.timelines[schedule]
    expected = {(round(i.start_ms, 9), round(i.end_ms, 9), row[i.lane]) for i in line}
    drawn = bars_drawn(figure_of(ratio, num_layers, back), schedule)
    assert expected <= drawn
    busy = sum(i.end_ms - i.start_ms for i in line if i.lane == "compute")
    waits = drawn - expected
    assert {row for _, _, row in waits} <= {0}
    step = max(i.end_ms for i in line if i.lane == "compute")
    assert sum(end - start for start, end, _ in waits) == pytest.approx(step - busy, abs=1e-6)


@pytest.mark.parametrize(("ratio", "num_layers", "back"), CASES)
def test_no_text_lies_on_another_or_outside(ratio, num_layers, back):
    figure = figure_of(ratio, num_layers, back)
    boxes = {text: text.get_window_extent() for text in shown_texts(figure)}
    for one, other in combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)
    for text, box in boxes.items():
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text


def test_labels_stand_in_bars_and_beside_narrow_copies():
    figure = figure_of(0.05, 80)
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts].count("0") == 5  # forward, recompute, backward, two copies
    wide, narrow = (figure_of(ratio, 80).axes[0] for ratio in (1.0, 0.05))
    for axes, is_inside in ((wide, True), (narrow, False)):
        copy = next(text for text in axes.texts if text.get_position()[1] == 1)
        boxes = [bars.get_paths()[0].get_extents() for bars in axes.collections]
        first = next(box for box in boxes if box.y0 < 1 < box.y1)
        assert (copy.get_position()[0] < first.x1) == is_inside


def test_both_schedules_have_one_time_axis_in_ms():
    plan, figure = plan_of_ratio(1.0, 80), figure_of(1.0, 80)
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim()
    assert upper.get_xlim()[1] >= max(i.end_ms for line in plan.timelines.values() for i in line)
    assert [axes.get_xlabel() for axes in figure.axes] == ["time (ms)"] * 2
    # 4 blocks of 4 forwards; synchronous, 3 of them wait for 2 copies of a forward each
    forward = plan.layers[0].forward_ms
    words = [axes._left_title.get_text() for axes in figure.axes]
    assert words[0] == f"synchronous, forward and backward of 4 of the 80 blocks: {22 * forward:.4g} ms"
    assert words[1] == f"overlapped, forward and backward of 4 of the 80 blocks: {16 * forward:.4g} ms"


def test_a_pass_ends_when_its_compute_ends():
    line = plan_of_ratio(40.0, 80).timelines["overlap"]
    end = max(i.end_ms for i in line if i.lane == "compute")
    assert max(i.end_ms for i in line) > 1.1 * end  # copies that nobody waits for
    assert figure_of(40.0, 80).axes[1]._left_title.get_text().endswith(f" {end:.4g} ms")


def test_the_title_has_what_was_planned_and_its_cost():
    plan = plan_of_ratio(0.3, 80)
    first, second = plan_plot.title(plan)
    rate = plan.machine.d2h_gb_per_s
    assert first == f"Qwen3 8B, 4,096 tokens, link {rate:.4g} GB/s, 500 TFLOP/s"
    # 79 of 80 blocks wait for two copies: 2 * 0.3 / 4, less one part in 80
    assert second.endswith(f"{15 * 79 / 80:.2f} % synchronous, 0.00 % overlapped")
    shared = replace(plan, machine=Machine(170.0, 411.0, devices_per_link=2))
    assert "link 170 out, 411 back, GB/s, shared by 2 devices" in plan_plot.title(shared)[0]
    cut = replace(plan, job=replace(plan.job, context_parallel=8))
    assert "4,096 tokens (512 on a device)" in plan_plot.title(cut)[0]


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_suffix_sets_the_format(tmp_path, suffix, start):
    path = tmp_path / f"plan{suffix}"
    plan_plot.write_plot(plan_of_ratio(1.0, 3), path)
    assert path.read_bytes().startswith(start)


def test_bad_paths_are_refused(tmp_path):
    plan = plan_of_ratio(1.0, 3)
    with pytest.raises(ValueError, match=r"plan\.gif is not allowed: let the name end in one of \.png, \.svg, \.pdf"):
        plan_plot.write_plot(plan, tmp_path / "plan.gif")
    with pytest.raises(ValueError, match=r"plan\.png cannot be written \(No such file.*name a file in a folder"):
        plan_plot.write_plot(plan, tmp_path / "missing" / "plan.png")


# What each kind of color vision makes of linear RGB. Source: Machado, Oliveira, Fernandes, "A physiologically-based
# model for simulation of color vision deficiency", 2009, severity 1.
VISION = {
    "any": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]


def lab(color: str, vision: str) -> np.ndarray:
    """CIELAB of a color as it is seen."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    xyz = TO_XYZ @ np.clip(np.asarray(VISION[vision]) @ linear, 0, 1) / [0.95047, 1.0, 1.08883]
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colors_are_told_apart_with_any_color_vision(vision):
    colors = [color for color in plan_plot.COLORS.values() if color != "none"]
    seen = [lab(color, vision) for color in (*colors, "white")]
    distances = [np.linalg.norm(one - other) for one, other in combinations(seen, 2)]
    assert min(distances) > 15  # 2.3 is just noticeable


def test_a_plan_with_nothing_to_draw_back(tmp_path):
    """With copies as long as the whole pass nothing has left the device when backward asks: a lane stays empty."""
    plan: Plan = plan_of_ratio(40.0, 3)
    assert not [i for i in plan.timelines["overlap"] if i.lane == "h2d"]
    plan_plot.write_plot(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
