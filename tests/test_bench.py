"""The benchmarks run and tell what they promise; the simulated step is what the engine does, event by event."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from titan_offload import OffloadConfig, Runtime, apply_offload

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
bench_hooks = importlib.import_module("bench_hooks")
bench_overlap = importlib.import_module("bench_overlap")
bench_selective = importlib.import_module("bench_selective")

OF_STEADY_STATE = 1000  # blocks: what is different at both ends of forward and backward no longer counts


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# The scripts


def test_bench_overlap_prints_a_row_per_variant(capsys):
    arguments = ["--part", "paced", "--blocks", "3", "--rounds", "1", "--forward-ms", "2", "--ratios", "0.5", "4"]
    assert bench_overlap.main([*arguments, "--keep-last", "0", "--lookahead", "2", "--max-inflight", "1"]) == 0
    document = last_line(capsys)
    assert document["benchmark"] == "overlap" and document["device"] == "cpu (HostRuntime)"
    assert document["torch"] == torch.__version__ and "commit" in document
    assert document["gradients"] == "bitwise equal"
    parameters = {"blocks": 3, "rounds": 1, "keep_last": 0, "lookahead": 2, "max_inflight": 1, "ratios": [0.5, 4.0]}
    assert parameters.items() <= document["parameters"].items()
    schedules = [(row["schedule"], row.get("copy_over_forward")) for row in document["rows"]]
    assert schedules == [(None, None), ("sync", 0.5), ("overlap", 0.5), ("sync", 4.0), ("overlap", 4.0)]
    for row in document["rows"]:
        assert row["step_ms"] > 2 * 4 * 3  # sleeps are never shorter than asked for
        assert row["schedule"] is None or {"slowdown_percent", "closed_form_percent", "num_reloads"} <= row.keys()
        assert row["schedule"] != "overlap" or "simulated_percent" in row


def test_bench_overlap_fails_where_a_gradient_differs(capsys, monkeypatch):
    equal = iter([True, True, False])
    monkeypatch.setattr(bench_overlap.torch, "equal", lambda a, b: next(equal, True))
    arguments = ["--part", "paced", "--blocks", "2", "--rounds", "1", "--forward-ms", "1", "--ratios", "1"]
    assert bench_overlap.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "gradients differ" in captured.err


@pytest.mark.parametrize(
    "bad",
    [
        ["--blocks", "1"],
        ["--keep-last", "8"],
        ["--forward-ms", "0"],
        ["--ratios", "0"],
        ["--max-inflight", "-1"],
        ["--part", "none"],
        ["--tokens", "0"],
        ["--attention-blocks", "1"],
        ["--attention-rounds", "0"],
    ],
)
def test_bench_overlap_refuses_bad_input(bad):
    with pytest.raises(SystemExit, match="2"):
        bench_overlap.main(bad)


def test_bench_overlap_prints_both_parts_as_one_document(capsys):
    paced = ["--blocks", "2", "--rounds", "1", "--forward-ms", "1", "--ratios", "1"]
    assert bench_overlap.main([*paced, "--tokens", "16", "--attention-blocks", "2", "--attention-rounds", "1"]) == 0
    document = last_line(capsys)
    assert (len(document["rows"]), len(document["attention_rows"])) == (3, 5)


def test_attention_rows_say_what_was_saved_and_moved(capsys):
    sizes = ["--tokens", "48", "64", "--attention-blocks", "3", "--attention-rounds", "1"]
    assert bench_overlap.main(["--part", "attention", *sizes]) == 0
    document = last_line(capsys)
    assert document["gradients"] == "bitwise equal" and "rows" not in document
    parameters = {"tokens": [48, 64], "attention_blocks": 3, "attention_dim": 128, "attention_heads": 4}
    assert parameters.items() <= document["parameters"].items() and document["parameters"]["threads"] > 0
    names = ("tokens", "variant", "saved_bytes_per_block", "to_host_bytes", "attention_forwards_in_backward")
    expected = []
    for tokens in (48, 64):
        block_input, saved = tokens * 128 * 4, tokens * 128 * 4 + tokens * 4 * 4
        expected += [
            (tokens, "AC", 0, 0, 3),
            (tokens, "+ saved on device", saved, 0, 0),
            (tokens, "+ saved on host", saved, 2 * saved, 0),
            (tokens, "+ inputs on host", saved, 2 * (saved + block_input), 0),
            (tokens, "attention alone", None, None, None),
        ]
    assert [tuple(row.get(name) for name in names) for row in document["attention_rows"]] == expected
    ac_ms = {row["tokens"]: row["step_ms"] for row in document["attention_rows"] if row["variant"] == "AC"}
    for row in document["attention_rows"]:
        assert row["recompute_spared_percent"] == pytest.approx(row["recompute_spared_ms"] / ac_ms[row["tokens"]] * 100)
        if "step_ms" in row:
            assert row["recompute_spared_ms"] == ac_ms[row["tokens"]] - row["step_ms"]
            assert row["step_ms"] > row["backward_ms"] > 0


def test_a_wrong_attention_step_is_a_problem():
    x = bench_selective.make_input(16)
    ac, _, on_host, *_ = bench_selective.make_variants(16, 2)
    expected, grads = ac.run(x), on_host.run(x)
    assert ac.find_problems(expected, expected) == on_host.find_problems(grads, expected) == []
    wrong = [*grads[:-1], grads[-1] + 1]
    assert on_host.find_problems(wrong, expected) == [
        "16 tokens, + saved on host: gradients differ from those of AC alone"
    ]
    on_host.num_attention_forwards = 1
    on_host.stats[-1] = dataclasses.replace(on_host.stats[-1], saved={"rule": (2, 5)}, offloaded_bytes=7)
    saved = 16 * 128 * 4 + 16 * 4 * 4
    assert on_host.find_problems(grads, expected) == [
        f"16 tokens, + saved on host: bytes saved 5, expected {2 * saved}",
        f"16 tokens, + saved on host: bytes moved to the host 7, expected {saved}",
        "16 tokens, + saved on host: attention forwards in backward 1, expected 0",
    ]


def test_bench_overlap_fails_where_attention_saves_other_than_it_must(capsys, monkeypatch):
    monkeypatch.setattr(bench_selective, "saved_bytes", bench_selective.input_bytes)
    sizes = ["--tokens", "16", "--attention-blocks", "2", "--attention-rounds", "1"]
    assert bench_overlap.main(["--part", "attention", *sizes]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "round 1: 16 tokens, + saved on device: bytes saved 16896, expected" in captured.err


def test_bench_hooks_prints_a_row_per_model(capsys):
    assert bench_hooks.main(["--regions", "6", "3", "--rounds", "2"]) == 0
    document = last_line(capsys)
    assert document["benchmark"] == "hooks" and document["device"] == "cpu (HostRuntime)"
    assert document["torch"] == torch.__version__ and "commit" in document
    assert document["parameters"]["regions"] == [3, 6] == [row["regions"] for row in document["rows"]]
    for row in document["rows"]:
        assert row["pack_us"] > 0 and row["unpack_us"] > 0
        assert row["pair_us"] == row["pack_us"] + row["unpack_us"]
    assert document["pair_us_ratio"] > 0 and "added_us_per_region_ratio" in document


# The simulated step, by hand. Forward takes 1 everywhere.


def test_a_copy_as_long_as_a_forward_costs_nothing():
    step = bench_overlap.simulate_step(8, 1, 1, 1)
    assert step == bench_overlap.SimulatedStep(32, d2h_wait=0, h2d_wait=0, num_reloads=7, num_misses=0, num_resident=0)


def test_copies_of_two_forwards():
    """Copies to the host end at 2, 4 ... 14. Blocks 3 to 6 wait 1 each for the stash, so forward ends at 12, with block
    6 still in the stash; its copy is done when it dies at 18. Copies back take less than a block's backward."""
    step = bench_overlap.simulate_step(8, 1, 2, 2)
    assert step == bench_overlap.SimulatedStep(36, d2h_wait=4, h2d_wait=0, num_reloads=6, num_misses=0, num_resident=1)


def test_copies_of_four_forwards():
    """Copies to the host end at 4, 8 ... 28. Block 2 waits 2, blocks 3 to 6 wait 3 each, so forward ends at 22 with
    blocks 5 and 6 in the stash. The copy back of block 4 starts when block 5 is reached, at 28; from then on each is 1
    longer than the backward that it hides behind: blocks 4 to 0 wait."""
    step = bench_overlap.simulate_step(8, 1, 4, 4)
    assert step == bench_overlap.SimulatedStep(51, d2h_wait=14, h2d_wait=5, num_reloads=5, num_misses=0, num_resident=2)


def test_copies_of_four_forwards_without_a_limit():
    """Forward ends at 8 with only blocks 0 and 1 on the host; blocks 6 to 2 are resident, and nobody waits for their
    copies. The copies back of 1 and 0 take 1 longer than the backward that they hide behind."""
    step = bench_overlap.simulate_step(8, 1, 4, 4, max_inflight_offloads=0)
    assert step == bench_overlap.SimulatedStep(34, d2h_wait=0, h2d_wait=2, num_reloads=2, num_misses=0, num_resident=5)


def test_without_prefetch_each_copy_back_is_waited_for():
    step = bench_overlap.simulate_step(4, 1, 1, 2, keep_last=0, prefetch_lookahead=0)
    assert step == bench_overlap.SimulatedStep(24, d2h_wait=0, h2d_wait=8, num_reloads=4, num_misses=4, num_resident=0)


def test_a_host_that_runs_ahead_sees_no_copy_end():
    """What is in the stash at the end of forward is found there, although it is on the host by then."""
    step = bench_overlap.simulate_step(8, 1, 1, 1, max_inflight_offloads=3, host_runs_ahead=True)
    assert (step.step, step.num_resident, step.num_reloads) == (32, 3, 4)


@pytest.mark.parametrize("copy", [0.5, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("limit", [2, 4])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_many_blocks_come_to_the_closed_form(copy, limit, lookahead):
    step = bench_overlap.simulate_step(
        OF_STEADY_STATE, 1, copy, copy, max_inflight_offloads=limit, prefetch_lookahead=lookahead
    )
    expected = bench_overlap.overlap_slowdown(copy, limit)
    assert step.step / (4 * OF_STEADY_STATE) - 1 == pytest.approx(expected, abs=0.02)


def test_closed_forms():
    assert [bench_overlap.sync_slowdown(ratio) for ratio in (0.2, 1, 4)] == [0.1, 0.5, 2]
    assert [bench_overlap.overlap_slowdown(ratio, 2) for ratio in (1, 2, 4)] == [0, 0.25, 1]
    assert [bench_overlap.overlap_slowdown(ratio, 0) for ratio in (1, 2, 4)] == [0, 0, 0.25]


# The simulated step against the engine


class VirtualStream:
    """Work in order; ``now`` is when the last that was given ends."""

    def __init__(self) -> None:
        self.now = 0
        self.copy_time = 0


class VirtualRuntime(Runtime):
    """A device whose streams only count time. Copies are done at once; an event is the time when it is done."""

    device_type = "cpu"

    def __init__(self, d2h: int, h2d: int, host_runs_ahead: bool) -> None:
        self.compute, self.d2h, self.h2d = VirtualStream(), VirtualStream(), VirtualStream()
        self.d2h.copy_time, self.h2d.copy_time = d2h, h2d
        self.host_runs_ahead = host_runs_ahead

    def compute_stream(self, device):
        return self.compute

    def d2h_stream(self, device):
        return self.d2h

    def h2d_stream(self, device):
        return self.h2d

    def record_event(self, stream):
        return stream.now

    def wait_event(self, stream, event):
        stream.now = max(stream.now, event)

    def timed_wait(self, stream, event):
        wait = max(0, event - stream.now)
        self.wait_event(stream, event)
        return lambda: wait

    def query(self, event):
        return not self.host_runs_ahead and event <= self.compute.now

    def synchronize(self, event):
        raise AssertionError("the engine never blocks the host")

    def copy(self, dst, src, stream):
        dst.copy_(src)
        stream.now += stream.copy_time

    def empty(self, num_bytes, device):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def lend(self, buffer, stream):
        raise AssertionError("there is one compute stream")

    def allocate_pinned(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free_pinned(self, buffer):
        pass


class Compute(torch.autograd.Function):
    """``x * 2`` that takes ``forward`` of the compute stream's time, and twice that in backward."""

    @staticmethod
    def forward(ctx, x, stream, forward):
        stream.now += forward
        ctx.save_for_backward(x)
        ctx.stream, ctx.forward = stream, forward
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # recomputes
        ctx.stream.now += 2 * ctx.forward
        return grad * 2, None, None


class VirtualBlock(nn.Module):
    def __init__(self, stream, forward):
        super().__init__()
        self.stream, self.forward_time = stream, forward

    def forward(self, x):
        return Compute.apply(x, self.stream, self.forward_time)


def run_engine(num_blocks, forward, runtime, **config):
    """The second step of a real engine on virtual time: how long it took, and its statistics."""
    blocks = nn.Sequential(*[checkpoint_wrapper(VirtualBlock(runtime.compute, forward)) for _ in range(num_blocks)])
    offloader = apply_offload(blocks, OffloadConfig(min_offload_mib=0.0, **config), blocks="*", runtime=runtime)
    for _ in range(2):
        start = runtime.compute.now
        blocks(torch.ones(4, requires_grad=True)).sum().backward()
        stats = offloader.step_end()
        duration = runtime.compute.now - start
        runtime.compute.now = max(stream.now for stream in (runtime.compute, runtime.d2h, runtime.h2d))  # the optimizer
    return duration, stats


@st.composite
def settings_of_a_step(draw):
    num_blocks = draw(st.integers(1, 9))
    times = [draw(st.integers(1, 3)), draw(st.integers(0, 15)), draw(st.integers(0, 15))]
    config = {
        "keep_last": draw(st.integers(0, num_blocks - 1)),
        "prefetch_lookahead": draw(st.integers(0, 3)),
        "max_inflight_offloads": draw(st.integers(0, 4)),
    }
    return num_blocks, times, config, draw(st.booleans())


@settings(deadline=None, max_examples=200, derandomize=True)
@given(settings_of_a_step())
def test_the_engine_does_what_is_simulated(case):
    num_blocks, (forward, d2h, h2d), config, host_runs_ahead = case
    step, stats = run_engine(num_blocks, forward, VirtualRuntime(d2h, h2d, host_runs_ahead), **config)
    simulated = bench_overlap.simulate_step(num_blocks, forward, d2h, h2d, **config, host_runs_ahead=host_runs_ahead)
    measured = (stats.num_reloads, stats.num_misses, stats.num_resident)
    assert (step, stats.d2h_wait_ms, stats.h2d_wait_ms, *measured) == (
        simulated.step,
        simulated.d2h_wait,
        simulated.h2d_wait,
        simulated.num_reloads,
        simulated.num_misses,
        simulated.num_resident,
    )


def test_the_engine_with_schedule_sync_takes_the_closed_form():
    runtime = VirtualRuntime(0, 0, host_runs_ahead=False)
    runtime.compute.copy_time = 3
    step, _ = run_engine(8, 2, runtime, schedule="sync", keep_last=2)
    assert step / (4 * 8 * 2) - 1 == bench_overlap.sync_slowdown(3 / 2) * 6 / 8
