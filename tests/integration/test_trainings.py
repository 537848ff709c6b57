"""TorchTitan trainings on two gloo ranks: with offload every number of every step is the same, to the last digit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SMALL = "--training.steps 3 --training.seq_len 64 --debug.deterministic --metrics.log_freq 1"
MOVE_ALL_SIZES = "--activation_offload.min_offload_mib 0.01"
VARIANTS = {
    "off": "--activation_offload.mode none",
    "overlap": f"{MOVE_ALL_SIZES} --activation_offload.prefetch_lookahead 2",
    "sync": f"{MOVE_ALL_SIZES} --activation_offload.schedule sync",
}

LLAMA3 = "--job.config_file train_configs/debug_cpu.toml"
MOE = "--job.config_file train_configs/debug_moe_cpu.toml"

# name -> flags, number of block inputs of rank 0 that move in a step
ROWS = {
    "llama3 FSDP2": (LLAMA3, 5),
    "deepseek_v3 FSDP2": (f"{MOE} --training.local_batch_size 4", 5),
    "deepseek_v3 FSDP2, accumulation": (
        f"{MOE} --training.local_batch_size 4 --training.global_batch_size 16",
        10,
    ),
    "llama3 FSDP2, accumulation, validation": (
        f"{LLAMA3} --training.global_batch_size 16 --validation.enable --validation.freq 2 --validation.seq_len 64",
        10,
    ),
    "llama3 FSDP2, bfloat16": (f"{LLAMA3} --training.mixed_precision_param bfloat16", 5),
    "llama3 TP, stock Trainer": (
        f"stock {LLAMA3} --parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree 1",
        5,
    ),
    "llama3 PP 1F1B": (
        f"{LLAMA3} --parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 1 "
        "--parallelism.pipeline_parallel_schedule 1F1B",
        8,
    ),
    "llama3 FSDP2, selective AC of ops": (
        f"{LLAMA3} --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op",
        5,
    ),
    "llama3 FSDP2, every second block": (
        f"{LLAMA3} --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option 2",
        2,
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainings")
    corpus = REPO / "data" / "corpus"
    subprocess.run([sys.executable, "scripts/make_corpus.py", "--out", str(corpus)], cwd=REPO, check=True)
    rows = [
        f"{flags} {SMALL} --job.dump_folder {folder / 'run'} {extra}".split()
        for flags, _ in ROWS.values()
        for extra in VARIANTS.values()
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += [str(Path(__file__).parent / "trainings.py"), str(folder / "rows.json"), str(folder / "out.json")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    out = iter(json.loads((folder / "out.json").read_text()))
    return {name: {variant: next(out) for variant in VARIANTS} for name in ROWS}


pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", ROWS)
def test_numbers_are_identical(results, name):
    for rank in range(2):
        off, overlap, sync = (results[name][variant][rank]["metrics"] for variant in VARIANTS)
        assert len(off) >= 3
        assert off[0][1] != "None"
        assert off == overlap == sync
    assert off[0][1:3] != off[-1][1:3]


@pytest.mark.parametrize("name", ROWS)
def test_block_inputs_move_and_come_back(results, name):
    for variant in ("overlap", "sync"):
        report = results[name][variant][0]["report"]
        last = report["last_step"]
        assert last["num_offloads"] == ROWS[name][1]
        assert last["num_reloads"] + last["num_resident"] >= ROWS[name][1]
        assert last["num_misses"] == 0
        assert last["pinned_in_use_bytes"] == 0
        assert last["num_slabs_made"] == 0
        assert report["num_steps"] == 3


@pytest.mark.parametrize("name", ROWS)
def test_model_looks_the_same(results, name):
    for rank in range(2):
        off, on = (results[name][variant][rank] for variant in ("off", "overlap"))
        assert on["report"] is not None
        assert off["report"] is None
        assert (off["modules"], off["keys"], off["classes"]) == (on["modules"], on["keys"], on["classes"])
