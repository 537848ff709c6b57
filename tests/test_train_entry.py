"""titan/train.py: a CPU repair does what TorchTitan needs, none is made with an accelerator, mistakes are one line."""

import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torchtitan.components.metrics
import torchtitan.distributed.parallel_dims
import torchtitan.distributed.utils
import torchtitan.tools.profiling
import torchtitan.tools.utils
import torchtitan.train
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.torch_version import TorchVersion
from torchtitan.config import JobConfig

from titan_offload.titan import train

REPO = Path(__file__).parent.parent
NAMES_OF_THE_DEVICE = ("device_type", "device_module", "get_device_info")


def repaired_state() -> dict[tuple[str, str], object]:
    """Everything outside train.py that the repairs may change."""
    state = {
        (module_name, name): vars(module)[name]
        for module_name, module in sys.modules.items()
        if module_name.startswith("torchtitan.")
        for name in NAMES_OF_THE_DEVICE
        if name in vars(module)
    }
    return state | {("torch", "histc"): torch.histc, ("torch.profiler", "profile"): torch.profiler.profile}


@pytest.fixture(autouse=True)
def repairs_undone():
    before = repaired_state()
    yield
    for (module_name, name), value in before.items():
        setattr(sys.modules[module_name], name, value)


@pytest.fixture
def no_accelerator(monkeypatch):
    """As on a machine with none, whatever this one has."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args: False)


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args: True)


@pytest.fixture
def one_rank_of_gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- repairs --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="TorchTitan found an accelerator when it was imported")
def test_loaded_modules_learn_that_the_device_is_the_cpu(no_accelerator):
    users = [
        torchtitan.tools.utils,
        torchtitan.tools.profiling,
        torchtitan.components.metrics,
        torchtitan.distributed.utils,
        torchtitan.distributed.parallel_dims,
    ]
    assert train.repair_for_cpu()
    for module in users:
        assert getattr(module, "device_type", "cpu") == "cpu", module
        assert isinstance(getattr(module, "device_module", train.HostDeviceModule()), train.HostDeviceModule), module
    assert torchtitan.tools.utils.get_device_info()[0] == "cpu"


def test_nothing_is_repaired_with_an_accelerator(accelerator):
    before = repaired_state()
    assert not train.repair_for_cpu()
    assert repaired_state() == before


def test_torchtitan_monitors_the_memory_of_the_host(monkeypatch):
    monkeypatch.setattr(torchtitan.components.metrics, "device_module", train.HostDeviceModule())
    monkeypatch.setattr(torchtitan.components.metrics, "device_type", "cpu")
    monitor = torchtitan.components.metrics.build_device_memory_monitor()
    assert monitor.device_capacity == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert monitor.device_index == 0
    ballast = torch.ones(64 * 2**20, dtype=torch.uint8)
    stats = monitor.get_peak_stats()
    assert ballast.numel() / 2**30 < stats.max_active_gib < monitor.device_capacity_gib
    assert (stats.num_alloc_retries, stats.num_ooms) == (0, 0)


def test_device_module_is_torch_cpu_otherwise():
    module = train.HostDeviceModule()
    assert module.Stream is torch.cpu.Stream
    module.set_device(torch.device("cpu:1"))
    module.synchronize()
    with pytest.raises(AttributeError):
        _ = module.no_such_query


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("num_experts", [1, 6, 7, 8, 49, 64])
def test_histc_counts_integers(dtype, num_experts):
    experts = torch.randint(num_experts, (3 * num_experts + 5,)).to(dtype)
    counts = train.histc_of_integers(experts, bins=num_experts, min=0, max=num_experts)
    reference = torch.bincount(experts, minlength=num_experts).to(dtype)
    assert counts.dtype == dtype
    assert torch.equal(counts, reference)


def test_histc_of_floats_is_untouched():
    values = torch.rand(100)
    assert torch.equal(train.histc_of_integers(values, 7, 0.1, 0.9), torch.histc(values, 7, 0.1, 0.9))


def test_profiler_ignores_the_missing_accelerator():
    cpu = torch.profiler.ProfilerActivity.CPU
    with train.ProfileWithoutAccelerator(activities=[cpu, None]) as profile:
        torch.ones(3).add(1)
    assert "aten::add" in {event.key for event in profile.key_averages()}


def test_every_fsdp_module_reduces_by_plain_sums(one_rank_of_gloo, monkeypatch):
    told = {}
    monkeypatch.setattr(
        FSDPModule, "set_force_sum_reduction_for_comms", lambda module, enable: told.update({module: enable})
    )
    mesh = dist.init_device_mesh("cpu", (1,))
    parts = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(2)]
    for part in parts:
        fully_shard(part[0], mesh=mesh)
        fully_shard(part, mesh=mesh)
    train.reduce_gradients_by_plain_sums(parts)
    assert told == {parts[0]: True, parts[0][0]: True, parts[1]: True, parts[1][0]: True}


@pytest.mark.parametrize("key", ["profiling.enable_memory_snapshot", "training.enable_cpu_offload"])
def test_settings_that_need_an_accelerator_are_refused(key):
    config = JobConfig()
    train.refuse_what_the_cpu_cannot_do(config)
    section, name = key.split(".")
    setattr(getattr(config, section), name, True)
    with pytest.raises(ValueError, match=f"{key} = true needs an accelerator"):
        train.refuse_what_the_cpu_cannot_do(config)


@pytest.mark.parametrize(
    ("flavor", "fsdp_enabled", "version", "refused"),
    [
        ("0.6B", True, "2.13.0", True),
        ("0.6B", True, "2.12.0+cpu", True),
        ("0.6B", True, "2.11.0", False),
        ("0.6B", False, "2.13.0", False),
        ("8B", True, "2.13.0", False),
    ],
)
def test_tied_embeddings_are_refused_where_fsdp_refuses_them(monkeypatch, flavor, fsdp_enabled, version, refused):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    config = JobConfig()
    config.model.name, config.model.flavor = "qwen3", flavor
    expected = pytest.raises(ValueError, match=r"model\.flavor = '0\.6B'.*8B.*parallelism\.data_parallel_shard_degree")
    with expected if refused else contextlib.nullcontext():
        train.refuse_tied_embeddings(config, SimpleNamespace(fsdp_enabled=fsdp_enabled))


# ---- OffloadTrainer -------------------------------------------------------------------------------------------------


@pytest.fixture
def stub_trainer(monkeypatch):
    """TorchTitan's Trainer with nothing in it but the life cycle."""

    def init(self, job_config):
        self.job_config = job_config
        self.model_parts = []
        self.parallel_dims = self.init_distributed()

    def train_three_steps(self):
        for self.step in (5, 6, 7):
            self.train_step(iter(()))

    stock = torchtitan.train.Trainer
    monkeypatch.setattr(stock, "__init__", init)
    monkeypatch.setattr(stock, "init_distributed", lambda self: SimpleNamespace(fsdp_enabled=True))
    monkeypatch.setattr(stock, "train", train_three_steps)
    monkeypatch.setattr(stock, "train_step", lambda self, data_iterator: None)
    return init


def make_config(name: str = "llama3", flavor: str = "debugmodel") -> JobConfig:
    config = JobConfig()
    config.model.name, config.model.flavor = name, flavor
    config.training.steps = 7
    return config


def test_trainer_repairs_its_model_on_the_cpu_only(stub_trainer, monkeypatch):
    told = []
    monkeypatch.setattr(train, "reduce_gradients_by_plain_sums", told.append)
    monkeypatch.setattr(train, "refuse_what_the_cpu_cannot_do", lambda config: told.append("settings"))
    monkeypatch.setattr(train, "refuse_tied_embeddings", lambda config, parallel_dims: told.append("embeddings"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args: True)
    train.OffloadTrainer(make_config())
    assert told == []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args: False)
    train.OffloadTrainer(make_config())
    assert told == ["settings", "embeddings", []]


def test_unknown_flavor_is_a_mistake(stub_trainer, capsys):
    with pytest.raises(SystemExit) as exit_info:
        train.OffloadTrainer(make_config(flavor="9B"))
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.startswith("error: model.flavor = '9B' is none of llama3's: debugmodel, ")


@pytest.mark.parametrize(("rank", "terminal"), [(0, True), (1, True), (0, False)])
def test_progress_on_the_terminal_of_rank_0(stub_trainer, monkeypatch, rank, terminal):
    shown = []

    @contextlib.contextmanager
    def record_progress(total_steps):
        yield lambda step: shown.append((step, total_steps))

    monkeypatch.setattr(train, "progress_shown", record_progress)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    train.OffloadTrainer(make_config()).train()
    assert shown == ([(5, 7), (6, 7), (7, 7)] if (rank, terminal) == (0, True) else [])


def test_log_lines_are_written_above_the_progress(monkeypatch):
    plain_stdout = sys.stdout
    monkeypatch.setattr(plain_stdout, "isatty", lambda: True)
    handler = logging.StreamHandler(plain_stdout)
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match="fails in training"), train.progress_shown(3) as show_step:
            assert handler.stream is sys.stdout
            show_step(2)
            raise RuntimeError("fails in training")
        assert handler.stream is plain_stdout
    finally:
        logging.getLogger().removeHandler(handler)


# ---- mistakes and failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("keep_last = -1:\n  allowed is 0 or more"), "keep_last = -1: allowed is 0 or more"),
        (FileNotFoundError("no tokenizer"), "no tokenizer"),
    ],
)
def test_mistake_found_while_building_ends_in_one_line(monkeypatch, capsys, error, expected):
    def refuse(self, job_config):
        raise error

    monkeypatch.setattr(torchtitan.train.Trainer, "__init__", refuse)
    with pytest.raises(SystemExit) as exit_info:
        train.OffloadTrainer(make_config())
    assert exit_info.value.code == 2
    # This file is in neither package, so the line says where the error was raised.
    first, *rest = capsys.readouterr().err.splitlines()
    assert rest == []
    assert first.startswith(f"error: {expected} ({type(error).__name__} at {__file__}:")


def test_other_failure_while_building_keeps_its_traceback(monkeypatch):
    def fail(self, job_config):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torchtitan.train.Trainer, "__init__", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        train.OffloadTrainer(make_config())


def test_failure_in_training_keeps_its_traceback(monkeypatch):
    def fail(trainer_class):
        raise ValueError("shapes differ")

    monkeypatch.setattr(train, "repair_for_cpu", lambda: True)
    monkeypatch.setattr(train, "check_command_line", lambda: None)
    monkeypatch.setattr(torchtitan.train, "main", fail)
    with pytest.raises(ValueError, match="shapes differ"):
        train.main()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file or directory"),
        ("[training]\nsteps = = 3\n", "line 2"),
        ("[training]\nstepz = 3\n", "'stepz'"),
        ("[trainings]\n", "'trainings'"),
    ],
)
def test_bad_config_file_ends_in_one_line(monkeypatch, tmp_path, capsys, text, expected):
    config = tmp_path / "config.toml"
    if text is not None:
        config.write_text(text)
    monkeypatch.setattr(sys, "argv", ["train.py", "--job.config_file", str(config)])
    with pytest.raises(SystemExit) as exit_info:
        train.check_command_line()
    assert exit_info.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("error: config: ")
    assert expected in output.err


def run_entry(*flags: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-m", "titan_offload.titan.train", *flags]
    return subprocess.run(command, cwd=REPO, env=os.environ | env, capture_output=True, text=True, timeout=60)


def test_process_with_a_bad_config_ends_with_code_2(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("[training]\nstepz = 3\n")
    process = run_entry("--job.config_file", str(config))
    assert process.returncode == 2
    assert process.stderr.startswith("error: config: ")
    assert process.stderr.count("\n") == 1
    assert "Traceback" not in process.stdout


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine with no accelerator")
def test_process_with_a_mistake_found_while_building_ends_with_code_2(tmp_path):
    """Here the process group is up already when the missing tokenizer is found; it must not hang or complain."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    flags = ["--model.name", "llama3", "--model.flavor", "debugmodel", "--job.dump_folder", str(tmp_path)]
    process = run_entry(*flags, "--model.hf_assets_path", str(tmp_path / "none"), **rank)
    assert process.returncode == 2, process.stderr
    assert process.stderr == f"error: Tokenizer path '{tmp_path / 'none'}' does not exist\n"
    assert "Traceback" not in process.stdout


def test_process_not_started_by_torchrun_says_so(monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit):
        train.check_command_line()
    assert "start this with torchrun" in capsys.readouterr().err


def test_section_without_its_converter_is_warned_of(caplog):
    config = SimpleNamespace(activation_offload=object(), model=SimpleNamespace(converters=["float8"]))
    train.warn_if_converter_is_missing(config)
    config.model.converters.append("titan_offload")
    train.warn_if_converter_is_missing(config)
    assert [record.message for record in caplog.records] == [
        '[activation_offload] and [selective_checkpoint] have no effect: add "titan_offload" to model.converters'
    ]
