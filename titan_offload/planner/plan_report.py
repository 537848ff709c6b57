"""A plan for people: the verdict, then the tables that it comes from.

Owns the texts and tables of ``titan-offload plan``. Relies on the data of `plan` alone; nothing is computed here but
sums and units.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from titan_offload.config import GIB, MIB
from titan_offload.planner.plan import Plan

PIPE_WIDTH = 100
"""Columns where the output is no terminal."""

VARIANT_NAMES = {
    "ac": "AC alone",
    "sync": "offload, sync",
    "overlap": "offload, overlap",
    "overlap_selective_device": "overlap, saves on device",
    "overlap_selective_host": "overlap, saves on host",
    "all_without_ac": "all activations, no AC",
}


@dataclass(frozen=True)
class Context:
    """What stands around a plan.

    Attributes:
        config: path of the train config.
        link: its name, and where its rates are from.
        missing: lines of TOML without which the run would not be as planned.
        notes: what the figures do not count.
    """

    config: str
    link: str
    missing: Sequence[str]
    notes: Sequence[str]


def console(is_terminal: bool | None = None) -> Console:
    """For standard output. Where that is no terminal, as wide as the tables need."""
    out = Console(highlight=False, force_terminal=is_terminal)
    return out if out.is_terminal else Console(highlight=False, width=PIPE_WIDTH, force_terminal=False)


def render(plan: Plan, context: Context) -> Group:
    """The whole report."""
    return Group(*_parts(plan, context))


def _parts(plan: Plan, context: Context) -> Iterator[RenderableType]:
    yield _verdict(plan)
    yield _settings(plan)
    if context.missing:
        yield _lines(f"For the run to be as planned, {context.config} needs these too", context.missing)
    yield _times(plan)
    yield _bytes(plan)
    yield _layers(plan)
    yield _memory(plan)
    yield _lines("Counted with", _assumptions(plan, context))
    if notes := [*plan.verdict.unknown, *context.notes]:
        yield _lines("Not counted, or taken for granted", notes)


# Verdict


def headline(plan: Plan) -> str:
    """Whether it fits and what it costs, in one line."""
    verdict = plan.verdict
    fits = {"host memory": verdict.fits_host, "device memory": verdict.fits_device}
    by_answer = {answer: " and ".join(name for name, fit in fits.items() if fit is answer) for answer in (False, None)}
    if by_answer[False]:
        what = f"DOES NOT FIT {by_answer[False]}"
    elif not _fits_as_asked(plan):
        what = "DOES NOT FIT host memory as configured"
        what += ", fits with the keys below" if verdict.pays else ""
    elif by_answer[None]:
        is_known = True in fits.values()
        what = f"FITS as far as known, {by_answer[None]} not given" if is_known else f"{by_answer[None]} not given"
    else:
        what = "FITS"
    if not verdict.pays:
        recompute = verdict.settings[0].key.startswith("activation_checkpoint")
        return f"{what}; {'to recompute is faster' if recompute else 'offload is of no use'} here"
    longer = percent(verdict.slowdown_percent)
    return f"{what}; the step gets {'no' if longer == percent(0) else longer} longer than with AC alone"


def _fits_as_asked(plan: Plan) -> bool:
    """Whether the host has room without the verdict's settings, as far as that is known."""
    budget = plan.host_budget_bytes
    return budget is None or plan.steps[plan.variant].pinned_node_bytes <= budget


def _verdict(plan: Plan) -> Panel:
    verdict = plan.verdict
    fits = False not in (verdict.fits_host, verdict.fits_device) and _fits_as_asked(plan)
    text = Text(headline(plan), style="bold green" if fits else "bold red")
    for sentence in verdict.text:
        text.append(f"\n{sentence}", style="not bold default")
    return Panel(text, title=plan.model.name, title_align="left", border_style="green" if fits else "red")


def _settings(plan: Plan) -> Group:
    table = _table("key")
    table.columns[0].no_wrap = True
    table.add_column("value", no_wrap=True)
    table.add_column("why")
    for setting in plan.verdict.settings:
        table.add_row(setting.key, _toml(setting.value), setting.why)
    return _titled("Set", table)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


# Tables


def _times(plan: Plan) -> Group:
    table = _table()
    for heading in (
        "step ms",
        "vs AC alone",
        "waits for copies",
        "formula, no limit",
        "formula, limited",
    ):
        table.add_column(heading, justify="right", max_width=9)
    for variant, step in plan.steps.items():
        shares = (step.simulated_percent, step.closed_form_unlimited_percent, step.closed_form_limited_percent)
        cells = [milliseconds(step.step_ms), *map(percent, (step.vs_ac_percent, *shares))]
        table.add_row(VARIANT_NAMES[variant], *cells, style="bold" if variant == plan.variant else "")
    return _titled("One step of the slowest rank; embedding, head, loss, optimizer and collectives left out", table)


def _bytes(plan: Plan) -> Group:
    table = _table()
    for heading in ("moved per step", "held on device", "peak on device", "pinned per rank", "pinned per node"):
        table.add_column(heading, justify="right", max_width=9)
    for variant, step in plan.steps.items():
        sizes = (step.moved_bytes, step.held_bytes, step.peak.num_bytes, step.pinned_bytes, step.pinned_node_bytes)
        table.add_row(VARIANT_NAMES[variant], *map(gib, sizes), style="bold" if variant == plan.variant else "")
    return _titled(
        "Memory of that step in GiB; block inputs and saved outputs, and the peak as far as it is known", table
    )


def _layers(plan: Plan) -> Group:
    table = _table("layers")
    for heading in ("forward ms", "of it attention", "copy out ms", "copy back ms"):
        table.add_column(heading, justify="right", max_width=9)
    for heading in ("copy over forward", "input MiB", "saved MiB"):
        table.add_column(heading, justify="right", max_width=9)
    for layer in plan.layers:
        table.add_row(
            str(layer.first) if layer.count == 1 else f"{layer.first}-{layer.first + layer.count - 1}",
            *map(milliseconds, (layer.forward_ms, layer.attention_ms, layer.d2h_ms, layer.h2d_ms)),
            f"{layer.copy_over_forward:.4f}",
            *(f"{num_bytes / MIB:.1f}" for num_bytes in (layer.input_bytes, layer.saved_bytes)),
        )
    return _titled("One forward pass of a layer", table)


def _memory(plan: Plan) -> Group:
    table = _table("what")
    for heading in ("per rank GiB", "per node GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    step = plan.steps[plan.variant]
    inputs = (plan.block_inputs_bytes, plan.block_inputs_node_bytes)
    table.add_row("block inputs, on the device with AC alone", *map(gib, inputs))
    table.add_row("pinned host memory, as planned", gib(step.pinned_bytes), gib(step.pinned_node_bytes))
    if plan.host_budget_bytes is not None:
        table.add_row("what a node's ranks may pin", "", gib(plan.host_budget_bytes))
    for part, num_bytes in step.peak.parts.items():
        table.add_row(f"at the peak, {step.peak.name}: {part}", gib(num_bytes), "")
    for rank in plan.ranks if len(plan.ranks) > 1 else ():
        layers = "+".join(map(str, rank.num_layers))
        bound = "at most " if plan.in_flight_is_bound else ""
        what = f"pipeline rank {rank.pipeline_rank}: {layers} layers, {bound}{rank.passes_in_flight} passes in flight"
        table.add_row(what, gib(rank.pinned_bytes), "")
    longest = plan.longest
    for what, tokens in (
        ("by host memory", longest.host),
        ("by device memory, AC alone", longest.device_ac),
        ("by device memory, as planned", longest.device),
    ):
        if tokens is not None:
            table.add_row(f"longest sequence {what}: {tokens:,} tokens", "", "")
    return _titled("What memory holds, and for how long a sequence", table)


def _assumptions(plan: Plan, context: Context) -> list[str]:
    job, machine, model = plan.job, plan.machine, plan.model
    degrees = {"context": job.context_parallel, "tensor": job.tensor_parallel, "pipeline": job.pipeline_parallel}
    parallel = ", ".join(f"{name} parallel {degree}" for name, degree in degrees.items() if degree > 1)
    params = "" if model.num_params is None else f", {model.num_params / 1e9:.3g} billion parameters"
    link = f"link {context.link}: {machine.d2h_gb_per_s:g} GB/s D2H, {machine.h2d_gb_per_s:g} GB/s H2D"
    if machine.devices_per_link > 1:
        link += f", shared by {machine.devices_per_link} devices"
    return [
        f"{model.name}: {len(model.layers)} layers, dim {model.dim}{params}",
        f"sequences of {job.seq_len:,} tokens, {job.batch} per forward pass, {job.num_forwards} forward passes per "
        f"step, {job.itemsize} bytes per element{', ' if parallel else ''}{parallel}",
        f"{machine.num_nodes} x {machine.devices_per_node} devices at {machine.tflops:g} TFLOP/s",
        link,
    ]


def _table(first: str = "way") -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(first, no_wrap=first == "way")
    return table


def _titled(title: str, table: RenderableType) -> Group:
    """A title that is not wrapped to the width of its table."""
    return Group(Text(title, style="bold"), table)


def _lines(title: str, lines: Sequence[str]) -> Group:
    grid = Table.grid(padding=(0, 1))
    for line in lines:
        grid.add_row("-", Text(line))
    return _titled(title, Padding(grid, (0, 0, 1, 1)))


# Units


def percent(value: float) -> str:
    """One decimal, without a sign before zero."""
    return f"{round(value, 1) + 0.0:.1f} %"


def milliseconds(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def gib(num_bytes: float) -> str:
    """Bytes in GiB."""
    return f"{num_bytes / GIB:.2f}" if num_bytes >= GIB / 10 or num_bytes == 0 else f"{num_bytes / GIB:.4f}"
