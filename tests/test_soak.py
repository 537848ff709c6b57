"""What a soak run measures, and what it takes for flat."""

import gc
import os
import threading
from dataclasses import replace

import pytest
import soak_samples
import torch
import toy
from soak_samples import FLAT_FROM, MIB, QUANTITIES, SLACK, Sample, find_problems, make_rows, take_sample

FLAT = Sample(FLAT_FROM, device=10, heap=20, pinned=30, handles=0, slots=0, files=5, threads=3, rss=40, objects=50)


def later(**changes):
    return replace(FLAT, step=2 * FLAT_FROM, **changes)


@pytest.mark.parametrize("name", QUANTITIES)
def test_what_grows_by_more_than_its_slack_is_a_problem(name):
    allowed = getattr(FLAT, name) + SLACK.get(name, 0)
    assert find_problems([FLAT, later(**{name: allowed})], "here") == []
    [problem] = find_problems([FLAT, later(**{name: allowed + 1}), FLAT], "here")
    assert problem == f"here: {name} {allowed + 1} after step {2 * FLAT_FROM}, at most {allowed} allowed"


@pytest.mark.parametrize("name", ["handles", "slots"])
def test_no_graph_may_be_left_from_the_start(name):
    leaking = replace(FLAT, **{name: 7})
    assert len(find_problems([leaking, replace(leaking, step=100)], "here")) == 1


def test_what_shrinks_is_none():
    assert find_problems([FLAT, later(**dict.fromkeys(QUANTITIES, 0))], "here") == []


def test_rows_show_the_first_the_most_and_the_last():
    rows = make_rows([[replace(FLAT, pinned=MIB), later(pinned=3 * MIB), replace(FLAT, pinned=2 * MIB)]])
    assert ("0", "pinned", "1.00 MiB", "3.00 MiB", "2.00 MiB") in rows
    assert ("0", "files", "5", "5", "5") in rows


@pytest.fixture(autouse=True)
def nothing_of_other_tests():
    """A sample is of the whole process: what tests before have left in cycles must not go, or count, in between."""
    gc.collect()


def test_a_graph_that_is_left_shows_as_handles_and_slots_and_not_as_device_memory():
    model = toy.make_model()
    offloader = toy.offload(model)
    before = take_sample(0, offloader)
    loss = model.loss(toy.make_tokens())
    during = take_sample(1, offloader)
    assert before.slots == 0
    assert during.slots == toy.NUM_BLOCKS - 1
    # Of each block its input and the rotary table, before torch 2.12 an empty tensor too, and a region; the payloads of
    # those that moved; a tape.
    num_saved = 3 if torch.__version__ < (2, 12) else 2
    assert during.handles - before.handles == (num_saved + 1) * toy.NUM_BLOCKS + (toy.NUM_BLOCKS - 1) + 1
    assert during.pinned == 5 * toy.INPUT_BYTES
    del loss
    after = take_sample(2, offloader)
    assert (after.handles, after.slots, after.device) == (before.handles, 0, before.device)


def test_tensors_count_once_and_pinned_memory_does_not():
    runtime_tensor = toy.offload(toy.make_model()).engine.runtime.allocate_pinned(MIB)
    before = take_sample(0, None)
    left = torch.empty(8 * MIB, dtype=torch.uint8)
    views = [left[1:], left.view(2, -1)]
    after = take_sample(1, None)
    assert after.device - before.device == 8 * MIB
    assert after.heap - before.heap >= 7.9 * MIB  # small things may go meanwhile
    del left, views, runtime_tensor


def test_what_only_a_graph_holds_is_in_the_heap():
    weight = torch.ones(2048, 1024, requires_grad=True)
    targets = torch.zeros(2048, dtype=torch.long)
    before = take_sample(0, None)
    loss = torch.nn.functional.cross_entropy(weight, targets)  # holds log-probabilities that Python never saw
    after = take_sample(1, None)
    assert after.device - before.device < MIB
    assert 8 * MIB <= after.heap - before.heap < 9 * MIB
    del loss


def test_files_and_threads_that_are_left():
    before = take_sample(0, None)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with open(os.devnull) as file:
        after = take_sample(1, None)
    done.set()
    thread.join()
    assert (after.files, after.threads) == (before.files + 1, before.threads + 1)
    assert file.closed


def test_without_glibc_there_is_no_heap(monkeypatch):
    monkeypatch.setattr(soak_samples.ctypes, "CDLL", lambda name: object())
    assert soak_samples.heap_bytes() == 0
