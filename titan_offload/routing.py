"""RoutingCheck: how many tokens a recompute would have sent to other experts, had the router not been saved.

In each recompute a router runs once more, on the side, with nothing saved and nothing recalled: what its last top-k
then picks is compared with what forward picked. The counts stay on the device until the step ends, so the check never
waits for the device. Price: one more forward of each router per recompute.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from titan_offload.saved_tensor import local_tensor


class Pass(Protocol):
    """A forward or recompute of a block that is running now.

    Attributes:
        is_recompute: which of them.
        is_paused: while set, ops run as if nothing had been saved.
        topk: the indices that top-k gave last, ``(tokens, k)``.
        trial: those of the last trial run of a router.
    """

    is_recompute: bool
    is_paused: bool
    topk: torch.Tensor | None
    trial: torch.Tensor | None


class RoutingCheck:
    """Counts re-routed tokens by block, step by step."""

    def __init__(self) -> None:
        self._counts: dict[str, torch.Tensor] = {}
        self._fqns: list[str] = []

    def install(self, router: nn.Module, fqn: str, passes: Callable[[], Sequence[Pass]]) -> list[RemovableHandle]:
        """Watches ``router``, which belongs to block ``fqn``; ``passes()`` are those of this thread, innermost last."""
        self._fqns.append(fqn)

        def before(router: nn.Module, args: tuple, kwargs: dict) -> None:
            run = _recompute(passes())
            if run is not None:
                with _paused(run), torch.no_grad(), _same_random_numbers(args):
                    router.forward(*args, **kwargs)
                run.trial, run.topk = run.topk, None

        def after(router: nn.Module, args: tuple, outputs: object) -> None:
            run = _recompute(passes())
            if run is not None and run.trial is not None and run.topk is not None:
                with _paused(run), torch.no_grad():
                    self._add(fqn, num_rerouted(run.trial, run.topk))

        return [
            router.register_forward_pre_hook(before, with_kwargs=True),
            router.register_forward_hook(after),
        ]

    def _add(self, fqn: str, count: torch.Tensor) -> None:
        self._counts[fqn] = self._counts[fqn] + count if fqn in self._counts else count

    def step_end(self) -> dict[str, int]:
        """Tokens of the step that would have been re-routed, by block; 0 where none."""
        counts = {fqn: int(self._counts.get(fqn, 0)) for fqn in self._fqns}
        self._counts.clear()
        return counts


def num_rerouted(picked: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of ``(tokens, k)`` expert indices: in how many rows the two pick different sets of experts; the order is free."""
    picked, expected = (local_tensor(indices).sort(dim=-1).values for indices in (picked, expected))
    return (picked != expected).any(dim=-1).sum()


def _recompute(passes: Sequence[Pass]) -> Pass | None:
    return passes[-1] if passes and passes[-1].is_recompute and not passes[-1].is_paused else None


@contextlib.contextmanager
def _paused(run: Pass) -> Iterator[None]:
    run.is_paused = True
    try:
        yield
    finally:
        run.is_paused = False


def _same_random_numbers(args: tuple) -> contextlib.AbstractContextManager:
    """The generators are left as they are found: that of the host, and that of the device of ``args``."""
    devices = [arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type != "cpu"][:1]
    return torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda")
