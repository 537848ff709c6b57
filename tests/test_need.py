"""What a run will take, by formula: by hand, and against what torch makes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

from titan_offload import pool
from titan_offload.need import (
    LOADER_WORKER_BYTES,
    attention_save_bytes,
    block_input_bytes,
    cpu_offload_bytes,
    data_loader_bytes,
    in_flight_1f1b,
    max_in_flight,
    slots_bytes,
    staging_bytes,
    stem_bytes,
)

GIB, MIB = 1024**3, 1024**2


def test_qwen3_8b_at_128k_tokens_needs_36_gib():
    """36 blocks of dim 4096 in bf16. Eight ways of context parallel, or four of tensor parallel, divide it."""
    assert 36 * block_input_bytes(1, 128 * 1024, 4096, 2) == 36 * GIB
    assert block_input_bytes(1, 128 * 1024, 4096, 2, context_parallel=8) == 128 * MIB
    assert block_input_bytes(2, 128 * 1024, 4096, 2, context_parallel=2, tensor_parallel=4) == 256 * MIB


@pytest.mark.parametrize("seq_len", [1, 7, 8, 9, 100, 101])
def test_rank_0_holds_the_longest_part_of_a_sequence(seq_len):
    """As torch.chunk cuts, which DTensor shards with; first by context parallel, then by tensor parallel."""
    part = torch.empty(3, seq_len, 5, dtype=torch.bfloat16).chunk(2, 1)[0].chunk(4, 1)[0]
    assert block_input_bytes(3, seq_len, 5, 2, context_parallel=2, tensor_parallel=4) == part.numel() * 2


@pytest.mark.parametrize("num_bytes", [0, 1, 511, 512, 513, 80 * MIB, 80 * MIB + 1])
def test_slots_are_those_of_the_pool(num_bytes):
    assert slots_bytes(num_bytes) == pool._align(num_bytes)
    assert slots_bytes(num_bytes, 1024) == -(-num_bytes // 1024) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_saves_what_the_op_returns_and_backward_needs(dtype):
    query = torch.randn(2, 3, 20, 16, dtype=dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, is_causal=True)[:2]
    assert lse.dtype == torch.float32
    assert attention_save_bytes(2, 20, 3, 16, dtype.itemsize) == out.nbytes + lse.nbytes


# Regions in flight


def parse(actions):
    """``"0F1 0B1"`` to (stage, kind, microbatch)."""
    return [(int(action[0]), action[1], int(action[2:])) for action in actions.split()]


@pytest.mark.parametrize(
    "actions, expected",
    [
        ("0F0 0B0 0F1 0B1", 3),
        ("0F0 0F1 0B0 0F2 0B1 0B2", 6),
        ("0F0 1F0 1B0 0B0", 8),  # 3 regions of stage 0 and 5 of stage 1
        ("0F0 0F1 0I0 0I1 0F2 0W0 0W1 0I2 0W2", 9),  # an input backward frees nothing
        ("1F0 1F1 0F0 1B0 1B1 0F1 0F2 0B0 0B1 0B2", 13),
        ("", 0),
    ],
)
def test_regions_alive_by_hand(actions, expected):
    assert max_in_flight(parse(actions), {0: 3, 1: 5}) == expected


def test_what_frees_can_be_said():
    assert max_in_flight(parse("0F0 0I0 0F1 0I1 0W0 0W1"), {0: 3}, frees=("B", "I")) == 3


def fake_stage(num_stages, group_size):
    return SimpleNamespace(
        stage_index=0, num_stages=num_stages, group_size=group_size, group_rank=0, submod=nn.Identity(), is_last=False
    )


def actions_of(schedule_class, num_microbatches, num_ranks=4, stages_per_rank=1):
    """What each rank of a torch schedule does. Overlapped actions come as their parts."""
    stages = [fake_stage(num_ranks * stages_per_rank, num_ranks) for _ in range(stages_per_rank)]
    is_single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    order = schedule_class(stages[0] if is_single else stages, num_microbatches).pipeline_order
    for rank in range(num_ranks):
        parts = [part for action in order[rank] if action for part in action.sub_actions or (action,)]
        yield [(part.stage_index, part.computation_type.value, part.microbatch_index) for part in parts]


def alive_by_identity(actions):
    """Most forward passes alive, told apart by stage and microbatch."""
    alive, most = set(), 0
    for stage, kind, microbatch in actions:
        if kind == "F":
            alive.add((stage, microbatch))
        elif kind in "BW":
            alive.remove((stage, microbatch))
        most = max(most, len(alive))
    assert not alive
    return most


@pytest.mark.parametrize("num_microbatches", [4, 5, 16])
def test_formula_of_1f1b_is_that_of_torchs_schedule(num_microbatches):
    """Also on the last stage, whose forwards torch 2.13 lists from 1 and backwards from 0. Guards: that `max_in_flight`
    does not tell microbatches apart."""
    ones = dict.fromkeys(range(4), 1)
    for rank, actions in enumerate(actions_of(schedules.Schedule1F1B, num_microbatches)):
        assert (
            max_in_flight(actions, ones) == in_flight_1f1b(4, rank, num_microbatches) == min(4 - rank, num_microbatches)
        )
    for actions in actions_of(schedules.ScheduleGPipe, num_microbatches):
        assert max_in_flight(actions, ones) == num_microbatches
    assert in_flight_1f1b(4, 0, 2) == 2


@pytest.mark.parametrize(
    "name, expected",
    [
        ("ScheduleInterleaved1F1B", [11, 9, 7, 5]),  # (2 - 1) x 4 + 2 x (4 - 1 - rank), and one
        ("ScheduleLoopedBFS", [16, 16, 16, 16]),  # all
        ("ScheduleInterleavedZeroBubble", [8, 8, 8, 8]),
        ("ScheduleZBVZeroBubble", [8, 8, 8, 8]),
        ("ScheduleDualPipeV", [9, 9, 9, 9]),
    ],
)
def test_regions_alive_in_torchs_schedules_of_several_stages(name, expected):
    """8 stages on 4 ranks, 8 microbatches, 1 region each; and with 3 regions each."""
    ranks = list(actions_of(getattr(schedules, name), 8, stages_per_rank=2))
    assert [alive_by_identity(actions) for actions in ranks] == expected
    assert [max_in_flight(actions, dict.fromkeys(range(8), 1)) for actions in ranks] == expected
    assert max_in_flight(ranks[0], dict.fromkeys(range(8), 3)) == 3 * expected[0]


# What else takes host memory


def test_cpu_offload_by_hand():
    """FSDP2 pins parameters and gradients; torch rounds what it pins up to a power of two; AdamW keeps two states."""
    assert cpu_offload_bytes([80, 128]) == (128 - 80) + 128 + 2 * 80 + 128 + 2 * 128
    assert cpu_offload_bytes([80, 128], is_pinned=False) == 3 * (80 + 128)
    assert cpu_offload_bytes([80], num_states=0) == 48 + 128
    assert cpu_offload_bytes([0, 1]) == 1 + 2


def test_adamw_keeps_what_is_counted():
    """Gradients and states of an optimizer, less its step counters, are the bytes counted without pinning."""
    model = nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 30)).sum().backward()
    optimizer.step()
    states = sum(state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert cpu_offload_bytes(sizes, is_pinned=False) == sum(p.grad.nbytes for p in model.parameters()) + states
    assert staging_bytes(sum(sizes)) == sum(sizes) + states


def test_data_loader_by_hand():
    batch = 4 * 2048 * 16
    assert data_loader_bytes(0, batch) == 0
    assert data_loader_bytes(3, batch) == 3 * (2 * batch + LOADER_WORKER_BYTES)
    assert data_loader_bytes(3, batch, prefetch_factor=5, worker_bytes=7) == 3 * (5 * batch + 7)


@pytest.mark.parametrize(
    ("num_views", "minimum", "expected"),
    [(1, 0, 8000), (2, 0, 16000), (3, 0, 8000), (1, 8000, 8000), (1, 8001, 0), (2, 8001, 0)],
)
def test_tokens_of_the_embedding(num_views, minimum, expected):
    """1000 tokens of 8 bytes; a view that is half of its storage travels as the whole of it."""
    assert stem_bytes(1000, num_views, minimum) == expected
