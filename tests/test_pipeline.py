"""Stages and passes in flight: by hand, and against torch's own schedules and TorchTitan's own division."""

import pytest
from test_need import actions_of
from torch.distributed.pipelining import schedules
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from titan_offload.need import max_in_flight
from titan_offload.planner.pipeline import (
    BOUNDED,
    blocks_of_stages,
    interleaved_actions,
    most_in_flight,
    passes_in_flight,
    stage_layers,
    stages_of_rank,
)
from titan_offload.planner.shapes import SCHEDULES, Job, LayerShape, ModelShape

RANKS = 4


def job_of(schedule, num_microbatches, ranks=RANKS, **others):
    return Job(8192, num_forwards=num_microbatches, pipeline_parallel=ranks, schedule=schedule, **others)


def model_of(num_layers):
    return ModelShape("toy", 64, (LayerShape(1000, 64, 4),) * num_layers)


def torchs_actions(schedule, num_microbatches, ranks=RANKS):
    several = 1 if schedule in ("1F1B", "GPipe") else 2
    order = actions_of(schedules.get_schedule_class(schedule), num_microbatches, ranks, several)
    return [[action for action in rank if action[1] in "FBIW"] for rank in order]


def torchs_in_flight(rank_actions, weight_of):
    return max_in_flight(rank_actions, {stage: weight_of(stage) for stage, _, _ in rank_actions})


# Layers of stages


@pytest.mark.parametrize("num_layers, num_stages", [(32, 4), (80, 8), (61, 16), (6, 8), (27, 2), (5, 1)])
@pytest.mark.parametrize("weights", [(1, 1), (0, 0), (0, 1)])
def test_layers_are_divided_as_torchtitan_does(num_layers, num_stages, weights):
    if num_layers + sum(weights) < num_stages:
        pytest.skip("TorchTitan refuses it")
    parts = generate_llm_fqn_per_model_part(num_stages, num_layers, *weights)
    expected = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
    assert stage_layers(num_layers, num_stages, *weights) == expected


def test_blocks_follow_each_other():
    assert blocks_of_stages(model_of(8), job_of("1F1B", 4)) == [range(0, 2), range(2, 5), range(5, 7), range(7, 8)]
    given = job_of("1F1B", 4, stage_layers=(1, 1, 1, 5))
    assert [len(blocks) for blocks in blocks_of_stages(model_of(8), given)] == [1, 1, 1, 5]
    assert blocks_of_stages(model_of(3), Job(8)) == [range(0, 3)]


def test_stages_of_a_rank():
    assert stages_of_rank(job_of("1F1B", 8), 3) == (3,)
    assert stages_of_rank(job_of("Interleaved1F1B", 8, stages_per_rank=3), 1) == (1, 5, 9)
    assert [stages_of_rank(job_of("ZBVZeroBubble", 8), rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


@pytest.mark.parametrize(
    "bad, text",
    [
        ({"stage_layers": (4, 4)}, r"\[4, 4\] does not divide 8 blocks among 4 stages"),
        ({"stage_layers": (4, 4, 4, 4)}, "with the blocks as their sum"),
    ],
)
def test_stages_that_do_not_fit_are_refused(bad, text):
    with pytest.raises(ValueError, match=text):
        blocks_of_stages(model_of(8), job_of("1F1B", 4, **bad))


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ValueError, match="2 blocks cannot be divided among 8 pipeline stages"):
        blocks_of_stages(model_of(2), job_of("1F1B", 4, ranks=8))


# Passes in flight


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [8, 16, 48])
def test_passes_in_flight_are_those_of_torchs_schedules(schedule, num_microbatches):
    job = job_of(schedule, num_microbatches)
    counted = [torchs_in_flight(rank, lambda stage: 1) for rank in torchs_actions(schedule, num_microbatches)]
    assert [passes_in_flight(job, rank) for rank in range(RANKS)] == counted


@pytest.mark.parametrize("num_microbatches", [4, 8, 12, 20])
def test_the_order_is_torchs(num_microbatches):
    for rank, expected in enumerate(torchs_actions("Interleaved1F1B", num_microbatches)):
        assert len(expected) == 4 * num_microbatches
        got = interleaved_actions(job_of("Interleaved1F1B", num_microbatches), rank)
        of_torch = sorted({stage for stage, _, _ in expected})  # the stand-in for a stage has index 0 on each rank
        stages = stages_of_rank(job_of("Interleaved1F1B", num_microbatches), rank)
        assert [(stages.index(stage), kind, i) for stage, kind, i in got] == [
            (of_torch.index(stage), kind, i) for stage, kind, i in expected
        ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [8, 12, 36])
def test_stages_of_different_size_never_hold_less_than_in_torchs_order(schedule, num_microbatches):
    job = job_of(schedule, num_microbatches)
    for rank, order in enumerate(torchs_actions(schedule, num_microbatches)):
        stages = sorted({stage for stage, _, _ in order})
        weights = {stage: 3 + 4 * (stage >= 4) for stage in stages}
        ours = dict(zip(stages_of_rank(job, rank), weights.values(), strict=True))
        expected = max_in_flight(order, weights)
        got = most_in_flight(job, rank, ours)
        assert got >= expected if schedule in BOUNDED else got == expected
        assert got <= num_microbatches * sum(weights.values())


def test_without_a_pipeline_one_pass_is_in_flight():
    job = Job(8192, num_forwards=5)
    assert (passes_in_flight(job, 0), most_in_flight(job, 0, {0: 7})) == (1, 7)


def test_few_microbatches_fill_a_pipeline_no_further():
    assert [passes_in_flight(job_of("1F1B", 2), rank) for rank in range(4)] == [2, 2, 2, 1]
    assert passes_in_flight(job_of("ZBVZeroBubble", 2), 0) == 4


def test_microbatches_that_torch_refuses_are_refused():
    with pytest.raises(ValueError, match=r"9 microbatches cannot be divided into 2 rounds.*multiple of 2, such as 8"):
        passes_in_flight(job_of("Interleaved1F1B", 9), 0)
