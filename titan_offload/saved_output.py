"""SavedOutput: one output of an op that recompute takes instead of running the op. How it is kept, how an in-place edit
of it is noticed, and how it is given back.

Owns what is known of version counters and random number generators below a dispatch mode. Relies on the engine for what
goes to the host. All functions here are called inside dispatch modes.

Edits. Mandatory outputs are cloned twice, when they are kept and for each recompute, so no edit reaches the kept copy.
Any other output is watched by *witnesses*: aliases that have its version counter and not its memory. An op may hand its
memory on as if it were new: a linear on a batch of sequences ends in ``_unsafe_view``, whose result has a counter of
its own. Each such alias is one more witness.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from titan_offload.saved_tensor import shared_version_counters, storage_id, storage_of, version_of
from titan_offload.tape import DEAD, Handle


@dataclass(eq=False, slots=True)
class SavedOutput:
    """Either ``tensor`` (it stays where it is) or ``handle`` (the engine's) is set. ``witnesses`` are with the version
    that each had; none if the output was cloned."""

    is_cloned: bool
    tensor: torch.Tensor | None = None
    handle: Handle | None = None
    witnesses: list[tuple[torch.Tensor, tuple[int, ...]]] = field(default_factory=list)

    def watch(self, alias: torch.Tensor) -> None:
        """``alias`` has the memory of the output: edits of it count."""
        with shared_version_counters():
            witness = alias.detach()
            if isinstance(witness, DTensor):
                witness._local_tensor = witness._local_tensor.new_empty(0)  # edits of a DTensor count on the outside
            elif type(witness) is torch.Tensor:
                witness.data = alias.new_empty(0)
        self.witnesses.append((witness, version_of(witness)))

    def is_edited(self) -> bool:
        return any(version_of(witness) != version for witness, version in self.witnesses)

    def take(self, unpack: Callable[[Handle], torch.Tensor]) -> torch.Tensor:
        """The output, as a new tensor."""
        tensor = self.tensor if self.handle is None else unpack(self.handle)
        if self.is_cloned:
            return tensor.clone()
        with shared_version_counters():
            return tensor.detach()  # autograd will give the tensor that it gets a history


def keep(output: torch.Tensor, is_cloned: bool, save: Callable[[torch.Tensor], Handle] | None) -> SavedOutput:
    """Keeps ``output``, or a clone of it: through ``save`` of the engine, or if that is None where it is."""
    saved = SavedOutput(is_cloned)
    kept = output.clone() if is_cloned else output
    with shared_version_counters():
        if save is None:
            saved.tensor = kept.detach()
        else:
            saved.handle = save(kept)
    if not is_cloned:
        saved.watch(output)
    return saved


class Watched:
    """The outputs of one region that were not cloned, by storage."""

    def __init__(self) -> None:
        # The weak reference tells whether it is the same storage: an identity is used again.
        self._saved: dict[int, tuple[weakref.ref[torch.UntypedStorage], SavedOutput]] = {}

    def add(self, output: torch.Tensor, saved: SavedOutput) -> None:
        if output.layout is torch.strided:
            self._saved[storage_id(output)] = weakref.ref(storage_of(output)), saved

    def op_returned(self, outputs: object) -> None:
        """Finds aliases of what is watched among the outputs of an op."""
        if not self._saved:
            return
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if not isinstance(output, torch.Tensor):
                continue
            storage, saved = self._saved.get(storage_id(output), (DEAD, None))
            if storage() is not None and storage() is storage_of(output):
                saved.watch(output)


# Random numbers


def rng_states(devices: Iterable[torch.device]) -> list[tuple[torch.device, torch.Tensor]]:
    """States of the generators of ``devices`` and of the host: even an op of a device may draw its seed there."""
    return [(device, _get_rng_state(device)) for device in {torch.device("cpu"), *devices}]


def set_rng_states(states: Iterable[tuple[torch.device, torch.Tensor]]) -> None:
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _get_rng_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
