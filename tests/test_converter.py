"""The converter against TorchTitan's own models and config, in one process."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import CheckpointError
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.moe.moe import MoE, TokenChoiceTopKRouter
from torchtitan.protocols.train_spec import get_train_spec

from titan_offload import report
from titan_offload.save_registry import registered_saves
from titan_offload.titan.converter import OffloadConverter
from titan_offload.titan.metrics import OffloadLogger
from titan_offload.titan.models import layer_type

pytestmark = pytest.mark.usefixtures("titan_on_cpu", "in_repo")

CONFIG = ["--job.config_file", "train_configs/debug_cpu.toml"]
# All models of TorchTitan 0.2.2 that have layers
FLAVORS = {
    "llama3": "debugmodel",
    "qwen3": "debugmodel",
    "llama4": "debugmodel",
    "deepseek_v3": "debugmodel",
    "gpt_oss": "debugmodel",
}


def parse(*flags):
    return ConfigManager().parse_args([*CONFIG, "--activation_offload.min_offload_mib", "0.001", *flags])


def make_converter(*flags, **dims):
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1) | dims
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    return OffloadConverter(parse(*flags), ParallelDims(world_size=world_size, **degrees))


def build(name, job_config, flavor=None, **changes):
    spec = get_train_spec(name)
    args = dataclasses.replace(copy.deepcopy(spec.model_args[flavor or FLAVORS[name]]), **changes)
    args.update_from_config(job_config)
    with torch.device("meta"):
        return spec.model_cls(args)


def finish(model, job_config):
    """What TorchTitan does with a model part after ``convert``."""
    apply_ac(model, job_config.activation_checkpoint)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model.train()


def test_a_run_leaves_nothing_behind_in_the_process():
    """FSDP2 keeps the class of each model that it was given, for the life of the process."""
    classes = []

    def run():
        job_config = parse()
        converter = make_converter()
        model = build("llama3", job_config, n_layers=2)
        converter.convert(model)
        classes.append(type(model))
        part = finish(copy.deepcopy(model), job_config)
        assert converter._offloader.part_fqns
        return [weakref.ref(x) for x in (converter, converter._offloader, model, part)]

    seen = run() + run()
    gc.collect()
    assert [ref() for ref in seen] == [None] * 8
    assert classes[0] is classes[1]


@pytest.mark.parametrize("name", FLAVORS)
def test_every_model_of_torchtitan_gets_its_blocks(name):
    """Also H26: pipelines deep-copy the converted model; the copy that is trained must use its own weights."""
    job_config = parse()
    converter = make_converter()
    original = build(name, job_config)
    class_name = type(original).__name__
    converter.convert(original)
    part = finish(copy.deepcopy(original), job_config)
    assert type(part).__name__ == class_name
    fqns = [f"layers.{i}" for i in range(len(part.layers))]
    assert converter._offloader.part_fqns == [fqns]
    part.eval()
    part.train()  # after each validation; attaches nothing again
    assert converter._offloader.part_fqns == [fqns]

    if name == "gpt_oss":
        pytest.skip("its attention needs a compiled kernel; that its blocks are found was seen")
    expected = finish(build(name, job_config), job_config)
    assert list(part.state_dict()) == list(expected.state_dict())
    assert [n for n, _ in part.named_modules()] == [n for n, _ in expected.named_modules()]
    tokens = torch.arange(64).reshape(2, 32) % 256
    for model in (part, expected):
        model(tokens).float().square().mean().backward()
    for (param_name, p), q in zip(part.named_parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), param_name
        assert p.grad is None or torch.equal(p.grad, q.grad), param_name
    assert all(p.grad is None for p in original.parameters())
    converter.post_optimizer_hook([part])
    stats = converter._offloader.stats()
    dim = part.model_args.dim
    assert (stats.num_offloads, stats.offloaded_bytes) == (len(fqns) - 1, (len(fqns) - 1) * 2 * 32 * dim * 4)
    assert stats.pinned_in_use_bytes == 0


def test_model_parts_share_one_offloader():
    job_config = parse()
    converter = make_converter()
    whole = build("llama3", job_config)
    converter.convert(whole)
    parts = []
    for names in (["0", "1", "2"], ["3", "4", "5"]):
        part = copy.deepcopy(whole)
        for name in set(part.layers) - set(names):
            del part.layers[name]
        parts.append(finish(part, job_config))
    assert converter._offloader.part_fqns == [[f"layers.{i}" for i in r] for r in ((0, 1, 2), (3, 4, 5))]


def test_a_model_part_with_too_few_blocks_is_refused_before_the_first_step():
    job_config = parse()
    converter = make_converter("--activation_offload.keep_last", "2")
    whole = build("llama3", job_config)
    converter.convert(whole)
    del whole.layers["0"], whole.layers["1"], whole.layers["2"], whole.layers["3"]
    with pytest.raises(ValueError, match=r"keep_last = 2 leaves nothing to move.*2 blocks.*at most 1"):
        finish(whole, job_config)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--activation_checkpoint.mode", "none"],
            'activation_checkpoint.mode = "none".*no block input to move.*"full"',
        ),
        (["--activation_checkpoint.mode", "memory_budget"], "memory_budget.*the compiler decides"),
    ],
)
def test_config_that_contradicts_itself(flags, text):
    with pytest.raises(ValueError, match=text):
        make_converter(*flags)


def test_without_offload_any_checkpointing_goes():
    converter = make_converter("--activation_checkpoint.mode", "none", "--activation_offload.mode", "none")
    model = build("llama3", parse())
    cls = type(model)
    converter.convert(model)
    assert type(model) is cls
    converter.post_optimizer_hook([model])


def test_without_offload_any_model_goes():
    """One without layers, or whose args have no ``dim``: what is registered has nothing to be saved in."""

    class Other(torch.nn.Module):
        model_args = object()

    converter = make_converter("--activation_offload.mode", "none")
    model = Other()
    converter.convert(model)
    assert model.train().training
    converter.post_optimizer_hook([model])


def test_section_is_missing():
    with pytest.raises(ValueError, match=r"custom_config_module = \"titan_offload.titan.job_config\""):
        OffloadConverter(JobConfig(), None)


@pytest.mark.parametrize(
    ("flags", "dims", "num_bytes"),
    [
        ([], {}, 4 * 512 * 256 * 4),
        (["--training.mixed_precision_param", "bfloat16"], {"dp_shard": 2}, 4 * 512 * 256 * 2),
        (["--training.mixed_precision_param", "bfloat16"], {}, 4 * 512 * 256 * 4),  # no FSDP2: the residual is float32
        ([], {"tp": 2}, 4 * 256 * 256 * 4),
        ([], {"cp": 2, "dp_shard": 1}, 4 * 256 * 256 * 4),
        (["--parallelism.pipeline_parallel_microbatch_size", "2"], {"pp": 2}, 2 * 512 * 256 * 4),
    ],
)
def test_expected_block_input_bytes_and_a_budget_below_it(flags, dims, num_bytes):
    converter = make_converter(*flags, **dims)
    model = build("llama3", parse(*flags))
    converter.convert(model)
    assert converter._need.block_input_bytes == num_bytes
    budget = f"{(num_bytes - 1) / 1024**3:.20f}"
    converter = make_converter(*flags, "--activation_offload.pinned_budget_gib", budget, **dims)
    with pytest.raises(ValueError, match=r"pinned_budget_gib = .* is smaller than one block input"):
        converter.convert(build("llama3", parse(*flags)))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--activation_offload.mode", "all", "--activation_offload.limit", "link"], 'limit = "link" does not go'),
        (["--activation_offload.mode", "blocks"], "activation_offload.mode = 'blocks'"),
        (["--activation_offload.keep_last", "-1"], "activation_offload.keep_last = -1"),
        (["--selective_checkpoint.save_matmul_min_k", "-1"], "selective_checkpoint.save_matmul_min_k = -1"),
    ],
)
def test_bad_flags_on_the_command_line(flags, text, capsys):
    with pytest.raises((ValueError, SystemExit)) as raised:
        parse(*flags)
    assert text in str(raised.value) + " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_help_shows_every_key_with_its_default(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for key in ("mode", "schedule", "keep-last", "prefetch-lookahead", "max-inflight-offloads", "min-offload-mib"):
        assert f"--activation-offload.{key}" in text
    assert "newest blocks of a model part whose tensors stay on the device" in text
    for combination in (
        '"block_inputs", with activation_checkpoint.mode "full"',
        '"all" with activation_checkpoint.mode "none": every activation that autograd saves, and nothing is recomputed',
        '"all" with "full": each block\'s input, and what is saved outside the blocks',
    ):
        assert combination in text.replace("``", "")


# ---- selective saves ------------------------------------------------------------------------------------------------

NO_MOVE = ["--activation_offload.mode", "none"]
ENABLE = "--selective_checkpoint.enable"


def selective(**keys):
    """Flags of a run with selective saves; a key that is True is a switch."""
    flags = [ENABLE]
    for key, value in keys.items():
        flags += [f"--selective_checkpoint.{key}", *([] if value is True else str(value).split())]
    return flags


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("none", "nothing is recomputed"),
        ("selective", "TorchTitan's own selective checkpointing decides"),
        ("memory_budget", "the compiler decides"),
    ],
)
@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ([ENABLE], r"save_ops = ('attention',)"),
        (["--selective_checkpoint.save_ops", "aten::mm"], r"save_ops = ('aten::mm',)"),
        (["--selective_checkpoint.offload"], "offload = True"),
    ],
)
def test_saves_need_full_checkpointing(mode, why, flags, key):
    with pytest.raises(ValueError) as raised:
        make_converter(*NO_MOVE, "--activation_checkpoint.mode", mode, *flags)
    text = str(raised.value)
    assert text.startswith(f'selective_checkpoint.{key} does not go with activation_checkpoint.mode = "{mode}": {why}')
    assert text.endswith('Set activation_checkpoint.mode to "full", or remove [selective_checkpoint]')


@pytest.mark.parametrize("key", ["offload", "check_routing"])
def test_what_a_compiled_model_cannot_do(key):
    flags = [*selective(**{key: True}), "--compile.enable"]
    with pytest.raises(ValueError, match=rf"selective_checkpoint.{key} = true does not go with compile.enable = true"):
        make_converter(*flags)
    make_converter(*flags, "--compile.components", "loss")
    make_converter(*selective(), "--compile.enable")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"save_ops": "atention"}, "save_ops = 'atention' is neither the group 'attention' nor .*closest: attention,"),
        ({"save_ops": "attention aten::topkk"}, "save_ops = 'aten::topkk' is neither .*closest: aten::topk,"),
        (
            {"save_ops": "_flash_attention_backward"},
            "nor part of the name of any op's forward.*flash_attention_forward",
        ),
        ({"save_modules": "wx"}, "save_modules = 'wx' matches no module; closest: wv, wq, wo, wk"),
        ({"save_modules": "wo output"}, r"'output' matches only output, outside the blocks \(layers\.\*\); closest: "),
        ({"save_modules": "layers"}, r"'layers' matches only layers, outside the blocks \(layers\.\*\); closest: "),
        ({"save_modules": "layers.6.attention.wo"}, "'layers.6.attention.wo' matches no module; closest: wo"),
        ({"recompute_layer_types": "sliding"}, "recompute_layer_types = 'sliding' .*closest: sliding_attention"),
    ],
)
def test_names_that_mean_nothing(keys, text):
    flags = [*NO_MOVE, *selective(**keys)]
    converter = make_converter(*flags)
    model = build("llama3", parse(*flags))
    cls = type(model)
    with pytest.raises(ValueError, match=f"^selective_checkpoint\\..*{text}"):
        converter.convert(model)
    assert type(model) is cls  # nothing was done


def test_module_names_are_those_of_the_model():
    flags = selective(save_modules="wo feed_forward.w2 layers.*.w1 layers.5.attention moe.router.gate")
    with pytest.raises(ValueError, match=r"save_modules = 'moe\.router\.gate' matches no module"):
        make_converter(*flags).convert(build("llama3", parse(*flags)))
    converter = make_converter(*flags)
    converter.convert(build("llama4", parse(*flags)))


def test_keys_of_a_section_that_is_off_are_warned_of(caplog):
    make_converter("--selective_checkpoint.save_modules", "wo", "--selective_checkpoint.check_routing")
    make_converter()
    ours = [record.message for record in caplog.records if record.message.startswith("[")]  # not TorchTitan's on data
    assert ours == [
        "[selective_checkpoint] save_modules, check_routing set, without effect: set selective_checkpoint.enable = true"
    ]


@pytest.mark.parametrize(
    ("name", "flavor", "types"),
    [
        ("gpt_oss", "debugmodel", ["sliding_attention", "full_attention"] * 2),
        ("llama4", "debugmodel_irope", ["full_attention", *["chunked_attention"] * 3] * 2),
        ("llama4", "debugmodel", ["full_attention"] * 6),
        ("llama3", "debugmodel", [None] * 6),
        ("deepseek_v3", "debugmodel", [None] * 6),
    ],
)
def test_layer_types(name, flavor, types):
    blocks = build(name, parse(), flavor).layers.values()
    assert [layer_type(block) for block in blocks] == types[: len(blocks)]


def test_attention_of_sliding_layers_is_recomputed():
    flags = [*NO_MOVE, *selective()]
    converter = make_converter(*flags)
    model = build("gpt_oss", parse(*flags), vocab_size=256, moe_inter_dim=64)
    converter.convert(model)
    finish(model, parse(*flags))
    saves = converter._offloader.saves
    for op in (torch.ops.higher_order.flex_attention, torch.ops.higher_order.inductor_compiled_code):
        rules = [block.rule_for(op, (), {}, []) for block in saves.blocks.values()]
        assert [rule and rule.name for rule in rules] == [None, 'save_ops "attention"'] * 2
    text = report.save_block(saves.save_list(list(saves.blocks)))
    assert "not attention in blocks of type sliding_attention, which is recomputed: layers.0, layers.2" in text


def test_what_is_registered_for_torchtitan():
    saves = [save for save in registered_saves() if save.is_builtin]
    assert all(save.is_mandatory and save.reason for save in saves)
    ops = {module: {save.op for save in saves if save.module is module} for module in (TokenChoiceTopKRouter, MoE)}
    assert {"aten::topk", "aten::mm", "aten::addmm", "aten::sigmoid", "aten::_softmax"} == ops[TokenChoiceTopKRouter]
    assert {"aten::_to_copy", "_c10d_functional::all_to_all_single", "deepep::dispatch", "deepep::combine"} < ops[MoE]
    assert len(saves) == sum(map(len, ops.values()))


@pytest.mark.parametrize(("name", "moe_layers"), [("deepseek_v3", range(1, 6)), ("llama4", (1, 3, 5)), ("llama3", ())])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_routers_are_saved_without_being_asked_for(name, moe_layers, mode, caplog):
    flags = [*NO_MOVE, "--activation_checkpoint.mode", mode, "--activation_checkpoint.selective_ac_option", "op"]
    converter = make_converter(*flags)
    model = build(name, parse(*flags))
    converter.convert(model)
    with caplog.at_level("INFO"):
        finish(model, parse(*flags))
    blocks = converter._offloader.saves.blocks
    assert list(blocks) == [f"layers.{i}" for i in moe_layers]
    assert all(set(block.scopes) == {"moe", "moe.router"} for block in blocks.values())
    assert all(
        {rule.module for rule in block.scopes["moe.router"]} == {TokenChoiceTopKRouter} for block in blocks.values()
    )
    lists = [record.message for record in caplog.records if record.message.startswith("Selective saves in")]
    if not moe_layers:
        assert lists == []
        return
    (text,) = lists
    first, *rules = text.split("\n")
    where = f"(layers.{moe_layers[0]} .. layers.{moe_layers[-1]}), kept on the device"
    assert first.startswith(f"Selective saves in {len(moe_layers)} blocks {where}")
    (of_router,) = (rule for rule in rules if "moe.router" in rule)
    assert of_router.startswith("  registered, mandatory: ")
    ops = ("aten::mm", "aten::addmm", "aten::sigmoid", "aten::_softmax", "aten::topk")
    assert all(op in of_router for op in ops)
    assert "recomputed scores or near ties would send tokens to other experts" in of_router
    assert any("all_to_all_single in moe (" in rule for rule in rules)
    assert any("deepep::dispatch" in rule for rule in rules)
    assert ("list of matmuls to recompute" in rules[-1]) == (mode == "selective")


def test_debug_mode_of_checkpointing_does_not_go_with_routers():
    for name in ("llama3", "deepseek_v3"):
        flags = [*NO_MOVE, "--activation_checkpoint.debug"]
        converter = make_converter(*flags)
        model = build(name, parse(*flags))
        converter.convert(model)
        if name == "llama3":
            finish(model, parse(*flags))  # nothing is saved there
            continue
        with pytest.raises(
            ValueError, match=r"layers\.1 is checkpointed with debug=True.*activation_checkpoint\.debug"
        ):
            finish(model, parse(*flags))


def test_a_pipeline_part_need_not_have_every_module_that_is_named():
    flags = [*NO_MOVE, *selective(save_ops="", save_modules="layers.0.attention.wo")]
    converter = make_converter(*flags)
    whole = build("llama3", parse(*flags))
    converter.convert(whole)
    scopes = []
    for names in (["0", "1", "2"], ["3", "4", "5"]):
        part = copy.deepcopy(whole)
        for name in set(part.layers) - set(names):
            del part.layers[name]
        finish(part, parse(*flags))
        scopes.append({fqn: list(block.scopes) for fqn, block in converter._offloader.saves.blocks.items()})
    assert scopes == [{"layers.0": ["attention.wo"]}] * 2


class LastValues:
    """Stands in for TorchTitan's metric logger."""

    def log(self, metrics, step):
        self.metrics = metrics


def train_with_noise_in_recompute(*flags, noise=0.0, registered=True):
    """Gradients of a deepseek_v3 model whose routers get other logits in recompute, and the converter."""
    converter = make_converter(*flags)
    model = build("deepseek_v3", parse(*flags))
    converter.convert(model)
    if not registered:
        model.__class__ = model.__class__.__mro__[1]
    finish(model, parse(*flags))
    for name, module in model.named_modules():
        if name.endswith("router.gate"):
            generator = torch.Generator().manual_seed(0)

            def add_noise(module, args, logits, generator=generator):
                if torch._C._current_graph_task_id() == -1:  # not in backward
                    return logits
                return logits + noise * torch.randn(logits.shape, generator=generator)

            module.register_forward_hook(add_noise)
    tokens = torch.arange(64).reshape(2, 32) % 256
    model(tokens).float().square().mean().backward()
    converter.post_optimizer_hook([model])
    return [param.grad for param in model.parameters()], converter


def test_routing_is_that_of_forward_and_re_routed_tokens_are_counted(caplog):
    """The noise is what an op that is not deterministic would do to the logits."""
    expected, converter = train_with_noise_in_recompute(*NO_MOVE, *selective(check_routing=True))
    stats = converter._offloader.stats()
    blocks = [f"layers.{i}" for i in range(1, 6)]
    assert stats.num_rerouted == dict.fromkeys(blocks, 0)

    with pytest.raises(CheckpointError, match="different metadata"):  # the experts get other numbers of tokens
        train_with_noise_in_recompute(*NO_MOVE, noise=0.1, registered=False)

    for flags in (NO_MOVE, [*NO_MOVE, *selective()], [*NO_MOVE, *selective(check_routing=True)]):
        grads, converter = train_with_noise_in_recompute(*flags, noise=0.1)
        assert all(map(torch.equal, grads, expected))
    stats = converter._offloader.stats()
    assert list(stats.num_rerouted) == blocks
    assert all(0 < num <= 64 for num in stats.num_rerouted.values())

    logged = LastValues()
    caplog.clear()
    logger = OffloadLogger.__new__(OffloadLogger)  # only the rest of it needs a process group
    logger.inner, logger._offloader = logged, converter._offloader
    with caplog.at_level("INFO"):
        logger.log({"loss_metrics/global_avg_loss": 1.0}, 1)
    for fqn, num in stats.num_rerouted.items():
        assert logged.metrics[f"selective/rerouted_tokens/{fqn}"] == num
    assert logged.metrics["selective/saved(GiB)"] == sum(n for _, n in stats.saved.values()) / 1024**3
    assert not any(key.startswith("offload/") for key in logged.metrics)
    (line,) = (record.message for record in caplog.records)
    assert line.startswith("saved instead of recomputed: registered 15 outputs, ")
    counts = ", ".join(f"{fqn} {num}" for fqn, num in stats.num_rerouted.items())
    assert line.endswith(f"; tokens that recompute would have re-routed: {counts}")
