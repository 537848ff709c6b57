"""Breaks the rules of the engine's contract (docs/engine.md) one by one, and shows that a test notices each.

Run by hand: ``python scripts/break_rules.py [WORD]`` (only the rules whose name has WORD in it). Each rule is one
change of text in a copy of the package; the tests named with it must fail there. They pass on an unchanged copy, which
is checked first. Those of the engine are below, the others in `rules`. Prints a table, and one JSON document as the
last line; exits with 1 if any change went unnoticed.
"""

import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
COPIED = ("titan_offload", "tests", "scripts", "launch", "train_configs", ".ci", "pyproject.toml")
TEST_TIMEOUT_S = 20
RULE_TIMEOUT_S = 90
ALL_TIMEOUT_S = 3600  # of the tests of all rules, on an unchanged copy


@dataclass(frozen=True)
class Rule:
    """``old`` occurs once in ``file`` of the package; with ``new`` in its place the rule no longer holds."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    oldest_torch: str = ""


def rule(name: str, place: str, old: str, new: str, *tests: str, **kwargs: str) -> Rule:
    """``place`` is a module, or a file of the package or (with a slash) of the repository by its whole name; tests are
    ``module::name``, without their suffix."""
    nodes = tuple(f"tests/{test.replace('::', '.py::', 1)}" for test in tests)
    if "." not in place:
        place += ".py"
    is_ours = (REPOSITORY / "titan_offload" / place).exists()
    return Rule(name, f"titan_offload/{place}" if is_ours else place, old, new, nodes, **kwargs)


E, A, P, R, D = (
    "test_engine::test_",
    "test_apply::test_",
    "test_pool::test_",
    "test_host_runtime::test_",
    "distributed/test_dtensor::test_",
)
OVERLAP, SYNC = f"{E}exact_order_with_schedule_overlap", f"{E}exact_order_with_schedule_sync"
GRADIENTS = f"{E}gradients_are_bitwise_equal"

ORDER = [
    rule(
        "D2H waits for what compute has done",
        "engine",
        "events = (self.runtime.record_event(compute), *payload.slot.events)",
        "events = payload.slot.events",
        GRADIENTS,
    ),
    rule(
        "D2H waits for the slot's last user",
        "engine",
        "events = (self.runtime.record_event(compute), *payload.slot.events)",
        "events = (self.runtime.record_event(compute),)",
        f"{E}slots_are_reused_in_order_when_backward_and_forward_interleave",
    ),
    rule(
        "H2D waits for what compute has done",
        "engine",
        "events = (self.runtime.record_event(compute), payload.event)",
        "events = (payload.event,)",
        GRADIENTS,
    ),
    rule(
        "H2D waits for the D2H",
        "engine",
        "events = (self.runtime.record_event(compute), payload.event)",
        "events = (self.runtime.record_event(compute),)",
        OVERLAP,
    ),
    rule(
        "H2D waits for what compute did before the destination was allocated",
        "engine",
        "        reload = self.runtime.empty(payload.slot.buffer.numel(), payload.device)\n"
        "        h2d = compute if self._is_sync else self.runtime.h2d_stream(payload.device)\n"
        "        with self._settled(h2d):\n"
        "            events = (self.runtime.record_event(compute), payload.event)\n",
        "        events = (self.runtime.record_event(compute), payload.event)\n"
        "        reload = self.runtime.empty(payload.slot.buffer.numel(), payload.device)\n"
        "        h2d = compute if self._is_sync else self.runtime.h2d_stream(payload.device)\n"
        "        with self._settled(h2d):\n",
        GRADIENTS,
    ),
    rule(
        "compute waits for the H2D before first use",
        "engine",
        "        self._wait(compute, payload.event)\n",
        "",
        GRADIENTS,
    ),
    rule(
        "compute waits for the D2H before the stash entry is dropped",
        "stash",
        '        self._counter.wait("d2h", self._runtime.timed_wait(entry.stream, entry.event))\n',
        "",
        GRADIENTS,
    ),
    rule(
        "compute waits for the H2D before what a dead payload reloaded is dropped unused",
        "engine",
        "                self._wait(remains.stream, remains.event)",
        "                pass",
        f"{E}graph_dropped_while_a_reload_is_under_way",
    ),
    rule(
        "a slot is freed with its last copy's event",
        "engine",
        "self.pool.free(remains.slot, remains.event)",
        "self.pool.free(remains.slot, None)",
        OVERLAP,
    ),
    rule(
        "the compute stream is asked for anew at each pack",
        "engine",
        "        compute = payload.stream = self.runtime.compute_stream(payload.device)\n",
        '        if not hasattr(self, "compute"):\n'
        "            self.compute = self.runtime.compute_stream(payload.device)\n"
        "        compute = payload.stream = self.compute\n",
        OVERLAP,
    ),
    rule(
        "the compute stream is asked for anew at each unpack",
        "engine",
        "        compute = self.runtime.compute_stream(payload.device)\n        self._wait(compute, payload.event)",
        "        compute = payload.stream\n        self._wait(compute, payload.event)",
        OVERLAP,
        f"{E}backward_on_another_compute_stream_lends_the_memory",
    ),
    rule(
        "memory used on another compute stream than its own is lent to it",
        "engine",
        "            self.runtime.lend(payload.reload, compute)",
        "            pass",
        f"{E}backward_on_another_compute_stream_lends_the_memory",
    ),
    rule(
        "schedule sync: D2H on the compute stream",
        "engine",
        "d2h = compute if self._is_sync else self.runtime.d2h_stream(payload.device)",
        "d2h = self.runtime.d2h_stream(payload.device)",
        SYNC,
    ),
    rule(
        "schedule sync: H2D on the compute stream",
        "engine",
        "h2d = compute if self._is_sync else self.runtime.h2d_stream(payload.device)",
        "h2d = self.runtime.h2d_stream(payload.device)",
        SYNC,
    ),
    rule(
        "schedule sync: nothing waits in the stash",
        "engine",
        "        if self._is_sync:\n            self.stash.drop_oldest()\n",
        "",
        SYNC,
    ),
    rule(
        "schedule sync: nothing is prefetched",
        "engine",
        "if tape.reached() is not region and not self._is_sync:",
        "if tape.reached() is not region:",
        SYNC,
    ),
]

DEVICE_MEMORY = [
    rule(
        "a reloaded tensor is cached weakly",
        "engine",
        "payload.reloaded = weakref.ref(reload.untyped_storage())",
        "payload.reloaded = lambda storage=reload.untyped_storage(): storage",
        f"{E}reloaded_tensors_are_not_held",
    ),
    rule(
        "a reloaded tensor that is alive is used again",
        "tape",
        "        return self.reloaded() if self.reloaded is not None else None",
        "        return None",
        f"{E}prefetch_does_not_repeat_what_is_alive",
    ),
    rule(
        "a tensor in the stash is used as it is",
        "tape",
        "        if self.stashed is not None:\n            return self.stashed.source.untyped_storage()\n",
        "",
        OVERLAP,
    ),
    rule(
        "at most max_inflight_offloads in the stash",
        "stash",
        "while len(self._entries) >= limit:",
        "while False:",
        f"{E}stash_is_bounded_at_every_moment",
    ),
    rule(
        "the oldest leaves the stash before one more copy starts",
        "stash",
        "while len(self._entries) >= limit:",
        "while len(self._entries) > limit:",
        f"{E}stash_is_bounded_at_every_moment",
    ),
    rule(
        "what has arrived leaves the device at the next pack",
        "engine",
        "        with self._locked():\n            self.stash.reap()\n",
        "        with self._locked():\n",
        f"{E}what_has_arrived_leaves_the_device_at_the_next_pack",
    ),
    rule(
        "the stash is looked through when backward starts, not later",
        "engine",
        "            # Not later: what is in the stash when a region is prefetched must be there when the region is "
        "reached.\n            self.stash.reap()\n",
        "",
        f"{E}exact_counts",
    ),
    rule(
        "keep_last counts from the end",
        "engine",
        "region.index >= len(region.tape.part.fqns) - self.config.keep_last",
        "region.index > len(region.tape.part.fqns) - self.config.keep_last",
        f"{E}exact_counts",
    ),
    rule(
        "prefetched memory is given back where backward goes another way",
        "engine",
        "                self._drop_reload(ref())  # backward went another way",
        "                pass",
        f"{E}backward_that_goes_another_way_gives_prefetched_memory_back",
    ),
]

OWNERSHIP = [
    rule(
        "a payload that dies gives its slot back",
        "tape",
        "        if self.slot is not None:\n            self.release(",
        "        if False:\n            self.release(",
        f"{E}dropped_graph_releases_everything",
    ),
    rule(
        "the slot lives until the handle dies, not until the first unpack",
        "engine",
        "        return reload\n\n    # Prefetch",
        "        self.pool.free(payload.slot, payload.event)\n        payload.slot = None\n        return reload\n\n"
        "    # Prefetch",
        f"{E}retained_graph_and_second_backward",
    ),
    rule(
        "what is dead leaves the stash once its copy has ended",
        "engine",
        "        self.stash.drop_dead()\n",
        "",
        f"{E}dropped_graph_releases_everything",
    ),
    rule(
        "what is dead is known to be so at once",
        "tape",
        "            self.stashed.payload = DEAD",
        "            pass",
        f"{E}dropped_graph_leaves_nothing_in_the_stash_if_its_copies_have_ended",
    ),
    rule(
        "what is dead stays in the stash until its copy has ended",
        "stash",
        "while self._entries and self._entries[-1].payload() is None and self._runtime.query(self._entries[-1].event):",
        "while self._entries and self._entries[-1].payload() is None:",
        f"{E}what_is_dead_stays_in_the_stash_until_its_copy_has_ended",
    ),
    rule(
        "what is packed has no history: a handle holds no graph",
        "engine",
        "        tensor = tensor.detach()\n",
        "",
        f"{E}saved_outputs_do_not_keep_their_own_graph_alive",
    ),
    rule(
        "what is packed in a recompute has no history",
        "engine",
        "with saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):",
        "with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):",
        f"{E}saved_outputs_of_a_recompute_do_not_keep_their_own_graph_alive",
    ),
    rule(
        "the stash holds payloads weakly",
        "engine",
        "StashEntry(weakref.ref(payload), ",
        "StashEntry(lambda: payload, ",
        f"{E}dropped_graph_releases_everything",
    ),
    rule(
        "a region holds payloads weakly",
        "engine",
        "region.payloads.setdefault(weakref.ref(payload), len(region.payloads))",
        "region.payloads.setdefault(lambda: payload, len(region.payloads))",
        f"{E}dropped_graph_releases_everything",
    ),
    rule(
        "a tape holds payloads weakly",
        "engine",
        "region.tape.moved[view_id(local) if is_gathered else storage_id(local)] = weakref.ref(payload)",
        "region.tape.moved[view_id(local) if is_gathered else storage_id(local)] = lambda: payload",
        f"{E}dropped_graph_releases_everything",
    ),
    rule(
        "a tape holds regions weakly",
        "tape_order",
        "tape.regions.append(weakref.ref(region))",
        "tape.regions.append(lambda: region)",
        f"{E}300_steps_leave_nothing_behind",
    ),
    rule(
        "tapes are held weakly",
        "tape_order",
        "self._tapes[tape.serial] = weakref.ref(tape)",
        "self._tapes[tape.serial] = lambda: tape",
        f"{E}300_steps_leave_nothing_behind",
    ),
    rule(
        "a release never waits for the lock",
        "engine",
        "while self._remains and not self._lock.locked():",
        "while self._remains:",
        f"{E}release_from_another_thread_while_the_lock_is_held",
    ),
    rule(
        "what is released while the lock is held is given back on the way out",
        "engine",
        "        finally:\n            self._release_if_free()\n",
        "        finally:\n            pass\n",
        f"{E}release_from_another_thread_while_the_lock_is_held",
    ),
    rule(
        "hooks are popped by `with`: a forward that raises leaves none",
        "engine",
        "        with (\n            self._timed(region, inputs),\n"
        "            saved_tensors_hooks(lambda tensor: self.pack(region, tensor, is_ours(tensor)), self.unpack),\n"
        "        ):\n            yield region\n",
        "        hooks = saved_tensors_hooks(lambda tensor: self.pack(region, tensor, is_ours(tensor)), self.unpack)\n"
        "        hooks.__enter__()\n        yield region\n        hooks.__exit__()\n",
        f"{E}forward_that_raises_releases_everything_and_leaves_no_hook",
    ),
    rule(
        "each forward pass has a tape of its own",
        "tape_order",
        "if tape is None or index <= tape.last_index:",
        "if tape is None:",
        f"{E}next_tape_is_learned_from_the_step_before",
    ),
    rule(
        "no trace of a forward under no_grad",
        "module_hooks",
        "if self.engine is None or not torch.is_grad_enabled() or not module.training:",
        "if self.engine is None or not module.training:",
        f"{E}forwards_without_backward_leave_no_trace[no_grad]",
    ),
    rule(
        "no trace of a forward in eval",
        "module_hooks",
        "if self.engine is None or not torch.is_grad_enabled() or not module.training:",
        "if self.engine is None or not torch.is_grad_enabled():",
        f"{E}forwards_without_backward_leave_no_trace[eval]",
    ),
    rule(
        "a recompute by an outer checkpoint moves nothing again",
        "engine",
        "is_recompute = torch._C._current_graph_task_id() != -1",
        "is_recompute = False",
        f"{E}recompute_by_an_outer_checkpoint_does_not_offload_again",
    ),
]

WHAT_MOVES = [
    rule(
        "content: the version counter when the stash entry is dropped",
        "stash",
        "if payload is not None and version_of(entry.packed) == payload.version:",
        "if payload is not None:",
        f"{E}in_place_change_of_a_packed_input_raises_as_autograd_would",
    ),
    rule(
        "content: the version counter when unpack takes from the stash",
        "engine",
        "                check_version(payload.stashed.packed, payload.version)\n",
        "                pass\n",
        f"{E}in_place_change_of_a_packed_input_raises_as_autograd_would",
    ),
    rule(
        "content: the version counter of what stayed on the device",
        "engine",
        "                check_version(handle.tensor, handle.version)\n",
        "",
        f"{E}in_place_change_of_a_packed_input_raises_as_autograd_would",
    ),
    rule(
        "content: a DTensor's own version counter",
        "saved_tensor",
        "tensors = (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,)",
        "tensors = (tensor._local_tensor,) if isinstance(tensor, DTensor) else (tensor,)",
        f"{D}in_place_change_of_a_packed_dtensor_raises",
    ),
    rule(
        "a storage that moved is found by identity, which cannot be recycled",
        "engine",
        "payload.origin() is local.untyped_storage() and is_same_version(payload.version, version_of(tensor)):",
        "is_same_version(payload.version, version_of(tensor)):",
        f"{E}recycled_storage_identity_is_another_payload",
    ),
    rule(
        "a storage that moved is found with the content it had",
        "engine",
        "payload.origin() is local.untyped_storage() and is_same_version(payload.version, version_of(tensor)):",
        "payload.origin() is local.untyped_storage():",
        f"{E}a_moved_storage_whose_content_changed_is_another_payload",
    ),
    rule(
        "a storage that several inputs share moves once",
        "engine",
        "payload = self._find_moved(region, tensor) or self._offload(region, tensor)",
        "payload = self._offload(region, tensor)",
        f"{E}inputs_that_share_storage_move_once",
    ),
    rule(
        "parameters, buffers and their views stay",
        "engine",
        "taken = {storage for storage in input_storages(inputs) if storage not in state}",
        "taken = input_storages(inputs)",
        f"{E}parameters_and_buffers_never_move",
    ),
    rule(
        "only a block's inputs move",
        "engine",
        "return lambda tensor: storage_id(tensor) in taken",
        "return lambda tensor: True",
        f"{E}exact_counts",
        f"{E}what_needs_no_gradient_stays",
    ),
    rule(
        "what lives elsewhere stays",
        "engine",
        "        if not self.runtime.owns(local):\n            return Stay.NOT_OURS\n",
        "",
        f"{E}what_lives_elsewhere_stays",
    ),
    rule(
        "what needs no gradient stays",
        "saved_tensor",
        "chosen = [tensor for tensor in tensors if tensor.requires_grad]",
        "chosen = tensors",
        f"{E}what_needs_no_gradient_stays",
    ),
    rule(
        "if nothing needs a gradient, what feeds one moves",
        "saved_tensor",
        "    chosen = chosen or [tensor for tensor in tensors if tensor.is_floating_point()]\n",
        "",
        f"{E}frozen_embedding_still_moves_block_inputs",
    ),
    rule(
        "expanded and overlapping tensors stay",
        "engine",
        "        if not is_dense(local):\n            return Stay.LAYOUT\n",
        "",
        f"{E}kinds_of_views",
    ),
    rule(
        "tensors below min_offload_mib stay",
        "engine",
        "if local.nbytes == 0 or local.nbytes < self.config.min_offload_bytes:",
        "if local.nbytes == 0:",
        f"{E}small_tensors_stay_and_a_run_that_moves_nothing_says_so",
    ),
    rule(
        "a view of little of its storage travels alone",
        "engine",
        "is_gathered = 2 * local.nbytes < local.untyped_storage().nbytes()",
        "is_gathered = False",
        f"{E}kinds_of_views",
    ),
    rule(
        "a view comes back at its offset",
        "saved_tensor",
        "return tensor.set_(storage, view.offset, view.size, view.stride)",
        "return tensor.set_(storage, 0, view.size, view.stride)",
        f"{E}kinds_of_views",
    ),
    rule(
        "a gathered view comes back with its strides",
        "saved_tensor",
        "    return spread.copy_(tensor.set_(storage).view(view.size))",
        "    return tensor.set_(storage).view(view.size)",
        f"{E}kinds_of_views",
    ),
    rule(
        "a pending collective is waited for first",
        "saved_tensor",
        "return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor",
        "return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor",
        f"{D}pending_collective_is_waited_for_before_the_copy",
    ),
    rule(
        "a hidden state given by keyword moves",
        "module_hooks",
        "        args, kwargs = self._make_inputs_positional(self._module(), args, kwargs)\n",
        "",
        f"{E}hidden_state_by_keyword_moves_too",
    ),
    rule(
        "outer hooks do not see the block inputs of a recompute",
        "engine",
        "            with saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):\n"
        "                yield None\n            return\n",
        "            yield None\n            return\n",
        f"{E}recompute_by_an_outer_checkpoint_does_not_offload_again",
    ),
]

PREFETCH = [
    rule(
        "unpack prefetches what comes next",
        "engine",
        "        while tape.to_reload:\n",
        "        while False:\n",
        f"{E}exact_counts",
    ),
    rule(
        "unpack prefetches from where backward is, not from where the payload was packed",
        "engine",
        "storage = self._bring_back(handle.region, handle.payload)",
        "storage = self._bring_back(handle.payload.region, handle.payload)",
        f"{E}a_miss_of_what_blocks_share_reloads_what_its_own_block_needs",
    ),
    rule(
        "prefetch_lookahead regions ahead",
        "tape_order",
        "found = _last_regions(region.tape, region.position, num)",
        "found = _last_regions(region.tape, region.position, min(1, num))",
        f"{E}lookahead_is_the_number_of_regions_reloaded_ahead",
    ),
    rule(
        "what is alive is not reloaded ahead",
        "engine",
        "return payload.state is State.ON_HOST and payload.alive_storage() is None",
        "return payload.state is State.ON_HOST",
        f"{E}prefetch_does_not_repeat_what_is_alive",
    ),
    rule(
        "what stayed on the device prefetches too",
        "engine",
        "                    self._prefetch(handle.region)\n",
        "                    pass\n",
        f"{E}exact_counts",
    ),
    rule(
        "a region's own reload starts before those of the next",
        "engine",
        "                if not handle.region.payloads:",
        "                if True:",
        f"{E}a_regions_own_reload_starts_before_those_of_the_next",
    ),
    rule(
        "a tape's first region starts the next tape's last",
        "tape_order",
        "and (tape := self._tape_after(region.tape)) is not None:",
        "and (tape := None) is not None:",
        f"{E}last_in_first_out_until_an_order_is_known",
    ),
    rule(
        "the order of tapes is learned from the step before",
        "tape_order",
        "self._next_tape = dict(itertools.pairwise(self._order))",
        "self._next_tape = {}",
        f"{E}next_tape_is_learned_from_the_step_before",
    ),
    rule(
        "last in, first out until an order is known",
        "tape_order",
        "candidates = [ref for serial, ref in reversed(self._tapes.items()) if serial < tape.serial]",
        "candidates = []",
        f"{E}last_in_first_out_until_an_order_is_known",
    ),
    rule(
        "tapes are numbered within their step",
        "tape_order",
        "        self._first_serial = self.num_opened\n",
        "",
        f"{E}next_tape_is_learned_from_the_step_before",
    ),
]

REPORTS = [
    rule(
        "exhausted, error: the step stops",
        "engine",
        'if self.config.on_exhausted == "error":',
        "if False:",
        f"{E}exhausted_pool_raises_if_asked_to",
    ),
    rule(
        "exhausted, keep: reported once per step",
        "stats",
        "        if self._exhausted and not has_said_why:\n",
        "        if False:\n",
        f"{E}exhausted_pool_keeps_the_rest_on_the_device",
    ),
    rule(
        "a budget below one block input stops at once",
        "engine",
        "if chosen is not None and num_bytes > chosen and not self._counter.has_moved:",
        "if False:",
        f"{E}budget_smaller_than_one_block_input_stops_at_once",
    ),
    rule(
        "a run that moves nothing says so",
        "stats",
        "if not self.has_moved and not self._has_warned_of_no_op and not has_said_why:",
        "if False:",
        f"{E}small_tensors_stay_and_a_run_that_moves_nothing_says_so",
    ),
    rule(
        "waits are measured",
        "stats",
        "return sum(ms for _, ms in times if ms is not None)",
        "return 0.0",
        f"{E}waits_are_measured",
    ),
    rule(
        "copies have labels for profilers",
        "engine",
        'with record_function(f"Offload::{direction} ({region.fqn})"):',
        "with contextlib.nullcontext():",
        f"{E}profiler_labels",
    ),
]

HOOKS = [
    rule(
        "a copy of the model runs its own weights",
        "module_hooks",
        "    def __deepcopy__(self, memo: dict)",
        "    def __other__(self, memo: dict)",
        f"{A}a_copy_trains_its_own_weights_and_is_not_under_offload",
    ),
    rule(
        "globs do not cross segments",
        "blocks",
        "return len(segments) == len(globs) and all(map(fnmatchcase, segments, globs))",
        "return fnmatchcase(fqn, pattern)",
        f"{A}wildcards_do_not_cross_segments",
    ),
    rule(
        "remove takes the hooks away",
        "module_hooks",
        "        self.module.__dict__.pop(self.entry, None)\n",
        "",
        f"{A}remove_leaves_nothing_behind",
    ),
    rule(
        "remove gives pinned memory back",
        "apply",
        "        self.engine.pool.retire()\n",
        "",
        f"{A}remove_leaves_nothing_behind",
    ),
    rule(
        "pinned memory in use at remove goes back with the last graph",
        "pool",
        "        if self._is_retired:\n",
        "        if False:\n",
        f"{A}pinned_memory_goes_back_once_the_last_graph_is_gone_after_remove",
    ),
    rule(
        "offload twice is refused",
        "apply",
        "if isinstance(called, HookedForward) and called.engine is not None:",
        "if False:",
        f"{A}applying_twice_is_refused_and_again_after_remove_is_fine",
    ),
    rule(
        "reentrant checkpoints are refused",
        "apply",
        'if getattr(wrapper.checkpoint_fn, "keywords", {}).get("use_reentrant"):',
        "if False:",
        f"{A}what_is_refused_leaves_the_model_as_it_was",
    ),
    rule(
        "blocks that are not checkpointed are left alone",
        "blocks",
        "    return wrapper if isinstance(wrapper, CheckpointWrapper) else None\n",
        "    return wrapper\n",
        f"{A}only_the_checkpointed_blocks_are_taken",
        f"{A}what_is_refused_leaves_the_model_as_it_was",
    ),
    rule(
        "saved-tensor hooks and selective saves are kept apart",
        "module_hooks",
        "wrapper.checkpoint_fn = functools.partial(wrapper.checkpoint_fn, respect_saved_tensors_hooks=False)",
        "pass",
        f"{A}selective_checkpoint_moves_exactly_the_block_inputs",
        oldest_torch="2.14",
    ),
]

POOL = [
    rule(
        "pool: a slot carries the event of its last user",
        "pool",
        "            extent.events = (self._runtime.scrub(slot.buffer, event),)\n",
        "            self._runtime.scrub(slot.buffer, event)\n",
        f"{P}a_slot_carries_the_event_of_its_last_user",
    ),
    rule(
        "pool: pieces carry the events of the whole",
        "pool",
        "rest = Extent(extent.slab, extent.start + size, extent.size - size, extent.events)",
        "rest = Extent(extent.slab, extent.start + size, extent.size - size)",
        f"{P}pieces_of_a_slot_carry_its_event",
    ),
    rule(
        "pool: a joined slab carries the events of its pieces",
        "pool",
        "extents = [Extent(slab, start, size, events) for start",
        "extents = [Extent(slab, start, size) for start",
        f"{P}a_joined_slab_carries_the_events_of_its_pieces_that_are_not_done",
    ),
    rule(
        "pool: a slab goes back after its copies",
        "pool",
        "            self._runtime.synchronize(event)\n",
        "            pass\n",
        f"{P}a_slab_is_given_back_only_after_its_copies_are_done",
    ),
    rule(
        "pool: growth stays within the budget",
        "pool",
        "return self.budget_bytes is None or needed <= self.budget_bytes",
        "return True",
        f"{P}growth_is_bounded_by_the_budget_when_shapes_vary",
    ),
    rule(
        "pool: what is idle and too small goes back before growth",
        "pool",
        "while idle and (released < size or not self._has_room(size)):",
        "while idle and not self._has_room(size):",
        f"{P}growing_shapes_cost_the_largest_not_the_sum",
    ),
    rule(
        "pool: nothing is released in vain",
        "pool",
        "if self.refusal is not None or not self._has_room(size, freed=sum(slab.pinned_bytes for slab in idle)):",
        "if self.refusal is not None:",
        f"{P}too_large_for_the_budget_gives_none_and_releases_nothing",
        f"{P}any_sequence_of_allocate_and_free",
    ),
    rule(
        "pool: extents are joined only when nothing fits",
        "pool",
        "        extent = self._take(size)\n        if extent is None and self._join_free_slab(size):\n"
        "            extent = self._take(size)\n",
        "        self._join_free_slab(size)\n        extent = self._take(size)\n",
        f"{P}constant_shapes_allocate_nothing_after_the_first_step",
    ),
    rule(
        "pool: at most 1/64 is made ahead",
        "pool",
        "self.bytes_pinned // 64 // size",
        "self.bytes_pinned // 8 // size",
        f"{P}block_inputs_of_80_mib_pin_at_most_2_percent_more_than_is_in_use",
    ),
    rule(
        "pool: the number of slabs grows with the logarithm",
        "pool",
        "num = spare if spare > 1 and self._has_room(spare * size) else 1",
        "num = 1",
        f"{P}many_small_slots_make_few_slabs",
    ),
]

RUNTIME = [
    rule(
        "runtime: the current stream is not entered again",
        "runtime",
        "on_stream = contextlib.nullcontext() if stream == self.compute_stream(device) else stream",
        "on_stream = stream",
        f"{R}copy_does_not_enter_the_stream_that_is_current",
    ),
    rule(
        "runtime: what is done is waited for all the same",
        "runtime",
        "            stream.wait_event(event)\n            return lambda: 0.0\n",
        "            return lambda: 0.0\n",
        f"{R}accelerator_timed_wait_for_what_is_done_takes_no_events",
    ),
]

OTHERS = [
    rule(f"{path.stem}: {name}", *rest)
    for path in sorted((Path(__file__).parent / "rules").glob("[!_]*.py"))
    for name, *rest in importlib.import_module(f"rules.{path.stem}").RULES
]
"""Those of a file are named after it."""

RULES = ORDER + DEVICE_MEMORY + OWNERSHIP + WHAT_MOVES + PREFETCH + REPORTS + HOOKS + POOL + RUNTIME + OTHERS


def copy_repository(folder: Path) -> None:
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def break_rule(folder: Path, broken: Rule) -> None:
    path = folder / broken.file
    text = path.read_text()
    assert text.count(broken.old) == 1
    path.write_text(text.replace(broken.old, broken.new))


def stale(rules: list[Rule]) -> list[str]:
    """Rules whose text is no longer in the package, or not only once."""
    counts = [(REPOSITORY / broken.file).read_text().count(broken.old) for broken in rules]
    return [
        f"{broken.name}: this text occurs {count} times in {broken.file}:\n{broken.old}"
        for broken, count in zip(rules, counts, strict=True)
        if count != 1
    ]


def _run_pytest(folder: Path, tests: tuple[str, ...]) -> None:
    """In a process of its own: imports the package that lies in ``folder``."""
    os.chdir(folder)
    with (folder / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
        code = pytest.main([*options, *tests])
        output.flush()
    os._exit(int(code))


def run_tests(folder: Path, tests: tuple[str, ...], timeout_s: float = RULE_TIMEOUT_S) -> tuple[int | None, str]:
    """Pytest's exit code (None: it hung and was killed), and the first test that failed or the last line."""
    # A fork has torch loaded already: a second for each rule instead of five.
    process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=(folder, tests))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        return None, "killed: it hung"
    output = (folder / "output.txt").read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return process.exitcode, failed[0].rsplit("::", 1)[-1] if failed else output.strip().rsplit("\n", 1)[-1]


def check(broken: Rule | None, tests: tuple[str, ...]) -> tuple[int | None, str]:
    with tempfile.TemporaryDirectory(prefix="break_rules_") as name:
        folder = Path(name)
        copy_repository(folder)
        if broken is not None:
            break_rule(folder, broken)
        return run_tests(folder, tests, RULE_TIMEOUT_S if broken is not None else ALL_TIMEOUT_S)


def preload() -> None:
    """What the tests import, so that each fork has it."""
    import hypothesis  # noqa: F401
    import torch._dynamo
    import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor
    import torch.profiler

    torch.set_num_threads(1)
    assert "titan_offload" not in sys.modules


def is_for_this_torch(broken: Rule) -> bool:
    def parse(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)[:2]]

    return not broken.oldest_torch or parse(torch.__version__) >= parse(broken.oldest_torch)


def commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "none"


def main() -> int:
    rules = [broken for broken in RULES if not sys.argv[1:] or sys.argv[1] in broken.name]
    if texts := stale(rules):
        print("\n".join(texts))
        return 1
    preload()
    all_tests = tuple(sorted({test for broken in rules for test in broken.tests}))
    code, last = check(None, all_tests)
    if code != 0:
        print(f"the tests do not pass on an unchanged copy: {last}")
        return 1
    results = {}
    for broken in rules:
        if not is_for_this_torch(broken):
            print(f"-           {broken.name}: torch >= {broken.oldest_torch} only", flush=True)
            continue
        start = time.perf_counter()
        code, test = check(broken, broken.tests)
        is_caught = code in (None, pytest.ExitCode.TESTS_FAILED)
        seconds = time.perf_counter() - start
        print(f"{'caught' if is_caught else 'NOT CAUGHT':<11} {broken.name}: {test} ({seconds:.1f} s)", flush=True)
        results[broken.name] = {"is_caught": is_caught, "test": test, "seconds": round(seconds, 1)}
    num_caught = sum(result["is_caught"] for result in results.values())
    print(f"{num_caught} of {len(results)} broken rules were caught")
    print(json.dumps({"device": "cpu", "torch": torch.__version__, "commit": commit(), "rules": results}))
    return 0 if num_caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
