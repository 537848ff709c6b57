"""The rules of what an error leaves behind, for `break_rules`."""

F, P = "test_faults::test_", "test_faults::test_interrupt_while_a_slot_is_taken_or_given_back"


def case(test: str, setting: str, point: str) -> str:
    return f"{F}{test}[{setting}-{point}]"


AGAIN, SAME_GRAPH = "step_that_failed_is_done_again", "backward_that_failed_is_done_again_on_the_same_graph"
LINES = f"{F}interrupt_at_every_line_of_the_pool_hands_nothing_out_twice"
LOST, INTERRUPT, RELEASE = (
    f"{F}device_that_is_lost",
    f"{F}interrupt_is_raised_as_itself",
    f"{F}release_that_failed_is_done_by_the_next_call",
)

DEVICE_MEMORY = [
    (
        "an error after a copy to the host began waits for it",
        "engine",
        "        with self._settled(d2h):\n",
        "        with contextlib.nullcontext():\n",
        case(AGAIN, "overlap", "after copy"),
    ),
    (
        "an error after a reload began waits for it",
        "engine",
        "        with self._settled(h2d):\n",
        "        with contextlib.nullcontext():\n",
        case(SAME_GRAPH, "overlap", "after copy"),
    ),
    (
        "so does an interrupt",
        "engine",
        "        except BaseException:\n            with contextlib.suppress(RuntimeError):  # of a device",
        "        except Exception:\n            with contextlib.suppress(RuntimeError):  # of a device",
        f"{INTERRUPT}[after copy]",
    ),
    (
        "to wait for a device that is lost is no new error",
        "engine",
        "contextlib.suppress(RuntimeError):  # of a device",
        "contextlib.suppress(ZeroDivisionError):  # of a device",
        LOST,
    ),
    (
        "a reload that has no memory has not begun",
        "engine",
        "        reload = self.runtime.empty(payload.slot.buffer.numel(), payload.device)\n",
        "        payload.state, state = State.H2D_IN_FLIGHT, payload.state\n"
        "        reload = self.runtime.empty(payload.slot.buffer.numel(), payload.device)\n"
        "        payload.state = state\n",
        case(SAME_GRAPH, "overlap", "empty"),
    ),
    (
        "a wait that fails leaves the tensor in the stash",
        "stash",
        "        entry = self._entries[0]\n"
        '        self._counter.wait("d2h", self._runtime.timed_wait(entry.stream, entry.event))\n'
        "        self._entries.popleft()\n",
        "        entry = self._entries.popleft()\n"
        '        self._counter.wait("d2h", self._runtime.timed_wait(entry.stream, entry.event))\n',
        f"{F}wait_for_the_stash_that_failed_frees_no_memory_under_a_copy",
    ),
    (
        "what was changed in place fails its own backward, in whichever forward that is found",
        "stash",
        " and version_of(entry.packed) == payload.version:",
        ":",
        f"{F}tensor_that_was_changed_in_place_fails_its_own_backward_only",
    ),
    (
        "memory that cannot be lent is not handed over",
        "engine",
        "        if compute != payload.stream:\n            self.runtime.lend(payload.reload, compute)\n"
        "        payload.move_to(State.ON_HOST, State.H2D_IN_FLIGHT)\n",
        "        payload.move_to(State.ON_HOST, State.H2D_IN_FLIGHT)\n"
        "        if compute != payload.stream:\n            self.runtime.lend(payload.reload, compute)\n",
        f"{F}memory_that_cannot_be_lent_to_another_stream_is_reloaded_again",
    ),
]

RELEASES = [
    (
        "a release that fails is tried again",
        "engine",
        "            remains = self._remains[0]\n            if remains.reload is not None:\n"
        "                self._wait(remains.stream, remains.event)\n            self._remains.popleft()\n",
        "            remains = self._remains.popleft()\n            if remains.reload is not None:\n"
        "                self._wait(remains.stream, remains.event)\n",
        RELEASE,
    ),
    (
        "a release that fails raises nothing on top",
        "engine",
        "        with contextlib.suppress(RuntimeError):\n            # Not `acquire",
        "        with contextlib.nullcontext():\n            # Not `acquire",
        LOST,
        RELEASE,
    ),
    (
        "an interrupt leaves no lock locked",
        "engine",
        "            while self._remains and not self._lock.locked():\n                with self._lock:\n"
        "                    self._release_all()\n",
        "            while self._remains and self._lock.acquire(blocking=False):\n                try:\n"
        "                    self._release_all()\n                finally:\n                    self._lock.release()\n",
        P,
    ),
    (
        "a payload that was never finished can die",
        "tape",
        "    slot: Slot | None = None\n",
        "    slot: Slot | None\n",
        case(AGAIN, "gathered", "gather"),
    ),
    (
        "an error on the way out of a region is in no cycle",
        "module_hooks",
        "        with (\n            self.engine.region(self._part, self._index, args) as region,\n"
        "            contextlib.nullcontext() if self._saves is None else self._saves.in_region(region),\n        ):\n",
        "        with contextlib.ExitStack() as stack:\n"
        "            region = stack.enter_context(self.engine.region(self._part, self._index, args))\n"
        "            if self._saves is not None:\n                stack.enter_context(self._saves.in_region(region))\n",
        f"{F}error_on_the_way_out_of_a_region_keeps_nothing",
    ),
]

POOL = [
    (
        "an interrupt while a slot is taken leaves the pool whole",
        "pool",
        "            return self._allocate(num_bytes)\n        except BaseException:\n            self._index()\n",
        "            return self._allocate(num_bytes)\n        except BaseException:\n",
        P,
    ),
    (
        "an interrupt while a slot is given back leaves the pool whole",
        "pool",
        "            self._free_slot(slot, event)\n        except BaseException:\n            self._index()\n",
        "            self._free_slot(slot, event)\n        except BaseException:\n",
        P,
    ),
    (
        "a slot that is being taken is free, with its events, until it is taken",
        "pool",
        "        extent.slab.num_used += 1\n        extent.slab.free.remove(extent)",
        "        extent.slab.free.remove(extent)\n        extent.slab.num_used += 1",
        LINES,
    ),
    (
        "a slab is wholly free only with all that is in it",
        "pool",
        "        self._put(extent)\n        extent.slab.num_used -= 1\n",
        "        extent.slab.num_used -= 1\n        self._put(extent)\n",
        LINES,
    ),
    (
        "the two parts of a slot that is cut never overlap",
        "pool",
        "            extent.size = size\n            self._put(rest)\n",
        "            self._put(rest)\n            extent.size = size\n",
        LINES,
    ),
    (
        "a slab is cut anew at once",
        "pool",
        "        events = self._pending(slab)\n        self._unlist(slab)\n",
        "        events = self._pending(slab)\n        self._unlist(slab)\n        slab.free.clear()\n",
        LINES,
    ),
    (
        "a slab is asked for its events before it is cut anew",
        "pool",
        "        events = self._pending(slab)\n        self._unlist(slab)\n",
        "        self._unlist(slab)\n        slab.free, free = set(), slab.free\n"
        "        for extent in free:\n            self._runtime.query(extent.events[0])\n"
        "        slab.free = free\n        events = self._pending(slab)\n",
        f"{F}device_error_while_a_slab_is_cut_anew_loses_no_memory",
    ),
]

RULES = DEVICE_MEMORY + RELEASES + POOL
