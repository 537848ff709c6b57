"""Mode "all" in a plan: what it counts by hand, what it advises, and the simulation against the engine."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from virtual_time import VirtualRuntime

from titan_offload import OffloadConfig, apply_offload
from titan_offload.cli import plan as plan_command
from titan_offload.config import GIB
from titan_offload.planner import make_plan
from titan_offload.planner.plan_plot import title
from titan_offload.planner.plan_report import Context, console, render
from titan_offload.planner.shapes import Job, LayerShape, Machine, ModelShape
from titan_offload.planner.simulation import simulate_step

pytestmark = pytest.mark.timeout(120)

TOKENS = 2**15
KEPT, MOVED = 16, (64, 512, 512, 4096)  # bytes per token: half a MiB stays
LAYER = LayerShape(10**8, 4096, 32, activations=(KEPT, *MOVED))
MODEL = ModelShape("four blocks", 1024, (LAYER,) * 4)
JOB = Job(TOKENS, num_devices=8, is_checkpointed=False)
ALL = OffloadConfig(mode="all")
BLOCK_BYTES = sum(MOVED) * TOKENS
STEM_BYTES = 8 * TOKENS  # below the minimum of 1 MiB


def machine(copy_over_forward, **fields):
    """A link on which the copies of a block take this many forwards."""
    rate = BLOCK_BYTES / (copy_over_forward * forward_ms()) / 1e6
    return Machine(rate, rate, **fields)


def forward_ms():
    return make_plan(MODEL, JOB, Machine(1.0, 1.0), ALL).layers[0].forward_ms


def plan_all(copy_over_forward=0.5, job=JOB, model=MODEL, fields=None, **config):
    return make_plan(model, job, machine(copy_over_forward, **(fields or {})), replace(ALL, **config))


# Figures


def test_blocks_move_what_is_not_too_small():
    plan = plan_all()
    assert plan.variant == "all_without_ac"
    step, (layer,) = plan.steps["all_without_ac"], plan.layers
    assert step.pinned_bytes == step.moved_bytes == 3 * BLOCK_BYTES  # the last one stays
    assert step.pinned_node_bytes == 8 * step.pinned_bytes
    assert (layer.saved_bytes, layer.input_bytes) == (BLOCK_BYTES + KEPT * TOKENS, 2048 * TOKENS)
    assert layer.d2h_ms == pytest.approx(step.d2h_ms) == pytest.approx(0.5 * layer.forward_ms)
    # The last block, what is too small of all; the copy of the last but one has ended when forward does.
    assert step.held_bytes == BLOCK_BYTES + 4 * KEPT * TOKENS
    assert step.peak.parts["activations"] >= step.held_bytes


def test_nothing_is_recomputed():
    plan = plan_all()
    assert plan.steps["all_without_ac"].step_ms == pytest.approx(4 * 3 * plan.layers[0].forward_ms)
    assert plan.steps["ac"].step_ms == pytest.approx(4 * 4 * plan.layers[0].forward_ms)
    assert plan.steps["all_without_ac"].vs_ac_percent == pytest.approx(-25)
    assert "one block's recompute" not in plan.steps["all_without_ac"].peak.parts
    for line in plan.timelines.values():
        assert not any(interval.name.startswith("recompute") for interval in line)


def test_what_is_saved_before_the_blocks_moves_too():
    """The tokens, as int64; only with mode "all", and only if they are large enough."""
    small = {"min_offload_mib": 0.25}
    with_kept = 3 * (BLOCK_BYTES + KEPT * TOKENS)
    assert plan_all(**small).steps["all_without_ac"].pinned_bytes == with_kept + STEM_BYTES
    assert plan_all(**small).steps["all_without_ac"].moved_bytes == with_kept + STEM_BYTES
    checkpointed = replace(JOB, is_checkpointed=True)
    inputs = 3 * 2048 * TOKENS
    for mode, stem in (("all", STEM_BYTES), ("block_inputs", 0)):
        plan = plan_all(job=checkpointed, mode=mode, **small)
        assert (plan.variant, plan.steps["overlap"].pinned_bytes) == ("overlap", inputs + stem)
        assert plan.steps["overlap"].moved_bytes == inputs + stem
    assert plan_all(job=checkpointed).steps["overlap"].pinned_bytes == inputs


@pytest.mark.parametrize(("num_forwards", "views"), [(2, 2 * 2), (4, 2)])
def test_microbatches_of_a_pipeline_move_their_tokens_with_the_batch_if_they_are_half_of_it(num_forwards, views):
    """Two passes are alive on the first rank of two, one on the second, which has no tokens."""
    job = replace(JOB, pipeline_parallel=2, num_forwards=num_forwards)
    first, second = plan_all(job=job, min_offload_mib=0.25).ranks
    block = BLOCK_BYTES + KEPT * TOKENS
    assert first.pinned_bytes == 2 * block + views * STEM_BYTES
    assert second.pinned_bytes == block


def test_a_job_with_ac_is_compared_with_what_the_literature_counts():
    """34 bytes per element, whatever is known of its blocks."""
    plan = plan_all(job=replace(JOB, is_checkpointed=True), mode="block_inputs")
    assert plan.steps["all_without_ac"].moved_bytes == 3 * 17 * 2048 * TOKENS
    assert plan.layers[0].saved_bytes != BLOCK_BYTES + KEPT * TOKENS


def test_a_window_of_one_region_is_on_the_device_in_backward():
    """What is reloaded for the next block takes the place of what this one is done with; two ahead are two."""
    by_lookahead = {}
    for lookahead in (0, 1, 2, 3):
        model = replace(MODEL, layers=(LAYER,) * 12)
        step = plan_all(0.1, model=model, prefetch_lookahead=lookahead, keep_last=0).steps["all_without_ac"]
        by_lookahead[lookahead] = step.peak.parts["activations"] - 12 * KEPT * TOKENS
    assert by_lookahead == {0: BLOCK_BYTES, 1: BLOCK_BYTES, 2: 2 * BLOCK_BYTES, 3: 3 * BLOCK_BYTES}


# Advice


def test_copies_that_hide_are_advised():
    verdict = plan_all(fields={"host_memory_gib": 64, "device_memory_gib": 80}).verdict
    assert (verdict.pays, verdict.fits_host, verdict.fits_device) == (True, True, True)
    assert {setting.key: setting.value for setting in verdict.settings} == {
        "activation_offload.mode": "all",
        "activation_offload.keep_last": 1,
        "activation_offload.prefetch_lookahead": 1,
    }
    assert verdict.freed_bytes == verdict.peak_drop_bytes == 3 * BLOCK_BYTES  # against no AC, and no offload
    assert "25.0 % less than with activation checkpointing alone" in " ".join(verdict.text)


def test_where_copies_take_longer_than_a_recompute_that_is_advised():
    verdict = plan_all(6.0, model=replace(MODEL, layers=(LAYER,) * 24)).verdict
    assert not verdict.pays
    assert [(setting.key, setting.value) for setting in verdict.settings] == [
        ("activation_checkpoint.mode", "full"),
        ("activation_offload.mode", "block_inputs"),
    ]
    assert verdict.text[0].startswith("Do not move everything: to recompute is faster than to copy everything over")


def test_a_host_that_is_too_small_keeps_blocks_on_the_device():
    """A node's eight ranks have room for one block each and a half."""
    host_gib = 1.5 * 8 * BLOCK_BYTES / GIB / ALL.host_memory_fraction
    verdict = plan_all(fields={"host_memory_gib": host_gib}).verdict
    assert {setting.key: setting.value for setting in verdict.settings}["activation_offload.keep_last"] == 3


def test_a_minimum_above_all_tensors_is_named():
    verdict = plan_all(min_offload_mib=2.0**10).verdict
    assert not verdict.pays
    assert "all that blocks save is below activation_offload.min_offload_mib = 1024" in verdict.text[0]


@pytest.mark.parametrize("is_checkpointed", [True, False])
@pytest.mark.parametrize("copy_over_forward", [0.1, 3.0, 50.0])
def test_limit_link_is_never_advised(is_checkpointed, copy_over_forward):
    """It does not go with mode "all"."""
    plan = plan_all(copy_over_forward, job=replace(JOB, is_checkpointed=is_checkpointed))
    assert all(setting.value != "link" for setting in plan.verdict.settings)


def test_text_and_picture_name_what_moves():
    plan = plan_all()
    with (screen := console(False)).capture() as capture:
        screen.print(render(plan, Context("run.toml", "a link", (), ())))
    assert "activations" in capture.get() and "block inputs and saved outputs (" not in capture.get()
    assert "25.00 % less" in title(plan)[1] and "synchronous" not in title(plan)[1]
    slow = plan_all(6.0, model=replace(MODEL, layers=(LAYER,) * 24))
    with (screen := console(False)).capture() as capture:
        screen.print(render(slow, Context("run.toml", "a link", (), ())))
    assert "to recompute is faster here" in capture.get()


# The command


TOML = """
[model]
name = "{model}"
flavor = "{flavor}"
[training]
seq_len = 8192
local_batch_size = 1
[activation_checkpoint]
mode = "{ac}"
[activation_offload]
mode = "{mode}"
"""


@pytest.fixture
def plan(tmp_path, capsys):
    def plan(model="llama3", flavor="8B", ac="none", mode="all", more=""):
        path = tmp_path / "run.toml"
        path.write_text(TOML.format(model=model, flavor=flavor, ac=ac, mode=mode) + more)
        plan_command(path, nodes=1, gpus_per_node=8, as_json=True)
        return json.loads(capsys.readouterr().out)

    return plan


def test_a_config_without_ac(plan):
    """Llama 3 8B: per token 2 bytes each of 4 hidden states, queries, output, keys and values, 4 times w1's output."""
    document = plan()
    per_token = [2 * 4096] * 6 + [2 * 1024] * 2 + [2 * 14336] * 4 + [4 * 32]  # two numbers per token are too small
    assert document["variant"] == "all_without_ac"
    assert document["memory"]["pinned_bytes"] == 31 * 8192 * sum(per_token)
    assert not any("activation_checkpoint" in line for line in document["missing"])
    assert not any("estimate" in note for note in document["notes"])
    assert any("RMSNorm" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model": "deepseek_v3", "flavor": "16B"}, "router"),
        ({"model": "qwen3", "flavor": "30B-A3B"}, "router"),
        ({"flavor": "debugmodel_flex_attn"}, "attention of kind 'flex'"),
        ({"more": "[compile]\nenable = true\n"}, "the compiler decides"),
        ({"more": "[parallelism]\ncontext_parallel_degree = 2\n"}, "context parallel"),
        ({"model": "qwen3", "flavor": "8B", "more": "[parallelism]\ntensor_parallel_degree = 8\n"}, None),
        (
            {"more": "[parallelism]\ndata_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n"},
            "autocast",
        ),
    ],
)
def test_where_it_is_an_estimate_the_plan_says_so(plan, config, reason):
    notes = [note for note in plan(**config)["notes"] if note.startswith("what blocks save is an estimate: ")]
    assert len(notes) == (reason is not None)
    assert all(reason in note for note in notes)


def test_what_does_not_go_together_is_refused(plan):
    with pytest.raises(ValueError, match=r'set activation_checkpoint.mode to "full", or .*mode to "all" or "none"'):
        plan(mode="block_inputs")
    with pytest.raises(ValueError, match=r"cannot be planned .* the compiler decides what is saved"):
        plan(ac="memory_budget")


# The simulation against the engine


class Op(torch.autograd.Function):
    """``x * 2``, which saves ``x``; backward takes twice as long."""

    @staticmethod
    def forward(ctx, x, stream, ms):
        ctx.save_for_backward(x)
        ctx.stream, ctx.ms = stream, ms
        stream.now += ms
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        ctx.stream.now += 2 * ctx.ms
        return grad * 2, None, None


class Ops(nn.Module):
    def __init__(self, stream, num, ms):
        super().__init__()
        self.stream, self.num, self.ms = stream, num, ms

    def forward(self, x):
        for _ in range(self.num):
            x = Op.apply(x, self.stream, self.ms)
        return x


FORWARD, NUM_OPS = 1600, 16


def engine_step(num_blocks, d2h, h2d, **config):
    """A real engine on virtual time: each block saves 16 tensors, one after the other. The third step."""
    runtime = VirtualRuntime(d2h * FORWARD / NUM_OPS, h2d * FORWARD / NUM_OPS, host_runs_ahead=True)
    model = nn.Sequential(*[Ops(runtime.compute, NUM_OPS, FORWARD / NUM_OPS) for _ in range(num_blocks)])
    settings = OffloadConfig(mode="all", min_offload_mib=0.0, **config)
    offloader = apply_offload(model, settings, blocks="*", runtime=runtime, budget_bytes=2**40)
    for _ in range(3):
        start = runtime.compute.now
        model(torch.ones(4, requires_grad=True)).sum().backward()
        offloader.step_end()
        duration = runtime.compute.now - start
        runtime.compute.now = max(stream.now for stream in (runtime.compute, runtime.d2h, runtime.h2d))
    return duration


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("stash", [1, 2, 4])
@pytest.mark.parametrize(("d2h", "h2d"), [(0.5, 0.5), (1.0, 1.5), (1.3, 2.5), (2.5, 1.5), (2.5, 2.5)])
def test_a_block_is_fine_enough_a_grain(d2h, h2d, stash, lookahead):
    """The simulation knows blocks, the engine tensors: a step of 24 blocks differs by less than a block or so."""
    expected = engine_step(24, d2h, h2d, prefetch_lookahead=lookahead, max_inflight_offloads=stash)
    simulated = simulate_step(
        *(24, FORWARD, d2h * FORWARD, h2d * FORWARD),
        backward=2 * FORWARD,
        prefetch_lookahead=lookahead,
        max_inflight_offloads=stash,
        host_runs_ahead=True,
    )
    assert simulated.step == pytest.approx(expected, rel=0.05)
