"""Faults on one of two gloo ranks: the other one ends with the error of its process group, not with one of ours, and
no later than the group's timeout. What both ranks catch, both do again."""

import json
import multiprocessing
import os
import signal
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import toy
from fault_injector import FaultInjector, FaultyRuntime

from titan_offload import OffloadConfig, apply_offload

TIMEOUT_S = 5
"""Of the process group."""

MARGIN_S = 15
"""A rank that took longer than that in addition hangs. The machine may be busy."""


class Mean(torch.autograd.Function):
    """The mean over ranks, in forward and in backward."""

    @staticmethod
    def forward(ctx, x, injector):
        ctx.injector = injector
        injector.reach_pass("collective in {}")
        return mean(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.injector.reach("collective in backward")
        return mean(grad), None


def mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


class Block(toy.Block):
    injector = FaultInjector()

    def forward(self, x, rope, mask=None):
        return super().forward(Mean.apply(x, self.injector), rope)


class Rank:
    """A model whose blocks have collectives, under offload."""

    def __init__(self, rank, mode):
        wrap = {"wrap": lambda block: block} if mode == "all" else {}
        self.rank, self.model = rank, None
        self.expected, model = (toy.make_model(num_blocks=4, block=Block, **wrap) for _ in range(2))
        self.step(self.expected)
        self.model = model
        self.injector = Block.injector
        self.injector.install(self.model)
        self.runtime = FaultyRuntime(self.injector, link_gb_per_s=0.05, jitter_ms=0.1, seed=rank)
        config = OffloadConfig(mode=mode, min_offload_mib=0.0)
        self.offloader = apply_offload(self.model, config, runtime=self.runtime, budget_bytes=2**30)
        self.train()

    def step(self, model):
        model.zero_grad()
        loss = model.loss(toy.make_tokens(self.rank))
        if model is self.model:
            self.let_copies_end()
        loss.backward()

    def let_copies_end(self):
        for entry in self.offloader.engine.stash:
            self.runtime.synchronize(entry.event)

    def train(self):
        self.step(self.model)
        toy.assert_same_grads(self.model, self.expected)

    def num_left(self):
        """Once gloo's thread has let go of a collective that failed: with it go the caller's thread-local state and, in
        that, the hooks that checkpointing had pushed."""
        engine, until = self.offloader.engine, time.monotonic() + 5
        while True:
            self.let_copies_end()
            self.offloader.step_end()
            left = engine.pool.num_slots_in_use + len(engine.stash)
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.01)


def one_rank_fails(rank, mode, point, error):
    own = Rank(rank, mode)
    if rank == 1:
        own.injector.fail_at(point, 3, error)
    try:
        own.step(own.model)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        seen = {
            "error": f"{type(error).__name__}: {error}",
            "is_first": error.__context__ is None,
            "is_ours": "/titan_offload/" in frames[-1].filename,
            "is_injected": error is own.injector.raised,
        }
        error.__traceback__ = own.injector.raised = None
    return {**seen, "left": own.num_left()}


def both_ranks_fail(rank, mode, point):
    own = Rank(rank, mode)
    num_failed = 0
    for n in (1, 2, 3):
        own.injector.fail_at(point, n)
        try:
            own.train()
        except BaseException as error:
            num_failed += error is own.injector.raised and error.__context__ is None
            error.__traceback__ = None
        own.injector.disarm()
        own.train()
    return {"failed": num_failed, "left": own.num_left()}


def enter(rank, folder, body, args):
    store, timeout = f"file://{folder}/store", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, timeout=timeout, rank=rank, world_size=2)
    start = time.monotonic()
    ended = body(rank, *args)
    ended["seconds"] = time.monotonic() - start
    (folder / f"{rank}.json").write_text(json.dumps(ended))
    os._exit(0)  # as a process that an error ends: it does not wait for its group


@pytest.fixture
def on_two_ranks(tmp_path):
    """``on_two_ranks(body, *args)``: what ``body(rank, *args)`` returns on each rank; None: it never did."""

    def run(body, *args):
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=enter, args=(rank, tmp_path, body, args)) for rank in range(2)]
        for process in processes:
            process.start()
        for process, limit_s in zip(processes, (TIMEOUT_S + MARGIN_S, 2), strict=True):
            process.join(limit_s)
        for process in processes:
            process.kill()
            process.join()
        paths = [tmp_path / f"{rank}.json" for rank in range(2)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    return run


FAULTS = {
    "out of memory in forward": ("forward inside", None),
    "a bug in backward": ("backward start", None),
    "out of memory in a recompute": ("recompute inside", None),
    "a collective in forward": ("collective in forward", None),
    "a collective in a recompute": ("collective in recompute", None),
    "a collective in backward": ("collective in backward", None),
    "killed in forward": ("forward inside", signal.SIGKILL),
    "killed in backward": ("backward inside", signal.SIGKILL),
    "stopped in backward": ("backward inside", signal.SIGSTOP),
}


CASES = [("block_inputs", name) for name in FAULTS]
CASES += [("all", name) for name in ("a bug in backward", "killed in backward", "stopped in backward")]


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_fault_on_one_rank(mode, name, on_two_ranks):
    point, error = FAULTS[name]
    other, failed = on_two_ranks(one_rank_fails, mode, point, error)
    assert other is not None, "rank 0 hangs"
    assert (other["is_first"], other["is_ours"], other["left"]) == (True, False, 0), other
    assert other["seconds"] < TIMEOUT_S + MARGIN_S
    if error is None:
        assert (failed["is_injected"], failed["is_first"], failed["left"]) == (True, True, 0), failed
        assert "closed by peer" in other["error"] or "reset by peer" in other["error"], other
    else:
        assert failed is None
    if error is signal.SIGSTOP:
        assert "imed out" in other["error"], other


@pytest.mark.parametrize("mode", ["block_inputs", "all"])
@pytest.mark.parametrize("point", ["forward inside", "backward inside", "empty", "collective in backward"])
def test_fault_on_both_ranks_is_caught_and_the_step_done_again(point, mode, on_two_ranks):
    for ended in on_two_ranks(both_ranks_fail, mode, point):
        assert (ended["failed"], ended["left"]) == (3, 0)
