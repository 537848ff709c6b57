"""What forward leaves behind for backward: the records that the engine works on.

    Tape      one forward pass of one model part: the regions in the order they ran
    Region    one checkpointed block in that pass
    Handle    one tensor as autograd, or a selective save, holds it: kept on the device, or a view of a Payload
    Payload   one storage that moves: its slot, its events, where it is (`State`)
    Stash     the device tensors whose copy to the host is still under way (`StashEntry`)

Autograd's graph owns the handles. References go one way, handle -> payload -> region -> tape, and all others are weak:
there is no cycle, because TorchTitan switches the garbage collector off.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from titan_offload.pool import Slot
from titan_offload.runtime import Event, Stream
from titan_offload.saved_tensor import View

DEAD = weakref.ref(type("Dead", (), {})())
"""A weak reference to nothing."""


class State(Enum):
    """Where a payload is. A released one is one that no longer exists."""

    ON_DEVICE = auto()  # its copy to the host has not started
    D2H_IN_FLIGHT = auto()  # on the device, in the stash; its slot is being written
    ON_HOST = auto()
    H2D_IN_FLIGHT = auto()  # reload started, not yet used


@dataclass(eq=False)
class ModelPart:
    """The blocks of one model (or pipeline part) in the order they run.

    Attributes:
        fqns: fully qualified names of the blocks: the names of their regions.
        protected_storages: identities of the storages of the parameters and buffers as they are now.
        num_moved: the earliest blocks whose tensors may move. Default: all.
        num_arrived: for each block, how many of the earliest ones must have left the device when it starts, see
            `link_choice.LinkChoice`. None: ``max_inflight_offloads`` holds instead.
    """

    fqns: list[str]
    protected_storages: Callable[[], set[int]]
    num_moved: int = field(init=False)
    num_arrived: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.num_moved = len(self.fqns)


class Tape:
    """One forward pass of one model part."""

    def __init__(self, part: ModelPart, serial: int) -> None:
        self.part = part
        self.serial = serial
        self.protected = part.protected_storages()
        self.last_index = -1
        self.regions: list[weakref.ref[Region]] = []
        self.moved: dict[int, weakref.ref[Payload]] = {}  # by storage identity
        self.prefetched: list[weakref.ref[Payload]] = []
        self.is_started = False


class Region:
    """One checkpointed block in one forward pass."""

    def __init__(self, tape: Tape, index: int) -> None:
        self.tape = tape
        self.index = index
        self.position = len(tape.regions)
        self.inputs: set[int] = set()  # storage identities; only while the block's forward runs
        self.payloads: list[weakref.ref[Payload]] = []

    @property
    def fqn(self) -> str:
        return self.tape.part.fqns[self.index]

    @property
    def place(self) -> tuple[int, int]:
        """Later regions have a larger one: serial number of the tape, index of the block."""
        return self.tape.serial, self.index


class Payload:
    """One storage that moves: whole, or (``is_gathered``) as the dense copy of one view of it."""

    def __init__(
        self,
        region: Region,
        origin: torch.Tensor,
        version: tuple[int, ...],
        is_gathered: bool,
        release: Callable[["Remains"], None],
    ) -> None:
        self.region = region
        self.device = origin.device
        self.version = version
        self.release = release
        self.origin = weakref.ref(origin.untyped_storage())
        self.is_gathered = is_gathered
        self.state = State.ON_DEVICE
        self.slot: Slot | None = None
        self.event: Event = None  # last copy of the slot, in or out
        self.stream: Stream = None  # the compute stream in whose order its device memory is freed
        self.stashed: StashEntry | None = None  # until the device copy is dropped
        self.reload: torch.Tensor | None = None  # from the start of a reload to its first use
        self.is_late = False  # its reload started only when backward had reached its region
        self.reloaded: weakref.ref[torch.UntypedStorage] | None = None

    def move_to(self, state: State, *allowed: State) -> None:
        assert self.state in allowed, f"{self.region.fqn}: {self.state.name} -> {state.name} is not a transition"
        self.state = state

    def alive_storage(self) -> torch.UntypedStorage | None:
        """The device copy that a reload would only repeat, if there is one."""
        if self.stashed is not None:
            return self.stashed.source.untyped_storage()
        return self.reloaded() if self.reloaded is not None else None

    def __del__(self) -> None:
        if self.stashed is not None:
            self.stashed.payload = DEAD  # a weak reference to an object still leads to it while it is finalized
        if self.slot is not None:
            self.release(Remains(self.slot, self.event, self.stream, self.reload))


@dataclass(eq=False, slots=True)
class StashEntry:
    """A device tensor whose copy to the host is under way."""

    payload: "weakref.ref[Payload]"
    source: torch.Tensor
    packed: torch.Tensor  # as autograd saved it: it carries the version counter
    event: Event
    stream: Stream  # the compute stream when it was packed
    place: tuple[int, int]  # of its region


@dataclass(eq=False, slots=True)
class Remains:
    """What a dead payload leaves to be given back in stream order."""

    slot: Slot
    event: Event
    stream: Stream
    reload: torch.Tensor | None


@dataclass(eq=False, slots=True)
class Handle:
    """What is held in place of a saved tensor. Either ``tensor`` (kept) or ``payload`` and ``view`` are set."""

    region: Region
    tensor: torch.Tensor | None = None
    version: tuple[int, ...] = ()
    payload: Payload | None = None
    view: View | None = None
    rebuild: Callable[[torch.Tensor], torch.Tensor] | None = None  # from the local tensor to the DTensor
