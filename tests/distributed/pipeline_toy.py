"""A model of toy blocks, cut into the stages of a rank and run by torch's own pipeline schedules."""

import copy

import torch
import torch.distributed as dist
import toy
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

CPU = torch.device("cpu")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Stage(toy.Model):
    """A part of the model: the first one embeds tokens, the last one has the head."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h if self.emb is None else self.emb(h)
        for i, block in self.layers.items():
            h = self.call(block, self.between(int(i), h), self.rope)
        return h if self.head is None else self.head(h)


def make_stage(model: toy.Model, index: int, num_stages: int) -> Stage:
    """Cut as TorchTitan does it: a copy of the whole model without what other stages have."""
    stage = copy.deepcopy(model)
    stage.__class__ = Stage
    size = len(model.layers) // num_stages
    own = range(index * size, (index + 1) * size)
    stage.layers = nn.ModuleDict({name: block for name, block in stage.layers.items() if int(name) in own})
    stage.emb = stage.emb if index == 0 else None
    stage.head = stage.head if index == num_stages - 1 else None
    return stage


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Pipeline:
    """The stages of this rank under a schedule of torch.

    Args:
        schedule: name of the schedule, as in ``parallelism.pipeline_parallel_schedule``.
        blocks_per_stage, num_microbatches: of each stage; in each step.
    """

    def __init__(self, schedule: str, blocks_per_stage: int, num_microbatches: int, **model_args) -> None:
        schedule_class = get_schedule_class(schedule)
        self.is_single = issubclass(schedule_class, PipelineScheduleSingle)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        num_stages = num_ranks * (1 if self.is_single else 2)
        second = num_stages - 1 - rank if schedule in V_SHAPED else rank + num_ranks
        indices = [rank] if self.is_single else [rank, second]
        model = toy.make_model(num_blocks=blocks_per_stage * num_stages, **model_args)
        self.parts = [make_stage(model, index, num_stages) for index in indices]
        stages = [PipelineStage(part, i, num_stages, CPU) for part, i in zip(self.parts, indices, strict=True)]
        self.schedule = schedule_class(
            stages[0] if self.is_single else stages, num_microbatches, loss_fn=loss_of, scale_grads=False
        )
        self._is_first, self._is_last = 0 in indices, num_stages - 1 in indices
        self._num_microbatches = num_microbatches

    def step(self, seed: int) -> list[torch.Tensor]:
        """Runs all microbatches, forward and backward. Returns their losses, where the last stage is."""
        tokens = toy.make_tokens(seed, batch=toy.BATCH * self._num_microbatches)
        for part in self.parts:
            part.zero_grad()
        losses = []
        self.schedule.step(
            *((tokens,) if self._is_first else ()),
            target=tokens if self._is_last else None,
            losses=losses if self._is_last else None,
            return_outputs=False,  # as TorchTitan: else the last stage keeps graphs until the next step
        )
        return [loss.detach() for loss in losses]


def assert_same_step(got: Pipeline, expected: Pipeline, seed: int) -> None:
    losses, expected_losses = got.step(seed), expected.step(seed)
    assert len(losses) == len(expected_losses) and all(map(torch.equal, losses, expected_losses))
    for part, expected_part in zip(got.parts, expected.parts, strict=True):
        assert all(p.grad is not None for p in part.parameters())
        toy.assert_same_grads(part, expected_part)
