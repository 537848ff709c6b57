"""OffloadEngine: takes block inputs, and saved outputs of ops, to pinned host memory and brings them back for backward.

Owns every tensor that moves, and when. Relies on the runtime for the order of streams, on the pool for host memory, and
on `apply` to say which blocks make up a model part.

How it works. While a block's forward runs, saved-tensor hooks are on: `pack` turns what autograd saves into a `Handle`,
`unpack` turns the handle back into the tensor. `save` does the same for the output of an op that recompute will not run
again. The graph is the only owner of a handle, so whatever ends a graph (backward done, loss dropped, forward raised,
branch never run) releases what it held; nothing is ever reset. `tape` has the records that the two sides share.

Order. D2H: the side stream waits for an event of the compute stream at `pack`, and for the slot's last user. The
tensor stays in the stash until the compute stream has waited for the copy's event. H2D: the destination is allocated
on the compute stream; the side stream waits for that and for the D2H; the compute stream waits for the H2D before first
use, or before the memory is dropped unused. With ``schedule = "sync"`` both side streams are the compute stream.

With ``limit = "link"`` each forward is timed on the compute stream. `apply` makes of that which regions go on moving
(`ModelPart.num_moved`) and when each must have left the stash (`ModelPart.num_arrived`).

Price: O(1) host work per tensor; on the device at most ``max_inflight_offloads`` tensors in the stash (with a link
limit, what `link_choice.choose_link_limit` says) and ``prefetch_lookahead`` regions ahead of backward.
"""

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function

from titan_offload.config import GIB, OffloadConfig
from titan_offload.forward_watch import ForwardRecord, ForwardWatch
from titan_offload.pool import PinnedPool
from titan_offload.runtime import Event, Runtime, Stream
from titan_offload.saved_tensor import (
    View,
    as_view,
    check_version,
    flat_bytes,
    gather,
    input_storages,
    is_dense,
    local_tensor,
    num_bytes_of,
    rebuilder,
    storage_id,
    version_of,
)
from titan_offload.stats import OffloadStats, Stay, StepCounter
from titan_offload.tape import DEAD, Handle, ModelPart, Payload, Region, Remains, StashEntry, State, Tape


class OffloadEngine:
    """Moves block inputs of any number of model parts through one pool and one pair of side streams.

    Args:
        config: see `OffloadConfig`.
        runtime: the device.
        pool: host memory; its budget holds for all parts together.

    Attributes:
        watch: times the forwards, until somebody sets it to None; only with ``limit = "link"``.
        max_tapes: largest number of tapes that were alive at once so far.
    """

    def __init__(self, config: OffloadConfig, runtime: Runtime, pool: PinnedPool) -> None:
        self.config = config
        self.runtime = runtime
        self.pool = pool
        self._is_sync = config.schedule == "sync"
        self._lock = threading.Lock()
        self._remains: deque[Remains] = deque()  # of dead payloads, to be given back by whoever holds the lock next
        self._stash: deque[StashEntry] = deque()
        self._current: dict[ModelPart, weakref.ref[Tape]] = {}
        self._tapes: dict[int, weakref.ref[Tape]] = {}  # by serial number, oldest first
        self._num_tapes = 0
        self._first_serial = 0  # of this step
        self._order: list[int] = []  # this step's tapes, numbered from 0, as backward reached them
        self._next_tape: dict[int, int] = {}  # learned from the step before
        self._counter = StepCounter(pool)
        self.watch = ForwardWatch(runtime) if config.limit == "link" else None
        self._watched: ForwardRecord | None = None  # of the block whose forward runs
        self.max_tapes = 0

    # Forward

    @contextlib.contextmanager
    def region(self, part: ModelPart, index: int, inputs: Sequence[object]) -> Iterator[Region | None]:
        """Offloads what autograd saves of ``inputs``, the positional arguments of block ``index``, in the body.

        Yields the region, for `save`; None where an outer checkpoint recomputes the block: what is saved then is used
        at once.
        """
        is_recompute = torch._C._current_graph_task_id() != -1
        if self.config.mode == "none":
            with self._locked():
                region = None if is_recompute else self._open(part, index)
            with self._timed(region, inputs):
                yield region
            return
        if is_recompute:
            # Must still not reach the outer checkpoint, which did not see it in forward either.
            with saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
                yield None
            return
        with self._locked():
            region = self._open(part, index)
            region.inputs = input_storages(inputs) - region.tape.protected
        try:
            with (
                self._timed(region, inputs),
                saved_tensors_hooks(lambda tensor: self.pack(region, tensor), self.unpack),
            ):
                yield region
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
            self.max_tapes = max(self.max_tapes, len(self._tapes))
        region = Region(tape, index)
        tape.last_index = index
        tape.regions.append(weakref.ref(region))
        self._counter.num["regions"] += 1
        self._drop_arrived(region)
        return region

    @contextlib.contextmanager
    def _timed(self, region: Region | None, inputs: Sequence[object]) -> Iterator[None]:
        """Times what is done in the body, the forward of ``region``, as long as there is a `watch`."""
        device = None
        if self.watch is not None and region is not None:
            device = next((x.device for x in inputs if isinstance(x, torch.Tensor) and self.runtime.owns(x)), None)
        if device is None:
            yield
            return
        watch, part = self.watch, region.tape.part
        record = self._watched = watch.start(region.index, self.runtime.compute_stream(device))
        try:
            yield
        finally:
            self._watched = None
        watch.end(part, record, self.runtime.compute_stream(device))

    def pack(self, region: Region, tensor: torch.Tensor) -> Handle:
        """Autograd saves ``tensor`` inside ``region``: moved if it is an input of the block."""
        return self._take(region, tensor, is_input=True)

    def save(self, region: Region, tensor: torch.Tensor) -> Handle:
        """Takes ``tensor``, the output of an op in ``region`` that recompute will ask for instead of running the op."""
        return self._take(region, tensor, is_input=False)

    def _take(self, region: Region, tensor: torch.Tensor, is_input: bool) -> Handle:
        # An alias without history, but with the same version counter: the tensor itself holds the graph, which holds
        # the handle.
        tensor = tensor.detach()
        local = local_tensor(tensor)
        with self._locked():
            self._reap_stash()
            reason = self._why_stay(region, local, is_input)
            payload = None
            if reason is None:
                payload = self._find_moved(region, tensor, local) or self._offload(region, tensor, local)
            if payload is None:
                return self._keep(region, tensor, local, reason or Stay.EXHAUSTED)
            region.payloads.append(weakref.ref(payload))
        view = View(local.dtype, local.size(), local.stride(), local.storage_offset(), payload.is_gathered)
        return Handle(region, payload=payload, view=view, rebuild=rebuilder(tensor))

    def _why_stay(self, region: Region, local: torch.Tensor, is_input: bool) -> Stay | None:
        if not self.runtime.owns(local) or (is_input and storage_id(local) not in region.inputs):
            return Stay.NOT_OURS
        if region.index >= len(region.tape.part.fqns) - self.config.keep_last:
            return Stay.KEEP_LAST
        if region.index >= region.tape.part.num_moved:
            return Stay.LINK
        if not is_dense(local):
            return Stay.LAYOUT
        if local.nbytes == 0 or local.nbytes < self.config.min_offload_bytes:
            return Stay.TOO_SMALL
        return None

    def _keep(self, region: Region, tensor: torch.Tensor, local: torch.Tensor, reason: Stay) -> Handle:
        if reason is Stay.EXHAUSTED:
            self._check_exhausted(region, local.nbytes)
        self._counter.keep(region.fqn, reason, num_bytes_of(local))
        return Handle(region, tensor=tensor, version=version_of(tensor))

    def _check_exhausted(self, region: Region, num_bytes: int) -> None:
        chosen = self.config.budget_bytes
        if chosen is not None and num_bytes > chosen and not self._counter.has_moved:
            raise ValueError(
                f"activation_offload.pinned_budget_gib = {chosen / GIB:.6g} is smaller than one tensor to move: "
                f"{region.fqn} needs {num_bytes / GIB:.6g} GiB; set it to that times the blocks to move, or to 0 for "
                "a share of the host"
            )
        if self.config.on_exhausted == "error":
            raise RuntimeError(
                f"no pinned host memory for the input or a saved output of {region.fqn} ({num_bytes / GIB:.6g} GiB): "
                f'{self.pool.why_full()}, or set activation_offload.on_exhausted = "keep"'
            )

    def _find_moved(self, region: Region, tensor: torch.Tensor, local: torch.Tensor) -> Payload | None:
        """The payload that has this storage already, with the same content."""
        payload = next(_alive([region.tape.moved.get(storage_id(local), DEAD)]), None)
        if payload is None or payload.origin() is not local.untyped_storage():
            return None
        return payload if payload.version == version_of(tensor) else None

    def _offload(self, region: Region, tensor: torch.Tensor, local: torch.Tensor) -> Payload | None:
        """Starts the copy to the host. None: the pool has no room."""
        # A view of a small part of its storage travels alone; otherwise the storage travels and views are rebuilt.
        is_gathered = 2 * local.nbytes < local.untyped_storage().nbytes()
        payload = Payload(region, local, version_of(tensor), is_gathered, self._release)
        source = flat_bytes(gather(local) if payload.is_gathered else local)
        payload.slot = self.pool.allocate(source.numel())
        if payload.slot is None:
            return None
        self._make_room_in_stash(region)
        compute = payload.stream = self.runtime.compute_stream(payload.device)
        payload.move_to(State.D2H_IN_FLIGHT, State.ON_DEVICE)
        d2h = compute if self._is_sync else self.runtime.d2h_stream(payload.device)
        events = (self.runtime.record_event(compute), *payload.slot.events)
        payload.event = self._copy("d2h", region, payload.slot.buffer, source, d2h, events)
        payload.stashed = StashEntry(weakref.ref(payload), source, tensor, payload.event, compute, region.place)
        self._stash.append(payload.stashed)
        if self._is_sync:
            self._drop_oldest()
        if not payload.is_gathered:
            region.tape.moved[storage_id(local)] = weakref.ref(payload)
        self._counter.move("offloads", source.numel())
        if self._watched is not None:
            self._watched.num_bytes += source.numel()
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

    def _drop_arrived(self, region: Region) -> None:
        """Before ``region`` runs, drops what has arrived by then if copies and blocks take the time that they took when
        the link's limit was chosen. The host need not have seen it arrive: it runs ahead of the device."""
        part, serial = region.tape.part, region.tape.serial
        if part.num_arrived is None or not self.config.max_inflight_offloads:
            return
        while self._stash and self._stash[0].place < (serial, part.num_arrived[region.index]):
            self._drop_oldest()

    def _make_room_in_stash(self, region: Region) -> None:
        limit = self.config.max_inflight_offloads if region.tape.part.num_arrived is None else 0
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
            check_version(entry.packed, payload.version)

    def _drop_dead(self) -> None:
        """Drops what has arrived and nobody will ask for; newest first, as backward goes. What has not arrived stays:
        to wait for it here would make backward wait for copies whose tensors it is done with."""
        while self._stash and self._stash[-1].payload() is None and self.runtime.query(self._stash[-1].event):
            self._stash.pop()

    def _wait(self, compute: Stream, event: Event, direction: str) -> None:
        wait = self.runtime.timed_wait(compute, event)
        self._counter.wait(direction, wait)
        if self._watched is not None:
            self._watched.waits.append(wait)

    # Backward

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Backward (or a recompute) asks for a saved tensor; it may do so any number of times."""
        with self._locked():
            self._start_backward(handle.region.tape)
            if handle.payload is None:
                if not handle.region.payloads:  # else its own reload comes first, and starts the next ones
                    self._prefetch(handle.region)
                check_version(handle.tensor, handle.version)
                return handle.tensor
            storage = self._bring_back(handle.region, handle.payload)
        local = as_view(storage, handle.view)
        return local if handle.rebuild is None else handle.rebuild(local)

    def start_recompute(self, region: Region) -> None:
        """Backward is about to run the forward of ``region`` again, which will ask for what was saved."""
        with self._locked():
            self._start_backward(region.tape)
            self._reload_late(region)
            self._prefetch(region)

    def _start_backward(self, tape: Tape) -> None:
        if tape.is_started:
            return
        tape.is_started = True
        if tape.serial >= self._first_serial:
            self._order.append(tape.serial - self._first_serial)
        # Not later: what is in the stash when a region is prefetched must still be there when the region is reached.
        self._reap_stash()

    def _bring_back(self, region: Region, payload: Payload) -> torch.UntypedStorage:
        """The payload's content on the device, ready for the compute stream, for use in ``region``."""
        alive = payload.alive_storage()
        if alive is not None:
            if payload.stashed is not None:
                check_version(payload.stashed.packed, payload.version)
            self._counter.num["resident"] += 1
            self._prefetch(region)
            return alive
        if payload.state is State.H2D_IN_FLIGHT:
            self._counter.num["misses" if payload.is_late else "prefetch_hits"] += 1
        else:
            self._counter.num["misses"] += not self._is_sync
            self._start_reload(payload)
            self._reload_late(region)
        self._prefetch(region)
        return self._end_reload(payload).untyped_storage()

    def _reload_late(self, region: Region) -> None:
        """Starts all reloads of a region that backward has reached already, ahead of those of the next regions."""
        if self._is_sync:
            return
        for payload in _alive(region.payloads):
            if payload.state is State.ON_HOST and payload.alive_storage() is None:
                self._start_reload(payload)
                payload.is_late = True

    def _start_reload(self, payload: Payload) -> None:
        payload.move_to(State.H2D_IN_FLIGHT, State.ON_HOST)
        payload.is_late = False
        compute = payload.stream = self.runtime.compute_stream(payload.device)
        payload.reload = self.runtime.empty(payload.slot.buffer.numel(), payload.device)
        h2d = compute if self._is_sync else self.runtime.h2d_stream(payload.device)
        events = (self.runtime.record_event(compute), payload.event)
        payload.event = self._copy("h2d", payload.region, payload.reload, payload.slot.buffer, h2d, events)
        self._counter.move("reloads", payload.reload.numel())

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
        ahead = [ref for next_region in self._regions_after(region) for ref in next_region.payloads]
        for ref in region.tape.prefetched:
            if ref not in ahead and ref not in region.payloads:
                self._drop_reload(ref())  # backward went another way
        region.tape.prefetched = ahead
        for payload in _alive(ahead):
            if payload.state is State.ON_HOST and payload.alive_storage() is None:
                self._start_reload(payload)

    def _drop_reload(self, payload: Payload | None) -> None:
        if payload is not None and payload.state is State.H2D_IN_FLIGHT:
            self._end_reload(payload)

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
            candidates = [self._tapes.get(self._first_serial + number, DEAD)]
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
            if remains.reload is not None:
                self._wait(remains.stream, remains.event, "h2d")
            self.pool.free(remains.slot, remains.event)
        self._drop_dead()

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
            if self.watch is not None:
                self.watch.step_end(has_backward=bool(self._order))
            self._order = []
            self._first_serial = self._num_tapes
            return self._counter.step_end()


def _alive(refs: Iterable[weakref.ref]) -> Iterator:
    return (target for ref in refs if (target := ref()) is not None)


def _last_regions(tape: Tape, stop: int, num: int) -> list[Region]:
    """At most ``num`` live regions of ``tape`` before position ``stop``, last first."""
    return list(itertools.islice(_alive(tape.regions[i] for i in range(stop - 1, -1, -1)), num))
