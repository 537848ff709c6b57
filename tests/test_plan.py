"""The plan: the figures of the reference article, by hand, and what must hold whatever is asked."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_offload.config import GIB, MIB, OffloadConfig, SelectiveConfig
from titan_offload.need import slots_bytes
from titan_offload.planner import Job, LayerShape, Machine, ModelShape, make_plan, planned_variant
from titan_offload.planner.costs import attention_flop, copy_ms, matmul_flop, saved_sizes
from titan_offload.planner.plan import VARIANTS
from titan_offload.planner.simulation import simulate_step
from titan_offload.planner.steps import Way

PCIE5, PCIE4 = 55.43, 31.0
QWEN3_8B = ModelShape("qwen3_8b", 4096, (LayerShape(192937984, 4096, 32),) * 36)
QWEN3_1_7B = ModelShape("qwen3_1_7b", 2048, (LayerShape(50331648, 2048, 16),) * 28)
LLAMA_70B = ModelShape("llama_70b", 8192, (LayerShape(855638016, 8192, 64),) * 80)
QWEN3_30B_A3B = ModelShape("qwen3_30b_a3b", 2048, (LayerShape(56885248, 4096, 32),) * 48)

ALONE = Job(4096, num_devices=1)


def machine_of(gb_per_s, **others):
    return Machine(gb_per_s, gb_per_s, **{"devices_per_node": 1, **others})


def plan_of(model=QWEN3_8B, job=ALONE, machine=None, selective=None, **offload):
    return make_plan(model, job, machine or machine_of(PCIE5), OffloadConfig(**offload), selective)


def figure(value, printed):
    """Whether ``value`` prints as ``printed``, at its precision."""
    places = len(str(printed).partition(".")[2])
    return round(value, places) == pytest.approx(printed, abs=10**-places / 2 * 1.001)


# The figures of the article and of the reference calculation


@pytest.mark.parametrize(
    "model, tokens, rate, copy, forward, ratio, sync",
    [
        (QWEN3_8B, 4096, PCIE5, 0.6053, 3.436, 0.1762, 8.81),
        (QWEN3_8B, 4096, PCIE4, 1.0824, 3.436, 0.315, 15.75),
        (QWEN3_8B, 32768, PCIE5, 4.8428, 42.881, 0.1129, 5.65),
        (QWEN3_8B, 32768, PCIE4, 8.6592, 42.881, 0.2019, 10.1),
        (QWEN3_8B, 131072, PCIE5, 19.3711, 382.63, 0.0506, 2.53),
        (QWEN3_8B, 131072, PCIE4, 34.6368, 382.63, 0.0905, 4.53),
        (QWEN3_1_7B, 4096, PCIE5, 0.3027, 0.9621, 0.3146, 15.73),
        (QWEN3_1_7B, 4096, PCIE4, 0.5412, 0.9621, 0.5625, 28.13),
        (QWEN3_1_7B, 32768, PCIE5, 2.4214, 15.3932, 0.1573, 7.87),
        (QWEN3_1_7B, 32768, PCIE4, 4.3296, 15.3932, 0.2813, 14.06),
        (QWEN3_1_7B, 131072, PCIE5, 9.6856, 167.1258, 0.058, 2.9),
        (QWEN3_1_7B, 131072, PCIE4, 17.3184, 167.1258, 0.1036, 5.18),
        (QWEN3_30B_A3B, 4096, PCIE5, 0.3027, 1.2069, 0.2508, 12.54),
        (QWEN3_30B_A3B, 4096, PCIE4, 0.5412, 1.2069, 0.4484, 22.42),
        (QWEN3_30B_A3B, 32768, PCIE5, 2.4214, 25.0482, 0.0967, 4.83),
        (QWEN3_30B_A3B, 32768, PCIE4, 4.3296, 25.0482, 0.1729, 8.64),
        (QWEN3_30B_A3B, 131072, PCIE5, 9.6856, 311.2992, 0.0311, 1.56),
        (QWEN3_30B_A3B, 131072, PCIE4, 17.3184, 311.2992, 0.0556, 2.78),
    ],
)
def test_steps_of_the_reference(model, tokens, rate, copy, forward, ratio, sync):
    document = plan_of(model, Job(tokens, num_devices=1), machine_of(rate)).to_json()
    [layer], steps = document["layers"], document["steps"]
    assert figure(layer["d2h_ms"], copy) and figure(layer["h2d_ms"], copy)
    assert figure(layer["forward_ms"], forward) and figure(layer["copy_over_forward"], ratio)
    assert figure(steps["sync"]["closed_form_unlimited_percent"], sync)
    assert figure(steps["sync"]["closed_form_limited_percent"], sync)
    assert steps["overlap"]["closed_form_unlimited_percent"] == steps["overlap"]["closed_form_limited_percent"] == 0
    assert steps["overlap"]["simulated_percent"] == 0


@pytest.mark.parametrize(
    "model, job, machine, key, gib",
    [
        (QWEN3_8B, Job(131072, num_devices=1), machine_of(PCIE5), "block_inputs_gib", 36.0),
        (QWEN3_1_7B, Job(32768, num_devices=1), machine_of(PCIE5), "block_inputs_gib", 3.5),
        (
            LLAMA_70B,
            Job(3_000_000, context_parallel=32, num_devices=32),
            machine_of(PCIE5, devices_per_node=8, num_nodes=4),
            "block_inputs_node_gib",
            915.5,
        ),
    ],
)
def test_host_memory_of_the_reference(model, job, machine, key, gib):
    """The article counts every block; those that stay on the device are not pinned."""
    document = make_plan(model, job, machine, OffloadConfig(keep_last=0)).to_json()
    assert figure(document["memory"][key], gib)
    assert document["memory"][key.replace("block_inputs", "pinned")] == document["memory"][key]
    one_less = make_plan(model, job, machine, OffloadConfig()).to_json()["memory"]
    num = len(model.layers)
    pinned, pinned_of_all = (m[key.replace("block_inputs", "pinned")] for m in (one_less, document["memory"]))
    assert pinned == pytest.approx(pinned_of_all * (num - 1) / num)


def test_all_activations_of_the_reference():
    plan = plan_of()
    assert figure(plan.steps["all_without_ac"].d2h_ms, 10.29)
    assert figure(plan.layers[0].forward_ms, 3.44)


@pytest.mark.parametrize("devices, sync", [(1, 8.81), (2, 17.62), (4, 35.24)])
def test_shared_links_of_the_reference(devices, sync):
    plan = plan_of(machine=machine_of(PCIE5, devices_per_link=devices, devices_per_node=8))
    assert figure(plan.steps["sync"].closed_form_limited_percent, sync)


@pytest.mark.parametrize("ratio, simulated, closed", [(2, 12.5, 25 * 7 / 8), (4, 59.375, 100 * 7 / 8)])
def test_few_blocks_are_simulated(ratio, simulated, closed):
    """Of `test_simulation`: 36 and 51 instead of 32. The closed form, of the blocks that move, says twice as much."""
    layers = (LayerShape(250_000, 1, 1),) * 8
    job = Job(1000, num_devices=1)
    forward_ms = (matmul_flop(layers[0], job) + attention_flop(layers[0], job)) / 500e9
    rate = 1000 * 4096 * 2 / (ratio * forward_ms * 1e6)
    step = plan_of(ModelShape("toy", 4096, layers), job, machine_of(rate)).steps["overlap"]
    assert step.simulated_percent == pytest.approx(simulated)
    assert step.closed_form_limited_percent * 7 / 8 == pytest.approx(closed)


@pytest.mark.parametrize("h2d", [2.0, 3.0, 10.0])
@pytest.mark.parametrize("d2h, limit", [(2.0, 2), (3.0, 3), (10.0, 2), (500.0, 0)])
def test_with_many_blocks_the_simulation_comes_to_the_closed_form(d2h, h2d, limit):
    """Without a limit of the stash only where copies to the host keep up with forward: else inputs are found on the
    device that the closed form copies back."""
    model = replace(QWEN3_8B, layers=QWEN3_8B.layers[:1] * 1000)
    offload, machine = OffloadConfig(max_inflight_offloads=limit), Machine(d2h, h2d, devices_per_node=1)
    for variant in VARIANTS:
        step = Way(model, ALONE, machine, offload, None, variant).cost()
        closed = step.closed_form_limited_percent if limit else step.closed_form_unlimited_percent
        assert step.simulated_percent == pytest.approx(closed, rel=0.01, abs=0.1), variant


# Costs, by hand


def test_flop_by_hand():
    layer = LayerShape(1000, 64, 4)
    assert matmul_flop(layer, Job(128, batch=3)) == 2 * 3 * 128 * 1000
    assert attention_flop(layer, Job(128, batch=3)) == 2 * 3 * 128**2 * 64
    divided = Job(128, batch=3, context_parallel=2, tensor_parallel=4)
    assert matmul_flop(layer, divided) == 2 * 3 * 128 * 1000 / 8
    assert attention_flop(layer, divided) == 2 * 3 * 128**2 * 64 / 8


@pytest.mark.parametrize("window", [1, 3, 8, 16, 99])
def test_a_window_is_a_band_of_the_causal_triangle(window):
    """Of continuous tokens: the area of the triangle less that of the smaller one that the window leaves out."""
    seq, width = 16, 64
    area = seq**2 / 2 - max(0, seq - window) ** 2 / 2
    assert attention_flop(LayerShape(1, width, 4, window=window), Job(seq)) == 4 * width * area


def test_latent_attention_has_two_widths():
    """192 per head for queries and keys, 128 for values."""
    layer = LayerShape(1, 16 * 192, 16, value_width=16 * 128)
    assert attention_flop(layer, Job(100)) == 100**2 * 16 * (192 + 128)
    assert saved_sizes(layer, Job(100), None) == (100 * 16 * 128 * 2, 100 * 16 * 4)


def test_saved_sizes_by_hand():
    layer = LayerShape(1, 4096, 32, other_saves=(128 * 4, 8 * 4, 8 * 8))
    job = Job(1001, batch=2, context_parallel=2, tensor_parallel=4)
    tokens = 2 * 501
    out, lse = tokens * 8 * 128 * 2, tokens * 8 * 4
    assert saved_sizes(layer, job, None) == (out, lse, tokens * 512, tokens * 32, tokens * 64)
    assert saved_sizes(layer, job, SelectiveConfig(save_ops=("aten::mm",))) == (tokens * 512, tokens * 32, tokens * 64)
    sliding = replace(layer, window=100, other_saves=())
    assert saved_sizes(sliding, job, None) == ()
    assert saved_sizes(sliding, job, SelectiveConfig(save_sliding_window=True)) == (out, lse)


def test_experts_cost_the_copy_of_all_and_the_compute_of_few():
    """Half of the matmuls' time, the same copy."""
    job = Job(4096, num_devices=1)
    dense, sparse = (
        plan_of(replace(QWEN3_8B, layers=(LayerShape(params, 4096, 32),))) for params in (2_000_000, 10**6)
    )
    attention = attention_flop(LayerShape(1, 4096, 32), job) / 500e9
    assert sparse.layers[0].d2h_ms == dense.layers[0].d2h_ms
    assert sparse.layers[0].forward_ms - attention == pytest.approx((dense.layers[0].forward_ms - attention) / 2)


def test_a_copy_by_hand():
    assert copy_ms(10**9, 50.0) == pytest.approx(20)
    assert copy_ms(10**9, 50.0, devices_per_link=4) == pytest.approx(80)


def test_each_direction_has_its_speed():
    step = plan_of(machine=Machine(50.0, 20.0, devices_per_node=1)).steps["overlap"]
    assert (step.d2h_ms, step.h2d_ms) == pytest.approx((32 * MIB / 50e6, 32 * MIB / 20e6))


# Rows


def test_steps_by_hand():
    """With copies that hide: 4 forwards, 4 less attention's, 3; sync adds the copies of 35 blocks."""
    plan = plan_of()
    [layer], steps = plan.layers, plan.steps
    forward, attention = layer.forward_ms, layer.attention_ms
    assert attention == pytest.approx(2 * 4096**2 * 4096 / 500e9)
    expected = {
        "ac": 36 * 4 * forward,
        "sync": 36 * 4 * forward + 35 * 2 * layer.d2h_ms,
        "overlap": 36 * 4 * forward,
        "overlap_selective_device": 36 * (4 * forward - attention),
        "overlap_selective_host": 36 * (4 * forward - attention),
    }
    assert {name: steps[name].step_ms for name in expected} == pytest.approx(expected)
    assert steps["all_without_ac"].compute_ms == pytest.approx(36 * 3 * forward)
    assert steps["all_without_ac"].step_ms > steps["ac"].step_ms
    for name, cost in steps.items():
        assert cost.vs_ac_percent == pytest.approx((cost.step_ms / expected["ac"] - 1) * 100), name
        assert cost.simulated_percent == pytest.approx((cost.step_ms / cost.compute_ms - 1) * 100), name


def test_bytes_of_rows_by_hand():
    steps = plan_of(selective=SelectiveConfig(offload=True)).steps
    size, out, lse = 32 * MIB, 32 * MIB, 512 * 1024  # lse is below min_offload_mib: it stays
    assert [steps[name].pinned_bytes for name in VARIANTS] == [
        0,
        35 * size,
        35 * size,
        35 * size,
        35 * (size + out),
        35 * 17 * size,
    ]
    assert [steps[name].held_bytes for name in VARIANTS] == [
        36 * size,
        size,
        size,
        size + 36 * (out + lse),
        size + out + 36 * lse,
        17 * size * 3,  # the stash is full: two wait for their copy
    ]
    assert steps["overlap"].moved_bytes == 35 * size and steps["ac"].moved_bytes == 0


def test_slots_are_rounded_as_in_the_pool():
    model = ModelShape("odd", 3, (LayerShape(1000, 4, 1),) * 4)
    plan = make_plan(model, Job(101, num_devices=1), machine_of(PCIE5), OffloadConfig(min_offload_mib=0.0))
    assert plan.steps["overlap"].pinned_bytes == 3 * slots_bytes(101 * 3 * 2) == 3 * 1024


def test_passes_of_accumulation_take_their_time_and_no_more_memory():
    one, four = plan_of(), plan_of(job=replace(ALONE, num_forwards=4))
    for variant in VARIANTS:
        assert four.steps[variant].step_ms == pytest.approx(4 * one.steps[variant].step_ms)
        assert four.steps[variant].pinned_bytes == one.steps[variant].pinned_bytes
        assert four.steps[variant].moved_bytes == 4 * one.steps[variant].moved_bytes


def test_pipeline_by_hand():
    """36 blocks as 9, 10, 10, 8 and one less for the head: 38 by 4 is 10, 10, 9, 9, of which the first and last lose
    one. 1F1B holds 4, 3, 2, 1 passes; one input of each stage stays. Two ranks of each stage are on a node of four."""
    job = Job(4096, num_forwards=8, pipeline_parallel=4, num_devices=8)
    plan = plan_of(job=job, machine=machine_of(PCIE5, devices_per_node=4, num_nodes=2))
    size = 32 * MIB
    assert [rank.num_layers for rank in plan.ranks] == [(9,), (10,), (9,), (8,)]
    assert [rank.passes_in_flight for rank in plan.ranks] == [4, 3, 2, 1]
    pinned = [4 * 8 * size, 3 * 9 * size, 2 * 8 * size, 7 * size]
    assert [rank.pinned_bytes for rank in plan.ranks] == pinned
    assert plan.steps["overlap"].pinned_node_bytes == 2 * pinned[0] + 2 * pinned[1]
    assert plan.block_inputs_bytes == 4 * 9 * size and not plan.in_flight_is_bound
    assert plan.steps["overlap"].held_bytes == 4 * size
    assert plan.steps["ac"].step_ms == pytest.approx((8 + 3) * 10 * 4 * plan.layers[0].forward_ms)


def test_nodes_are_filled_in_the_order_of_ranks():
    """Three nodes of four for two stages of six ranks: the middle one has two ranks of each."""
    job = Job(4096, num_forwards=4, pipeline_parallel=2, num_devices=12)
    plan = plan_of(job=job, machine=machine_of(PCIE5, devices_per_node=4, num_nodes=3))
    assert plan.steps["overlap"].pinned_node_bytes == 4 * plan.ranks[0].pinned_bytes
    way = Way(QWEN3_8B, job, machine_of(PCIE5, devices_per_node=4, num_nodes=3), OffloadConfig(), None, "overlap")
    assert [way.most_of_a_node(pair) for pair in ([1, 0], [0, 1], [1, 1])] == [4, 4, 4]
    assert way.most_of_a_node([1, 5]) == 20


def test_blocks_that_differ_are_listed_in_runs():
    full, sliding = LayerShape(10**6, 4096, 32), LayerShape(10**6, 4096, 32, window=512)
    plan = plan_of(replace(QWEN3_8B, layers=(full, full, sliding, full)))
    assert [(layer.first, layer.count) for layer in plan.layers] == [(0, 2), (2, 1), (3, 1)]
    assert plan.layers[1].attention_ms == pytest.approx(4 * 4096 * (4096 * 512 - 512**2 / 2) / 500e9)
    assert plan.layers[1].saved_bytes == 0 < plan.layers[0].saved_bytes
    ac = plan.steps["ac"].step_ms
    spared = 3 * plan.layers[0].attention_ms
    assert plan.steps["overlap_selective_device"].compute_ms == pytest.approx(ac - spared)


def test_the_row_that_was_asked_about_has_its_own_settings():
    assert planned_variant(OffloadConfig(mode="none"), None) == "ac"
    assert planned_variant(OffloadConfig(schedule="sync"), None) == "sync"
    assert planned_variant(OffloadConfig(), SelectiveConfig()) == "overlap_selective_device"
    saves_only = plan_of(mode="none", selective=SelectiveConfig(offload=True))
    assert saves_only.variant == "overlap_selective_host"
    assert saves_only.steps[saves_only.variant].pinned_bytes == 35 * 32 * MIB  # attention's outputs, no inputs
    assert saves_only.steps["overlap"].pinned_bytes == 35 * 32 * MIB  # and what offload would move
    in_turn = plan_of(schedule="sync", selective=SelectiveConfig(offload=True)).steps
    assert in_turn["overlap_selective_host"].step_ms > in_turn["overlap"].step_ms


def test_tensors_below_the_minimum_stay():
    plan = plan_of(min_offload_mib=33.0)
    assert plan.steps["overlap"].pinned_bytes == plan.steps["overlap"].moved_bytes == 0
    assert plan.steps["overlap"].held_bytes == plan.steps["ac"].held_bytes
    assert not plan.verdict.pays and "32 MiB, below activation_offload.min_offload_mib = 33" in plan.verdict.text[0]


def test_link_limit_moves_what_hides():
    """Copies of two forwards: half of the blocks."""
    forward_ms = plan_of().layers[0].forward_ms
    slow = machine_of(32 * MIB / (2 * forward_ms * 1e6))
    steps = plan_of(machine=slow, limit="link").steps
    assert steps["overlap"].moved_bytes == 18 * 32 * MIB
    assert steps["overlap"].step_ms == pytest.approx(steps["ac"].step_ms)
    assert steps["overlap"].pinned_bytes == 35 * 32 * MIB  # the first steps move all


# What is held, and when


def test_the_peak_by_hand():
    """4 blocks, inputs of 32 MiB. With AC: all four when the last one's recompute stands, 17 inputs. With offload the
    last one's input and the one reloaded ahead. Gradients of 10 M parameters: none yet, three quarters in block 0."""
    model = replace(QWEN3_8B, layers=QWEN3_8B.layers[:4])
    plan = plan_of(model)
    size = 32 * MIB
    assert plan.steps["ac"].peak.parts == {
        "block inputs and saved outputs": 4 * size,
        "one block's recompute": 17 * size,
    }
    assert plan.steps["ac"].peak.name == "backward of block 3"
    assert plan.steps["overlap"].peak.num_bytes == (2 + 17) * size
    assert plan.verdict.peak_drop_bytes == 2 * size
    assert plan.verdict.freed_bytes == 3 * size
    assert plan_of(model, schedule="sync").steps["sync"].peak.num_bytes == (1 + 17) * size
    assert plan_of(model, prefetch_lookahead=3).steps["overlap"].peak.num_bytes == (4 + 17) * size


def test_gradients_take_the_place_of_inputs():
    """Qwen3-1.7B at 32K tokens frees 3.375 of 3.5 GiB after forward. With gradients of 2.475 GiB, nearly all of
    which stand at the end of backward, the peak falls by much less."""
    num_params = int(2.475 * GIB) // 4
    plan = plan_of(replace(QWEN3_1_7B, num_params=num_params), Job(32768, num_devices=1))
    size, gradients, states = GIB // 8, 4 * num_params, 12 * num_params
    assert plan.verdict.freed_bytes == 27 * size
    ac, overlap = plan.steps["ac"].peak, plan.steps["overlap"].peak
    assert ac.num_bytes == 28 * size + 17 * size + states
    assert overlap.name == "backward of block 1"  # its own input and that of block 0, which is reloaded ahead
    assert overlap.num_bytes == 2 * size + 17 * size + int(gradients * 26 / 28) + states
    assert plan.verdict.peak_drop_bytes == ac.num_bytes - overlap.num_bytes == pytest.approx(0.952 * GIB, rel=1e-3)
    assert "frees 3.375 GiB after forward; the peak falls by 0.9518 GiB" in " ".join(plan.verdict.text)
    later = plan_of(replace(QWEN3_1_7B, num_params=num_params), Job(32768, num_devices=1, num_forwards=2))
    assert later.steps["ac"].peak.parts["gradients"] == gradients


def test_logits_count_where_the_head_is():
    model = replace(QWEN3_8B, vocab_size=151936)
    peak = plan_of(model, replace(ALONE, tensor_parallel=1)).steps["overlap"].peak
    assert peak.name == "end of forward" and peak.parts["logits"] == 4096 * 151936 * 10
    divided = plan_of(model, Job(4096, tensor_parallel=2, num_devices=2), machine_of(PCIE5, devices_per_node=2))
    assert divided.steps["overlap"].peak.parts["logits"] == 4096 * 151936 * 5


def test_states_are_sharded():
    model = replace(QWEN3_8B, num_params=8 * 10**9)
    parts = {}
    for replicate in (1, 2):
        job = Job(4096, num_devices=8, data_parallel_replicate=replicate)
        parts[replicate] = plan_of(model, job, machine_of(PCIE5, devices_per_node=8)).steps["overlap"].peak.parts
    assert parts[1]["parameters and optimizer states"] == 12 * 10**9
    assert parts[2]["parameters and optimizer states"] == 24 * 10**9
    assert parts[1]["unsharded parameters"] == 2 * 8 * 10**9 * 2 // 36
    assert "unsharded parameters" not in plan_of(model).steps["overlap"].peak.parts  # one device: nothing is sharded


def test_passes_in_flight_hold_their_inputs():
    """Rank 0 of 2 has two passes alive: with AC both have all inputs, with offload the newest of each. 38 by 2 is 19,
    one less on each for embedding and head."""
    job = Job(4096, num_forwards=4, pipeline_parallel=2, num_devices=2)
    steps = plan_of(job=job, machine=machine_of(PCIE5, devices_per_node=2)).steps
    assert steps["ac"].held_bytes == 2 * 18 * 32 * MIB
    assert steps["overlap"].held_bytes == 2 * 32 * MIB


# What fits


def test_the_longest_sequence_by_hand():
    """35 inputs of ``seq x 4096 x 2 / 8`` bytes on each of 8 ranks, of 0.8 x 100 GiB: 299593.1 tokens."""
    job = Job(131072, context_parallel=8, num_devices=8)
    plan = plan_of(job=job, machine=machine_of(PCIE5, devices_per_node=8, host_memory_gib=100.0))
    most = 80 * GIB // (35 * 4096 * 2)
    assert plan.longest.multiple == 16
    assert plan.longest.host == most // 16 * 16
    assert (plan.longest.device, plan.longest.device_ac) == (None, None)
    assert plan.host_budget_bytes == 80 * GIB and plan.verdict.fits_host
    for seq_len, fits in ((plan.longest.host, True), (plan.longest.host + 16, False)):
        at = make_plan(QWEN3_8B, replace(job, seq_len=seq_len), plan.machine, OffloadConfig())
        assert (at.steps["overlap"].pinned_node_bytes <= plan.host_budget_bytes) is fits


def test_the_longest_sequence_of_the_device():
    """With AC 36 inputs and a recompute of 17; with offload 2 and 17."""
    plan = plan_of(machine=machine_of(PCIE5, device_memory_gib=53.0))
    assert plan.longest.device_ac == 53 * GIB // ((36 + 17) * 8192) // 2 * 2
    assert plan.longest.device == 53 * GIB // ((2 + 17) * 8192) // 2 * 2
    assert plan.verdict.fits_device and plan.verdict.fits_device_ac


def test_no_sequence_fits_a_full_device():
    model = replace(QWEN3_8B, num_params=8 * 10**9)
    plan = plan_of(model, machine=machine_of(PCIE5, device_memory_gib=53.0))
    assert (plan.longest.device, plan.longest.device_ac) == (0, 0)
    assert plan.verdict.fits_device is False


def test_a_budget_of_the_user_bounds_each_rank():
    plan = plan_of(machine=machine_of(PCIE5, host_memory_gib=100.0), pinned_budget_gib=1.0)
    assert plan.host_budget_bytes == GIB


# The verdict


def values(plan):
    return {setting.key: setting.value for setting in plan.verdict.settings}


def test_the_defaults_are_advised_where_copies_hide():
    plan = plan_of(job=Job(131072, num_devices=1), machine=machine_of(PCIE5, host_memory_gib=60.0), keep_last=1)
    assert plan.verdict.pays and plan.verdict.slowdown_percent == 0
    assert list(values(plan).values()) == ["block_inputs", 1, 1] and len(plan.verdict.settings) == 3


def test_a_deeper_prefetch_is_advised_where_it_helps():
    """Sliding and full attention in turn: a copy back outlasts a sliding block's backward, and two hide behind two."""
    full, sliding = LayerShape(6_000_000, 1, 1), LayerShape(1_000_000, 1, 1)
    model = ModelShape("mixed", 1024, (full, sliding) * 12)
    forward_ms = 2 * 16384 * 3.5e6 / 500e9
    machine = Machine(1e5, 16384 * 2048 / (1.9 * forward_ms * 1e6), devices_per_node=1)
    plan = plan_of(model, Job(16384, num_devices=1), machine)
    assert values(plan)["activation_offload.prefetch_lookahead"] > 1
    advised = plan_of(
        *(model, Job(16384, num_devices=1), machine),
        prefetch_lookahead=values(plan)["activation_offload.prefetch_lookahead"],
    )
    assert advised.steps["overlap"].vs_ac_percent == pytest.approx(plan.verdict.slowdown_percent)
    assert advised.steps["overlap"].simulated_percent < 2 < plan.steps["overlap"].simulated_percent


def test_link_limit_is_advised_where_the_link_is_slow():
    forward_ms = plan_of().layers[0].forward_ms
    plan = plan_of(machine=machine_of(32 * MIB / (2 * forward_ms * 1e6)))
    assert plan.steps["overlap"].simulated_percent > 10
    assert values(plan)["activation_offload.limit"] == "link" and plan.verdict.slowdown_percent <= 1


def test_blocks_stay_for_which_the_host_has_no_room():
    """0.84 GiB hold 26 inputs of 32 MiB."""
    plan = plan_of(machine=machine_of(PCIE5, host_memory_gib=1.05))
    assert values(plan)["activation_offload.keep_last"] == 36 - 26
    assert plan.verdict.fits_host and plan.steps["overlap"].pinned_node_bytes > plan.host_budget_bytes


def test_saves_are_advised_where_they_spare_time_and_have_room():
    job = Job(131072, num_devices=1)
    roomy = plan_of(job=job, machine=machine_of(PCIE5, host_memory_gib=200.0))
    assert values(roomy)["selective_checkpoint.enable"] and values(roomy)["selective_checkpoint.offload"]
    selective = plan_of(job=job, selective=SelectiveConfig(offload=True)).steps["overlap_selective_host"]
    assert roomy.verdict.slowdown_percent == 0 > selective.vs_ac_percent
    assert f"{-selective.vs_ac_percent:.1f} % less" in " ".join(roomy.verdict.text)
    tight = plan_of(job=job, machine=machine_of(PCIE5, host_memory_gib=50.0))
    assert "selective_checkpoint.enable" not in values(tight)
    chosen = plan_of(job=job, machine=roomy.machine, selective=SelectiveConfig())
    assert "selective_checkpoint.offload" not in values(chosen)


def test_offload_is_not_advised_where_the_peak_would_not_fall():
    plan = plan_of(replace(QWEN3_1_7B, num_params=1_720_000_000), Job(32768, num_devices=1))
    assert not plan.verdict.pays and values(plan) == {"activation_offload.mode": "none"}
    assert plan.verdict.text[0].startswith("Do not offload: the peak would not fall: at it stands")
    assert "gradients" in plan.verdict.text[0]


def test_offload_is_not_advised_where_it_slows_more_than_it_saves():
    """Copies back of 20 forwards; the deepest prefetch that is tried hides 12. So no block moves for nothing, and each
    of 7 costs more than twice the time of a block, for a peak that falls by less than a third."""
    forward_ms = plan_of().layers[0].forward_ms
    model = replace(QWEN3_8B, layers=QWEN3_8B.layers[:8])
    plan = plan_of(model, machine=Machine(1e4, 32 * MIB / (20 * forward_ms * 1e6), devices_per_node=1))
    assert not plan.verdict.pays and values(plan) == {"activation_offload.mode": "none"}
    assert "the link is too slow" in plan.verdict.text[0]


def test_more_devices_than_the_nodes_have_are_refused():
    with pytest.raises(ValueError, match="num_devices = 16 is more than 1 nodes of 8 devices have: give at least 2"):
        make_plan(QWEN3_8B, Job(4096, num_devices=16), Machine(50.0, 50.0), OffloadConfig())


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Job(0), "job seq_len = 0 is not allowed"),
        (lambda: Job(8, batch=1.5), "job batch = 1.5"),
        (lambda: Job(8, schedule="zb"), "schedule = 'zb' is not known: set it to one of"),
        (lambda: Job(8, context_parallel=3), r"num_devices = 8 is no multiple of 3.*give a multiple"),
        (lambda: Machine(0, 1), "machine d2h_gb_per_s = 0 is not allowed"),
        (lambda: Machine(1, 1, host_memory_gib=-1), "host_memory_gib = -1"),
        (lambda: Machine(1, 1, devices_per_link=9), "devices_per_link = 9 is more than devices_per_node = 8"),
        (lambda: LayerShape(1, 10, 3), "num_heads = 3 does not divide"),
        (lambda: LayerShape(0, 8, 1), "layer params = 0"),
        (lambda: LayerShape(1, 8, 1, window=0), "layer window = 0"),
        (lambda: ModelShape("m", 8, ()), "model m has no layers"),
    ],
)
def test_bad_numbers_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# JSON and the picture


def test_json_is_plain_and_complete():
    plan = plan_of(machine=machine_of(PCIE5, host_memory_gib=100.0), selective=SelectiveConfig(offload=True))
    document = plan.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert list(document["steps"]) == list(VARIANTS)
    step = document["steps"]["overlap"]
    assert step["pinned_gib"] == step["pinned_bytes"] / GIB
    assert step["peak"]["num_gib"] == sum(step["peak"]["parts_gib"].values())
    assert step["peak"]["num_bytes"] == plan.steps["overlap"].peak.num_bytes
    assert document["memory"]["pinned_bytes"] == plan.steps[plan.variant].pinned_bytes
    assert document["memory"]["ranks"][0]["pinned_bytes"] == document["memory"]["pinned_bytes"]
    assert document["model"] == {
        "name": "qwen3_8b",
        "dim": 4096,
        "num_layers": 36,
        "vocab_size": None,
        "num_params": None,
    }
    assert document["offload"] == asdict(OffloadConfig()) and document["job"]["seq_len"] == 4096


def test_timelines_by_hand():
    """Four blocks, the last of which stays."""
    plan = plan_of()
    forward, copy = plan.layers[0].forward_ms, plan.layers[0].d2h_ms
    overlap = {interval.name: interval for interval in plan.timelines["overlap"]}
    sync = {interval.name: interval for interval in plan.timelines["sync"]}
    assert set(overlap) == {f"{what} {k}" for k in range(4) for what in ("forward", "recompute", "backward")} | {
        f"{what} {k}" for k in range(3) for what in ("offload", "reload")
    }
    assert (overlap["offload 1"].start_ms, overlap["offload 1"].end_ms) == pytest.approx((forward, forward + copy))
    assert overlap["reload 2"].start_ms == pytest.approx(4 * forward) == overlap["recompute 3"].start_ms
    assert overlap["backward 0"].end_ms == pytest.approx(16 * forward)
    assert sync["forward 1"].start_ms == pytest.approx(forward + 2 * copy) and sync["forward 1"].lane == "compute"
    assert sync["backward 0"].end_ms == pytest.approx(16 * forward + 6 * copy)
    assert sync["reload 0"].end_ms == pytest.approx(sync["recompute 0"].start_ms)


# What must hold whatever is asked


@st.composite
def questions(draw):
    sizes = st.integers(10**4, 10**8)
    shapes = st.builds(LayerShape, params=sizes, attention_width=st.just(256), num_heads=st.just(4))
    windows = st.builds(
        LayerShape, params=sizes, attention_width=st.just(256), num_heads=st.just(4), window=st.just(64)
    )
    layers = draw(st.lists(shapes | windows, min_size=1, max_size=10))
    cp, tp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 4)]))
    job = Job(
        draw(st.integers(1, 4000)) * 16,
        batch=draw(st.integers(1, 3)),
        num_forwards=draw(st.integers(1, 4)),
        context_parallel=cp,
        tensor_parallel=tp,
    )
    rates = st.floats(0.1, 500, allow_nan=False)
    machine = Machine(draw(rates), draw(rates), draw(st.integers(1, 7)), tflops=draw(st.floats(10, 1000)))
    offload = OffloadConfig(
        keep_last=draw(st.integers(0, 3)),
        prefetch_lookahead=draw(st.integers(0, 3)),
        max_inflight_offloads=draw(st.integers(0, 4)),
        min_offload_mib=0.0,
    )
    return ModelShape("any", 256, tuple(layers)), job, machine, offload


def costs_of(question):
    return {variant: Way(*question, None, variant).cost() for variant in VARIANTS}


@settings(deadline=None, max_examples=150, derandomize=True)
@given(questions(), st.floats(1.001, 3))
def test_more_to_do_never_takes_less(question, factor):
    """Longer sequence, slower link in either direction, more devices on it."""
    model, job, machine, offload = question
    base = costs_of(question)
    worse = {
        "seq_len": (model, replace(job, seq_len=job.seq_len + 16), machine, offload),
        "d2h": (model, job, replace(machine, d2h_gb_per_s=machine.d2h_gb_per_s / factor), offload),
        "h2d": (model, job, replace(machine, h2d_gb_per_s=machine.h2d_gb_per_s / factor), offload),
        "shared": (model, job, replace(machine, devices_per_link=machine.devices_per_link + 1), offload),
    }
    for what, other in worse.items():
        for variant, cost in costs_of(other).items():
            before = base[variant]
            assert cost.step_bound_ms >= before.step_bound_ms * (1 - 1e-9), (what, variant)
            assert cost.pinned_bytes >= before.pinned_bytes, (what, variant)
            assert cost.pinned_node_bytes >= before.pinned_node_bytes, (what, variant)
            for name in ("closed_form_limited_percent", "closed_form_unlimited_percent"):
                assert what == "seq_len" or getattr(cost, name) >= getattr(before, name) - 1e-9, (what, variant)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(questions())
def test_slowdowns_are_never_negative_and_overlap_never_slower_than_sync(question):
    costs = costs_of(question)
    for variant, cost in costs.items():
        assert cost.step_bound_ms >= cost.step_ms >= cost.compute_ms > 0, variant
        assert cost.simulated_percent >= 0 <= cost.closed_form_unlimited_percent <= cost.closed_form_limited_percent
    assert costs["overlap"].step_bound_ms <= costs["sync"].step_ms * (1 + 1e-9)
    assert costs["overlap"].closed_form_limited_percent <= costs["sync"].closed_form_limited_percent + 1e-9
    assert costs["overlap"].simulated_percent <= costs["sync"].simulated_percent + 1e-9


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.integers(1, 40), st.floats(0.05, 12), st.floats(1, 3), st.floats(1.001, 2))
def test_blocks_that_are_alike_take_longer_on_a_slower_link(num_blocks, copy, back_is_faster_by, factor):
    """The engine's own rules, with the default settings and a way back that is no slower than the way out."""
    before, after = (simulate_step(num_blocks, 1.0, d2h, d2h / back_is_faster_by) for d2h in (copy, copy * factor))
    assert after.step >= before.step * (1 - 1e-9)
