"""The parts of gpu_check on a CPU: what they compare, measure and leave out, one by one."""

import contextlib
import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from gpu_parts import device_tests, memory, right, sanitizer, step_time, timeline
from gpu_parts.copy_log import CopyLog
from gpu_parts.device import CudaDevice, EmulatedDevice, find_device, start_process_group
from gpu_parts.part import TimeBox
from gpu_parts.step_time import WAYS
from gpu_parts.ways import Running, make_tokens, model_args, running, ways_of

from titan_offload import HostRuntime, OffloadStats
from titan_offload.config import GIB, MIB
from titan_offload.host_runtime import HostLink
from titan_offload.link import PortRates
from titan_offload.planner.plan import VARIANTS

DEVICE = EmulatedDevice()
PLACE = torch.device("cpu")


@pytest.fixture(scope="module")
def mesh(titan_on_cpu):
    with DEVICE.mesh() as mesh:
        yield mesh
    assert not dist.is_initialized()


def run_steps(runs: Running, num: int = 3) -> dict[str, torch.Tensor]:
    """Gradients of the last of some steps."""
    args = runs.model.model_args
    for seed in range(num):
        runs.backward(make_tokens(DEVICE, args, 48, seed))
        gradients = {name: gradient.clone() for name, gradient in runs.gradients()}
        runs.step_end()
    return gradients


# Device


def test_without_a_device_it_must_be_emulated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--emulate"):
        find_device(False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(find_device(False), CudaDevice)
    assert find_device(True).is_emulated


def test_a_process_group_that_does_not_work_gives_way_to_another(monkeypatch, capsys):
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: started.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: started.append("destroyed"))
    started: list[str] = []

    def gather(values, value):
        if started[-1] == "nccl":
            raise RuntimeError("no network interface")

    monkeypatch.setattr(dist, "all_gather_object", gather)
    CudaDevice()._init_process_group()
    assert started == ["nccl", "destroyed", "gloo"]
    assert "does not work with nccl: no network interface" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="no network interface"):
        start_process_group("nccl")


def test_emulated_peak_is_what_is_allocated_at_once():
    before = torch.ones(16 * MIB, dtype=torch.uint8)
    with DEVICE.peak() as peak:
        for _ in range(3):
            first, second = (torch.ones(4 * MIB, dtype=torch.uint8) for _ in range(2))
            del first, second
        left = torch.ones(MIB, dtype=torch.uint8)
        del before
    assert 8 * MIB <= peak.allocated < 8.1 * MIB
    with DEVICE.peak() as peak:  # above what there was before, of the one before too
        del left
        torch.ones(3 * MIB, dtype=torch.uint8)
    assert 2 * MIB <= peak.allocated < 2.1 * MIB


def test_poison_takes_exactly_what_the_allocator_has_free(monkeypatch):
    """Guards: blocks of other streams, which are not handed out next, and blocks in use."""

    def segment(stream, *blocks):
        return {"stream": stream, "blocks": [{"size": size, "state": state} for size, state in blocks]}

    segments = [
        segment(0, (512, "inactive"), (1024, "active_allocated"), (2048, "inactive")),
        segment(9, (4096, "inactive")),
        segment(0, (8192, "active_awaiting_free"), (256, "inactive")),
    ]
    made = []

    def empty(size, **kwargs):
        made.append(torch.zeros(size, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        CudaDevice().poison()
    assert [tensor.numel() for tensor in made] == [2048, 512, 256]
    assert all((tensor == 0xFF).all() for tensor in made)


# Ways


def test_every_variant_of_a_plan_is_a_way(mesh):
    assert {way.variant for way in ways_of(DEVICE).values()} - {None} == set(VARIANTS)


def test_all_ways_give_the_gradients_of_ac_and_move_what_they_should(mesh):
    args = model_args(DEVICE, "8B", 4, 48)
    moved, expected = {}, {}
    for name, way in ways_of(DEVICE).items():
        with running(DEVICE, mesh, args, way) as runs:
            gradients = run_steps(runs)
            expected = expected or gradients
            assert all(torch.equal(gradients[key], expected[key]) for key in expected), name
            moved[name] = runs.stats.offloaded_bytes
    one = 48 * args.dim * 2
    assert {name: moved[name] for name in ("ac", "save_on_cpu", "no_ac")} == {"ac": 0, "save_on_cpu": 0, "no_ac": 0}
    assert [moved[name] // one for name in ("sync", "overlap", "attention_on_device", "all_with_ac")] == [3] * 4
    assert moved["attention_on_host"] == 6 * one + 3 * 48 * args.n_heads * 4 * (48 * args.n_heads * 4 >= 0.001 * MIB)
    assert moved["all_without_ac"] > 20 * one


def test_save_on_cpu_stands_around_each_checkpoint(mesh, monkeypatch):
    """Guards: that the peer is really run."""
    entered = []

    @contextlib.contextmanager
    def save_on_cpu(pin_memory):
        entered.append(pin_memory)
        yield

    monkeypatch.setattr("gpu_parts.ways.save_on_cpu", save_on_cpu)
    args = model_args(DEVICE, "8B", 4, 48)
    with running(DEVICE, mesh, args, ways_of(DEVICE)["save_on_cpu"]) as runs:
        runs.backward(make_tokens(DEVICE, args, 48))
    assert entered == [True] * 4


def test_what_ran_leaves_nothing(mesh):
    with running(DEVICE, mesh, model_args(DEVICE, "8B", 4, 48), ways_of(DEVICE)["overlap"]) as runs:
        run_steps(runs, 1)
        pool = runs.offloader.engine.pool
        assert pool.bytes_pinned > 0
    assert pool.bytes_pinned == 0
    assert runs.model is None


# Right


def test_bits_are_compared():
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert right.same_bits(nan, nan.clone())
    assert not right.same_bits(zero, -zero)
    assert right.same_bits(torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T.contiguous())


def test_a_wrong_gradient_is_counted_and_named():
    result = right.Result("plain", "overlap")
    expected = {"a": torch.ones(2), "b": torch.ones(2)}
    right.note(result, 0, expected, expected)
    right.note(result, 1, {"a": torch.ones(2), "b": torch.zeros(2)}, expected)
    right.note(result, 2, {"a": torch.zeros(2), "b": torch.zeros(2)}, expected)
    assert (result.num_steps, result.num_gradients, result.num_different) == (3, 6, 3)
    assert result.first_different == "step 1: b"


def test_default_kernels_may_differ_by_their_noise_alone():
    """Guards: a gradient that is wrong, or no number, in the round whose bits are not compared."""
    expected = {"a": torch.full((100,), 2.0), "b": torch.ones(100)}
    noisy = {"a": expected["a"] * (1 + 0.8 * right.MAX_NOISE), "b": expected["b"]}
    result = right.Result(right.NOISY, "overlap")
    right.note(result, 0, noisy, expected)
    assert result.num_different == 0
    assert result.max_noise == pytest.approx(0.8 * right.MAX_NOISE, rel=1e-3)
    for wrong in (expected["b"] * (1 + 1.2 * right.MAX_NOISE), expected["b"] * float("nan"), 0 * expected["b"]):
        result = right.Result(right.NOISY, "overlap")
        right.note(result, 0, {"a": expected["a"], "b": wrong}, expected)
        assert (result.num_different, result.first_different) == (1, "step 0: b")


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_a_comparison_that_says_nothing_is_an_error(value):
    right.check_sense({"a": torch.ones(2), "b": torch.zeros(2)})
    with pytest.raises(AssertionError):
        right.check_sense({"a": torch.full((2,), value)})


@pytest.fixture
def wrong_copies(monkeypatch):
    """All copies of more than a few bytes are of other bytes."""
    copy, sources = HostRuntime.copy, []

    def wrong_copy(self, dst, src, stream):
        sources.append(src.roll(4))
        copy(self, dst, sources[-1], stream)

    monkeypatch.setattr(HostRuntime, "copy", wrong_copy)


@pytest.mark.parametrize("name", right.ROUNDS)
def test_a_copy_that_goes_wrong_shows_in_every_round(mesh, monkeypatch, wrong_copies, name):
    """Guards: the whole comparison. What does not offload is still right."""
    monkeypatch.setattr(right, "sequence_lengths", lambda *args: [40, 33])
    monkeypatch.setattr(right.Competitor, "start", lambda self: None)
    rows = {row["way"]: row for row in right.compare(DEVICE, mesh, name, TimeBox(60.0))}
    assert [rows[way]["num_different"] for way in (right.AGAIN, "no_ac")] == [0, 0]
    for way in set(rows) - {right.AGAIN, "no_ac"}:
        assert rows[way]["num_different"] > 0, way
        assert rows[way]["first_different"].startswith("step 0: ")


def test_a_round_that_fails_says_so_and_leaves_nothing(mesh, monkeypatch):
    monkeypatch.setattr(right, "check_sense", lambda gradients: 1 / 0)
    [row] = right.try_round(DEVICE, mesh, "strict", TimeBox(60.0))
    assert (row["round"], row["num_gradients"]) == ("strict", 0)
    assert row["problem"] == "ZeroDivisionError: division by zero"


def test_a_round_without_time_compares_nothing(mesh):
    rows = right.try_round(DEVICE, mesh, "plain", TimeBox(0.0))
    assert {row["num_steps"] for row in rows} == {0}


def test_torch_fills_nothing_where_gradients_are_compared():
    with right.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_sequence_lengths_differ_and_are_the_same_each_time():
    lengths = right.sequence_lengths(20, 512, 4096)
    assert lengths == right.sequence_lengths(20, 512, 4096)
    assert len(set(lengths)) > 15
    assert all(512 <= length <= 4096 for length in lengths)
    assert any(length % 2 for length in lengths)


def test_a_competitor_keeps_the_link_busy():
    link = HostLink(0.05)
    own, other = HostRuntime(link=link), HostRuntime(link=link)
    pinned, memory_ = own.allocate_pinned(MIB), own.empty(MIB, PLACE)

    def copy_s() -> float:
        start = time.perf_counter()
        stream = own.d2h_stream(PLACE)
        own.wait_event(stream, own.record_event(own.compute_stream(PLACE)))
        own.copy(pinned, memory_, stream)
        own.synchronize(own.record_event(stream))
        return time.perf_counter() - start

    alone = min(copy_s() for _ in range(3))
    competitor = right.Competitor(other, DEVICE)
    for _ in range(5):
        competitor.start()
    beside = copy_s()
    competitor.close()
    assert beside > 1.5 * alone
    assert min(copy_s() for _ in range(3)) < 1.3 * alone


@pytest.mark.timeout(400)
def test_the_tests_of_a_device_pass_on_a_cpu():
    row = device_tests.run_tests(DEVICE, TimeBox(300.0))
    assert (row["failures"], row["failed"], row["error"], row["problem"]) == ([], 0, 0, "")
    assert row["passed"] > 50


def test_the_tests_of_a_device_are_counted():
    output = (
        "..F\nFAILED tests/gpu/test_a.py::test_b[1] - AssertionError: 3 failed\n"
        "ERROR tests/gpu/test_a.py::test_c\n1 failed, 12 passed, 2 skipped, 1 error in 3.21s\n"
    )
    assert device_tests.count_tests(output) == {
        **{"passed": 12, "failed": 1, "skipped": 2, "error": 1},
        "failures": ["tests/gpu/test_a.py::test_b[1]", "tests/gpu/test_a.py::test_c"],
    }
    assert device_tests.count_tests("Traceback")["passed"] == 0


def test_tests_that_do_not_end_in_time_are_a_problem(monkeypatch, tmp_path):
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_slow.py").write_text(
        "import pytest, time\npytestmark = pytest.mark.gpu\ndef test_slow(): time.sleep(60)\n"
    )
    monkeypatch.setattr(device_tests, "TESTS", tmp_path / "tests" / "gpu")
    row = device_tests.run_tests(DEVICE, TimeBox(2.0))
    assert row["problem"] == "they did not end in time"
    assert row["seconds"] < 10


# Memory


def test_pinning_and_giving_back_are_timed_apart():
    """Guards: memory that is dropped, and so given back, while it is being pinned, or stays when it is given back."""
    log = []

    class Machine:
        def allocate_pinned(self, num_bytes):
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            weakref.finalize(buffer.untyped_storage(), log.append, "dropped")
            return buffer

        def free_pinned(self, buffer):
            log.append("given back")

    def pin():
        free = memory.pin(Machine(), MIB)
        log.append("pinned")
        return lambda: (free(), log.append("over"))

    row = memory.timed("registered", MIB, pin)
    assert log == ["pinned", "given back", "dropped", "over"]
    assert row["gib_per_s"] == pytest.approx(MIB / GIB / row["pin_s"])


def test_touch_threads_are_as_many_as_asked_and_undone(monkeypatch):
    cpus, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with memory.touch_threads(1) as num:
        assert num == len(os.sched_getaffinity(0)) == torch.get_num_threads() == 1
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cpus, threads)


def test_device_memory_grows_with_depth_without_offload_alone(mesh):
    """What else grows is the state of a CPU's generator, which checkpointing keeps for each block."""
    ways, generator_bytes = ways_of(DEVICE), torch.get_rng_state().nbytes
    rows = [[memory.measure(DEVICE, mesh, ways[way], num) for num in (4, 8)] for way in memory.WAYS]
    ac, overlap = ((many["step_bytes"] - few["step_bytes"]) / 4 for few, many in rows)
    table_bytes = 256 * 2 * 16 * 2  # of rotary embeddings, cast for each block
    assert ac == pytest.approx(rows[0][0]["input_bytes"] + table_bytes + generator_bytes, abs=64)
    assert overlap == pytest.approx(generator_bytes, abs=64)
    assert [row["num_offloads"] for row in rows[1]] == [3, 7]
    assert rows[1][1]["pinned_bytes"] == rows[1][1]["pinned_peak_bytes"] == 7 * rows[0][0]["input_bytes"]


# Link


class CountingRuntime:
    """A link that carries 0.5 GB/s to the host and 0.25 back, on a clock that stands still between copies."""

    now_ms = 0.0
    d2h_stream = staticmethod(lambda device: "d2h")
    elapsed_ms = staticmethod(lambda start, end: end - start)
    synchronize = staticmethod(lambda event: None)

    def record_timed_event(self, stream: str) -> float:
        return self.now_ms

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: str) -> None:
        self.now_ms += dst.numel() / 1e6 / (0.5 if stream == "d2h" else 0.25)


def test_a_copy_log_tells_what_the_link_carried():
    runtime = CountingRuntime()
    log = CopyLog(runtime, PLACE)
    small, large = (torch.empty(size, dtype=torch.uint8) for size in (1000, 9000))
    for stream, memory_ in (("d2h", small), ("h2d", small), ("d2h", large), ("h2d", large)):
        runtime.copy(memory_, memory_, stream)
    assert [copy.direction for copy in log.copies] == ["d2h", "h2d"] * 2
    assert [copy.num_bytes for copy in log.copies] == [1000, 1000, 9000, 9000]
    assert log.gb_per_s("d2h") == pytest.approx(0.5)
    assert log.gb_per_s("h2d") == pytest.approx(0.25)
    log.copies.clear()
    assert log.gb_per_s("d2h") == 0.0


# Step time


def make_case(tflops: float = 1e-3, **kwargs) -> step_time.Case:
    return step_time.Case(DEVICE, "8B", 64, PortRates(0.5, 0.5, 0.5, 0.5), tflops, **{"num_blocks": 4, **kwargs})


def rows_of(case: step_time.Case, mesh, seconds: float = 5.0) -> dict[str, dict]:
    return {row["way"]: row for row in case.measure(mesh, TimeBox(seconds))}


def test_all_ways_are_timed_and_compared_with_a_plan_of_this_device(mesh):
    case = make_case()
    rows = rows_of(case, mesh)
    assert list(rows) == list(step_time.WAYS)
    assert {row["num_steps"] for row in rows.values()} == {step_time.MAX_ROUNDS}
    assert rows["ac"]["ratio_to_ac"] == 1.0
    assert rows["ac"]["planned_ms"] == pytest.approx(rows["ac"]["step_ms"])
    assert case.tflops != 1e-3
    assert rows["no_ac"]["planned_ratio"] == pytest.approx(3 / 4)
    sync = rows["sync"]
    copies_ms = 2 * 3 * 64 * case.args.dim * 2 / 0.5e6
    assert sync["planned_ms"] == pytest.approx(rows["ac"]["step_ms"] + copies_ms)
    assert sync["planner_error_percent"] == pytest.approx((sync["planned_ms"] / sync["step_ms"] - 1) * 100)
    assert "planned_ms" not in rows["save_on_cpu"]
    assert rows["overlap"]["num_offloads"] == 3


def test_rounds_end_with_the_time(mesh):
    rows = rows_of(make_case(), mesh, seconds=0.0)
    assert {row["num_steps"] for row in rows.values()} == {step_time.MIN_ROUNDS}


def test_ways_and_blocks_are_as_many_as_the_time_allows(monkeypatch):
    monkeypatch.setattr(DEVICE, "is_emulated", False)
    monkeypatch.setattr(step_time, "model_args", lambda device, *rest: model_args(EmulatedDevice(), *rest))
    case = make_case()
    block_s = 1e-3 * case.plan(step_time.Way("ac", "ac")).steps["ac"].step_ms / case.num_blocks

    def choose(ways, num_blocks):
        steps_s = (step_time.WARM_UP + step_time.MIN_ROUNDS) * num_blocks * block_s
        seconds = len(ways) * (step_time.START_S + steps_s)
        assert case.choose(seconds / step_time.SHARES[ways]) == pytest.approx(seconds)
        return case.ways, case.num_blocks

    fewest, most = step_time.MIN_BLOCKS, step_time.MAX_BLOCKS
    assert choose(WAYS, fewest + 1.5) == (WAYS, fewest + 1)
    assert choose(WAYS, 1000) == (WAYS, most)
    assert choose(step_time.ESSENTIAL, fewest + 0.5) == (step_time.ESSENTIAL, fewest)
    assert case.choose(3 * step_time.START_S) is None
    assert case.row["num_blocks"] == fewest


def test_ways_that_there_is_no_time_for_say_so(mesh):
    rows = rows_of(make_case(ways=step_time.ESSENTIAL), mesh)
    assert [name for name in rows if "step_ms" in rows[name]] == list(step_time.ESSENTIAL)
    assert {row["left_out"] for name, row in rows.items() if name not in step_time.ESSENTIAL} == {step_time.NO_TIME}


def test_what_does_not_fit_is_left_out_and_the_others_run(mesh, monkeypatch):
    backward = Running.backward

    def out_of_memory(self, tokens):
        if self.way.name == "no_ac":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return backward(self, tokens)

    monkeypatch.setattr(Running, "backward", out_of_memory)
    case = make_case()
    budget = case.pinned_bytes(ways_of(DEVICE)["attention_on_host"])
    monkeypatch.setattr(case, "host_budget", lambda: budget)
    rows = rows_of(case, mesh)
    assert rows["no_ac"]["left_out"] == "out of device memory"
    assert rows["all_without_ac"]["left_out"].startswith("pins 0.0 GiB of host memory: more than ")
    assert rows["save_on_cpu"]["left_out"].startswith("pins ")  # torch's allocator rounds up
    assert [name for name in rows if "step_ms" in rows[name]] == [*WAYS[:1], *WAYS[2:6]]


def test_a_pool_that_is_full_leaves_out_and_other_errors_are_problems(mesh, monkeypatch):
    case = make_case()
    monkeypatch.setattr(case, "pinned_bytes", lambda way: 512)
    backward = Running.backward

    def fail(self, tokens):
        if self.way.name == "ac" and case.step_ms.get("ac"):
            raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")
        return backward(self, tokens)

    monkeypatch.setattr(Running, "backward", fail)
    rows = rows_of(case, mesh)
    assert rows["overlap"]["left_out"].startswith("no pinned host memory for a tensor of layers.0")
    assert rows["ac"]["problem"] == "RuntimeError: CUDA error: an illegal memory access"
    assert "ratio_to_ac" not in rows["no_ac"]
    assert "step_ms" in rows["no_ac"]


def test_pinned_memory_of_a_way_is_what_it_takes(mesh):
    case = make_case()
    ways = ways_of(DEVICE)
    assert case.pinned_bytes(ways["ac"]) == case.pinned_bytes(ways["no_ac"]) == 0
    assert case.pinned_bytes(ways["overlap"]) == 3 * 64 * case.args.dim * 2
    assert 0 < case.host_budget() < 1024 * GIB


# Timeline, sanitizer


def test_a_trace_whose_copies_are_not_ours_is_a_problem(mesh, tmp_path):
    seen, stats = timeline.trace_step(DEVICE, mesh, "overlap", tmp_path / "trace.json.gz")
    assert timeline.find_problem(seen, stats) == {}
    assert seen.d2h_bytes == stats.offloaded_bytes == 5 * 128 * 64 * 2
    assert 0 < seen.d2h_gb_per_s < 1.1 * 0.5
    assert "copies of" in timeline.find_problem(seen, OffloadStats())["problem"]


def test_a_tool_is_stopped_told_and_judged(tmp_path):
    assert sanitizer.run_tool(["sleep", "60"], 1.0)["result"] == "stopped after 1 s"
    told = sanitizer.run_tool(["sh", "-c", "echo ========= ERROR SUMMARY: 2 errors; exit 9"], 9.0)
    assert (told["result"], told["problem"]) == ("2 errors", "exit code 9: ========= ERROR SUMMARY: 2 errors")
    fine = sanitizer.run_tool(["echo", "========= RACECHECK SUMMARY: 0 hazards displayed"], 9.0)
    assert fine["result"] == "0 hazards displayed"
    assert "problem" not in fine


def test_the_case_for_the_sanitizer_is_right():
    sanitizer.run_case(DEVICE)


def test_the_case_for_the_sanitizer_sees_a_wrong_gradient(wrong_copies):
    with pytest.raises(AssertionError, match="mode block_inputs: gradients differ"):
        sanitizer.run_case(DEVICE)
