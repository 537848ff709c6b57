"""From a TorchTitan train config to what `planner.make_plan` is asked.

Owns the reading of the TOML file, and what the config lacks for offload to run. Relies on `titan_source` for
TorchTitan's sections, defaults and model args, so that a plan needs neither torch nor a device, and on `titan_job` for
the rules on degrees and sizes.

What TorchTitan refuses at start is refused here, in one sentence that names the key. Settings that no figure depends on
are looked at by name only.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from titan_offload.config import OFFLOAD, SELECTIVE, OffloadConfig, SelectiveConfig
from titan_offload.planner import titan_source
from titan_offload.planner.model_shape import FAMILIES, model_shape
from titan_offload.planner.shapes import Job, ModelShape
from titan_offload.planner.titan_job import job_of, num_accumulated
from titan_offload.planner.titan_source import TrainSpec, UnreadableSource

CONFIG_MODULE, IMPORT, CONVERTER = "titan_offload.titan.job_config", "titan_offload.titan", "titan_offload"
"""What turns offload on: ``job.custom_config_module``, ``experimental.custom_import``, one of ``model.converters``."""


@dataclass(frozen=True)
class PlanInput:
    """What a train config says.

    Attributes:
        model, job: sizes of the model, and how it is trained.
        offload, selective: settings; selective None: not enabled.
        estimate: why what autograd saves of blocks that are not checkpointed is an estimate; None: it is exact.
        missing: keys to set for the run to be as planned, with their values, as lines of TOML.
        notes: what the figures do not count, or take for granted; for people.
        dump_folder: where the run writes.
    """

    model: ModelShape
    job: Job
    offload: OffloadConfig
    selective: SelectiveConfig | None
    estimate: str | None
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    dump_folder: Path


def read_plan_input(path: Path, num_devices: int) -> PlanInput:
    """Reads a train config.

    Args:
        path: a TOML file with TorchTitan's sections; those of this package may be missing.
        num_devices: of the whole job.

    Raises:
        ValueError: the file is missing or malformed, a section, key, model or flavor is not known, or TorchTitan would
            refuse the settings.
    """
    return plan_input_of(read_config(path), num_devices)


def plan_input_of(config: Any, num_devices: int, on_cpu: bool = False) -> PlanInput:
    """The same of a train config that was read already.

    Args:
        config: see `read_config`, or TorchTitan's own JobConfig with the sections of `titan.job_config`.
        num_devices: of the whole job.
        on_cpu: whether they are CPUs, where autograd saves more of a block.

    Raises:
        ValueError: the model or its flavor is not known, or TorchTitan would refuse the settings.
    """
    spec = _train_spec(config.model.name)
    args = _model_args(config.model, spec)
    offload, selective = offload_of(config), selective_of(config)
    job = job_of(config, spec, args, num_devices)
    model = model_shape(
        f"{config.model.name} {config.model.flavor}",
        spec.family,
        args,
        selective,
        itemsize=job.itemsize,
        tensor_parallel=job.tensor_parallel,
        batch=job.batch,
        on_cpu=on_cpu,
    )
    estimate = why_estimate(config, spec.family, args, job)
    texts = tuple(_missing(config, job)), tuple(_notes(config, args, job, estimate))
    return PlanInput(model, job, offload, selective, estimate, *texts, Path(config.job.dump_folder))


# The file


def read_config(path: Path) -> SimpleNamespace:
    """A train config with TorchTitan's defaults: a namespace per section. The two sections of this package are dicts.

    Raises:
        ValueError: see `read_plan_input`.
    """
    content = b""
    try:
        content = path.read_bytes()
        values = tomllib.loads(content.decode())
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: give the path of a TorchTitan train config") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} is not TOML: it is not UTF-8 (at line {line})") from None
    except tomllib.TOMLDecodeError as error:
        last = f"(at line {len(content.splitlines())}, the last)"
        raise ValueError(f"{path} is not TOML: {str(error).replace('(at end of document)', last)}") from None
    ours = {section: values.pop(section, {}) for section in (OFFLOAD, SELECTIVE)}
    for section, keys in (
        (OFFLOAD, [key.name for key in fields(OffloadConfig)]),
        (SELECTIVE, ["enable", *(key.name for key in fields(SelectiveConfig))]),
    ):
        _check_table(section, ours[section])
        _check_known(f"[{section}] has no key", ours[section], keys)
    config = titan_source.read_job_config()
    job = values.get("job", {})
    module = job.get("custom_config_module", "") if isinstance(job, Mapping) else ""
    _update(config, values, "", is_open=module not in ("", CONFIG_MODULE))
    vars(config).update(ours)
    return config


def _update(config: SimpleNamespace, values: Mapping[str, Any], section: str, is_open: bool) -> None:
    """Puts ``values`` in the place of defaults, as TorchTitan's ConfigManager does.

    Args:
        is_open: whether a config module that is not ours may add sections and keys.
    """
    if not is_open:
        what = f"[{section}] has no key" if section else "TorchTitan 0.2.2 has no section"
        _check_known(what, values, vars(config))
    for key, value in values.items():
        name, default = f"{section}.{key}".lstrip("."), getattr(config, key, None)
        if isinstance(default, SimpleNamespace):
            _check_table(name, value)
            _update(default, value, name, is_open)
        else:
            setattr(config, key, value)


def _check_table(section: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{section} = {value!r} is not allowed: it is a section, so write [{section}]")


def _check_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            raise ValueError(f"{what} {name!r}: {_closest(name, known)}")


def _closest(name: object, known: Iterable[str]) -> str:
    """A repair: the names most like ``name``, or all."""
    by_lower = {choice.lower(): choice for choice in known}
    likely = [by_lower[lower] for lower in difflib.get_close_matches(str(name).lower(), by_lower)]
    return f"did you mean {' or '.join(likely)}?" if likely else f"it has {', '.join(by_lower.values())}"


# Model


def _train_spec(name: str) -> TrainSpec:
    if name not in (known := titan_source.model_names()):
        raise ValueError(f"model.name = {name!r} is not known to TorchTitan 0.2.2: {_closest(name, known)}")
    try:
        return titan_source.read_train_spec(name)
    except UnreadableSource:
        raise ValueError(
            f"model.name = {name!r} has no model args that can be read without running it: plan one of "
            f"{', '.join(FAMILIES)}, with the same sizes"
        ) from None


def _model_args(model: Any, spec: TrainSpec) -> SimpleNamespace:
    if model.flavor not in spec.flavors:
        raise ValueError(
            f"model.flavor = {model.flavor!r} is not known to {model.name}: {_closest(model.flavor, spec.flavors)}"
        )
    return spec.flavors[model.flavor]


# Settings of this package


def offload_of(config: Any) -> OffloadConfig:
    """The section ``[activation_offload]``, or its defaults.

    Raises:
        ValueError: a value is not allowed, or the section asks to move block inputs where there are none.
    """
    settings, mode = _settings(config, OFFLOAD), config.activation_checkpoint.mode
    offload = OffloadConfig(**settings)
    if settings and offload.mode == "block_inputs" and mode not in ("full", "selective"):
        raise ValueError(
            f'activation_checkpoint.mode = {mode!r} does not go with {OFFLOAD}.mode = "{offload.mode}", since no block '
            f'is checkpointed as such: set activation_checkpoint.mode to "full", or {OFFLOAD}.mode to "all" or "none"'
        )
    if offload.mode == "all" and mode not in ("full", "selective", "none"):
        raise ValueError(
            f'activation_checkpoint.mode = {mode!r} cannot be planned with {OFFLOAD}.mode = "all": the compiler '
            'decides what is saved. Set activation_checkpoint.mode to "none" or "full"'
        )
    return offload


def selective_of(config: Any) -> SelectiveConfig | None:
    """The section ``[selective_checkpoint]``, if it is enabled.

    Raises:
        ValueError: a value is not allowed, or blocks are not checkpointed as a whole.
    """
    settings = _settings(config, SELECTIVE)
    is_enabled = settings.pop("enable", False)
    if not isinstance(is_enabled, bool):
        raise ValueError(f"{SELECTIVE}.enable = {is_enabled!r} is not allowed: set it to true or false")
    selective = SelectiveConfig(**settings)
    if is_enabled and config.activation_checkpoint.mode != "full":
        raise ValueError(
            f"{SELECTIVE}.enable = true does not go with activation_checkpoint.mode = "
            f'{config.activation_checkpoint.mode!r}: set the mode to "full", or remove [{SELECTIVE}]'
        )
    return selective if is_enabled else None


def _settings(config: Any, section: str) -> dict[str, Any]:
    """Key and value: of a section as it was read those that are there, of a dataclass all."""
    values = getattr(config, section)
    return (
        dict(values) if isinstance(values, Mapping) else {key.name: getattr(values, key.name) for key in fields(values)}
    )


# For people


def why_estimate(config: Any, family: str, args: Any, job: Job) -> str | None:
    """Why `saved_activations` is an estimate for this job; None: it is exact, to the byte.

    Args:
        config: see `plan_input_of`.
        family, args: of its model, see `model_shape`.
        job: as it is trained.
    """
    blocks = [FAMILIES[family](args, index) for index in range(args.n_layers)]
    shards = job.num_devices // (job.tensor_parallel * job.pipeline_parallel * job.data_parallel_replicate)
    others = [name for name in config.model.converters if name != CONVERTER]
    training, kind = config.training, getattr(args, "attn_type", "sdpa")
    if any(block.router is not None for block in blocks):
        return "how many tokens an expert gets is up to its router"
    if any(block.linear("attention.wkv_b") for block in blocks):
        return "which kernel takes heads of two sizes is up to the device"
    if kind != "sdpa":
        return f"attention of kind {kind!r} was not looked at"
    if config.compile.enable and "model" in config.compile.components:
        return "in compiled blocks the compiler decides what is saved"
    if job.context_parallel > 1:
        return "with context parallel attention also saves what ranks send each other"
    if others:
        return f"the converter {others[0]} changes what linears save"
    if shards == 1 and any(block.copies_rope for block in blocks) and job.itemsize < 4:
        return "without FSDP2 rotary tables are cast in other places"
    is_cast = shards == job.tensor_parallel == job.pipeline_parallel == 1
    if is_cast and training.mixed_precision_param != training.dtype:
        return "without FSDP2 autocast saves the copies that it makes"
    return None


def _missing(config: Any, job: Job) -> list[str]:
    """Lines of TOML without which the run would not offload, or not every block."""
    lines = []
    if config.job.custom_config_module != CONFIG_MODULE:
        lines.append(f'[job] custom_config_module = "{CONFIG_MODULE}"')
    if config.experimental.custom_import != IMPORT:
        lines.append(f'[experimental] custom_import = "{IMPORT}"')
    if CONVERTER not in config.model.converters:
        lines.append(f'[model] converters = ["{CONVERTER}"]')
    if job.is_checkpointed and config.activation_checkpoint.mode != "full":
        lines.append('[activation_checkpoint] mode = "full"')
    return lines


def _notes(config: Any, args: Any, job: Job, estimate: str | None) -> list[str]:
    notes = []
    if not job.is_checkpointed:
        notes.append(
            "what blocks save is counted as on an accelerator, whose RMSNorm is one kernel; on a CPU it saves two "
            "float32 tensors instead of one"
        )
        if estimate is not None:
            notes.append(f"what blocks save is an estimate: {estimate}")
    elif config.activation_checkpoint.mode != "full":
        notes.append(
            f'activation_checkpoint.mode is "{config.activation_checkpoint.mode}"; the figures are for "full", in '
            "which every block keeps its input alone"
        )
    if getattr(args, "attn_mask_type", "causal") == "block_causal":
        notes.append(
            "attention is counted over the whole sequence: with documents that are shorter there is less compute for "
            "copies to hide behind"
        )
    accumulated = num_accumulated(config.training, job)
    if job.pipeline_parallel > 1 and accumulated > 1:
        notes.append(f"times are those of one of {accumulated} passes whose gradients are accumulated")
    if config.parallelism.pipeline_parallel_schedule_csv and job.pipeline_parallel > 1:
        notes.append(f"pipeline_parallel_schedule_csv is not read: the schedule is taken to be {job.schedule}")
    claims = []
    if config.training.enable_cpu_offload:
        claims.append("training.enable_cpu_offload")
    if config.checkpoint.enable and config.checkpoint.async_mode != "disabled":
        claims.append("checkpoint.async_mode")
    if config.training.dataloader.num_workers:
        claims.append("training.dataloader.num_workers")
    if claims:
        notes.append(f"{' and '.join(claims)} take host memory too, which is not counted")
    return notes
