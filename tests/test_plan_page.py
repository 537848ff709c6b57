import json
import random
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
from chromium import CHROMIUM, Chromium
from plan_cases import plan_of_ratio

from titan_offload.config import GIB, OffloadConfig, SelectiveConfig
from titan_offload.planner import make_plan, plan_page, plan_plot
from titan_offload.planner.plan import Plan
from titan_offload.planner.shapes import Job, LayerShape, Machine, ModelShape

PACKAGE = Path(plan_page.__file__).parent
NODE = shutil.which("node")

QWEN_8B, QWEN_30B_A3B = plan_page.MODELS[1], plan_page.MODELS[3]
MACHINE = Machine(55.43, 55.43, host_memory_gib=1024, device_memory_gib=80)
WIDTHS = (400, 1600)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here; with chromium the page itself is tested")


# What is asked for


@dataclass(frozen=True)
class Setting:
    """Of the page's controls, as `makePlan` in plan_page_formulas.js takes it."""

    model: int
    seq_len: int
    d2h_gb_per_s: float
    h2d_gb_per_s: float
    devices_per_link: int


def settings_of(plan: Plan, num: int, seed: int = 0) -> list[Setting]:
    """What the page opens with, and random ones that its controls allow."""
    data, rng, machine = plan_page.page_data(plan), random.Random(seed), plan.machine
    first = Setting(0, plan.job.seq_len, machine.d2h_gb_per_s, machine.h2d_gb_per_s, machine.devices_per_link)
    settings = [first]
    while len(settings) < num:
        rate = rng.choice(data["rate_stops"])
        back = rng.choice([rate, rng.choice(data["rate_stops"])])
        share = rng.randint(1, machine.devices_per_node)
        settings.append(Setting(rng.randrange(len(data["models"])), rng.choice(data["seq_stops"]), rate, back, share))
    return settings


def planned(plan: Plan, setting: Setting) -> dict:
    """What the planner itself says to a setting."""
    model, job = plan.model, plan.job
    if setting.model > 0:
        name = plan_page.page_data(plan)["models"][setting.model]["name"]
        model, job = next(model for model in plan_page.MODELS if model.name == name), replace(job, stage_layers=None)
    machine = replace(
        plan.machine,
        d2h_gb_per_s=setting.d2h_gb_per_s,
        h2d_gb_per_s=setting.h2d_gb_per_s,
        devices_per_link=setting.devices_per_link,
    )
    return make_plan(model, replace(job, seq_len=setting.seq_len), machine, plan.offload, plan.selective).to_json()


def assert_same(page: object, expected: object, where: str = "") -> None:
    """All that the page says is what the planner says. The planner says more."""
    if isinstance(page, dict):
        for key, value in page.items():
            assert_same(value, expected[key], f"{where}.{key}")
        if where.endswith("parts_bytes"):
            assert page.keys() == expected.keys(), where
    elif isinstance(page, list):
        assert len(page) == len(expected), where
        for index, (one, other) in enumerate(zip(page, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(page, float | int) and not isinstance(page, bool):
        assert page == pytest.approx(expected, rel=1e-9, abs=1e-7), where
    else:
        assert page == expected, where


def run_formulas(cases: list[tuple[Plan, list[Setting]]]) -> list[list[dict]]:
    """What the page's formulas say, in node, without a page."""
    script = (PACKAGE / "plan_page_formulas.js").read_text() + (
        'const cases = JSON.parse(require("fs").readFileSync(0));'
        "const answers = cases.map(({ data, settings }) => settings.map((setting) => makePlan(data, setting)));"
        "console.log(JSON.stringify(answers));"
    )
    asked = [{"data": plan_page.page_data(plan), "settings": [vars(s) for s in settings]} for plan, settings in cases]
    command = [NODE, "-e", script]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


# Models and jobs that reach every branch of the formulas

MIXED = ModelShape(
    "layers that differ",
    2880,
    (
        *[LayerShape(60_000_000, 4096, 64, window=128), LayerShape(60_000_000, 4096, 64)] * 5,
        *[LayerShape(90_000_000, 3072, 16, value_width=2048, other_saves=(512, 32, 64))] * 6,
        LayerShape(60_000_000, 4096, 64, window=8192),
    ),
    vocab_size=201_088,
    num_params=2_000_000_000,
)
PIPELINE = Job(8192, batch=2, num_forwards=8, pipeline_parallel=4, num_devices=32, tensor_parallel=2)
NODES = replace(MACHINE, num_nodes=4)
OVERLAP, ALL = OffloadConfig(), OffloadConfig(mode="all")
WITH_ACTIVATIONS = replace(
    MIXED,
    layers=tuple(replace(x, activations=(5760, 4.0, 4 / 3, 2000 * i + 512)) for i, x in enumerate(MIXED.layers)),
)

PLANS = {
    "plain": (QWEN_8B, Job(32768), MACHINE, OVERLAP, None),
    "memory not known": (QWEN_8B, Job(4096), Machine(31.0, 31.0), OVERLAP, None),
    "parallel": (
        *(QWEN_30B_A3B, Job(65536, context_parallel=4, tensor_parallel=2, num_devices=32, data_parallel_replicate=2)),
        *(NODES, OVERLAP, None),
    ),
    "layers that differ": (MIXED, Job(16384, num_forwards=3), MACHINE, OVERLAP, None),
    "sizes that are odd": (
        *(replace(MIXED, dim=2881), Job(14 * 1001, context_parallel=7, num_devices=7), MACHINE),
        *(OVERLAP, SelectiveConfig(offload=True)),
    ),
    "saves on the host": (MIXED, Job(16384), MACHINE, OVERLAP, SelectiveConfig(offload=True, save_sliding_window=True)),
    "saves on the device": (MIXED, Job(4096), MACHINE, OffloadConfig(mode="none"), SelectiveConfig()),
    "nothing moves": (QWEN_8B, Job(4096), MACHINE, OffloadConfig(mode="none"), None),
    "synchronous": (QWEN_8B, Job(4096), MACHINE, OffloadConfig(schedule="sync", keep_last=2), None),
    "small ones stay": (MIXED, Job(16384), MACHINE, OffloadConfig(min_offload_mib=100.0), None),
    "no prefetch, no limit": (
        *(QWEN_8B, Job(4096), replace(MACHINE, d2h_gb_per_s=3.0, h2d_gb_per_s=9.0)),
        *(OffloadConfig(prefetch_lookahead=0, max_inflight_offloads=0, keep_last=0), None),
    ),
    "deep prefetch": (
        *(QWEN_8B, Job(4096), replace(MACHINE, d2h_gb_per_s=9.0, h2d_gb_per_s=1.0)),
        *(OffloadConfig(prefetch_lookahead=3, max_inflight_offloads=4, keep_last=3), None),
    ),
    "limited by the link": (
        *(QWEN_8B, Job(4096, num_forwards=2), replace(MACHINE, d2h_gb_per_s=8.0, h2d_gb_per_s=8.0)),
        *(OffloadConfig(limit="link", pinned_budget_gib=20.0), None),
    ),
    "all, layout not known": (QWEN_8B, Job(4096, is_checkpointed=False), MACHINE, ALL, None),
    "all, synchronous": (
        *(WITH_ACTIVATIONS, Job(4096, batch=3, is_checkpointed=False), MACHINE),
        *(replace(ALL, schedule="sync", min_offload_mib=20.0), None),
    ),
    "all, no prefetch": (
        *(WITH_ACTIVATIONS, Job(65536, context_parallel=8, is_checkpointed=False), replace(MACHINE, h2d_gb_per_s=9.0)),
        *(replace(ALL, prefetch_lookahead=0, keep_last=2), None),
    ),
    "all, pipeline": (
        *(WITH_ACTIVATIONS, replace(PIPELINE, is_checkpointed=False, num_forwards=2)),
        *(NODES, replace(ALL, prefetch_lookahead=2, min_offload_mib=0.01), None),
    ),
    "all, with AC": (WITH_ACTIVATIONS, Job(2**18), MACHINE, ALL, None),
    "1F1B": (QWEN_8B, PIPELINE, NODES, OVERLAP, None),
    "stages of the user": (QWEN_8B, replace(PIPELINE, stage_layers=(6, 12, 12, 6)), NODES, OVERLAP, None),
    "interleaved": (QWEN_8B, replace(PIPELINE, schedule="Interleaved1F1B"), NODES, OVERLAP, SelectiveConfig()),
    "zero bubble": (MIXED, replace(PIPELINE, schedule="InterleavedZeroBubble"), NODES, OVERLAP, None),
    "V-shaped": (QWEN_8B, replace(PIPELINE, schedule="DualPipeV"), NODES, OffloadConfig(limit="link"), None),
}
SETTINGS_EACH = 4


@pytest.fixture(scope="module")
def formulas_said() -> dict[str, list[dict]]:
    plans = {name: make_plan(*asked) for name, asked in PLANS.items()}
    return dict(zip(PLANS, run_formulas([(p, settings_of(p, SETTINGS_EACH)) for p in plans.values()]), strict=True))


@needs_node
@pytest.mark.parametrize("name", PLANS)
def test_formulas_are_the_planners(formulas_said, name):
    plan = make_plan(*PLANS[name])
    for setting, said in zip(settings_of(plan, SETTINGS_EACH), formulas_said[name], strict=True):
        assert said.keys() >= {"layers", "steps", "memory", "longest", "timelines"}
        assert said["steps"].keys() == plan.steps.keys()
        assert_same(said, planned(plan, setting), str(setting))


@needs_node
def test_formulas_give_the_figures_of_the_literature():
    """Source: the article "Activation checkpoint offload", whose table has them; Qwen3-8B and 1.7B on PCIe 5 and 4."""
    plan = make_plan(*PLANS["memory not known"])
    names = [model["name"] for model in plan_page.page_data(plan)["models"]]
    cases = {
        ("Qwen3-8B", 4096, 55.43): (0.6053, 3.436, 8.81),
        ("Qwen3-8B", 131072, 55.43): (19.3711, 382.63, 2.53),
        ("Qwen3-1.7B", 4096, 31.0): (0.5412, 0.9621, 28.13),
        ("Qwen3-30B-A3B", 32768, 55.43): (2.4214, 25.0482, 4.83),
    }
    settings = [Setting(names.index(name), seq_len, rate, rate, 1) for name, seq_len, rate in cases]
    for (copy, forward, sync), said in zip(cases.values(), run_formulas([(plan, settings)])[0], strict=True):
        assert said["layers"][0]["d2h_ms"] == pytest.approx(copy, abs=5e-5)
        assert said["layers"][0]["forward_ms"] == pytest.approx(forward, abs=5e-3)
        assert said["steps"]["sync"]["closed_form_limited_percent"] == pytest.approx(sync, abs=5e-3)


# The file


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path):
    plan = make_plan(*PLANS["plain"])
    plan_page.write_page(plan, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w./-]+\.[\w./-]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a file
    assert not re.search(r"<(?:script|img|iframe|link)[^>]*\s(?:src|href)=(?!\"data:)|@import|url\((?!#)", text)
    assert "{{" not in text
    embedded = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])
    assert embedded == json.loads(json.dumps(plan_page.page_data(plan)))
    plan_json = json.loads(json.dumps(plan.to_json()))
    for key in ("job", "machine", "offload", "variant"):
        assert_same(embedded[key], plan_json[key], key)
    assert embedded["verdict"]["settings"] == plan_json["verdict"]["settings"]


def test_a_name_cannot_break_out_of_the_data(tmp_path):
    name = '</script><script>alert("{{script}}")</script>'
    plan = make_plan(replace(QWEN_8B, name=name), *PLANS["plain"][1:])
    plan_page.write_page(plan, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert name not in text and text.count("<script") == 3
    embedded = re.search(r'id="data">(.*?)</script>', text)[1]
    assert json.loads(embedded)["models"][0]["name"] == name


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--html .*plan\.html cannot be written \(No such file.*name a file"):
        plan_page.write_page(make_plan(*PLANS["plain"]), tmp_path / "missing" / "plan.html")


def test_the_package_ships_the_parts_of_the_page():
    config = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())
    patterns = config["tool"]["setuptools"]["package-data"]["titan_offload.planner"]
    others = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {"plan_page.html", "plan_page.js", "plan_page_formulas.js"} <= {path.name for path in others}
    for path in others:
        assert any(fnmatch(str(path.relative_to(PACKAGE)), pattern) for pattern in patterns), path


# What the controls offer


def test_models_are_the_plans_own_and_those_that_its_pipeline_can_divide():
    names = [model["name"] for model in plan_page.page_data(make_plan(*PLANS["layers that differ"]))["models"]]
    assert names == [MIXED.name, *(model.name for model in plan_page.MODELS)]
    names = [model["name"] for model in plan_page.page_data(make_plan(*PLANS["plain"]))["models"]]
    assert names == ["Qwen3-8B", "Qwen3-1.7B", "Llama-3 70B", "Qwen3-30B-A3B"]
    names = [model["name"] for model in plan_page.page_data(make_plan(*PLANS["stages of the user"]))["models"]]
    assert names == ["Qwen3-8B", "Qwen3-1.7B", "Llama-3 70B", "Qwen3-30B-A3B"]
    job = Job(8192, num_forwards=64, pipeline_parallel=32, num_devices=32)
    deep = make_plan(plan_page.MODELS[2], job, NODES, OVERLAP, None)
    names = [model["name"] for model in plan_page.page_data(deep)["models"]]
    assert names == ["Llama-3 70B", "Qwen3-8B", "Qwen3-30B-A3B"]  # 28 blocks are fewer than 32 stages


def test_stops_are_what_torchtitan_takes():
    job = Job(3 * 7 * 2 * 100, context_parallel=7, tensor_parallel=3, num_devices=21)
    data = plan_page.page_data(make_plan(QWEN_8B, job, replace(NODES, devices_per_node=7), OVERLAP))
    stops = data["seq_stops"]
    assert job.seq_len in stops and stops == sorted(set(stops))
    assert all(stop % (3 * 7 * 2) == 0 for stop in stops)
    assert stops[0] <= 1050 and stops[-1] >= 7_000_000
    assert {31.0, 55.43, 450.0} <= set(data["rate_stops"]) and data["rate_stops"] == sorted(set(data["rate_stops"]))


# The page in a browser


@pytest.fixture(scope="module")
def browser():
    with Chromium() as chromium:
        yield chromium


@pytest.fixture
def page(browser, tmp_path):
    """The plain plan's page, loaded; no test may leave a problem on it."""
    path = tmp_path / "plan.html"
    plan_page.write_page(make_plan(*PLANS["plain"]), path)
    browser.show(1280)
    browser.open(path)
    yield browser
    assert browser.problems == []
    assert browser.requests == [path.as_uri()]


def move(browser: Chromium, control: str, value: object) -> None:
    """As if by hand: the control has another value and says so."""
    element = f"document.getElementById({control!r})"
    browser.eval(f"{element}.value = {json.dumps(str(value))}; {element}.dispatchEvent(new Event('input'))")


def set_controls(browser: Chromium, data: dict, setting: Setting) -> None:
    move(browser, "model", setting.model)
    move(browser, "rate", data["rate_stops"].index(setting.d2h_gb_per_s))
    move(browser, "seq", data["seq_stops"].index(setting.seq_len))
    move(browser, "share", setting.devices_per_link)


def table(browser: Chromium, name: str) -> list[dict[str, str]]:
    """A table as it stands on the page, by heading."""
    rows = browser.eval(
        f"[...document.querySelectorAll('#{name} tr')].map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def assert_shown(text: str, value: float) -> None:
    """To the digits that are printed."""
    digits = len(text.partition(".")[2])
    assert float(text.replace(",", "")) == pytest.approx(value, abs=0.5000001 * 10**-digits), text


@needs_chromium
def test_figures_on_the_page_are_the_planners_wherever_the_controls_stand(page):
    plan = make_plan(*PLANS["plain"])
    data = plan_page.page_data(plan)
    seen = set()
    for setting in settings_of(plan, 25, seed=1):
        setting = replace(setting, h2d_gb_per_s=setting.d2h_gb_per_s)
        set_controls(page, data, setting)
        expected = planned(plan, setting)
        assert_same(page.eval("plan"), expected, str(setting))
        assert_tables(page, expected)
        seen.add(page.eval("document.getElementById('verdict').textContent"))
    assert len(seen) > 20  # the verdict follows too


def assert_tables(page: Chromium, expected: dict) -> None:
    (row,), (layer,) = table(page, "layers"), expected["layers"]
    assert row["blocks"] == f"blocks 0 to {layer['count'] - 1}"
    for heading, key in (
        *(("forward (ms)", "forward_ms"), ("of it attention (ms)", "attention_ms")),
        *(("copy to the host (ms)", "d2h_ms"), ("copy back (ms)", "h2d_ms")),
        *(("copy / forward", "copy_over_forward"), ("input (GiB)", "input_gib")),
    ):
        assert_shown(row[heading], layer[key])
    for row, step in zip(table(page, "steps"), expected["steps"].values(), strict=True):
        for heading, key in (
            *(("step (ms)", "step_ms"), ("slow-down (%)", "vs_ac_percent")),
            ("many blocks, unlimited (%)", "closed_form_unlimited_percent"),
            ("many blocks, limited (%)", "closed_form_limited_percent"),
            *(("held after forward (GiB)", "held_gib"), ("pinned per rank (GiB)", "pinned_gib")),
            ("pinned per node (GiB)", "pinned_node_gib"),
        ):
            assert_shown(row[heading], step[key])
        assert_shown(row["peak (GiB)"], step["peak"]["num_bytes"] / GIB)
        fits_host = step["pinned_node_gib"] <= 0.8 * 1024
        fits_device = step["peak"]["num_bytes"] <= 80 * GIB
        assert row["fits"] == f"host: {'yes' if fits_host else 'no'}, device: {'yes' if fits_device else 'no'}"
    longest = expected["longest"]
    shown = [int(row["tokens"].replace(",", "")) for row in table(page, "longest")]
    assert shown == [longest["host"], longest["device_ac"], longest["device"]]


@needs_chromium
def test_links_are_those_known_and_the_plans_own(browser, tmp_path):
    plan = make_plan(QWEN_8B, Job(4096), Machine(170.0, 411.0, devices_per_link=2), OVERLAP)
    plan_page.write_page(plan, tmp_path / "plan.html")
    browser.open(tmp_path / "plan.html")
    size = 4096 * 4096 * 2
    assert browser.eval("document.getElementById('rate-value').textContent") == "170 out, 411 back, GB/s"
    for link, d2h, h2d in (
        *(("asked", 170, 411), ("pcie4", 31, 31), ("pcie5", 55.43, 55.43), ("c2c", 450, 450)),
        *(("own", 450, 450), ("asked", 170, 411)),
    ):
        move(browser, "link", link)
        (row,) = table(browser, "layers")
        assert_shown(row["copy to the host (ms)"], size / (d2h / 2 * 1e6))
        assert_shown(row["copy back (ms)"], size / (h2d / 2 * 1e6))
    assert [row["fits"] for row in table(browser, "steps")] == ["not known"] * 6
    assert [row["tokens"] for row in table(browser, "longest")] == [
        *("give --host-memory", "give --gpu-memory", "give --gpu-memory")
    ]
    assert browser.problems == []


@needs_chromium
def test_the_address_has_the_setting(page, tmp_path):
    plan = make_plan(*PLANS["plain"])
    setting = Setting(3, 81920, 12.0, 12.0, 4)
    set_controls(page, plan_page.page_data(plan), setting)
    address = page.eval("location.hash")
    assert address == "#model=3&link=own&seq=81920&share=4&rate=12"
    before = page.eval("document.querySelector('main').innerText")
    page.open(tmp_path / "plan.html")
    assert page.eval("document.querySelector('main').innerText") != before
    page.open(tmp_path / "plan.html", address)
    assert page.eval("document.querySelector('main').innerText") == before


@needs_chromium
@pytest.mark.parametrize(
    "fragment", ["#model=99&link=x&seq=-1&share=0", "#model=&seq=abc&share=1e999&rate=NaN", "#x", "#model=__proto__"]
)
def test_an_address_that_makes_no_sense_is_what_was_asked_about(page, tmp_path, fragment):
    plain = page.eval("JSON.stringify(plan)")
    page.open(tmp_path / "plan.html", fragment)
    assert page.eval("JSON.stringify(plan)") == plain


@needs_chromium
def test_controls_work_with_the_keyboard_and_have_names(page):
    for control, value in (("rate", 1), ("seq", 1), ("share", 1)):
        page.eval(f"document.getElementById('{control}').focus()")
        before = page.eval(f"Number(document.getElementById('{control}').value)")
        said = page.eval(f"document.getElementById('{control}-value').textContent")
        page.press("ArrowRight", 39)
        assert page.eval(f"Number(document.getElementById('{control}').value)") == before + value
        now = page.eval(f"document.getElementById('{control}-value').textContent")
        assert now != said
        assert page.eval(f"document.getElementById('{control}').getAttribute('aria-valuetext')") == now
    names = page.eval("[...document.querySelectorAll('input, select')].map((one) => one.labels[0]?.textContent)")
    assert names == ["Model", "Link to the host", "Link speed", "Sequence length", "Devices per link"]
    focused = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.eval(focused) == "solid"


@needs_chromium
def test_keys_are_marked_as_of_what_was_asked_when_the_controls_move(page):
    keys = "document.getElementById('settings').textContent"
    plan = make_plan(*PLANS["plain"])
    assert all(f"{setting.key} = {json.dumps(setting.value)}" in page.eval(keys) for setting in plan.verdict.settings)
    assert "no longer show" not in page.eval(keys)
    move(page, "seq", 0)
    assert "no longer show" in page.eval(keys)
    move(page, "seq", plan_page.page_data(plan)["seq_stops"].index(32768))
    assert "no longer show" not in page.eval(keys)


# How it looks

BAR_SPANS = """[...document.querySelectorAll('#%s rect')].map((rect) => [rect.getAttribute('class'),
  Number(rect.getAttribute('x')), Number(rect.getAttribute('width'))])"""

OVERLAPPING = """(() => {
  const texts = [...document.querySelectorAll('.timeline text')].map((text) => [text.textContent,
    text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()]);
  const meet = (one, other) => one.left < other.right && other.left < one.right
    && one.top + 2 < other.bottom && other.top + 2 < one.bottom;
  const pairs = texts.flatMap(([one, box], index) => texts.slice(index + 1).filter(([, other]) => meet(box, other))
    .map(([other]) => `${one} on ${other}`));
  return [...pairs, ...texts.filter(([, box, svg]) => box.right > svg.right + 1 || box.left < svg.left - 1)
    .map(([text]) => `${text} outside`)];
})()"""


@needs_chromium
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("ratio", "back"), [(0.05, None), (0.3, None), (1.0, None), (4.0, None), (0.05, 100.0)])
def test_labels_of_the_timelines_do_not_overlap(browser, tmp_path, ratio, back, width):
    plan_page.write_page(plan_of_ratio(ratio, 80, back), tmp_path / "plan.html")
    browser.show(width)
    browser.open(tmp_path / "plan.html")
    assert browser.eval(OVERLAPPING) == []
    assert browser.eval("document.querySelectorAll('.timeline text').length") >= 20
    assert browser.problems == []


@needs_chromium
def test_both_timelines_have_one_scale(browser, tmp_path):
    plan = plan_of_ratio(1.0, 80)
    plan_page.write_page(plan, tmp_path / "plan.html")
    browser.show(1280)
    browser.open(tmp_path / "plan.html")
    scales = []
    for schedule in ("sync", "overlap"):
        spans = [span for span in browser.eval(BAR_SPANS % schedule) if span[0] != "wait"]
        line = [i for lane in ("compute", "d2h", "h2d") for i in plan.timelines[schedule] if i.lane == lane]
        assert [span[0] for span in spans] == [i.name.split()[0] for i in line]
        scales += [(span[2] + 0.5) / (i.end_ms - i.start_ms) for span, i in zip(spans, line, strict=True)]
        (start, *_), zero = spans, spans[0][1] - scales[0] * line[0].start_ms
        assert start[1] == pytest.approx(zero + scales[0] * line[0].start_ms)
    assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-6)
    titles = browser.eval("['sync', 'overlap'].map((name) => document.getElementById(`${name}-title`).textContent)")
    # 4 blocks of 4 forwards; synchronous, 3 of them wait for 2 copies of a forward each
    forward = plan.layers[0].forward_ms
    assert [title.rpartition(": ")[2] for title in titles] == [f"{22 * forward:.4f} ms", f"{16 * forward:.4f} ms"]


@needs_chromium
def test_a_pass_ends_when_its_compute_ends(browser, tmp_path):
    plan = plan_of_ratio(40.0, 80)
    plan_page.write_page(plan, tmp_path / "plan.html")
    browser.open(tmp_path / "plan.html")
    line = plan.timelines["overlap"]
    end = max(i.end_ms for i in line if i.lane == "compute")
    assert max(i.end_ms for i in line) > 1.1 * end  # copies that nobody waits for
    assert browser.eval("document.getElementById('overlap-title').textContent").endswith(f" {end:.4f} ms")


@needs_chromium
@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_readable_at_any_width_and_in_both_color_schemes(browser, tmp_path, width, is_dark):
    plan_page.write_page(make_plan(*PLANS["layers that differ"]), tmp_path / "plan.html")
    browser.show(width, is_dark=is_dark)
    browser.open(tmp_path / "plan.html")
    assert browser.eval("innerWidth") == width
    assert browser.eval("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('td, th, p, h1, h2, h3, label, output')].filter((one) => one.scrollWidth > "
    assert browser.eval(cut + "one.clientWidth + 1 && one.clientWidth && !one.closest('thead')).length") == 0
    sizes = "[...document.querySelectorAll('body *')].map((one) => parseFloat(getComputedStyle(one).fontSize))"
    assert min(browser.eval(sizes)) >= 12
    for element in ("body", "#asked", ".good, .bad", "td", "#steps tbody th", "#controls label"):
        assert contrast(browser, element) >= 4.5, element  # WCAG 2.1, 1.4.3
    screenshot = tmp_path / "page.png"
    browser.screenshot(screenshot)
    assert screenshot.stat().st_size > 20_000


def contrast(browser: Chromium, selector: str) -> float:
    """Of an element's text to what is behind it. Source: WCAG 2.1, definition of contrast ratio."""
    colors = browser.eval(
        f"""(() => {{
          let one = document.querySelector({json.dumps(selector)});
          const text = getComputedStyle(one).color;
          while (one && getComputedStyle(one).backgroundColor === 'rgba(0, 0, 0, 0)') one = one.parentElement;
          return [text, getComputedStyle(one).backgroundColor];
        }})()"""
    )
    luminances = []
    for color in colors:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


def test_the_page_has_the_colors_of_the_picture():
    text = (PACKAGE / "plan_page.html").read_text()
    colors = dict(re.findall(r"--(forward|recompute|backward|offload|reload): (#\w+);", text))
    assert colors == {kind: color.lower() for kind, color in plan_plot.COLORS.items() if color != "none"}
