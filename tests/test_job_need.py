"""What a TorchTitan job takes of host memory, against figures worked out from the config."""

import dataclasses
from types import SimpleNamespace

import pytest
import test_converter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

from titan_offload import HostRuntime
from titan_offload.apply import make_offloader
from titan_offload.need import LOADER_WORKER_BYTES, cpu_offload_bytes, staging_bytes
from titan_offload.titan.need import NeedOfJob, actions_of

pytestmark = pytest.mark.usefixtures("titan_on_cpu", "in_repo")


def other_claims(*flags):
    """By name, of the debug model of Llama 3 on one device; and the model's parameters."""
    job_config = test_converter.parse(*flags)
    model = test_converter.build("llama3", job_config)
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    need = NeedOfJob(job_config, ParallelDims(world_size=1, **degrees), model.model_args)
    claims = need._other_claims([model])
    assert not any(claim.is_offload for claim in claims)
    return {claim.name: claim.num_bytes for claim in claims}, list(model.parameters())


def test_nothing_else_is_claimed_by_default():
    assert other_claims()[0] == {}


def test_cpu_offload_of_fsdp2():
    claims, parameters = other_claims("--training.enable_cpu_offload")
    expected = cpu_offload_bytes(parameter.nbytes for parameter in parameters)
    assert claims == {"gradients and optimizer state (FSDP2 CPU offload)": expected}
    assert expected >= 3 * sum(parameter.nbytes for parameter in parameters)  # a gradient and Adam's two


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_asynchronous_checkpoints(mode):
    claims, parameters = other_claims("--checkpoint.enable", "--checkpoint.async_mode", mode)
    expected = staging_bytes(sum(parameter.nbytes for parameter in parameters))
    assert claims == {"staging of asynchronous checkpoints": expected}
    assert other_claims("--checkpoint.enable")[0] == {}
    assert other_claims("--checkpoint.async_mode", mode)[0] == {}


def test_data_loader_workers():
    """Two workers with two batches each, of 4 x 512 tokens and labels of 8 bytes."""
    flags = ("--training.dataloader.num_workers", "2")
    assert other_claims(*flags)[0] == {"data loader workers": 2 * (2 * 4 * 512 * 16 + LOADER_WORKER_BYTES)}
    claims, _ = other_claims(*flags, "--training.dataloader.prefetch_factor", "5")
    assert claims == {"data loader workers": 2 * (5 * 4 * 512 * 16 + LOADER_WORKER_BYTES)}


def test_actions_of_a_schedule_are_those_that_compute():
    """Actions that run at once come one after the other; idle steps and communication are left out."""
    from torch.distributed.pipelining.schedules import (
        BACKWARD_INPUT,
        BACKWARD_WEIGHT,
        FORWARD,
        FULL_BACKWARD,
        OVERLAP_F_B,
        SEND_F,
        _Action,
    )

    both = (_Action(1, FORWARD, 2), _Action(0, FULL_BACKWARD, 1))
    order = [
        *(_Action(0, FORWARD, 0), None, _Action(0, SEND_F, 0), _Action(-1, OVERLAP_F_B, None, both)),
        *(_Action(0, BACKWARD_INPUT, 0), _Action(0, BACKWARD_WEIGHT, 0)),
    ]
    assert actions_of(order) == [(0, "F", 0), (1, "F", 2), (0, "B", 1), (0, "I", 0), (0, "W", 0)]


# Mode "all", without checkpointing

ALL = ("--activation_checkpoint.mode", "none", "--activation_offload.mode", "all")


def need_of_all(*flags, name="llama3", flavor=None):
    """Of one device; the need, or why it is not known. Small tensors stay unless flags say otherwise."""
    large = ("--activation_offload.min_offload_mib", "1")
    job_config = test_converter.parse(*ALL, *large, "--model.name", name, *flags)
    model = test_converter.build(name, job_config, flavor)
    for index, block in model.layers.items() if "full" in flags else ():
        model.layers[index] = checkpoint_wrapper(block)
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    need = NeedOfJob(job_config, ParallelDims(world_size=1, **degrees), model.model_args)
    offloader = make_offloader(job_config.activation_offload, None, HostRuntime())
    offloader.attach(model)
    return need.why_unknown(offloader) or need(offloader, [model])


def test_need_of_all_that_blocks_save():
    """Of 4 x 512 tokens and five of six blocks, 256 wide, 768 in the feed-forward, on a CPU in float32: of each norm
    three tensors and of w1 four; what is below 1 MiB stays."""
    need = need_of_all()
    wide, hidden = 4 * 512 * 256 * 4, 4 * 512 * 768 * 4
    assert dict(need.activations) == {wide: 5 * (3 + 4 + 3), hidden: 5 * 4}
    assert (need.inputs, need.saves) == ([], [])
    small = need_of_all("--activation_offload.min_offload_mib", "0.005")
    stem, heads = 4 * 512 * 8, 4 * 512 * 16 * 4
    row = 4 * 512 * 4
    assert dict(small.activations) == {stem: 1, wide: 50, hidden: 20, row: 2 * 5, heads: 5}


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_need_of_the_input_of_checkpointed_blocks_and_of_tokens(name):
    """Known of any model."""
    flags = ("--activation_checkpoint.mode", "full", "--activation_offload.min_offload_mib", "0.005")
    need = need_of_all(*flags, name=name)
    assert need.inputs == [(4 * 512 * 256 * 4, 5)]
    assert need.activations == [(4 * 512 * 8, 1)]


@pytest.mark.parametrize(
    ("name", "flags", "reason"),
    [
        ("deepseek_v3", (), "router"),
        ("llama3", ("--compile.enable",), "compiler"),
        ("llama3", (), "'flex'"),
    ],
)
def test_where_no_need_is_known_there_is_a_reason(name, flags, reason):
    flavor = "debugmodel_flex_attn" if "flex" in reason else None
    assert reason in need_of_all(*flags, name=name, flavor=flavor)


def test_a_flavor_of_the_users_own_has_a_need(monkeypatch):
    """What its blocks are is up to its args' class."""
    args = get_train_spec("llama3").model_args
    monkeypatch.setitem(args, "mine", dataclasses.replace(args["debugmodel"], n_layers=3))
    need = need_of_all(flavor="mine")
    assert sum(count for _, count in need.activations) == 2 * 14


def test_another_models_args_are_not_known():
    need = NeedOfJob(test_converter.parse(*ALL), ParallelDims(1, 1, 1, 1, 1, 1, 1, world_size=1), SimpleNamespace())
    offloader = SimpleNamespace(fqns_saving_all={"layers.0"})
    assert need.why_unknown(offloader) == "the planner does not know this model"
