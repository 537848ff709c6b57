"""How a TorchTitan train config spreads a job over devices, and what TorchTitan 0.2.2 refuses of it.

Owns the rules of TorchTitan on degrees, sequence and batch that a plan depends on, so that a plan fails before the job
would, in one sentence. Relies on a job config by its attribute names: TorchTitan's own, or what `plan_input` read.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from titan_offload.planner.pipeline import stage_layers
from titan_offload.planner.shapes import SCHEDULES, Job
from titan_offload.planner.titan_source import TrainSpec

ITEMSIZES = {"bfloat16": 2, "float32": 4}
"""Of TorchTitan's dtypes, in bytes."""

REFUSED_WITH_CONTEXT_PARALLEL = {"llama3": ("varlen",), "gpt_oss": ("flex",)}
"""Kinds of attention, by family: ``update_from_config`` of its model args raises. Of others: all but ``"sdpa"``."""

SINGLE_STAGE = ("1F1B", "GPipe")
"""Schedules with one stage per rank; TorchTitan makes two with the others."""


def job_of(config: Any, spec: TrainSpec, args: Any, num_devices: int) -> Job:
    """How the model is trained.

    Args:
        config: a namespace per section, or TorchTitan's own JobConfig.
        spec, args: of its model.
        num_devices: of the whole job.

    Raises:
        ValueError: TorchTitan would refuse it.
    """
    parallelism = config.parallelism
    context, tensor, pipeline, replicate = (
        _count(f"parallelism.{key}", getattr(parallelism, key))
        for key in (
            *("context_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree"),
            "data_parallel_replicate_degree",
        )
    )
    shard = _shard_degree(parallelism, context * tensor * pipeline * replicate, num_devices)
    seq_len = _count("training.seq_len", config.training.seq_len)
    _check_seq_len(seq_len, tensor, context)
    _check_parallel(config, spec, args)
    batch = _count("training.local_batch_size", config.training.local_batch_size)
    pipelined: dict[str, Any] = {"num_forwards": _num_accumulated(config.training, replicate * shard)}
    if pipeline > 1:
        microbatch = _microbatch_size(parallelism, batch)
        pipelined = {"num_forwards": batch // microbatch, **_stages(parallelism, args.n_layers, pipeline)}
        batch = microbatch
    dtype = "mixed_precision_param" if shard > 1 or context > 1 else "dtype"  # FSDP2's, or none
    return Job(
        seq_len=seq_len,
        batch=batch,
        itemsize=ITEMSIZES[_choice(f"training.{dtype}", getattr(config.training, dtype), ITEMSIZES)],
        context_parallel=context,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        num_devices=num_devices,
        data_parallel_replicate=replicate,
        is_checkpointed=_is_checkpointed(config),
        **pipelined,
    )


def _is_checkpointed(config: Any) -> bool:
    """Whether the run that is planned has AC: not if the config has none, and asks for that."""
    offload = config.activation_offload
    moves_all = (offload.get("mode") if isinstance(offload, Mapping) else offload.mode) == "all"
    return not (moves_all and config.activation_checkpoint.mode == "none")


def _shard_degree(parallelism: Any, others: int, num_devices: int) -> int:
    """``data_parallel_shard_degree``, where -1 means: all that is left."""
    given = parallelism.data_parallel_shard_degree
    shard = num_devices // others if given == -1 else _count("parallelism.data_parallel_shard_degree", given)
    if shard * others != num_devices:
        degrees = {
            name: getattr(parallelism, f"{name}_degree")
            for name in (
                *("data_parallel_replicate", "data_parallel_shard"),
                *("context_parallel", "tensor_parallel", "pipeline_parallel"),
            )
        }
        product = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree not in (1, -1))
        relation = "a multiple" if given == -1 else "the number"
        raise ValueError(
            f"{num_devices} devices are not {relation} that [parallelism] asks for, {product or 1} = "
            f"{others if given == -1 else shard * others}: set --nodes and --gpus-per-node, or the degrees"
        )
    return shard


def _check_seq_len(seq_len: int, tensor: int, context: int) -> None:
    """``ParallelDims.seq_len_divisor`` of TorchTitan 0.2.2, which it asks for whatever the degrees are."""
    divisor = tensor * context * 2
    if rest := seq_len % divisor:
        raise ValueError(
            f"training.seq_len = {seq_len} is no multiple of {divisor}, which TorchTitan demands "
            f"(tensor_parallel_degree {tensor} x context_parallel_degree {context} x 2): set it to "
            f"{seq_len - rest + divisor}"
        )


def _check_parallel(config: Any, spec: TrainSpec, args: Any) -> None:
    """What this model of TorchTitan cannot do."""
    parallelism, name = config.parallelism, config.model.name
    kind, refused = getattr(args, "attn_type", "sdpa"), REFUSED_WITH_CONTEXT_PARALLEL.get(spec.family)
    is_refused = kind != "sdpa" if refused is None else kind in refused
    if is_refused and parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"parallelism.context_parallel_degree = {parallelism.context_parallel_degree} is refused by TorchTitan "
            f"0.2.2 for {name} {config.model.flavor}, whose attention is {kind!r}: set it to 1"
        )
    if parallelism.pipeline_parallel_degree > 1 and not spec.has_pipeline:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree} is refused by TorchTitan "
            f"0.2.2 for {name}, which it cannot cut in stages: set it to 1"
        )


def num_accumulated(training: Any, job: Job) -> int:
    """Forward passes of the whole batch whose gradients are summed before the optimizer's step."""
    degrees = job.context_parallel * job.tensor_parallel * job.pipeline_parallel
    return _num_accumulated(training, job.num_devices // degrees)


def _num_accumulated(training: Any, batch_degree: int) -> int:
    if training.global_batch_size == -1:
        return 1
    global_batch = _count("training.global_batch_size", training.global_batch_size)
    batch = training.local_batch_size * batch_degree
    if rest := global_batch % batch:
        raise ValueError(
            f"training.global_batch_size = {global_batch} is no multiple of {batch} (local_batch_size "
            f"{training.local_batch_size} x data parallel {batch_degree}), which TorchTitan demands: set it to "
            f"{global_batch - rest + batch}, or to -1"
        )
    return global_batch // batch


def _microbatch_size(parallelism: Any, batch: int) -> int:
    size = _count("parallelism.pipeline_parallel_microbatch_size", parallelism.pipeline_parallel_microbatch_size)
    if batch % size:
        raise ValueError(
            f"training.local_batch_size = {batch} is no multiple of parallelism.pipeline_parallel_microbatch_size = "
            f"{size}, which TorchTitan demands: change one of them"
        )
    return size


def _stages(parallelism: Any, num_layers: int, pipeline: int) -> dict[str, Any]:
    """Schedule, and which blocks are in which stage."""
    schedule = _choice(
        "parallelism.pipeline_parallel_schedule", parallelism.pipeline_parallel_schedule, SCHEDULES, ignores_case=True
    )
    weights = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    num_stages = pipeline * (1 if schedule in SINGLE_STAGE else 2)
    if parallelism.module_fqns_per_model_part is not None:
        layers = [sum(fqn.startswith("layers.") for fqn in stage) for stage in parallelism.module_fqns_per_model_part]
        num_stages = len(layers)
    else:
        most_layers = parallelism.pipeline_parallel_layers_per_stage
        if most_layers is not None:
            _count("parallelism.pipeline_parallel_layers_per_stage", most_layers)
            num_stages = -(-(num_layers + sum(weights)) // most_layers)
        layers = stage_layers(num_layers, num_stages, *weights)
    is_single, per_rank = schedule in SINGLE_STAGE, num_stages / pipeline
    if per_rank != (1 if is_single else max(2, int(per_rank))):
        raise ValueError(
            f"[parallelism] asks for {num_stages} pipeline stages on {pipeline} ranks, where schedule {schedule} takes "
            f"{'one' if is_single else 'two or more'} per rank: change pipeline_parallel_layers_per_stage, "
            "module_fqns_per_model_part or the schedule"
        )
    return {"schedule": schedule, "stages_per_rank": num_stages // pipeline, "stage_layers": tuple(layers)}


def _count(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} = {value!r} is not allowed: set it to a whole number >= 1")
    return value


def _choice(key: str, value: object, allowed: Iterable[str], ignores_case: bool = False) -> str:
    for choice in allowed:
        if value == choice or (ignores_case and str(value).lower() == choice.lower()):
            return choice
    raise ValueError(f"{key} = {value!r} is not known: set it to one of {', '.join(allowed)}")
