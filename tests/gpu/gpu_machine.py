"""What the tests of this folder run on: a CUDA device, or a CPU that plays one; and steps on it beside a reference.

Owns what the two do not have in common. On a CPU `HostRuntime` is the link, slow and jittery, and strict or not.
"""

import functools
import os
import time
from abc import ABC, abstractmethod
from typing import TypeVar

import pytest
import torch
import toy
from gpu_parts.strict_runtime import StrictAcceleratorRuntime, cycles_per_ms

from titan_offload import AcceleratorRuntime, HostRuntime, Offloader, OffloadStats, Runtime
from titan_offload.runtime import Stream

T = TypeVar("T")

IS_EMULATED = os.environ.get("TITAN_OFFLOAD_EMULATE") == "1"

LATE_MS = 1.0
"""About how late copies of a strict runtime come: more than the forward of a toy block takes on either machine."""


class Machine(ABC):
    """What the tests ask of the device.

    Attributes:
        device: where models and tensors are.
        is_emulated: whether a CPU plays the device.
        dim: width of models.
        seqs: sequence lengths of consecutive steps, with a longer one later.
    """

    device: torch.device
    is_emulated: bool
    dim: int
    seqs: tuple[int, ...]

    @abstractmethod
    def runtime(self, is_strict: bool = False, late_ms: float = LATE_MS) -> Runtime:
        """A new one.

        Args:
            is_strict: whether it makes mistakes visible.
            late_ms: about how late copies come then.
        """

    @abstractmethod
    def keep_busy(self, runtime: Runtime, stream: Stream, ms: float) -> None:
        """Gives ``stream`` something that takes about ``ms`` milliseconds."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all that the device was given."""

    def needs_device(self, why: str) -> None:
        """Skips a test that means nothing on a CPU."""
        if self.is_emulated:
            pytest.skip(f"on a device alone: {why}")

    def pick(self, on_device: T, emulated: T) -> T:
        """A size: the CPU's link is slow."""
        return emulated if self.is_emulated else on_device

    def model(self, seed: int = 0, **kwargs) -> toy.Model:
        return toy.make_model(seed, **{"dim": self.dim, **kwargs}).to(self.device)

    def tokens(self, seed: int = 0, seq: int | None = None) -> torch.Tensor:
        return toy.make_tokens(seed, seq=seq or self.seqs[0]).to(self.device)

    def input_bytes(self, seq: int | None = None) -> int:
        """Of a block of `model`, in float32."""
        return toy.BATCH * (seq or self.seqs[0]) * self.dim * 4


class Cuda(Machine):
    is_emulated, dim, seqs = False, 256, (512, 131, 700, 512)

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def runtime(self, is_strict: bool = False, late_ms: float = LATE_MS) -> Runtime:
        return StrictAcceleratorRuntime(max_late_ms=2 * late_ms, seed=1) if is_strict else AcceleratorRuntime()

    def keep_busy(self, runtime: Runtime, stream: torch.Stream, ms: float) -> None:
        with stream:
            torch.cuda._sleep(int(ms * cycles_per_ms(self.device)))

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Emulated(Machine):
    is_emulated, dim, seqs = True, toy.DIM, (toy.SEQ, 5, 2 * toy.SEQ, toy.SEQ)
    device = torch.device("cpu")

    def runtime(self, is_strict: bool = False, late_ms: float = LATE_MS) -> Runtime:
        return HostRuntime(link_gb_per_s=0.008, jitter_ms=late_ms, seed=1, strict=is_strict)

    def keep_busy(self, runtime: HostRuntime, stream: Stream, ms: float) -> None:
        runtime._submit(stream, lambda: time.sleep(ms / 1e3))

    def synchronize(self) -> None:
        pass  # the tests' last steps end with waits for all of their copies


@functools.cache
def the_machine() -> Machine | None:
    """None: there is neither a device, nor is one to be emulated."""
    if IS_EMULATED:
        return Emulated()
    return Cuda() if torch.cuda.is_available() else None


# Steps beside a reference


def reference(machine: Machine, tokens: torch.Tensor, **kwargs) -> list[torch.Tensor | None]:
    """Gradients of a model without offload."""
    model = machine.model(**kwargs)
    model.loss(tokens).backward()
    return toy.grads(model)


def assert_grads(model: torch.nn.Module, expected: list[torch.Tensor | None]) -> None:
    """The same bits; and finite, so that a NaN in both does not pass for right."""
    for (name, p), grad in zip(model.named_parameters(), expected, strict=True):
        assert (p.grad is None) == (grad is None), name
        assert p.grad is None or (torch.isfinite(grad).all() and torch.equal(p.grad, grad)), name


def let_copies_end(offloader: Offloader) -> None:
    """All that was given to the side stream is in host memory when it returns."""
    for entry in offloader.engine.stash:
        offloader.engine.runtime.synchronize(entry.event)


def step(model: toy.Model, offloader: Offloader, tokens: torch.Tensor, does_settle: bool = False) -> OffloadStats:
    """One step of ``model``.

    Args:
        does_settle: whether backward starts when all copies have ended, so that each tensor comes from host memory.
    """
    model.zero_grad()
    loss = model.loss(tokens)
    if does_settle:
        let_copies_end(offloader)
    loss.backward()
    return offloader.step_end()
