"""What forward leaves behind for backward: the records that the engine works on.

    Tape      one forward pass of one model part: the regions in the order they ran
    Region    one block in that pass, checkpointed or (mode "all") not, and what was saved between it and the next one
    Handle    one tensor as autograd, or a selective save, holds it: kept on the device, or a view of a Payload
    Payload   one storage that moves: its slot, its events, where it is (`State`)
    Stash     the device tensors whose copy to the host is still under way (`StashEntry`)

Autograd's graph owns the handles. References go one way, handle -> payload -> region -> tape, and all others are weak:
there is no cycle, because TorchTitan switches the garbage collector off.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

import torch

from titan_offload.cast_inputs import SharedCasts
from titan_offload.pool import Slot
from titan_offload.runtime import Event, Stream
from titan_offload.saved_tensor import View

T = TypeVar("T")

DEAD = weakref.ref(type("Dead", (), {})())
"""A weak reference to nothing."""


def living(refs: Iterable["weakref.ref[T]"]) -> Iterator[T]:
    """What is still there of what ``refs`` refer to."""
    return (target for ref in refs if (target := ref()) is not None)


STEM = -1
"""Index of the region of what is saved before the first block."""


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
        state_of: of a block, or `STEM`: what contains the identities of the storages of its parameters and buffers, and
            of those outside the blocks, as they are whenever it is asked.
        is_checkpointed: for each block, whether backward runs it again. Default: all.
        num_moved: the earliest blocks whose tensors may move. Default: all.
        num_arrived: for each block, how many of the earliest ones must have left the device when it starts, see
            `link_choice.LinkChoice`. None: ``max_inflight_offloads`` holds instead.
        use_order: for each block, the places of its payloads in the order in which backward last asked for them.
    """

    fqns: list[str]
    state_of: Callable[[int], Container[int | None]]
    is_checkpointed: Sequence[bool] = ()
    num_moved: int = field(init=False)
    num_arrived: Sequence[int] | None = None
    use_order: dict[int, dict[int, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_checkpointed = self.is_checkpointed or [True] * len(self.fqns)
        self.num_moved = len(self.fqns)


class Tape:
    """One forward pass of one model part."""

    def __init__(self, part: ModelPart, serial: int) -> None:
        self.part = part
        self.serial = serial
        self.last_index = STEM - 1
        self.regions: list[weakref.ref[Region]] = []
        self.moved: dict[object, weakref.ref[Payload]] = {}  # by `storage_id`, or `view_id` of one that travels alone
        self.is_started = False
        self.reached: weakref.ref[Region] = DEAD  # that backward works on
        self.to_reload: deque[weakref.ref[Payload]] = deque()  # in the order in which backward will ask for them
        self.reloading: list[weakref.ref[Payload]] = []  # what was in `to_reload` when the region was reached
        self.bytes_ahead = 0  # of reloads that have started and were not asked for yet
        self.max_bytes_ahead = math.inf
        self.casts = SharedCasts()


class Region:
    """One block in one forward pass; or what comes before the first one (index `STEM`) or after the last."""

    def __init__(self, tape: Tape, index: int) -> None:
        self.tape = tape
        self.index = index
        self.position = len(tape.regions)
        self.payloads: dict[weakref.ref[Payload], int] = {}  # and their places, counted from 0
        self.kept: set[int | None] = set()  # storage identities of what stays, each counted once
        self.used: dict[int, None] = {}  # places of payloads, in the order in which backward asks for them

    @property
    def fqn(self) -> str:
        if self.is_block:
            return self.tape.part.fqns[self.index]
        return "before the blocks" if self.index == STEM else "after the blocks"

    @property
    def is_block(self) -> bool:
        return 0 <= self.index < len(self.tape.part.fqns)

    @property
    def is_checkpointed(self) -> bool:
        return self.is_block and self.tape.part.is_checkpointed[self.index]

    @property
    def expected(self) -> list["weakref.ref[Payload]"]:
        """Its payloads in the order in which backward will ask for them: as the last time; until then as a recompute
        does, or the newest first."""
        refs, places = list(self.payloads), range(len(self.payloads))
        learned = self.tape.part.use_order.get(self.index, ())
        order = dict.fromkeys((*learned, *(places if self.is_checkpointed else reversed(places))))
        return [refs[place] for place in order if place in places]

    @property
    def place(self) -> tuple[int, int]:
        """Later regions have a larger one: serial number of the tape, index of the block."""
        return self.tape.serial, self.index


class Payload:
    """One storage that moves: whole, or (``is_gathered``) as the dense copy of one view of it."""

    # Of the class, because `__del__` asks for them, also after an `__init__` that was interrupted.
    slot: Slot | None = None
    stashed: "StashEntry | None" = None  # until the device copy is dropped

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
        self.handles: dict[int, list[weakref.ref[Handle]]] = {}  # by the position of their region
        self.state = State.ON_DEVICE
        self.event: Event = None  # last copy of the slot, in or out
        self.stream: Stream = None  # the compute stream in whose order its device memory is freed
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


@dataclass(eq=False, slots=True, weakref_slot=True)
class Handle:
    """What is held in place of a saved tensor. Either ``tensor`` (kept) or ``payload`` and ``view`` are set."""

    region: Region
    tensor: torch.Tensor | None = None
    version: tuple[int, ...] = ()
    payload: Payload | None = None
    view: View | None = None
    rebuild: Callable[[torch.Tensor], torch.Tensor] | None = None  # from the local tensor to the DTensor
    place: int = 0  # of the payload in the region
    storage: torch.UntypedStorage | None = None  # of the payload on the device, from another handle's use to this one's
