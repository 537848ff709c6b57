"""TorchTitan itself, on the CPU under torchrun, with the debug configs of train_configs/."""

import os
import subprocess
import sys
from pathlib import Path

import compare_loss
import make_corpus
import pytest
import torch

REPO = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine with no accelerator"),
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("corpus") / "debug"
    make_corpus.make_corpus(out, vocab_size=2048, max_mib=0.5)
    return out


@pytest.mark.parametrize("name", ["debug_cpu", "debug_moe_cpu"])
def test_debug_config_trains_without_offload(name, corpus, tmp_path):
    """The CPU repairs are enough for a whole run: loader, FSDP2 over gloo, MoE routing, clipping, metrics, validation.

    TorchTitan 0.2.2 has no validation for the MoE model.
    """
    validates = name == "debug_cpu"
    overrides = [
        f"model.hf_assets_path={corpus / 'tokenizer'}",
        f"training.dataset_path={corpus / 'train'}",
        "training.local_batch_size=1",
        "training.seq_len=64",
        f"validation.enable={str(validates).lower()}",
        f"validation.dataset_path={corpus / 'validation'}",
        "validation.local_batch_size=1",
        "validation.seq_len=64",
        "validation.freq=3",
        "validation.steps=1",
    ]
    config = compare_loss.load_config(REPO / "train_configs" / f"{name}.toml", overrides, 3, tmp_path)
    del config["activation_offload"], config["job"]["custom_config_module"], config["experimental"]
    del config["model"]["converters"]
    compare_loss.train(config, tmp_path, nproc=2, flags=[])
    curve = compare_loss.read_curve(tmp_path)
    validated = {"val_loss"} if validates else set()
    assert {step: set(values) for step, values in curve.items()} == {
        1: {"loss", "grad_norm"} | validated,
        2: {"loss", "grad_norm"},
        3: {"loss", "grad_norm"} | validated,
    }
    # ln(2048) is 7.62: an untrained model is near it, and the optimizer brings it down.
    assert 7.6 < float(curve[1]["loss"]) < 8.6
    if validates:
        assert float(curve[3]["val_loss"]) < float(curve[1]["val_loss"])


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            "--selective_checkpoint.save_modules wo wx",
            "error: selective_checkpoint.save_modules = 'wx' matches no module; closest: wv, wq, wo, wk, w3",
        ),
        (
            "--activation_checkpoint.mode none --activation_offload.mode none",
            "error: selective_checkpoint.save_ops = ('attention',) does not go with activation_checkpoint.mode = "
            '"none": nothing is recomputed. Set activation_checkpoint.mode to "full", or remove [selective_checkpoint]',
        ),
    ],
)
def test_process_with_a_mistake_in_selective_checkpoint_ends_with_code_2(flags, error, corpus, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "titan_offload.titan.train"]
    command += ["--job.config_file", "train_configs/debug_cpu.toml", "--job.dump_folder", str(tmp_path)]
    command += ["--model.hf_assets_path", str(corpus / "tokenizer"), "--training.dataset_path", str(corpus / "train")]
    command += ["--selective_checkpoint.enable", *flags.split()]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    env = {**os.environ, **rank, "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=100)
    assert process.returncode == 2, process.stderr
    assert [line for line in process.stderr.splitlines() if line.startswith("error")] == [error]
    assert "Traceback" not in process.stdout + process.stderr
