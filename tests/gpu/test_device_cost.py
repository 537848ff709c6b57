"""What offload costs and spares on the device: memory, waits of the host, and what a profiler shows."""

import contextlib
from collections import Counter

import pytest
import torch
import toy
from gpu_machine import step
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

NO_ALLOCATOR = "a CPU has no allocator to ask"
NO_RUN_AHEAD = "the host does the computing itself"


# Device memory


def peak_of_a_step(machine, num_blocks, does_offload):
    """Device memory in bytes: at the peak of a step above what is allocated before it; and what it leaves behind."""
    model, tokens = machine.model(num_blocks=num_blocks), machine.tokens()
    offloader = toy.offload(model, runtime=machine.runtime(), max_inflight_offloads=1) if does_offload else None

    def one_step():
        model.zero_grad(set_to_none=False)
        loss = model.loss(tokens)
        machine.synchronize()  # copies have ended, whatever the link, so that peaks can be compared
        loss.backward()
        del loss
        machine.synchronize()
        if offloader is not None:
            offloader.step_end()

    torch.cuda.empty_cache()  # what is allocated must not depend on the pieces that other tests left
    one_step()  # makes the gradients, and cuBLAS its workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one_step()
    return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("does_offload", [False, True], ids=["without", "with"])
def test_the_peak_grows_by_an_input_per_block_without_offload_and_not_at_all_with_it(machine, does_offload):
    machine.needs_device(NO_ALLOCATOR)
    few, many = 4, 12
    peaks = [peak_of_a_step(machine, num_blocks, does_offload) for num_blocks in (few, many)]
    assert [left for _, left in peaks] == [0, 0]
    grown = peaks[1][0] - peaks[0][0]
    inputs = 0 if does_offload else many - few
    assert abs(grown - inputs * machine.input_bytes()) <= machine.input_bytes()


def test_nothing_is_left_of_steps_of_any_length(machine):
    """Nor of copies that are late. Without a device: of slots."""
    model = machine.model()
    offloader = toy.offload(model, runtime=machine.runtime(is_strict=True))
    left = []
    for _ in range(2):
        for seed, seq in enumerate(machine.seqs):
            stats = step(model, offloader, machine.tokens(seed, seq))
            assert stats.pinned_in_use_bytes == 0
        model.zero_grad()
        machine.synchronize()
        offloader.step_end()
        left.append((torch.cuda.memory_allocated() if not machine.is_emulated else 0, toy.slots_in_use(offloader)))
    assert left[0] == left[1]
    assert left[0][1] == 0


# The host


@contextlib.contextmanager
def no_synchronization(runtime, monkeypatch):
    """What makes the host wait for the device raises."""

    def refuse(*args):
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "synchronize", refuse)
        patch.setattr(runtime, "allocate_pinned", refuse)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize(
    ("mode", "schedule", "max_inflight"),
    [
        *(("block_inputs", "overlap", 1), ("block_inputs", "overlap", 0), ("block_inputs", "sync", 2)),
        ("all", "overlap", 1),
    ],
)
def test_no_step_after_the_first_makes_the_host_wait(machine, monkeypatch, mode, schedule, max_inflight, is_strict):
    machine.needs_device(NO_RUN_AHEAD)
    model, tokens = machine.model(), machine.tokens()
    settings = {"mode": mode, "schedule": schedule, "max_inflight_offloads": max_inflight}
    offloader = toy.offload(model, runtime=machine.runtime(is_strict), keep_last=0, **settings)
    step(model, offloader, tokens)
    for _ in range(3):
        with no_synchronization(offloader.engine.runtime, monkeypatch):
            stats = step(model, offloader, tokens)
        assert stats.num_offloads >= toy.NUM_BLOCKS


def test_synchronization_would_be_noticed(machine, monkeypatch):
    machine.needs_device(NO_RUN_AHEAD)
    value = torch.ones(1, device=machine.device)
    with no_synchronization(machine.runtime(), monkeypatch), pytest.raises(RuntimeError, match="synchronizing"):
        value.item()


@pytest.mark.parametrize("max_inflight", [0, 1])
@pytest.mark.parametrize("schedule", ["overlap", "sync"])
def test_the_host_gives_a_whole_step_before_the_device_has_done_the_first_copy(machine, schedule, max_inflight):
    """Waits for the stash and for reloads are the device's."""
    machine.needs_device(NO_RUN_AHEAD)
    model, tokens = machine.model(), machine.tokens()
    runtime = machine.runtime()
    settings = {"schedule": schedule, "max_inflight_offloads": 2 if schedule == "sync" else max_inflight}
    offloader = toy.offload(model, runtime=runtime, **settings)
    step(model, offloader, tokens)
    machine.synchronize()
    expected = toy.grads(model)
    compute = runtime.compute_stream(machine.device)
    machine.keep_busy(runtime, compute, 500.0)
    is_busy = runtime.record_event(compute)
    model.zero_grad()
    loss = model.loss(tokens)
    assert not runtime.query(is_busy)
    loss.backward()
    assert not runtime.query(is_busy)
    machine.synchronize()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


def test_waits_of_the_device_are_in_the_stats(machine):
    """Copies are late, so forward waits for room in the stash and backward for reloads."""
    model = machine.model()
    offloader = toy.offload(model, runtime=machine.runtime(is_strict=True, late_ms=5.0), max_inflight_offloads=1)
    step(model, offloader, machine.tokens())
    machine.synchronize()
    stats = step(model, offloader, machine.tokens(), does_settle=True)
    machine.synchronize()
    late = offloader.step_end()  # what the device had not come past when the step ended
    assert stats.d2h_wait_ms + late.d2h_wait_ms > 1.0
    assert stats.h2d_wait_ms + late.h2d_wait_ms > 1.0
    assert offloader.step_end().d2h_wait_ms == 0


# The profiler


def profiled_step(machine, keep_last, *activities):
    """Events of a step whose inputs all come from host memory."""
    model, tokens = machine.model(), machine.tokens()
    offloader = toy.offload(model, runtime=machine.runtime(), keep_last=keep_last)
    step(model, offloader, tokens, does_settle=True)
    machine.synchronize()
    with profile(activities=[ProfilerActivity.CPU, *activities]) as profiler:
        step(model, offloader, tokens, does_settle=True)
        machine.synchronize()
    return profiler.events()


@pytest.mark.parametrize("keep_last", [0, 2])
def test_each_copy_has_its_label(machine, keep_last):
    moved = range(toy.NUM_BLOCKS - keep_last)
    events = profiled_step(machine, keep_last)
    labels = Counter(event.name for event in events if event.name.startswith("Offload::"))
    assert labels == {f"Offload::{way} (layers.{i})": 1 for way in ("d2h", "h2d") for i in moved}


def test_the_device_copies_from_and_to_pinned_memory(machine):
    """As the device's own records say: nothing else moves in the step, and nothing goes through pageable memory."""
    machine.needs_device("its records of copies")
    events = profiled_step(machine, 1, ProfilerActivity.CUDA)
    events = [event for event in events if event.device_type == DeviceType.CUDA]
    if not events:
        pytest.skip("the profiler sees nothing of the device here")
    copies = Counter(event.name for event in events if event.name.startswith("Memcpy"))
    moved = toy.NUM_BLOCKS - 1
    assert copies["Memcpy DtoH (Device -> Pinned)"] == copies["Memcpy HtoD (Pinned -> Device)"] == moved
    assert not [name for name in copies if "Pageable" in name]
