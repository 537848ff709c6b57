"""Every train config of the repository, as TorchTitan's own parser, models and parallelization take it."""

import copy
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import write_plans
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

import titan_offload.titan  # noqa: F401  registers the converter, as experimental.custom_import does
from titan_offload.config import OffloadConfig
from titan_offload.titan.converter import OffloadConverter
from titan_offload.titan.job_config import SelectiveCheckpoint

pytestmark = pytest.mark.usefixtures("titan_on_cpu", "in_repo")

GIB = 1024**3
FOLDER = Path("train_configs")

# By hand, from the models' papers and the degrees: devices; blocks; bytes of a block input on one device; parameters,
# gradients and two optimizer states of one device in GiB, with as many decimals as the config's comment has.
BIG = {
    "llama3_8b_128k": (8, 32, 131072 // 8 * 4096 * 2, "15.0"),
    "llama3_70b_1m": (64, 80, 1048576 // (4 * 8) * 8192 * 2, "16.4"),
    "qwen3_8b_128k": (8, 36, 131072 // 4 * 4096 * 2, "15.3"),
    "qwen3_30b_a3b_64k": (16, 48, 65536 // 2 * 2048 * 2, "28.4"),
    "deepseek_v3_16b_32k": (8, 27, 32768 * 2048 * 2, "29.3"),
}
SMALL = {
    "debug_cpu": (2, 6, 4 * 512 * 256 * 4),
    "debug_moe_cpu": (2, 6, 12 * 128 * 256 * 4),
    "debug_selective_cpu": (2, 6, 4 * 512 * 256 * 4),
}
ALL = {**{stem: entry[:3] for stem, entry in BIG.items()}, **SMALL}


@pytest.fixture
def ranks(request):
    """A process group of as many ranks as the config has devices, none of which is there but this one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ALL[request.param][0])
    yield request.param
    dist.destroy_process_group()


def parse(stem):
    return ConfigManager().parse_args(["--job.config_file", f"{FOLDER}/{stem}.toml"])


def text_of(stem):
    return (FOLDER / f"{stem}.toml").read_text()


def head_of(stem):
    """The opening comment as one line."""
    return " ".join(re.match(r"(#.*\n)+", text_of(stem))[0].replace("#", " ").split())


def parallel_dims(job_config: JobConfig, world_size: int) -> ParallelDims:
    """As TorchTitan's Trainer makes them; it refuses degrees whose product is not ``world_size``."""
    degrees = job_config.parallelism
    return ParallelDims(
        dp_replicate=degrees.data_parallel_replicate_degree,
        dp_shard=degrees.data_parallel_shard_degree,
        cp=degrees.context_parallel_degree,
        tp=degrees.tensor_parallel_degree,
        pp=degrees.pipeline_parallel_degree,
        ep=degrees.expert_parallel_degree,
        etp=degrees.expert_tensor_parallel_degree,
        world_size=world_size,
    )


def build(job_config):
    """The model on the meta device, all of it."""
    spec = get_train_spec(job_config.model.name)
    args = copy.deepcopy(spec.model_args[job_config.model.flavor])
    args.update_from_config(job_config)
    with torch.device("meta"):
        return spec, spec.model_cls(args)


def test_each_config_of_the_repository_is_in_these_tables():
    stems = {path.stem for path in FOLDER.glob("*.toml")}
    assert stems == set(ALL) == set(write_plans.MACHINES)


@pytest.mark.parametrize("stem", ALL)
def test_keys_are_written_out_and_real(stem):
    """TorchTitan's parser refuses unknown keys; that all of offload's are there is for the reader."""
    job_config, toml = parse(stem), tomllib.loads(text_of(stem))
    offload = toml["activation_offload"]
    assert set(offload) == {key.name for key in fields(OffloadConfig)}
    assert OffloadConfig(**offload) == job_config.activation_offload
    assert job_config.activation_offload.keys_without_effect() == []
    selective = toml.get("selective_checkpoint", {})
    assert set(selective) <= {key.name for key in fields(SelectiveCheckpoint)}
    assert bool(selective) == job_config.selective_checkpoint.enable
    assert job_config.activation_checkpoint.mode == "full"
    assert job_config.model.converters == ["titan_offload"]
    assert job_config.job.dump_folder == f"outputs/{stem}"


@pytest.mark.parametrize("stem", BIG)
def test_what_a_long_run_wants(stem):
    job_config = parse(stem)
    assert job_config.training.mixed_precision_param == "bfloat16"
    assert job_config.training.dataset == "c4"
    assert "Replace it by long documents" in text_of(stem)
    assert job_config.checkpoint.enable
    assert 0 < job_config.lr_scheduler.warmup_steps < job_config.training.steps / 10
    # Compiled blocks with context or expert parallel were not run, see docs/support.md.
    assert not job_config.compile.enable or job_config.compile.components == ["loss"]


@pytest.mark.parametrize("ranks", ALL, indirect=True)
def test_torchtitan_parallelizes_the_model(ranks):
    """Degrees multiply to the devices that the head names, and TorchTitan's own rules hold: on the sequence's length,
    attention under context parallel, heads under tensor parallel, experts under expert parallel."""
    stem, job_config = ranks, parse(ranks)
    num_devices, num_blocks, num_bytes = ALL[stem]
    if stem in BIG:
        assert f"Devices: {num_devices} = " in head_of(stem)
    dims = parallel_dims(job_config, num_devices)
    spec, model = build(job_config)
    converter = OffloadConverter(job_config, dims)
    converter.convert(model)
    assert converter._need.block_input_bytes == num_bytes
    assert len(model.layers) == num_blocks >= dims.pp
    args = model.model_args
    assert args.n_heads % dims.tp == 0
    assert (getattr(args, "n_kv_heads", None) or args.n_heads) % dims.tp == 0
    assert job_config.training.seq_len % dims.seq_len_divisor == 0
    assert dims.pp == 1  # the same with pipeline parallel would need spec.pipelining_fn
    part = spec.parallelize_fn(model, dims, job_config)
    local = sum(parameter.to_local().numel() for parameter in part.parameters())
    if stem in BIG:
        # 4 bytes each for parameter, gradient and AdamW's two states.
        assert f"{16 * local / GIB:.1f}" == BIG[stem][3]
        assert f"{BIG[stem][3].removesuffix('.0')} GiB" in head_of(stem)


@pytest.mark.parametrize("stem", ALL)
def test_sequences_of_a_step_divide_among_the_ranks(stem):
    """The Trainer asserts it, after all ranks started."""
    job_config = parse(stem)
    dims, training = parallel_dims(job_config, ALL[stem][0]), job_config.training
    together = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    assert training.global_batch_size == -1 or training.global_batch_size % together == 0


@pytest.mark.parametrize(
    ("flags", "error", "text"),
    [
        (["--parallelism.context_parallel_degree", "4"], AssertionError, "WORLD_SIZE"),
        (["--training.seq_len", "131080"], AssertionError, "must be divisible"),
        (["--activation_checkpoint.mode", "none"], ValueError, "no block input to move"),
    ],
)
def test_a_config_that_is_wrong_would_be_noticed(flags, error, text):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        config = ConfigManager().parse_args(["--job.config_file", "train_configs/llama3_8b_128k.toml", *flags])
        with pytest.raises(error, match=text):
            dims = parallel_dims(config, 8)
            spec, model = build(config)
            OffloadConverter(config, dims).convert(model)
            spec.parallelize_fn(model, dims, config)
    finally:
        dist.destroy_process_group()


# Plans


def test_heads_are_what_the_planner_says_now(capsys):
    assert write_plans.main(["--check"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == f"{len(ALL)} plans checked\n"


@pytest.mark.parametrize("stem", ALL)
def test_pinned_memory_of_a_head_is_right(stem):
    """All blocks but one, in slots of 512 bytes. Of the selective config attention's output besides; its log-sum-exp,
    4 x 512 x 16 x 4 bytes, is smaller than min_offload_mib and stays."""
    num_devices, num_blocks, num_bytes = ALL[stem]
    if stem == "debug_selective_cpu":
        num_bytes *= 2
    assert num_bytes % 512 == 0
    rank_gib, node_gib = map(
        float, re.search(r"Pinned: ([\d.]+) GiB per rank, ([\d.]+) GiB per node", head_of(stem)).groups()
    )
    assert rank_gib == pytest.approx((num_blocks - 1) * num_bytes / GIB, rel=1e-5)
    assert node_gib == pytest.approx(min(num_devices, 8) * rank_gib, rel=1e-4)


@pytest.mark.parametrize("stem", ALL)
def test_a_head_names_its_machine(stem):
    machine, head = write_plans.MACHINES[stem], head_of(stem)
    assert machine.nodes * machine.devices == ALL[stem][0]
    assert machine.text in head and f"{machine.tflops:g} TFLOP/s" in head and "GB/s" in head
    assert "Verdict, with activation_offload.mode = " in head
    assert text_of(stem).count(write_plans.BEGIN) == text_of(stem).count(write_plans.END) == 1


def test_check_notices_a_head_that_is_old(tmp_path, monkeypatch, capsys):
    """And writing it anew makes the same file again."""
    copied = tmp_path / "train_configs"
    copied.mkdir()
    for stem in ALL:
        (copied / f"{stem}.toml").write_text(text_of(stem))
    monkeypatch.chdir(tmp_path)
    path = copied / "debug_cpu.toml"
    path.write_text(path.read_text().replace("seq_len = 512 ", "seq_len = 1024 "))
    assert write_plans.main(["--check"]) == 1
    assert "train_configs/debug_cpu.toml; run python scripts/write_plans.py" in capsys.readouterr().err
    written = path.read_text()
    assert write_plans.main([]) == 0
    assert path.read_text() != written
    assert write_plans.main(["--check"]) == 0
    assert tomllib.loads(path.read_text()) == tomllib.loads(written)
    (copied / "new.toml").write_text("")
    assert write_plans.main(["--check"]) == 1
    assert "new: a config without a machine" in capsys.readouterr().err


def test_a_head_goes_to_the_end_of_the_opening_comment():
    text = "# title\n#\n# more\n\n[job]\n# not this\nx = 1\n"
    block = "#\n{}\n# {}\n{}\n"
    with_two = text.replace("# more\n", "# more\n" + block.format(write_plans.BEGIN, "one\n# two", write_plans.END))
    assert write_plans.with_head(text, ["one", "two"]) == with_two
    assert write_plans.with_head(with_two, ["one", "two"]) == with_two
    with_three = text.replace("# more\n", "# more\n" + block.format(write_plans.BEGIN, "three", write_plans.END))
    assert write_plans.with_head(with_two, ["three"]) == with_three
