"""The engine on a machine that refuses pinned host memory: what stays on the device, what is said, what is raised."""

import logging

import pytest
import toy

from titan_offload import HostRuntime

MOVABLE = toy.NUM_BLOCKS - 1  # the newest block input stays anyway
BUDGET_GIB = MOVABLE * toy.INPUT_BYTES / 1024**3
FROM_THE_SECOND_ON = range(2, 1_000_000)


def reference(tokens):
    model = toy.make_model()
    model.loss(tokens).backward()
    return model


def train(model, offloader, num_steps=3):
    """Gradients must be those of the model without offload, in each step. Returns what the steps did."""
    tokens = toy.make_tokens()
    expected = reference(tokens)
    steps = []
    for _ in range(num_steps):
        model.zero_grad()
        model.loss(tokens).backward()
        steps.append(offloader.step_end())
        toy.assert_same_grads(model, expected)
    return steps


@pytest.mark.parametrize("budget_gib", [BUDGET_GIB, 0.0], ids=["budget", "no budget"])
def test_without_room_for_a_second_slab_all_but_one_input_stay_on_the_device(caplog, budget_gib):
    """Guards: the refusal in `PinnedPool._make_slab`, and that it is not tried again."""
    model, runtime = toy.make_model(), toy.slow_link()
    runtime.fail_pinned_at = FROM_THE_SECOND_ON
    offloader = toy.offload(model, runtime=runtime, pinned_budget_gib=budget_gib)
    with caplog.at_level(logging.WARNING):
        steps = train(model, offloader)
    kept = MOVABLE - 1
    for stats in steps:
        assert stats.num_offloads == 1
        assert stats.kept["pinned budget exhausted"] == (kept, kept * toy.INPUT_BYTES)
        assert stats.pinned_total_bytes == toy.INPUT_BYTES
    assert runtime.num_pinned_allocations == 2
    [record] = caplog.records
    assert "pinned host memory, which is not device memory" in record.getMessage()
    assert toy.slots_in_use(offloader) == 0


@pytest.mark.parametrize("num_slabs", [1, 2, 3])
def test_reserved_slabs_are_refused_and_exactly_the_blocks_without_room_stay(caplog, num_slabs):
    """Slabs of two slots, of which the last ones are refused, small ones too."""
    model, runtime = toy.make_model(), toy.slow_link()
    runtime.max_pinned_bytes = 2 * toy.INPUT_BYTES
    runtime.fail_pinned_at = range(num_slabs, 1_000_000)
    offloader = toy.offload(model, runtime=runtime, pinned_budget_gib=BUDGET_GIB)
    with caplog.at_level(logging.WARNING):
        reserved = offloader.engine.pool.reserve([(toy.INPUT_BYTES, MOVABLE)])
        assert reserved == (num_slabs - 1) * 2 * toy.INPUT_BYTES
        steps = train(model, offloader)
    moved = 2 * (num_slabs - 1)
    for stats in steps:
        assert stats.num_offloads == moved
        assert stats.kept["pinned budget exhausted"] == (MOVABLE - moved, (MOVABLE - moved) * toy.INPUT_BYTES)
    assert runtime.num_pinned_allocations == num_slabs + (num_slabs < 3)  # of the last, single slot no less was asked
    assert len(caplog.records) == 1


def test_smaller_slabs_will_do(caplog):
    """The first one is refused, those of one slot are not. No step makes another."""
    model, runtime = toy.make_model(), toy.slow_link()
    runtime.fail_pinned_at = {1}
    offloader = toy.offload(model, runtime=runtime, pinned_budget_gib=BUDGET_GIB)
    with caplog.at_level(logging.WARNING):
        assert offloader.engine.pool.reserve([(toy.INPUT_BYTES, MOVABLE)]) == MOVABLE * toy.INPUT_BYTES
        steps = train(model, offloader)
    assert [stats.num_offloads for stats in steps] == [MOVABLE] * 3
    assert runtime.num_pinned_allocations == 1 + MOVABLE
    assert offloader.engine.pool.num_grown == MOVABLE
    assert caplog.records == []


def test_steps_on_reserved_slabs_make_none():
    model, runtime = toy.make_model(), toy.slow_link()
    offloader = toy.offload(model, runtime=runtime)
    offloader.engine.pool.reserve([(toy.INPUT_BYTES, MOVABLE)])
    assert [stats.num_offloads for stats in train(model, offloader)] == [MOVABLE] * 3
    assert (runtime.num_pinned_allocations, offloader.engine.pool.num_grown) == (1, 1)


@pytest.mark.parametrize("budget_gib", [BUDGET_GIB, 0.0], ids=["budget", "no budget"])
def test_refused_memory_is_an_error_if_asked_to(budget_gib):
    model, runtime = toy.make_model(), HostRuntime()
    runtime.fail_pinned_at = FROM_THE_SECOND_ON
    offloader = toy.offload(model, runtime=runtime, pinned_budget_gib=budget_gib, on_exhausted="error")
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"no pinned host memory for .*layers\.1 .*machine refuses.*on_exhausted"
        ):
            model.loss(toy.make_tokens())
        assert toy.slots_in_use(offloader) == 0
    pool = offloader.engine.pool
    assert (runtime.num_pinned_allocations, pool.num_slabs, pool.bytes_in_use) == (2, 1, 0)
    offloader.remove()
    assert (pool.num_slabs, pool.bytes_pinned, runtime._pinned) == (0, 0, set())


@pytest.mark.parametrize("budget_gib", [BUDGET_GIB, 0.0], ids=["budget", "no budget"])
def test_nothing_pinned_at_all_trains_as_without_offload(caplog, budget_gib):
    """F87: WSL2 and containers may allow next to none."""
    model, runtime = toy.make_model(), HostRuntime()
    runtime.fail_pinned_at = range(1, 1_000_000)
    offloader = toy.offload(model, runtime=runtime, pinned_budget_gib=budget_gib)
    steps = train(model, offloader)
    assert [stats.num_offloads for stats in steps] == [0] * 3
    assert runtime.num_pinned_allocations == 1
    assert [record.name for record in caplog.records] == ["titan_offload.pool"]
