"""What a TorchTitan job takes of host memory, against figures worked out from the config."""

import pytest
import test_converter
from torchtitan.distributed import ParallelDims

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
