"""How many block inputs a pipeline stage holds on the device, under torch's own schedules.

Counted without the engine: by weak references to the storages of what each block is called with, and to what the
runtime hands out for reloads. Left out is the input of a stage itself, which is its first block's (not in the first
stage, which embeds tokens): torch's ``PipelineStage`` receives it into a buffer of its own, one per microbatch, and
never frees it. The host never sees a copy arrive, so that the stash is as full as it is allowed to be.
"""

import weakref

import pytest
import torch
import torch.distributed as dist
import toy
from pipeline_toy import Pipeline, assert_same_step

from titan_offload import OffloadConfig
from titan_offload.apply import make_offloader

NUM_BLOCKS, NUM_BLOCKS_LARGE = 4, 7  # of a stage
MAX_INFLIGHT, LOOKAHEAD = 2, 1


class InputCounter:
    """Counts the block inputs of a pipeline that are alive: when a block starts, in forward or recompute, and when a
    reload is allocated. Only then can there be more than before."""

    def __init__(self, pipeline, runtime=None):
        self.peak = 0
        self._alive: list[weakref.ref[torch.UntypedStorage]] = []
        self._of_stages: list[torch.UntypedStorage] = []
        for part in pipeline.parts:
            part.register_forward_pre_hook(lambda _, args: self._of_stages.append(args[0].untyped_storage()))
            for block in part.layers.values():
                inner = block._checkpoint_wrapped_module
                inner.register_forward_pre_hook(lambda _, args: self.add(args[0].untyped_storage()))
        if runtime is not None:
            empty = runtime.empty
            runtime.empty = lambda *args: self.add_tensor(empty(*args))

    def add(self, storage):
        alive = [ref() for ref in self._alive if ref() is not None]
        if not any(storage is known for known in alive + self._of_stages):
            alive.append(storage)
        self._alive = [weakref.ref(storage) for storage in alive]
        self.peak = max(self.peak, len(alive))

    def add_tensor(self, tensor):
        self.add(tensor.untyped_storage())
        return tensor


def make_offloaded(pipeline, **config):
    runtime = toy.slow_link()
    runtime.query = lambda event: False
    offloader = make_offloader(OffloadConfig(min_offload_mib=0.0, **config), runtime=runtime)
    for part in pipeline.parts:
        offloader.attach(part)
    return offloader


def count_peaks(schedule, num_microbatches, num_blocks=NUM_BLOCKS, **config):
    """The most block inputs on the device of this rank in a second step, without and with offload."""
    args = (schedule, num_blocks, num_microbatches)
    plain, moving = Pipeline(*args), Pipeline(*args)
    offloader = make_offloaded(moving, **config)
    assert_same_step(moving, plain, seed=0)  # the first step has a pass more, in which torch learns the shapes
    counters = InputCounter(plain), InputCounter(moving, offloader.engine.runtime)
    assert_same_step(moving, plain, seed=1)
    offloader.step_end()
    assert toy.slots_in_use(offloader) == 0
    return tuple(counter.peak for counter in counters)


def num_counted(num_blocks=NUM_BLOCKS):
    """Blocks of this rank whose input is not also that of their stage."""
    return num_blocks - (dist.get_rank() > 0)


def check_1f1b(rank):
    size = dist.get_world_size()
    for num_microbatches in (size, 2 * size, 4 * size):
        off, on = count_peaks("1F1B", num_microbatches, keep_last=0)
        assert (off, on) == ((size - rank) * num_counted(), 1 + LOOKAHEAD + MAX_INFLIGHT), num_microbatches


@pytest.mark.parametrize("num_stages", [2, 4])
def test_1f1b_holds_the_same_number_however_many_microbatches_are_in_flight(num_stages, on_gloo):
    """On rank r of p, p - r microbatches are in flight: without offload each holds all its block inputs. With offload
    there are the one in use, those reloaded ahead, and the stash."""
    on_gloo(check_1f1b, num_stages)


def check_gpipe(rank):
    for num_microbatches in (1, 2, 4, 8):
        off, on = count_peaks("GPipe", num_microbatches, keep_last=0)
        assert (off, on) == (num_microbatches * num_counted(), 1 + LOOKAHEAD + MAX_INFLIGHT), num_microbatches


def test_gpipe_holds_the_same_number_with_all_microbatches_in_flight(on_gloo):
    on_gloo(check_gpipe)


def check_settings(rank):
    config = {"keep_last": 0, "prefetch_lookahead": 2, "max_inflight_offloads": 3}
    off, on = count_peaks("1F1B", 4, num_blocks=NUM_BLOCKS_LARGE, **config)
    assert (off, on) == ((2 - rank) * num_counted(NUM_BLOCKS_LARGE), 1 + 2 + 3)


def test_what_is_held_is_what_the_settings_say(on_gloo):
    on_gloo(check_settings)


def check_keep_last(rank):
    for num_microbatches in (2, 4, 8):
        off, on = count_peaks("GPipe", num_microbatches, keep_last=1)
        assert (off, on) == (num_microbatches * num_counted(), num_microbatches + LOOKAHEAD + MAX_INFLIGHT)


def test_keep_last_holds_its_inputs_once_per_microbatch_in_flight(on_gloo):
    """Backward needs the newest inputs first only where it follows its own forward at once."""
    on_gloo(check_keep_last)
