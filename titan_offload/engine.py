"""OffloadEngine: takes block inputs, and saved outputs of ops, to pinned host memory and brings them back for backward.

Owns every tensor that moves, and when. Relies on the runtime for the order of streams, on the pool for host memory, and
on `apply` to say which blocks make up a model part.

How it works. While a block's forward runs, or with mode "all" the model's, saved-tensor hooks are on: `pack` turns what
autograd saves into a `Handle`, `unpack` turns the handle back into the tensor. `save` does the same for the output of
an op that recompute will not run again. The graph is the only owner of a handle, so whatever ends a graph (backward
done, loss dropped, forward raised, branch never run) releases what it held; nothing is ever reset. `tape` has the
records that the two sides share, `tape_order` which of them backward takes next.

Order. D2H: the side stream waits for an event of the compute stream at `pack`, and for the slot's last user. The
tensor stays in the stash until the compute stream has waited for the copy's event. H2D: the destination is allocated
on the compute stream; the side stream waits for that and for the D2H; the compute stream waits for the H2D before first
use, or before the memory is dropped unused. With ``schedule = "sync"`` both side streams are the compute stream.

With ``limit = "link"`` each forward is timed on the compute stream. `apply` makes of that which regions go on moving
(`ModelPart.num_moved`) and when each must have left the stash (`ModelPart.num_arrived`).

Price: O(1) host work per tensor; on the device at most ``max_inflight_offloads`` tensors in the stash (regions, where
blocks are not checkpointed; with a link limit, what `link_choice.choose_link_limit` says) and ``prefetch_lookahead``
regions ahead of backward.
"""

import contextlib
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function

from titan_offload.config import GIB, OffloadConfig
from titan_offload.forward_watch import ForwardWatch
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
    is_same_version,
    local_elem,
    local_tensor,
    num_bytes_of,
    rebuilder,
    storage_id,
    version_of,
    view_id,
)
from titan_offload.stash import Stash
from titan_offload.stats import OffloadStats, Stay, StepCounter
from titan_offload.tape import DEAD, STEM, Handle, ModelPart, Payload, Region, Remains, StashEntry, State, living
from titan_offload.tape_order import TapeOrder


class OffloadEngine:
    """Moves block inputs of any number of model parts through one pool and one pair of side streams.

    Args:
        config: see `OffloadConfig`.
        runtime: the device.
        pool: host memory; its budget holds for all parts together.

    Attributes:
        tapes: the forward passes that are alive.
        stash: the device tensors whose copy to the host is under way.
        watch: times the forwards, until somebody sets it to None; only with ``limit = "link"``.
    """

    def __init__(self, config: OffloadConfig, runtime: Runtime, pool: PinnedPool) -> None:
        self.config = config
        self.runtime = runtime
        self.pool = pool
        self._is_sync = config.schedule == "sync"
        self._lock = threading.Lock()
        self._remains: deque[Remains] = deque()  # of dead payloads, to be given back by whoever holds the lock next
        self.tapes = TapeOrder()
        self._counter = StepCounter(pool, config.mode)
        self.stash = Stash(config.max_inflight_offloads, runtime, self._counter)
        self.watch = ForwardWatch(runtime) if config.limit == "link" else None

    # Forward

    @contextlib.contextmanager
    def region(self, part: ModelPart, index: int, inputs: Sequence[object]) -> Iterator[Region | None]:
        """Offloads what autograd saves in the body, the forward of block ``index``: of ``inputs``, its positional
        arguments, where it is checkpointed; else all but parameters and buffers.

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
        is_ours = _is_ours(part, region, inputs)
        with (
            self._timed(region, inputs),
            saved_tensors_hooks(lambda tensor: self.pack(region, tensor, is_ours(tensor)), self.unpack),
        ):
            yield region

    @contextlib.contextmanager
    def around_blocks(self, part: ModelPart) -> Iterator[None]:
        """Offloads what autograd saves outside the blocks in the body, the forward of ``part``."""
        if torch._C._current_graph_task_id() != -1:
            yield
            return
        with self._locked():
            outside = [self._open(part, STEM)]
        is_ours = _is_ours(part, outside[0], ())
        with saved_tensors_hooks(
            lambda tensor: self.pack(self._between(outside), tensor, is_ours(tensor)), self.unpack
        ):
            yield

    def _between(self, outside: list[Region]) -> Region:
        """The region for what is saved outside the blocks now, whose backward comes with that of the block before it.

        Args:
            outside: the stem of the pass; after the last block, what comes then is added.
        """
        tape = outside[0].tape
        num_blocks = len(tape.part.fqns)
        if tape.last_index == num_blocks - 1:
            with self._locked():
                outside.append(self._open(tape.part, num_blocks))
        return outside[-1] if tape.last_index == num_blocks else next(living(reversed(tape.regions)), outside[0])

    def _open(self, part: ModelPart, index: int) -> Region:
        region = self.tapes.open_region(part, index)
        self._counter.num["regions"] += region.is_block
        self.stash.drop_arrived(region)
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
        record = self._counter.watched = watch.start(region.index, self.runtime.compute_stream(device))
        try:
            yield
        finally:
            self._counter.watched = None
        watch.end(part, record, self.runtime.compute_stream(device))

    def save(self, region: Region, tensor: torch.Tensor) -> Handle:
        """Takes ``tensor``, the output of an op in ``region`` that recompute will ask for instead of running the op."""
        return self.pack(region, tensor, is_ours=True)

    def pack(self, region: Region, tensor: torch.Tensor, is_ours: bool) -> Handle:
        """Autograd saves ``tensor``: moved if it ``is_ours`` to move, unless something else speaks against it."""
        # An alias without history, but with the same version counter: the tensor itself holds the graph, which holds
        # the handle.
        tensor = tensor.detach()
        with self._locked():
            self.stash.reap()
            reason = self._why_stay(region, local_elem(tensor)) if is_ours else Stay.NOT_OURS
            payload = None
            if reason is None:
                payload = self._find_moved(region, tensor) or self._offload(region, tensor)
            if payload is None:
                return self._keep(region, tensor, reason or Stay.EXHAUSTED)
            return self._handle(region, tensor, payload)

    def _why_stay(self, region: Region, local: torch.Tensor) -> Stay | None:
        if not self.runtime.owns(local):
            return Stay.NOT_OURS
        if region.index >= len(region.tape.part.fqns):
            return Stay.HEAD
        if region.index >= len(region.tape.part.fqns) - self.config.keep_last:
            return Stay.KEEP_LAST
        if region.index >= region.tape.part.num_moved:
            return Stay.LINK
        if not is_dense(local):
            return Stay.LAYOUT
        if local.nbytes == 0 or local.nbytes < self.config.min_offload_bytes:
            return Stay.TOO_SMALL
        return None

    def _handle(self, region: Region, tensor: torch.Tensor, payload: Payload) -> Handle:
        local = local_elem(tensor)
        view = View(local.dtype, local.size(), local.stride(), local.storage_offset(), payload.is_gathered)
        place = region.payloads.setdefault(weakref.ref(payload), len(region.payloads))
        handle = Handle(region, payload=payload, view=view, rebuild=rebuilder(tensor), place=place)
        payload.handles.setdefault(region.position, []).append(weakref.ref(handle))
        return handle

    def _keep(self, region: Region, tensor: torch.Tensor, reason: Stay) -> Handle:
        if reason is Stay.EXHAUSTED:
            self._check_exhausted(region, num_bytes_of(tensor))
        if reason is not Stay.NOT_OURS and storage_id(tensor) not in region.kept:
            region.kept.add(storage_id(tensor))
            self._counter.keep(region.fqn, reason, num_bytes_of(tensor))
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
                f"no pinned host memory for a tensor of {region.fqn} ({num_bytes / GIB:.6g} GiB): "
                f'{self.pool.why_full()}, or set activation_offload.on_exhausted = "keep"'
            )

    def _find_moved(self, region: Region, tensor: torch.Tensor) -> Payload | None:
        """The payload that has this tensor's storage, or the very same view of it, with the same content."""
        local = local_elem(tensor)
        for payload in living(region.tape.moved.get(key, DEAD) for key in (storage_id(local), view_id(local))):
            if payload.origin() is local.untyped_storage() and is_same_version(payload.version, version_of(tensor)):
                return payload
        return None

    def _offload(self, region: Region, tensor: torch.Tensor) -> Payload | None:
        """Starts the copy to the host. None: the pool has no room."""
        local = local_tensor(tensor)
        # A view of a small part of its storage travels alone; otherwise the storage travels and views are rebuilt.
        is_gathered = 2 * local.nbytes < local.untyped_storage().nbytes()
        payload = Payload(region, local, version_of(tensor), is_gathered, self._release)
        source = flat_bytes(gather(local) if is_gathered else local)
        payload.slot = self.pool.allocate(source.numel())
        if payload.slot is None:
            return None
        self.stash.make_room(region)
        compute = payload.stream = self.runtime.compute_stream(payload.device)
        d2h = compute if self._is_sync else self.runtime.d2h_stream(payload.device)
        with self._settled(d2h):
            events = (self.runtime.record_event(compute), *payload.slot.events)
            payload.event = self._copy("d2h", region, payload.slot.buffer, source, d2h, events)
            payload.stashed = StashEntry(weakref.ref(payload), source, tensor, payload.event, compute, region.place)
            payload.move_to(State.D2H_IN_FLIGHT, State.ON_DEVICE)
            self.stash.add(payload.stashed)
        if self._is_sync:
            self.stash.drop_oldest()
        region.tape.moved[view_id(local) if is_gathered else storage_id(local)] = weakref.ref(payload)
        self._counter.move("offloads", source.numel())
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

    @contextlib.contextmanager
    def _settled(self, stream: Stream) -> Iterator[None]:
        """If the body raises, waits for the copy that it may have given to ``stream``: on the way out its device memory
        is freed, and nobody has its event."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of a device that is lost, and the copy with it
                self.runtime.synchronize(self.runtime.record_event(stream))
            raise

    def _wait(self, compute: Stream, event: Event) -> None:
        """The compute stream waits for a reload."""
        self._counter.wait("h2d", self.runtime.timed_wait(compute, event))

    # Backward

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Backward (or a recompute) asks for a saved tensor; it may do so any number of times."""
        with self._locked():
            self._reach(handle.region)
            if handle.payload is None:
                if not handle.region.payloads:  # else its own reload comes first, and starts the next ones
                    self._prefetch(handle.region)
                check_version(handle.tensor, handle.version)
                return handle.tensor
            storage = self._bring_back(handle.region, handle.payload)
            handle.region.used.setdefault(handle.place)
            self._share(storage, handle)
        local = as_view(storage, handle.view)
        return local if handle.rebuild is None else handle.rebuild(local)

    def start_recompute(self, region: Region) -> None:
        """Backward is about to run the forward of ``region`` again, which will ask for what was saved."""
        with self._locked():
            self._reach(region)
            self._reload_late(region)
            self._prefetch(region)

    def _reach(self, region: Region) -> None:
        """Backward works on ``region``, or a recompute is about to."""
        tape = region.tape
        if not tape.is_started:
            # Not later: what is in the stash when a region is prefetched must be there when the region is reached.
            self.stash.reap()
            self.tapes.start_backward(tape)
        if tape.reached() is not region and not self._is_sync:
            self._plan_reloads(region)

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
            region.tape.bytes_ahead -= payload.reload.numel()
        else:
            self._counter.num["misses"] += not self._is_sync
            self._start_reload(payload)
            self._reload_late(region)
        self._prefetch(region)
        return self._end_reload(payload).untyped_storage()

    def _share(self, storage: torch.UntypedStorage, used: Handle) -> None:
        """Other ops saved what one has just asked for: those of its region, and those of the regions that are reloaded
        ahead, keep it until they are asked, or die. For others it must not stay on the device for so long."""
        nearest = 0 if used.storage is None else 1  # of its own region another one was asked before, and has shared
        used.storage = None
        position = used.region.position
        for near in range(position - self.config.prefetch_lookahead, position - nearest + 1):
            for handle in living(used.payload.handles.get(near, ())):
                if handle is not used:
                    handle.storage = storage

    def _reload_late(self, region: Region) -> None:
        """Starts all reloads of a region that backward has reached already, ahead of those of the next regions."""
        if self._is_sync:
            return
        for ref, place in region.payloads.items():
            payload = ref()
            if payload is not None and place not in region.used and self._is_away(payload):
                self._start_reload(payload)
                payload.is_late = True

    @staticmethod
    def _is_away(payload: Payload) -> bool:
        return payload.state is State.ON_HOST and payload.alive_storage() is None

    def _start_reload(self, payload: Payload) -> None:
        compute = self.runtime.compute_stream(payload.device)
        reload = self.runtime.empty(payload.slot.buffer.numel(), payload.device)
        h2d = compute if self._is_sync else self.runtime.h2d_stream(payload.device)
        with self._settled(h2d):
            events = (self.runtime.record_event(compute), payload.event)
            payload.event = self._copy("h2d", payload.region, reload, payload.slot.buffer, h2d, events)
            payload.stream, payload.reload, payload.is_late = compute, reload, False
            payload.move_to(State.H2D_IN_FLIGHT, State.ON_HOST)
        self._counter.move("reloads", reload.numel())

    def _end_reload(self, payload: Payload) -> torch.Tensor:
        """Hands the reloaded memory over to the compute stream: for its use, or to be dropped."""
        compute = self.runtime.compute_stream(payload.device)
        self._wait(compute, payload.event)
        if compute != payload.stream:
            self.runtime.lend(payload.reload, compute)
        payload.move_to(State.ON_HOST, State.H2D_IN_FLIGHT)
        reload, payload.reload = payload.reload, None
        payload.reloaded = weakref.ref(reload.untyped_storage())  # a strong one would bring the whole peak back
        return reload

    # Prefetch

    def _prefetch(self, region: Region) -> None:
        """Backward works on ``region``: starts the reloads of what comes next."""
        tape = region.tape
        while tape.to_reload:
            payload = tape.to_reload[0]()
            if payload is not None and self._is_away(payload):
                num_bytes = payload.slot.buffer.numel()
                if tape.bytes_ahead and tape.bytes_ahead + num_bytes > tape.max_bytes_ahead:
                    return
                self._start_reload(payload)
                tape.bytes_ahead += num_bytes
            tape.to_reload.popleft()

    def _plan_reloads(self, region: Region) -> None:
        """Backward has come to ``region``: decides what is reloaded from now on, in which order, and how far ahead.

        Of checkpointed blocks all goes at once: it is little. A block that is not has tensors for its whole backward,
        which frees them one by one: the next block's come as these go.
        """
        tape = region.tape
        ahead = self.tapes.regions_after(region, self.config.prefetch_lookahead)
        then = [ref for next_region in ahead for ref in next_region.expected]
        kept = {*region.payloads, *then}
        for ref in tape.reloading:
            if ref not in kept:
                self._drop_reload(ref())  # backward went another way
        tape.reached, tape.reloading, tape.to_reload = weakref.ref(region), then, deque(then)
        tape.bytes_ahead = sum(p.reload.numel() for p in living(kept) if p.state is State.H2D_IN_FLIGHT)
        tape.max_bytes_ahead = math.inf if region.is_checkpointed else sum(p.slot.buffer.numel() for p in living(then))
        region.used = tape.part.use_order[region.index] = {}

    def _drop_reload(self, payload: Payload | None) -> None:
        if payload is not None and payload.state is State.H2D_IN_FLIGHT:
            self._end_reload(payload)

    # Release

    def _release(self, remains: Remains) -> None:
        """A payload died, on whatever thread, perhaps while this very thread holds the lock."""
        self._remains.append(remains)
        self._release_if_free()

    def _release_if_free(self) -> None:
        """Where the runtime fails here, perhaps on the way out of a first error, what is left waits for the next call:
        that has somebody to raise to."""
        with contextlib.suppress(RuntimeError):
            # Not `acquire(blocking=False)`: an interrupt between it and a `try` would leave the lock locked.
            while self._remains and not self._lock.locked():
                with self._lock:
                    self._release_all()

    def _release_all(self) -> None:
        while self._remains:
            remains = self._remains[0]
            if remains.reload is not None:
                self._wait(remains.stream, remains.event)
            self._remains.popleft()
            self.pool.free(remains.slot, remains.event)
        self.stash.drop_dead()

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
            has_backward = self.tapes.step_end()
            if self.watch is not None:
                self.watch.step_end(has_backward)
            return self._counter.step_end()


def _is_ours(part: ModelPart, region: Region, inputs: Sequence[object]) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor that autograd saves in ``region`` is one to move: an input of the block if backward runs it
    again, else all but parameters and buffers, and views of them. FSDP2 gathers those of a module inside a block only
    when the forward of the block has begun already."""
    state = part.state_of(region.index)
    if not region.is_checkpointed:
        return lambda tensor: storage_id(tensor) not in state
    taken = {storage for storage in input_storages(inputs) if storage not in state}
    return lambda tensor: storage_id(tensor) in taken
