"""What is read of a train config without TorchTitan, against TorchTitan itself."""

import ast
import copy
import dataclasses
import json
import math
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models
from torchtitan.protocols.train_spec import get_train_spec

from titan_offload import SelectiveConfig
from titan_offload.blocks import modules_of
from titan_offload.planner import titan_source
from titan_offload.planner.model_shape import FAMILIES, model_shape
from titan_offload.planner.plan_input import offload_of, plan_input_of, read_config, read_plan_input, selective_of
from titan_offload.selective import BlockSaves, SelectiveSaves
from titan_offload.titan.models import layer_type, register_builtin_saves
from titan_offload.titan.need import NeedOfJob

FLAVORS = [(name, flavor) for name in FAMILIES for flavor in get_train_spec(name).model_args]


def plain(value):
    """A dataclass or a namespace as dicts."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, types.SimpleNamespace):
        fields = vars(value)
    else:
        return value
    return {key: plain(item) for key, item in fields.items() if key != "_enforced"}


def build(name, flavor):
    """TorchTitan's model on the meta device, and its args."""
    spec = get_train_spec(name)
    args = dataclasses.replace(spec.model_args[flavor])
    args.moe_impl = "standard"  # of deepseek_v3; update_from_config sets it
    with torch.device("meta"):
        return spec.model_cls(args), args


def shape_of(name, flavor, *args, **kwargs):
    return model_shape("x", name, titan_source.read_train_spec(name).flavors[flavor], *args, **kwargs)


# TorchTitan's source


def test_models_are_those_that_torchtitan_has():
    assert set(titan_source.model_names()) == {*_supported_models, *_supported_experiments}
    assert set(FAMILIES) == set(_supported_models) - {"flux", "llama3_ft"}


@pytest.mark.parametrize("name", [*FAMILIES, "llama3_ft", "simple_fsdp.llama3"])
def test_model_args_are_those_of_torchtitan(name):
    spec = get_train_spec("llama3" if name == "llama3_ft" else name)  # importing that one needs torchft
    read = titan_source.read_train_spec(name)
    assert {flavor: plain(args) for flavor, args in read.flavors.items()} == {
        flavor: plain(args) for flavor, args in spec.model_args.items()
    }
    assert list(read.flavors) == list(spec.model_args)
    assert read.has_pipeline == (spec.pipelining_fn is not None)
    assert read.family == name.removeprefix("simple_fsdp.").removesuffix("_ft")


def test_job_config_is_that_of_torchtitan():
    assert plain(titan_source.read_job_config()) == plain(JobConfig())


def test_what_is_no_literal_is_not_guessed():
    for name in ("vlm", "transformers_modeling_backend", "autoparallel.local_map_deepseek_v3"):
        with pytest.raises(titan_source.UnreadableSource):
            titan_source.read_train_spec(name)
    llama3 = titan_source._load("torchtitan.models.llama3")
    for text in ("get_train_spec()", "llama3_args['8B']", "unknown", "len('8B')"):
        with pytest.raises(titan_source.UnreadableSource):
            llama3.evaluate(ast.parse(text, mode="eval").body)


# Sizes


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_parameters_are_those_of_the_built_model(name, flavor):
    model, args = build(name, flavor)
    shape = shape_of(name, flavor)
    assert shape.num_params == sum(parameter.numel() for parameter in set(model.parameters()))
    assert shape.vocab_size == model.tok_embeddings.weight.shape[0]
    assert shape.dim == model.tok_embeddings.weight.shape[1]
    top_k = args.moe_args.top_k if hasattr(args, "moe_args") else 0
    for layer, block in zip(shape.layers, model.layers.values(), strict=True):
        used = sum(module.weight.numel() for module in block.modules() if isinstance(module, nn.Linear))
        experts = [parameter for parameter in block.parameters() if parameter.ndim == 3]
        used += sum(parameter.numel() * top_k // parameter.shape[0] for parameter in experts)
        assert layer.params == used


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_attention_is_as_wide_as_what_goes_into_it(name, flavor):
    model, args = build(name, flavor)
    for layer, block in zip(shape_of(name, flavor).layers, model.layers.values(), strict=True):
        queries = getattr(block.attention, "wq", None) or block.attention.wq_b
        assert layer.attention_width == queries.weight.shape[0]
        assert layer.output_width == block.attention.wo.weight.shape[1]
        assert layer.num_heads == args.n_heads


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_windows_are_where_blocks_say_so(name, flavor):
    model, args = build(name, flavor)
    sizes = {
        "sliding_attention": getattr(args, "sliding_window_size", None),
        "chunked_attention": getattr(args, "fixed_attn_block_size", 0) // 2,
        "full_attention": None,
        None: None,
    }
    windows = [layer.window for layer in shape_of(name, flavor).layers]
    assert windows == [sizes[layer_type(block)] for block in model.layers.values()]
    if name == "gpt_oss" or flavor.endswith("_irope"):
        assert None in windows and len(set(windows)) == 2


def test_chunks_hold_half_of_them_before_a_token_on_average():
    """Of all pairs of a token and one that it looks at, for a sequence of many chunks."""
    chunk, seq_len = 8, 64
    row, column = torch.arange(seq_len)[:, None], torch.arange(seq_len)
    pairs = ((column <= row) & (row // chunk == column // chunk)).sum().item()
    args = dataclasses.replace(get_train_spec("llama4").model_args["debugmodel_irope"], fixed_attn_block_size=chunk)
    window = model_shape("x", "llama4", args).layers[1].window
    assert pairs - seq_len / 2 == window * seq_len  # without the half of a pair that a token is with itself


SELECTIONS = [
    SelectiveConfig(),
    SelectiveConfig(save_modules=("attention.wo", "wq")),
    SelectiveConfig(save_modules=("layers.0.feed_forward", "*.shared_experts.w[12]")),
    SelectiveConfig(save_matmul_min_k=512),
    SelectiveConfig(save_ops=("attention", "aten::mm")),
]


@pytest.mark.parametrize("selective", [None, *SELECTIONS])
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_outputs_are_those_that_a_run_counts(name, selective):
    register_builtin_saves()
    model, args = build(name, "debugmodel")
    config = JobConfig()
    config.training.seq_len, config.training.local_batch_size = 128, 3
    need = NeedOfJob(config, ParallelDims(1, 1, 1, 1, 1, 1, 1, world_size=1), args)
    saves = SelectiveSaves(selective, engine=None)
    layers = shape_of(name, "debugmodel", selective, itemsize=4).layers
    for index, (layer, block) in enumerate(zip(layers, model.layers.values(), strict=True)):
        fqn = f"layers.{index}"
        scopes = saves.scopes_of(fqn, modules_of(block, fqn))
        sizes = list(need._saved_sizes(block, BlockSaves(saves, fqn, scopes, layer_type(block))))
        attention = list(need._attention_sizes())
        sizes = sizes[2:] if sizes[:2] == attention else sizes
        assert sorted(sizes) == sorted(3 * 128 * each for each in layer.other_saves)
    if selective is not None and selective != SELECTIONS[0]:
        assert any(layer.other_saves for layer in layers)


def test_tensor_parallel_divides_outputs_of_column_wise_linears():
    """Plans of llama3 and deepseek_v3: wo and w2 by row, the latent and the router not at all."""
    selective = SelectiveConfig(save_matmul_min_k=1)
    whole, sliced = (shape_of("llama3", "8B", selective, tensor_parallel=tp).layers[0].other_saves for tp in (1, 4))
    wide, narrow = 2 * 4096, 2 * 1024
    assert whole == (wide, narrow, narrow, wide, 2 * 14336, wide, 2 * 14336)
    assert sliced == (wide // 4, narrow // 4, narrow // 4, wide, 2 * 14336 // 4, wide, 2 * 14336 // 4)
    latent = shape_of("deepseek_v3", "16B", selective, tensor_parallel=4).layers[0].other_saves
    assert latent[:4] == (2 * 16 * 192 // 4, 2 * (512 + 64), 2 * 16 * 256 // 4, wide // 2)


# The train config

CONFIGS = sorted((Path(__file__).parents[1] / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_read_as_torchtitan_reads_them(path):
    theirs = ConfigManager().parse_args(["--job.config_file", str(path)])
    ours = read_config(path)
    sections = [field.name for field in dataclasses.fields(JobConfig)]
    expected = {section: plain(getattr(theirs, section)) for section in sections}
    expected["job"]["config_file"] = None  # from the command line
    assert {section: plain(getattr(ours, section)) for section in sections} == expected
    assert offload_of(ours) == theirs.activation_offload
    selective = theirs.selective_checkpoint
    values = {field.name: getattr(selective, field.name) for field in dataclasses.fields(SelectiveConfig)}
    assert selective_of(ours) == (SelectiveConfig(**values) if selective.enable else None)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_run_plans_as_the_command_line_does(path):
    """From the job config that TorchTitan made."""
    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    parallelism = config.parallelism
    degrees = [getattr(parallelism, f"{name}_parallel_degree") for name in ("context", "tensor", "pipeline")]
    degrees += [parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree]
    num_devices = math.prod(8 if degree == -1 else degree for degree in degrees)
    assert plan_input_of(config, num_devices) == read_plan_input(path, num_devices)


@pytest.fixture
def read(tmp_path):
    """Reads a train config."""

    def read(model="llama3", flavor="8B", num_devices=8, training="seq_len = 4096", more="", **degrees):
        path = tmp_path / "run.toml"
        lines = [f"{key} = {value}" for key, value in degrees.items()]
        path.write_text(
            f'[model]\nname = "{model}"\nflavor = "{flavor}"\n[training]\n{training}\n[parallelism]\n'
            + "\n".join(lines)
            + f"\n{more}"
        )
        return read_plan_input(path, num_devices)

    return read


DEGREES = [
    {},
    {"data_parallel_replicate_degree": 2},
    {"context_parallel_degree": 8},
    {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
    {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 4},
    {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 8},
    {"tensor_parallel_degree": 8},
    # refused
    {"data_parallel_shard_degree": 3},
    {"context_parallel_degree": 3},
    {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 4},
    {"data_parallel_replicate_degree": 16},
    {"data_parallel_shard_degree": 0},
    {"tensor_parallel_degree": 0},
]


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_degrees_are_those_that_torchtitan_takes(read, degrees):
    get = {name: degrees.get(f"{name}_degree", 1) for name in ("context_parallel", "tensor_parallel")}
    shard = degrees.get("data_parallel_shard_degree", -1)
    replicate = degrees.get("data_parallel_replicate_degree", 1)
    try:
        dims = ParallelDims(replicate, shard, get["context_parallel"], get["tensor_parallel"], 1, 1, 1, world_size=8)
    except (AssertionError, ZeroDivisionError):
        with pytest.raises(ValueError, match=r"parallel"):
            read(training="seq_len = 4608", **degrees)
        return
    job = read(training="seq_len = 4608", **degrees).job
    assert (job.context_parallel, job.tensor_parallel) == (dims.cp, dims.tp)
    assert job.data_parallel_replicate == dims.dp_replicate
    is_bfloat16 = dims.fsdp_enabled  # else nothing casts what blocks hand on
    assert job.itemsize == (2 if is_bfloat16 else 4)


@pytest.mark.parametrize("seq_len", [16, 24, 32, 48, 50, 63, 64])
@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_sequences_divide_as_torchtitan_demands(read, seq_len, context, tensor):
    degrees = {"context_parallel_degree": context, "tensor_parallel_degree": tensor}
    divisor = ParallelDims(1, -1, context, tensor, 1, 1, 1, world_size=8).seq_len_divisor
    if seq_len % divisor == 0:
        assert read(training=f"seq_len = {seq_len}", **degrees).job.seq_len == seq_len
        return
    with pytest.raises(ValueError, match=f"is no multiple of {divisor}") as failure:
        read(training=f"seq_len = {seq_len}", **degrees)
    repair = int(str(failure.value).rpartition(" ")[2])
    assert repair % divisor == 0 and 0 < repair - seq_len < divisor


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_context_parallel_is_refused_where_torchtitan_refuses_it(read, name, flavor):
    config, args = JobConfig(), copy.deepcopy(get_train_spec(name).model_args[flavor])
    config.parallelism.context_parallel_degree = 2
    try:
        args.update_from_config(config)
    except NotImplementedError:
        with pytest.raises(ValueError, match=r"^parallelism.context_parallel_degree = 2 is refused by TorchTitan"):
            read(name, flavor, context_parallel_degree=2)
    else:
        assert read(name, flavor, context_parallel_degree=2).job.context_parallel == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_pipelines_are_refused_where_torchtitan_has_none(read, name):
    training = "seq_len = 4096\nlocal_batch_size = 8"
    if get_train_spec(name).pipelining_fn is None:
        with pytest.raises(ValueError, match=r"^parallelism.pipeline_parallel_degree = 2 is refused by TorchTitan"):
            read(name, "debugmodel", training=training, pipeline_parallel_degree=2)
    else:
        job = read(name, "debugmodel", training=training, pipeline_parallel_degree=2).job
        assert (job.pipeline_parallel, job.batch, job.num_forwards) == (2, 1, 8)


@pytest.mark.parametrize(
    ("pipeline", "schedule"), [(2, "1F1B"), (4, "GPipe"), (2, "interleaved1f1b"), (4, "ZBVZeroBubble")]
)
@pytest.mark.parametrize("weights", [(1, 1), (3, 2)])
def test_stages_are_those_of_torchtitan(read, pipeline, schedule, weights):
    first, last = weights
    job = read(
        training="seq_len = 4096\nlocal_batch_size = 8",
        pipeline_parallel_degree=pipeline,
        pipeline_parallel_schedule=f'"{schedule}"',
        pipeline_parallel_microbatch_size=2,
        pipeline_parallel_first_stage_less_layers=first,
        pipeline_parallel_last_stage_less_layers=last,
    ).job
    num_stages = pipeline if schedule in ("1F1B", "GPipe") else 2 * pipeline
    parts = generate_llm_fqn_per_model_part(num_stages, 32, first, last)
    assert job.stage_layers == tuple(sum(name.startswith("layers.") for name in part) for part in parts)
    assert job.stages_per_rank == num_stages // pipeline
    assert job.schedule.lower() == schedule.lower()
    assert (job.batch, job.num_forwards) == (2, 4)


def test_layers_per_stage_and_named_parts_make_stages(read):
    """32 blocks, embedding and head as one each: 34 / 9 is 4 stages."""
    training = "seq_len = 4096\nlocal_batch_size = 8"
    schedule = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": '"Interleaved1F1B"'}
    job = read(training=training, pipeline_parallel_layers_per_stage=9, **schedule).job
    assert (job.stages_per_rank, job.stage_layers) == (2, (8, 9, 8, 7))
    parts = [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2", "layers.3", "layers.4", "layers.5", "norm", "output"],
    ]
    named = {"pipeline_parallel_degree": 2, "module_fqns_per_model_part": json.dumps(parts)}
    assert read(flavor="debugmodel", training=training, **named).job.stage_layers == (1, 5)
    for bad in ({"pipeline_parallel_layers_per_stage": 12}, {"pipeline_parallel_layers_per_stage": 17}):
        with pytest.raises(ValueError, match=r"^\[parallelism\] asks for \d pipeline stages on 2 ranks"):
            read(training=training, **schedule, **bad)


@pytest.mark.parametrize(("global_batch", "expected"), [(-1, 1), (32, 1), (96, 3), (48, None), (0, None)])
def test_accumulated_passes(read, global_batch, expected):
    """4 sequences per rank, 8 ranks: a global batch is a multiple of 32."""
    training = f"seq_len = 4096\nlocal_batch_size = 4\nglobal_batch_size = {global_batch}"
    if expected is None:
        with pytest.raises(ValueError, match=r"^training.global_batch_size = "):
            read(training=training)
        return
    job = read(training=training).job
    assert (job.batch, job.num_forwards) == (4, expected)


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"pipeline_parallel_microbatch_size": 3}, "training.local_batch_size = 8 is no multiple of .*_size = 3"),
        ({"pipeline_parallel_schedule": '"2F2B"'}, "parallelism.pipeline_parallel_schedule = '2F2B' is not known"),
        ({"pipeline_parallel_layers_per_stage": 0}, "parallelism.pipeline_parallel_layers_per_stage = 0 is not"),
    ],
)
def test_pipelines_that_do_not_go_together(read, degrees, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        read(training="seq_len = 4096\nlocal_batch_size = 8", pipeline_parallel_degree=2, **degrees)


def test_what_is_not_counted_is_said(read):
    more = """
[activation_checkpoint]
mode = "full"
[training.dataloader]
num_workers = 2
[checkpoint]
enable = true
async_mode = "async"
"""
    assert read(more='[activation_checkpoint]\nmode = "full"').notes == ()
    (claims,) = read(more=more).notes
    assert (
        claims == "checkpoint.async_mode and training.dataloader.num_workers take host memory too, which is not counted"
    )
    (documents,) = read("deepseek_v3", "16B", more='[activation_checkpoint]\nmode = "full"').notes
    assert documents.startswith("attention is counted over the whole sequence")
    accumulated = read(
        training="seq_len = 4096\nlocal_batch_size = 4\nglobal_batch_size = 48",
        pipeline_parallel_degree=2,
        more='[activation_checkpoint]\nmode = "full"',
    )
    assert accumulated.notes == ("times are those of one of 3 passes whose gradients are accumulated",)
