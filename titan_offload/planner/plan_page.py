"""A plan as one HTML file: its figures and timelines follow sliders, with no network and no server.

Owns what of a plan is written into the page. Relies on ``plan_page.html`` for what is seen, on ``plan_page.js`` for
what moves, and on ``plan_page_formulas.js``, in which the planner's formulas stand once more, for the browser.

How it works: what the controls cannot change (the order of a pipeline's schedule, which blocks a stage has, which
outputs are saved, constants) is worked out here; the page does the arithmetic of times and bytes. A test holds both to
the same figures. Price: a formula of `costs`, `simulation`, `link_choice` or `steps` that changes must change there
too.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from titan_offload.config import SelectiveConfig
from titan_offload.planner import costs, link_choice, pipeline, planning, simulation
from titan_offload.planner.plan import VARIANTS, Plan
from titan_offload.planner.plan_machine import NAMED
from titan_offload.planner.shapes import Job, LayerShape, Machine, ModelShape

ASKED = "asked"
"""Key of the link that the plan was made for."""

LINK_NAMES = {"pcie4": "PCIe 4 x16", "pcie5": "PCIe 5 x16", "c2c": "NVLink-C2C"}

LINKS = {key: (name, NAMED[key].d2h_gb_per_s) for key, name in LINK_NAMES.items()}
"""Name and GB/s in each direction."""

SEQ_POWERS, SEQ_PARTS = range(10, 23), (1, 1.25, 1.5, 1.75)
RATE_POWERS, RATE_PARTS = range(0, 3), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)


def _alike(name: str, num_layers: int, dim: int, layer: LayerShape, vocab: int, num_params: int) -> ModelShape:
    return ModelShape(name, dim, (layer,) * num_layers, vocab, num_params)


MODELS = (
    _alike("Qwen3-1.7B", 28, 2048, LayerShape(50_331_648, 2048, 16), 151_936, 1_720_574_976),
    _alike("Qwen3-8B", 36, 4096, LayerShape(192_937_984, 4096, 32), 151_936, 8_190_735_360),
    _alike("Llama-3 70B", 80, 8192, LayerShape(855_638_016, 8192, 64), 128_256, 70_553_706_496),
    _alike("Qwen3-30B-A3B", 48, 2048, LayerShape(56_885_248, 4096, 32), 151_936, 30_532_122_624),
)
"""Models to compare with. Parameters from the sizes in the ``config.json`` of each; of a layer those of its matmuls,
with a mixture of experts those of 8 of 128 experts and of the router."""


def write_page(plan: Plan, path: Path | str) -> None:
    """Writes a page that asks nothing of any other file or server.

    Args:
        plan: see `planner.make_plan`; what the page opens with.
        path: of the file.

    Raises:
        ValueError: the file cannot be written.
    """
    text = _part("plan_page.html")
    for slot, content in (
        ("{{formulas}}", _part("plan_page_formulas.js")),
        ("{{script}}", _part("plan_page.js")),
        ("{{data}}", _as_script_text(page_data(plan))),  # last: it has names that others chose
    ):
        before, after = text.split(slot)
        text = before + content + after
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--html {path} cannot be written ({error.strerror}): name a file in a folder that is there and may be "
            "written"
        ) from None


def page_data(plan: Plan) -> dict[str, Any]:
    """What the page computes from: what was asked, and what of it does not follow from its controls."""
    job, machine, verdict = plan.job, plan.machine, plan.verdict
    models = [_model_data(plan.model, job, plan.selective), *_other_models(plan)]
    return {
        "asked": asked_text(plan),
        "models": models,
        "links": [_link(ASKED, "as asked about", machine.d2h_gb_per_s, machine.h2d_gb_per_s)]
        + [_link(key, name, rate, rate) for key, (name, rate) in LINKS.items()],
        "rate_stops": _rate_stops(machine),
        "seq_stops": _seq_stops(job),
        "multiple": job.seq_len_divisor,
        "job": asdict(job),
        "machine": asdict(machine),
        "offload": asdict(plan.offload),
        "variants": VARIANTS,
        "variant": plan.variant,
        "host_budget_bytes": plan.host_budget_bytes,
        "timeline_blocks": planning.TIMELINE_BLOCKS,
        "bubble": _bubble(job),
        "pipeline": [_rank_data(job, rank) for rank in range(job.pipeline_parallel)],
        "nodes": _nodes(job, machine),
        "constants": _constants(plan),
        "verdict": {"settings": [asdict(setting) for setting in verdict.settings], "unknown": verdict.unknown},
    }


def _constants(plan: Plan) -> dict[str, float]:
    return {
        "all_over_input": costs.ALL_OVER_INPUT,
        "state_bytes": costs.STATE_BYTES,
        "gradient_bytes": costs.GRADIENT_BYTES,
        "loss_bytes": costs.LOSS_BYTES,
        "unsharded_blocks": costs.UNSHARDED_BLOCKS,
        "backward": simulation.BACKWARD,
        "gradients": simulation.GRADIENTS,
        "rounding": simulation.ROUNDING,
        "tolerance": link_choice.TOLERANCE,
        "min_offload_bytes": plan.offload.min_offload_bytes,
    }


# Models


def _model_data(model: ModelShape, job: Job, selective: SelectiveConfig | None) -> dict[str, Any]:
    """Its layers in runs of those that are alike, and the blocks of each stage."""
    stages = [[blocks.start, blocks.stop] for blocks in pipeline.blocks_of_stages(model, job)]
    return {
        "name": model.name,
        "dim": model.dim,
        "num_layers": len(model.layers),
        "vocab_size": model.vocab_size,
        "num_params": model.num_params,
        "layers": [_layer_data(layer, len(list(run)), selective) for layer, run in groupby(model.layers)],
        "stages": stages,
    }


def _layer_data(layer: LayerShape, count: int, selective: SelectiveConfig | None) -> dict[str, Any]:
    derived = {
        "count": count,
        "output_width": layer.output_width,
        "saves_attention": costs.saves_attention(layer, selective),
    }
    return {**asdict(layer), **derived}


def _other_models(plan: Plan) -> list[dict[str, Any]]:
    """Those of `MODELS` that are not the plan's own and whose blocks its pipeline can divide, as TorchTitan would."""
    job, known = replace(plan.job, stage_layers=None), []
    for model in MODELS:
        if (model.dim, model.layers) == (plan.model.dim, plan.model.layers):
            continue
        try:
            known.append(_model_data(model, job, plan.selective))
        except ValueError:  # it has fewer blocks than the pipeline has stages
            continue
    return known


# The job's ranks


def _rank_data(job: Job, rank: int) -> dict[str, Any]:
    """Of a pipeline rank: its stages, and what `pipeline.most_in_flight` comes to, whatever a pass leaves behind."""
    return {
        "stages": pipeline.stages_of_rank(job, rank),
        "passes": pipeline.passes_in_flight(job, rank),
        "alive": _alive(job, rank),
    }


def _alive(job: Job, rank: int) -> list[list[int]] | None:
    """How many passes of each of its stages a rank has alive at once: each combination that no other one includes.
    None: what weighs most as many times as passes are alive, or all that there is, whichever is less."""
    stages = pipeline.stages_of_rank(job, rank)
    if job.pipeline_parallel == 1:
        return [[1] * len(stages)]
    if job.schedule != "Interleaved1F1B":
        return None
    alive, seen = Counter(), set()
    for stage, kind, _ in pipeline.interleaved_actions(job, rank):
        alive[stage] += 1 if kind == "F" else -1
        seen.add(tuple(alive[stage] for stage in stages))
    return [list(counts) for counts in sorted(seen) if not any(_includes(other, counts) for other in seen - {counts})]


def _includes(counts: Sequence[int], others: Sequence[int]) -> bool:
    return all(count >= other for count, other in zip(counts, others, strict=True))


def _nodes(job: Job, machine: Machine) -> list[list[int]]:
    """For each node that differs, how many ranks of each pipeline rank it has, as `steps.Way.most_of_a_node`."""
    per_stage, nodes = job.num_devices // job.pipeline_parallel, set()
    for start in range(0, job.num_devices, machine.devices_per_node):
        end = min(start + machine.devices_per_node, job.num_devices)
        counts = Counter(rank // per_stage for rank in range(start, end))
        nodes.add(tuple(counts[rank] for rank in range(job.pipeline_parallel)))
    return [list(counts) for counts in sorted(nodes)]


def _bubble(job: Job) -> float:
    """Passes that a pipeline's bubble is as long as, see `steps.Way.step_ms`."""
    if job.pipeline_parallel == 1 or job.schedule in pipeline.BOUNDED:
        return 0.0
    return (job.pipeline_parallel - 1) / pipeline.stages_per_rank(job)


# Controls


def _link(key: str, name: str, d2h_gb_per_s: float, h2d_gb_per_s: float) -> dict[str, Any]:
    return {"key": key, "name": name, "d2h_gb_per_s": d2h_gb_per_s, "h2d_gb_per_s": h2d_gb_per_s}


def _seq_stops(job: Job) -> list[int]:
    """What the slider of sequence lengths offers: what was asked about, and what is near powers of two and allowed."""
    multiple = job.seq_len_divisor
    wanted = (part * 2**power for power in SEQ_POWERS for part in SEQ_PARTS)
    return sorted({job.seq_len, *(max(1, round(length / multiple)) * multiple for length in wanted)})


def _rate_stops(machine: Machine) -> list[float]:
    """What the slider of link speeds offers, in GB/s."""
    known = {machine.d2h_gb_per_s, machine.h2d_gb_per_s, *(rate for _, rate in LINKS.values())}
    return sorted(known | {part * 10**power for power in RATE_POWERS for part in RATE_PARTS})


# Text


def asked_text(plan: Plan) -> str:
    """What stays as it is when the controls move."""
    job, machine = plan.job, plan.machine
    degrees = {
        "context": job.context_parallel,
        "tensor": job.tensor_parallel,
        "pipeline": job.pipeline_parallel,
    }
    parts = [
        f"{job.num_devices} devices, {machine.devices_per_node} per node",
        *(f"{name} parallel {degree}" for name, degree in degrees.items() if degree > 1),
        f"batch {job.batch}",
        *([f"{job.num_forwards} passes per step"] if job.num_forwards > 1 else []),
        f"{machine.tflops:g} TFLOP/s",
        *([f"{machine.host_memory_gib:g} GiB host memory per node"] if machine.host_memory_gib else []),
        *([f"{machine.device_memory_gib:g} GiB device memory"] if machine.device_memory_gib else []),
    ]
    return ", ".join(parts)


def _part(name: str) -> str:
    return files("titan_offload.planner").joinpath(name).read_text(encoding="utf-8")


def _as_script_text(data: dict[str, Any]) -> str:
    """JSON that cannot end the script element that it stands in."""
    return json.dumps(data).replace("<", "\\u003c")
