"""State dicts of a model under offload: what is saved, and that an asynchronous save and moves do not disturb each
other."""

import copy
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toy
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from titan_offload import Offloader

WAIT_S = 30


class SlowWriter(dcp.FileSystemWriter):
    """Writes when it is told to: a disk that is busy for as long as a step takes."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.may_write = threading.Event()
        self.is_waiting = threading.Event()

    def write_data(self, plan, planner):
        self.is_waiting.set()
        assert self.may_write.wait(WAIT_S)
        return super().write_data(plan, planner)


def make_trained(mode: str | None) -> tuple[toy.Model, torch.optim.Optimizer, Offloader | None]:
    """A model and its optimizer after one step."""
    wrap = {"wrap": lambda block: block} if mode == "all" else {}
    model = toy.make_model(**wrap)
    offloader = toy.offload(model, mode=mode) if mode else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, offloader, seed=0)
    return model, optimizer, offloader


def train(model: toy.Model, optimizer: torch.optim.Optimizer, offloader: Offloader | None, seed: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model.loss(toy.make_tokens(seed))
    loss.backward()
    optimizer.step()
    if offloader is not None:
        assert offloader.step_end().num_offloads >= toy.NUM_BLOCKS - 1
    return loss.detach()


def state_of(model: toy.Model, optimizer: torch.optim.Optimizer) -> dict:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def flat(tree: object) -> dict[str, torch.Tensor]:
    tree = dcp._nested_dict.flatten_state_dict(tree)[0]
    return {key: value for key, value in tree.items() if isinstance(value, torch.Tensor)}


def assert_same(got: dict, expected: dict) -> None:
    got, expected = flat(got), flat(expected)
    assert list(got) == list(expected)
    assert all(torch.equal(got[key], expected[key]) for key in got)


@pytest.mark.parametrize("mode", ["block_inputs", "all"])
def test_state_is_that_without_offload(mode):
    expected = make_trained(None)[:2]
    model, optimizer, _ = make_trained(mode)
    assert_same(state_of(model, optimizer), state_of(*expected))
    assert_same(copy.deepcopy(model.state_dict()), expected[0].state_dict())
    ema = torch.optim.swa_utils.AveragedModel(model)
    ema.update_parameters(model)
    assert_same(ema.module.state_dict(), expected[0].state_dict())
    assert torch.equal(ema(toy.make_tokens()), expected[0](toy.make_tokens()))


@pytest.mark.parametrize("mode", ["block_inputs", "all"])
def test_steps_go_on_while_a_checkpoint_is_written(mode, tmp_path):
    reference, reference_optimizer, _ = make_trained(None)
    saved = copy.deepcopy(state_of(reference, reference_optimizer))
    losses = [train(reference, reference_optimizer, None, seed) for seed in (1, 2)]

    model, optimizer, offloader = make_trained(mode)
    writer = SlowWriter(str(tmp_path))
    future = dcp.async_save(state_of(model, optimizer), storage_writer=writer, no_dist=True)
    assert writer.is_waiting.wait(WAIT_S)
    assert torch.equal(train(model, optimizer, offloader, seed=1), losses[0])
    assert not future.done()
    writer.may_write.set()
    future.result(WAIT_S)
    assert torch.equal(train(model, optimizer, offloader, seed=2), losses[1])

    for resumed_mode in (None, mode):
        model, optimizer, offloader = make_trained(resumed_mode)
        train(model, optimizer, offloader, seed=5)  # somewhere else
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
        assert_same(state, saved)
        dcp.state_dict.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert [train(model, optimizer, offloader, seed) for seed in (1, 2)] == losses
