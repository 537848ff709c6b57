"""An input that FSDP2 casts anew for each block is cast once for all of them.

TorchTitan gives each block the same rotary table. Where that is float32 (qwen3, gpt_oss) and blocks compute in bf16,
mixed precision of FSDP2 casts it before each forward, and checkpointing keeps each of these copies until backward: for
Qwen3-1.7B an eighth of a block input, and device memory would grow by it with each block. Nothing of that needs a
gradient, so nothing of it moves; but all copies are the same, and one is enough.

How it works. `look` notes what a block was given before FSDP2's own hook; `SharedCasts.share` compares that with what
the hook made of it. What is a cast of the same tensor, unchanged, as an earlier block of the pass had is replaced by
that block's. Price: some microseconds per block, and one cast per pass stays until its backward is over.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_offload.saved_tensor import view_id


@dataclass(frozen=True)
class Given:
    """A tensor as it was before it was cast: identity, while `storage` is alive, and version."""

    storage: "weakref.ref[torch.UntypedStorage]"
    view: tuple
    version: int


@dataclass(frozen=True)
class Cast:
    """What was made of it, as it was then."""

    given: Given
    tensor: torch.Tensor
    version: int


def casts_inputs(block: nn.Module) -> bool:
    """Whether FSDP2 casts what ``block`` is given."""
    if not isinstance(block, FSDPModule):
        return False
    policy = block._get_fsdp_state()._mp_policy
    return policy.cast_forward_inputs and policy.param_dtype is not None


def look(inputs: Sequence[object]) -> list[Given | None]:
    """What could be a table that blocks share: for each input; None: it is not."""
    return [
        Given(weakref.ref(value.untyped_storage()), view_id(value), value._version) if _is_table(value) else None
        for value in inputs
    ]


class SharedCasts:
    """The casts of one forward pass."""

    def __init__(self) -> None:
        self._casts: dict[tuple, Cast] = {}

    def share(self, given: Sequence[Given | None], inputs: tuple) -> tuple:
        """The inputs of a block, where one is a cast that an earlier block had, with that one in its place.

        Args:
            given: the same before they were cast.
            inputs: and after.
        """
        if len(given) != len(inputs):
            return inputs
        return tuple(map(self._shared, given, inputs))

    def _shared(self, given: Given | None, value: object) -> object:
        if given is None or not _is_table(value) or view_id(value) == given.view:
            return value
        key = (given.view, view_id(value)[1:])
        known = self._casts.get(key)
        if known is not None and _is_same(known.given, given) and known.tensor._version == known.version:
            return known.tensor
        # An alias, whose version counter is the tensor's own.
        self._casts[key] = Cast(given, value.detach(), value._version)
        return value


def _is_table(value: object) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.is_floating_point()
        and not value.requires_grad
        and not value.is_inference()
    )


def _is_same(known: Given, given: Given) -> bool:
    storage = given.storage()
    return storage is not None and known.storage() is storage and known.version == given.version
