"""OffloadEngine: takes the block inputs that autograd saves to pinned host memory and brings them back for backward.

Owns every tensor that moves, and when. Relies on the runtime for the order of streams, on the pool for host memory, and
on `apply` to say which blocks make up a model part.

How it works. While a block's forward runs, saved-tensor hooks are on: `pack` turns what autograd saves into a `Handle`,
`unpack` turns the handle back into the tensor. The graph is the only owner of a handle, so whatever ends a graph
(backward done, loss dropped, forward raised, branch never run) releases what it held; nothing is ever reset.

    Tape      one forward pass of one model part: the regions in the order they ran
    Region    one checkpointed block in that pass
    Handle    one tensor as autograd saved it: kept on the device, or a view of a Payload
    Payload   one storage that moves: its slot, its events, where it is (`State`)
    Stash     the device tensors whose copy to the host is still under way

References go one way, handle -> payload -> region -> tape, and the engine holds weak ones: no cycle, because TorchTitan
switches the garbage collector off.

Order. D2H: the side stream waits for an event of the compute stream at `pack`, and for the slot's last user. The
tensor stays in the stash until the compute stream has waited for the copy's event. H2D: the destination is allocated
on the compute stream; the side stream waits for that and for the D2H; the compute stream waits for the H2D before first
use, or before the memory is dropped unused. With ``schedule = "sync"`` both side streams are the compute stream.

Price: O(1) host work per tensor; on the device at most ``max_inflight_offloads`` tensors in the stash and
``prefetch_lookahead`` regions ahead of backward.
"""

import contextlib
import itertools
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function

from titan_offload.config import GIB, OffloadConfig
from titan_offload.pool import PinnedPool, Slot
from titan_offload.runtime import Event, Runtime, Stream, Wait
from titan_offload.saved_tensor import (
    View,
    as_view,
    check_version,
    flat_bytes,
    gather,
    input_storages,
    is_dense,
    local_tensor,
    rebuilder,
    storage_id,
    version_of,
)

logger = logging.getLogger(__name__)


class State(Enum):
    """Where a payload is. A released one is one that no longer exists."""

    ON_DEVICE = auto()  # its copy to the host has not started
    D2H_IN_FLIGHT = auto()  # on the device, in the stash; its slot is being written
    ON_HOST = auto()
    H2D_IN_FLIGHT = auto()  # reload started, not yet used


class Stay(Enum):
    """Why a tensor stays on the device."""

    NOT_AN_INPUT = "not an input of the block"
    KEEP_LAST = "keep_last"
    TOO_SMALL = "smaller than min_offload_mib"
    LAYOUT = "expanded, overlapping, conjugate, sparse or a tensor subclass"
    EXHAUSTED = "pinned budget exhausted"


@dataclass(frozen=True)
class OffloadStats:
    """What one step did. Bytes are of this rank; times are of the compute stream.

    Attributes:
        num_offloads, offloaded_bytes: storages moved to the host.
        num_reloads, reloaded_bytes: storages moved back. A second backward counts again.
        kept: for each reason, number and bytes of block inputs that stayed on the device.
        num_prefetch_hits: reloads that had been started before backward asked.
        num_misses: reloads that started only when backward asked; not counted with schedule "sync", where all do.
        num_resident: unpacks served from the device: copy to the host not done yet, or reloaded before and still alive.
        h2d_wait_ms: how long backward stood still for reloads.
        d2h_wait_ms: how long forward stood still because of max_inflight_offloads.
        pinned_in_use_bytes, pinned_peak_bytes: slots in use at the end of the step, and at most within it.
        pinned_total_bytes: what the pool's slabs take of the host.
        num_slabs_made: pinned allocations within the step.
    """

    num_offloads: int = 0
    offloaded_bytes: int = 0
    num_reloads: int = 0
    reloaded_bytes: int = 0
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_prefetch_hits: int = 0
    num_misses: int = 0
    num_resident: int = 0
    h2d_wait_ms: float = 0.0
    d2h_wait_ms: float = 0.0
    pinned_in_use_bytes: int = 0
    pinned_peak_bytes: int = 0
    pinned_total_bytes: int = 0
    num_slabs_made: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of block inputs that stayed on the device, for any reason."""
        return sum(num_bytes for _, num_bytes in self.kept.values())


@dataclass(eq=False)
class ModelPart:
    """The blocks of one model (or pipeline part) in the order they run.

    Attributes:
        fqns: fully qualified names of the blocks: the names of their regions.
        protected_storages: identities of the storages of the parameters and buffers as they are now.
    """

    fqns: list[str]
    protected_storages: Callable[[], set[int]]


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


class Payload:
    """One storage that moves: whole, or (``is_gathered``) as the dense copy of one view of it."""

    def __init__(self, engine: "OffloadEngine", region: Region, origin: torch.Tensor, is_gathered: bool) -> None:
        self.engine = engine
        self.region = region
        self.device = origin.device
        self.origin = weakref.ref(origin.untyped_storage())
        self.is_gathered = is_gathered
        self.state = State.ON_DEVICE
        self.slot: Slot | None = None
        self.event: Event = None  # last copy of the slot, in or out
        self.stream: Stream = None  # the compute stream in whose order its device memory is freed
        self.stashed: StashEntry | None = None  # until the device copy is dropped
        self.reload: torch.Tensor | None = None  # from the start of a reload to its first use
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
        if self.slot is not None:
            self.engine._release(Remains(self.slot, self.event, self.stream, self.stashed, self.reload))


@dataclass(eq=False, slots=True)
class StashEntry:
    """A device tensor whose copy to the host is under way."""

    payload: "weakref.ref[Payload]"
    source: torch.Tensor
    packed: torch.Tensor  # as autograd saved it: it carries the version counter
    version: object
    event: Event
    stream: Stream  # the compute stream when it was packed


@dataclass(eq=False, slots=True)
class Remains:
    """What a dead payload leaves to be given back in stream order."""

    slot: Slot
    event: Event
    stream: Stream
    stashed: StashEntry | None
    reload: torch.Tensor | None


@dataclass(eq=False, slots=True)
class Handle:
    """What autograd holds in place of a saved tensor. Either ``tensor`` (kept) or ``payload`` and ``view`` are set."""

    region: Region
    tensor: torch.Tensor | None = None
    version: object = None
    payload: Payload | None = None
    view: View | None = None
    rebuild: Callable[[torch.Tensor], torch.Tensor] | None = None  # from the local tensor to the DTensor


class OffloadEngine:
    """Moves block inputs of any number of model parts through one pool and one pair of side streams.

    Args:
        config: see `OffloadConfig`.
        runtime: the device.
        pool: host memory; its budget holds for all parts together.
    """

    def __init__(self, config: OffloadConfig, runtime: Runtime, pool: PinnedPool) -> None:
        self.config = config
        self.runtime = runtime
        self.pool = pool
        self._is_sync = config.schedule == "sync"
        self._lock = threading.Lock()
        self._remains: deque[Remains] = deque()  # of dead payloads, to be given back by whoever holds the lock next
        self._stash: deque[StashEntry] = deque()
        self._waits: dict[str, list[Wait]] = {"h2d": [], "d2h": []}
        self._current: dict[ModelPart, weakref.ref[Tape]] = {}
        self._tapes: dict[int, weakref.ref[Tape]] = {}  # by serial number, oldest first
        self._num_tapes = 0
        self._first_serial = 0  # of this step
        self._order: list[int] = []  # this step's tapes, numbered from 0, as backward reached them
        self._next_tape: dict[int, int] = {}  # learned from the step before
        self._counts: Counter[str] = Counter()
        self._num_kept: Counter[Stay] = Counter()
        self._kept_bytes: Counter[Stay] = Counter()
        self._exhausted: list[str] = []
        self._has_moved = False
        self._has_warned_of_no_op = False
        self._num_slabs_before = 0

    # Forward

    @contextlib.contextmanager
    def region(self, part: ModelPart, index: int, inputs: Sequence[object]) -> Iterator[None]:
        """Offloads what autograd saves of ``inputs``, the positional arguments of block ``index``, in the body."""
        if torch._C._current_graph_task_id() != -1:
            # An outer checkpoint recomputes this block inside backward: what is saved now is used at once. It must
            # still not reach the outer checkpoint, which did not see it in forward either.
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                yield
            return
        with self._locked():
            region = self._open(part, index)
            region.inputs = input_storages(inputs) - region.tape.protected
        try:
            with saved_tensors_hooks(lambda tensor: self.pack(region, tensor), self.unpack):
                yield
        finally:
            region.inputs = set()

    def _open(self, part: ModelPart, index: int) -> Region:
        current = self._current.get(part)
        tape = current() if current is not None else None
        if tape is None or index <= tape.last_index:
            tape = Tape(part, serial=self._num_tapes)
            self._num_tapes += 1
            self._current[part] = weakref.ref(tape)
            self._tapes = {serial: ref for serial, ref in self._tapes.items() if ref() is not None}
            self._tapes[tape.serial] = weakref.ref(tape)
        region = Region(tape, index)
        tape.last_index = index
        tape.regions.append(weakref.ref(region))
        self._counts["regions"] += 1
        return region

    def pack(self, region: Region, tensor: torch.Tensor) -> Handle:
        """Autograd saves ``tensor`` inside ``region``."""
        local = local_tensor(tensor)
        with self._locked():
            self._reap_stash()
            reason = self._why_stay(region, local)
            payload = None
            if reason is None:
                payload = self._find_moved(region, tensor, local) or self._offload(region, tensor, local)
            if payload is None:
                return self._keep(region, tensor, local, reason or Stay.EXHAUSTED)
        view = View(local.dtype, local.size(), local.stride(), local.storage_offset(), payload.is_gathered)
        return Handle(region, payload=payload, view=view, rebuild=rebuilder(tensor))

    def _why_stay(self, region: Region, local: torch.Tensor) -> Stay | None:
        if not self.runtime.owns(local) or storage_id(local) not in region.inputs:
            return Stay.NOT_AN_INPUT
        if region.index >= len(region.tape.part.fqns) - self.config.keep_last:
            return Stay.KEEP_LAST
        if not is_dense(local):
            return Stay.LAYOUT
        if local.nbytes == 0 or local.nbytes < self.config.min_offload_bytes:
            return Stay.TOO_SMALL
        return None

    def _keep(self, region: Region, tensor: torch.Tensor, local: torch.Tensor, reason: Stay) -> Handle:
        if reason is Stay.EXHAUSTED:
            self._check_exhausted(region, local.nbytes)
            self._exhausted.append(region.fqn)
        if reason is not Stay.NOT_AN_INPUT:
            self._num_kept[reason] += 1
            self._kept_bytes[reason] += local.nbytes
        return Handle(region, tensor=tensor, version=version_of(tensor))

    def _check_exhausted(self, region: Region, num_bytes: int) -> None:
        budget = self.pool.budget_bytes
        if num_bytes > budget and not self._has_moved:
            raise ValueError(
                f"activation_offload.pinned_budget_gib = {budget / GIB:.6g} is smaller than one block input: "
                f"{region.fqn} needs {num_bytes / GIB:.6g} GiB; set it to that times the blocks to move, or to 0 for "
                "no limit"
            )
        if self.config.on_exhausted == "error":
            raise RuntimeError(
                f"no pinned host memory for the input of {region.fqn} ({num_bytes / GIB:.6g} GiB): "
                f"{self.pool.bytes_in_use / GIB:.6g} of {budget / GIB:.6g} GiB are in use; raise "
                'activation_offload.pinned_budget_gib or set activation_offload.on_exhausted = "keep"'
            )

    def _find_moved(self, region: Region, tensor: torch.Tensor, local: torch.Tensor) -> Payload | None:
        """The payload that has this storage already, with the same content."""
        payload = next(_alive([region.tape.moved.get(storage_id(local), _DEAD)]), None)
        if payload is None or payload.origin() is not local.untyped_storage():
            return None
        return payload if payload.version == version_of(tensor) else None

    def _offload(self, region: Region, tensor: torch.Tensor, local: torch.Tensor) -> Payload | None:
        """Starts the copy to the host. None: the pool has no room."""
        # A view of a small part of its storage travels alone; otherwise the storage travels and views are rebuilt.
        payload = Payload(self, region, local, is_gathered=2 * local.nbytes < local.untyped_storage().nbytes())
        payload.version = version_of(tensor)
        source = flat_bytes(gather(local) if payload.is_gathered else local)
        payload.slot = self.pool.allocate(source.numel())
        if payload.slot is None:
            return None
        self._make_room_in_stash()
        compute = payload.stream = self.runtime.compute_stream(payload.device)
        payload.move_to(State.D2H_IN_FLIGHT, State.ON_DEVICE)
        d2h = compute if self._is_sync else self.runtime.d2h_stream(payload.device)
        events = (self.runtime.record_event(compute), *payload.slot.events)
        payload.event = self._copy("d2h", region, payload.slot.buffer, source, d2h, events)
        payload.stashed = StashEntry(weakref.ref(payload), source, tensor, payload.version, payload.event, compute)
        self._stash.append(payload.stashed)
        if self._is_sync:
            self._drop_oldest()
        region.payloads.append(weakref.ref(payload))
        if not payload.is_gathered:
            region.tape.moved[storage_id(local)] = weakref.ref(payload)
        self._has_moved = True
        self._counts["offloads"] += 1
        self._counts["offloaded_bytes"] += source.numel()
        return payload

    def _copy(
        self,
        direction: str,
        region: Region,
        dst: torch.Tensor,
        src: torch.Tensor,
        stream: Stream,
        after: Iterable[Event],
    ) -> Event:
        for event in after:
            self.runtime.wait_event(stream, event)
        with record_function(f"Offload::{direction} ({region.fqn})"):
            self.runtime.copy(dst, src, stream)
        return self.runtime.record_event(stream)

    # Stash

    def _reap_stash(self) -> None:
        """Drops what has arrived on the host already."""
        while self._stash and self.runtime.query(self._stash[0].event):
            self._drop_oldest()

    def _make_room_in_stash(self) -> None:
        limit = self.config.max_inflight_offloads
        while limit and len(self._stash) >= limit:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Ends the device copy of the oldest tensor in the stash, in the order of the compute stream."""
        entry = self._stash.popleft()
        self._wait(entry.stream, entry.event, "d2h")
        payload = entry.payload()
        if payload is not None:
            payload.move_to(State.ON_HOST, State.D2H_IN_FLIGHT)
            payload.stashed = None
            check_version(entry.packed, entry.version)

    def _wait(self, compute: Stream, event: Event, direction: str) -> None:
        self._waits[direction].append(self.runtime.timed_wait(compute, event))

    # Backward

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Backward (or a recompute) asks for a saved tensor; it may do so any number of times."""
        with self._locked():
            self._start_backward(handle.region.tape)
            if handle.payload is None:
                self._prefetch(handle.region)
                check_version(handle.tensor, handle.version)
                return handle.tensor
            storage = self._bring_back(handle.payload)
        local = as_view(storage, handle.view)
        return local if handle.rebuild is None else handle.rebuild(local)

    def _start_backward(self, tape: Tape) -> None:
        if tape.is_started:
            return
        tape.is_started = True
        if tape.serial >= self._first_serial:
            self._order.append(tape.serial - self._first_serial)
        # Not later: what is in the stash when a region is prefetched must still be there when the region is reached.
        self._reap_stash()

    def _bring_back(self, payload: Payload) -> torch.UntypedStorage:
        """The payload's content on the device, ready for the compute stream."""
        alive = payload.alive_storage()
        if alive is not None:
            if payload.stashed is not None:
                check_version(payload.stashed.packed, payload.stashed.version)
            self._counts["resident"] += 1
            self._prefetch(payload.region)
            return alive
        if payload.state is State.H2D_IN_FLIGHT:
            self._counts["prefetch_hits"] += 1
        else:
            self._counts["misses"] += not self._is_sync
            self._start_reload(payload)
        self._prefetch(payload.region)
        return self._end_reload(payload).untyped_storage()

    def _start_reload(self, payload: Payload) -> None:
        payload.move_to(State.H2D_IN_FLIGHT, State.ON_HOST)
        compute = payload.stream = self.runtime.compute_stream(payload.device)
        payload.reload = self.runtime.empty(payload.slot.buffer.numel(), payload.device)
        h2d = compute if self._is_sync else self.runtime.h2d_stream(payload.device)
        events = (self.runtime.record_event(compute), payload.event)
        payload.event = self._copy("h2d", payload.region, payload.reload, payload.slot.buffer, h2d, events)
        self._counts["reloads"] += 1
        self._counts["reloaded_bytes"] += payload.reload.numel()

    def _end_reload(self, payload: Payload) -> torch.Tensor:
        """Hands the reloaded memory over to the compute stream: for its use, or to be dropped."""
        compute = self.runtime.compute_stream(payload.device)
        self._wait(compute, payload.event, "h2d")
        payload.move_to(State.ON_HOST, State.H2D_IN_FLIGHT)
        reload, payload.reload = payload.reload, None
        if compute != payload.stream:
            self.runtime.lend(reload, compute)
        payload.reloaded = weakref.ref(reload.untyped_storage())  # a strong one would bring the whole peak back
        return reload

    # Prefetch

    def _prefetch(self, region: Region) -> None:
        """Backward works on ``region``: starts the reloads of the regions that come next."""
        if self._is_sync:
            return
        next_regions = self._regions_after(region)
        for payload in _alive(region.tape.prefetched):
            if payload.state is State.H2D_IN_FLIGHT and payload.region not in (region, *next_regions):
                self._end_reload(payload)  # backward went another way
        region.tape.prefetched = [ref for next_region in next_regions for ref in next_region.payloads]
        for payload in _alive(region.tape.prefetched):
            if payload.state is State.ON_HOST and payload.alive_storage() is None:
                self._start_reload(payload)

    def _regions_after(self, region: Region) -> list[Region]:
        """The next ``prefetch_lookahead`` regions in backward's order: of this tape, then of the one that follows."""
        found = _last_regions(region.tape, region.position, self.config.prefetch_lookahead)
        if len(found) < self.config.prefetch_lookahead and (tape := self._tape_after(region.tape)) is not None:
            found += _last_regions(tape, len(tape.regions), self.config.prefetch_lookahead - len(found))
        return found

    def _tape_after(self, tape: Tape) -> Tape | None:
        """The tape that backward takes next: as in the step before, else last in, first out."""
        number = self._next_tape.get(tape.serial - self._first_serial)
        if number is not None:
            candidates = [self._tapes.get(self._first_serial + number, _DEAD)]
        else:
            candidates = [ref for serial, ref in reversed(self._tapes.items()) if serial < tape.serial]
        return next((tape for tape in _alive(candidates) if not tape.is_started), None)

    # Release

    def _release(self, remains: Remains) -> None:
        """A payload died, on whatever thread, perhaps while this very thread holds the lock."""
        self._remains.append(remains)
        self._release_if_free()

    def _release_if_free(self) -> None:
        while self._remains and self._lock.acquire(blocking=False):
            try:
                self._release_all()
            finally:
                self._lock.release()

    def _release_all(self) -> None:
        while self._remains:
            remains = self._remains.popleft()
            if remains.stashed is not None:
                self._stash.remove(remains.stashed)
            if remains.stashed is not None or remains.reload is not None:
                self._wait(remains.stream, remains.event, "d2h" if remains.reload is None else "h2d")
            self.pool.free(remains.slot, remains.event)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock. What is released meanwhile waits, and is given back on the way out."""
        try:
            with self._lock:
                self._release_all()
                yield
        finally:
            self._release_if_free()

    # Steps

    def step_end(self) -> OffloadStats:
        """Ends a step: returns what it did, and learns the order in which backward took the tapes."""
        with self._locked():
            if self._order:
                self._next_tape = dict(itertools.pairwise(self._order))
            stats = self._take_stats()
            self._warn(stats)
            self._order = []
            self._first_serial = self._num_tapes
            self._counts.clear()
            self._num_kept.clear()
            self._kept_bytes.clear()
            self._exhausted.clear()
            self._num_slabs_before = self.pool.num_grown
            self.pool.reset_peak()
        return stats

    def _take_stats(self) -> OffloadStats:
        counts = self._counts
        return OffloadStats(
            num_offloads=counts["offloads"],
            offloaded_bytes=counts["offloaded_bytes"],
            num_reloads=counts["reloads"],
            reloaded_bytes=counts["reloaded_bytes"],
            kept={reason.value: (num, self._kept_bytes[reason]) for reason, num in self._num_kept.items()},
            num_prefetch_hits=counts["prefetch_hits"],
            num_misses=counts["misses"],
            num_resident=counts["resident"],
            h2d_wait_ms=self._take_waits("h2d"),
            d2h_wait_ms=self._take_waits("d2h"),
            pinned_in_use_bytes=self.pool.bytes_in_use,
            pinned_peak_bytes=self.pool.peak_bytes_in_use,
            pinned_total_bytes=self.pool.bytes_pinned,
            num_slabs_made=self.pool.num_grown - self._num_slabs_before,
        )

    def _take_waits(self, direction: str) -> float:
        """Milliseconds of the waits that the device has come past; the others are counted with the next step."""
        times = [(wait, wait()) for wait in self._waits[direction]]
        self._waits[direction] = [wait for wait, ms in times if ms is None]
        return sum(ms for _, ms in times if ms is not None)

    def _warn(self, stats: OffloadStats) -> None:
        if self._exhausted:
            num, num_bytes = stats.kept[Stay.EXHAUSTED.value]
            logger.warning(
                f"pinned budget of {self.pool.budget_bytes / GIB:.3f} GiB exhausted: {num} block inputs "
                f"({num_bytes / GIB:.3f} GiB) stayed on the device this step: {', '.join(self._exhausted)}; raise "
                "activation_offload.pinned_budget_gib"
            )
        if not self._has_moved and not self._has_warned_of_no_op:
            self._has_warned_of_no_op = True
            logger.warning(f"activation offload is on, but nothing was moved in the first step: {self._why_no_op()}")

    def _why_no_op(self) -> str:
        if not self._counts["regions"]:
            return "no block ran in training mode with gradients enabled"
        if not self._num_kept:
            return (
                "no block was given, as a positional tensor, an input that needs a gradient (keyword tensors are not "
                "seen by saved-tensor hooks)"
            )
        reasons = (f"{num} x {reason.value}" for reason, num in self._num_kept.items())
        return f"every block input stayed on the device: {', '.join(reasons)}"


_DEAD = weakref.ref(type("Dead", (), {})())
"""A weak reference to nothing: what a look-up returns where there is no entry."""


def _alive(refs: Iterable[weakref.ref]) -> Iterator:
    return (target for ref in refs if (target := ref()) is not None)


def _last_regions(tape: Tape, stop: int, num: int) -> list[Region]:
    """At most ``num`` live regions of ``tape`` before position ``stop``, last first."""
    return list(itertools.islice(_alive(tape.regions[i] for i in range(stop - 1, -1, -1)), num))
