"""A TorchTitan run that was saved half way is resumed, with offload on or off before and after: every number of the
steps that follow is that of a run without offload that was never interrupted, to the last digit."""

from pathlib import Path

import pytest
from runs import train_rows
from torch.distributed.checkpoint import FileSystemReader

LLAMA3 = "--job.config_file train_configs/debug_cpu.toml --training.steps 4"
PIPELINE = (
    f"{LLAMA3} --parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 1 "
    "--parallelism.pipeline_parallel_schedule 1F1B"
)
TENSOR_PARALLEL = f"stock {LLAMA3} --parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree 1"
RUNS = {"FSDP 2": LLAMA3, "PP 2": PIPELINE, "TP 2": TENSOR_PARALLEL}

OFF, MOVE = "--activation_offload.mode none", "--activation_offload.min_offload_mib 0.001"
NO_AC = "--activation_checkpoint.mode none"
VARIANTS = {
    "off": OFF,
    "inputs": MOVE,
    "saves": f"{MOVE} --selective_checkpoint.enable --selective_checkpoint.offload",
    "all": f"{MOVE} --activation_offload.mode all {NO_AC}",
}
# name of a run -> how often as many tensors move in each step with a variant, as rank 0 has blocks that move
NUM_MOVED = {
    "FSDP 2": {"inputs": 5, "saves": 5 * 3},
    "PP 2": {"inputs": 2 * 4, "saves": 2 * 4 * 3},
    "TP 2": {"inputs": 5, "saves": 5 * 3},
}

SAVE = "--checkpoint.enable --checkpoint.interval 2 --checkpoint.no_last_save_model_only --checkpoint.async_mode"
RESUME = "--checkpoint.enable --checkpoint.load_only --checkpoint.load_step 2"

# run, variant that saves, how, variants that resume
CASES = [
    ("FSDP 2", "off", "disabled", ["off", "inputs"]),
    ("FSDP 2", "inputs", "disabled", ["off", "inputs", "saves"]),
    ("FSDP 2", "saves", "disabled", ["off"]),
    ("FSDP 2", "all", "async", ["off", "inputs"]),
    ("FSDP 2", "off", "async", ["inputs", "all"]),
    ("FSDP 2", "inputs", "async", ["off", "inputs"]),
    ("PP 2", "off", "disabled", ["inputs"]),
    ("PP 2", "inputs", "async", ["off"]),
    ("TP 2", "off", "async", ["inputs"]),
    ("TP 2", "inputs", "disabled", ["off"]),
]
SAVED = [(run, variant, mode) for run, variant, mode, _ in CASES]
RESUMED = [(run, variant, mode, then) for run, variant, mode, thens in CASES for then in thens]

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


def dump_folder(folder: Path, run: str, variant: str, mode: str) -> Path:
    return folder / f"{run}-{variant}-{mode}".replace(" ", "")


@pytest.fixture(scope="module")
def results(folder):
    rows = {(run,): f"{flags} {OFF}" for run, flags in RUNS.items()}
    rows["count",] = f"count {LLAMA3} {OFF} {MOVE} {NO_AC}"
    for run, variant, mode in SAVED:
        flags = f"{RUNS[run]} --job.dump_folder {dump_folder(folder, run, variant, mode)}"
        rows[run, variant, mode] = f"{flags} {VARIANTS[variant]} {SAVE} {mode}"
        rows |= {
            (run, variant, mode, then): f"{flags} {VARIANTS[then]} {RESUME}"
            for then in VARIANTS
            if (run, variant, mode, then) in RESUMED
        }
    return dict(zip(rows, train_rows(list(rows.values()), folder), strict=True))


def assert_moved(results, run: str, variant: str, *row: str) -> None:
    report = results[run, *row][0]["report"]
    if variant == "off":
        assert report is None
        return
    last = report["last_step"]
    assert last["pinned_in_use_bytes"] == 0
    if variant == "all":
        assert last["offloaded_bytes"] == results["count",][0]["saved_bytes"][-1]
    else:
        assert last["num_offloads"] == NUM_MOVED[run][variant]


@pytest.mark.parametrize(("run", "variant", "mode"), SAVED)
def test_saving_changes_no_number(results, run, variant, mode):
    for rank in range(2):
        assert [step for step, *_ in results[run,][rank]["metrics"]] == [1, 2, 3, 4]
        assert results[run, variant, mode][rank]["metrics"] == results[run,][rank]["metrics"]
    assert_moved(results, run, variant, variant, mode)


@pytest.mark.parametrize(("run", "variant", "mode", "then"), RESUMED)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(results, run, variant, mode, then):
    for rank in range(2):
        metrics = results[run, variant, mode, then][rank]["metrics"]
        assert [step for step, *_ in metrics] == [3, 4]
        assert metrics == results[run,][rank]["metrics"][2:]
    assert_moved(results, run, then, variant, mode, then)


@pytest.mark.parametrize("run", RUNS)
def test_what_is_saved_is_the_same(results, folder, run):
    """Keys, shapes, dtypes and chunks of model, optimizer and all else."""
    keys = [row[1]["keys"] for name, row in results.items() if name[0] == run]
    assert keys == [keys[0]] * len(keys)
    saved = [
        FileSystemReader(dump_folder(folder, *case) / "checkpoint" / step).read_metadata().state_dict_metadata
        for case in SAVED
        if case[0] == run
        for step in ("step-2", "step-4")
    ]
    assert len(saved) >= 4
    assert {"layers.0.attention.wq.weight", "train_state.step"} <= saved[0].keys()
    assert any(key.startswith("optimizer.state.layers.5.") for key in saved[0])
    assert saved == [saved[0]] * len(saved)
