"""The rules of reserved and refused pinned memory (`pool`, `pinned_memory`), for `break_rules`: arguments of its
``rule``."""

P, M, N, R = (
    "test_pool::test_",
    "test_pinned_memory::test_",
    "test_engine_pinned::test_",
    "test_host_runtime::test_",
)
ANY_ORDER = f"{P}steps_of_reserved_shapes_make_no_slab_in_any_order"
OTHER_SHAPES = f"{P}reserved_slabs_get_their_slots_back_after_a_step_of_another_shape"
TWICE = f"{P}memory_refused_twice_is_never_asked_for_again"
LEFT_BEHIND = f"{M}refused_registration_leaves_nothing_behind"
RESERVE = f"{P}reserve_makes_few_large_slabs_of_whole_slots"
WITHOUT_LOCK = f"{M}without_a_lock_memory_is_pinned_all_the_same"

RESERVED = [
    (
        "a slab is cut into slots",
        "pool",
        "        self._slabs.append(slab)\n        self._cut(slab)\n",
        "        self._slabs.append(slab)\n        self._put(Extent(slab, 0, num_bytes))\n",
        ANY_ORDER,
    ),
    (
        "shapes that are named twice add up",
        "pool",
        "            counts[_align(num_bytes)] += count\n",
        "            counts[_align(num_bytes)] = count\n",
        RESERVE,
    ),
    (
        "reserving stays within the budget",
        "pool",
        "        limit = min(room, most * size)\n",
        "        limit = most * size\n",
        f"{P}reserve_takes_whole_slots_within_the_budget",
    ),
    (
        "a slab has no more than the machine pins at once",
        "pool",
        "        most = min(missing, self._max_slab_bytes // size)\n",
        "        most = missing\n",
        RESERVE,
        f"{P}reserve_on_a_kernel_that_pins_2_gb_at_once",
    ),
    (
        "a slot is not divided, however large",
        "pool",
        "        return num or int(self._runtime.pinned_bytes(size) <= room)\n",
        "        return num\n",
        RESERVE,
    ),
    (
        "a reserved slab is not rounded up to what nobody needs",
        "pool",
        "        limit = min(room, most * size)\n",
        "        limit = room\n",
        f"{P}reserve_counts_what_the_runtime_really_pins",
    ),
    (
        "reserving counts what is free already",
        "pool",
        "            missing = count - self._num_free(size)\n",
        "            missing = count\n",
        f"{P}reserve_makes_only_what_is_missing",
    ),
    (
        "a slab gets its slots back once it is wholly free",
        "pool",
        "        if extent.slab.is_recut and extent.slab.num_used == 0:\n            self._cut(extent.slab)\n",
        "",
        OTHER_SHAPES,
        f"{P}smaller_shapes_in_between_make_no_slab",
    ),
    (
        "a slab of which a slot was split is cut anew",
        "pool",
        "            extent.slab.is_recut = True\n            rest = ",
        "            rest = ",
        OTHER_SHAPES,
    ),
    (
        "a slab that was joined is cut anew",
        "pool",
        "        slab.is_recut = True\n        return True\n",
        "        return True\n",
        f"{P}a_reserved_slab_that_was_one_slot_is_cut_anew",
    ),
    (
        "slots that are cut anew carry the events of what was there",
        "pool",
        "extents = [Extent(slab, start, size, events) for start",
        "extents = [Extent(slab, start, size) for start",
        f"{P}slots_of_a_slab_that_was_cut_otherwise_carry_the_events_of_what_was_there",
    ),
    (
        "a reserved slab that is cut as it should be is left alone",
        "pool",
        "        if extent.slab.is_recut and extent.slab.num_used == 0:\n",
        "        if extent.slab.slot_bytes and extent.slab.num_used == 0:\n",
        f"{P}a_reserved_slab_that_is_cut_as_it_should_be_is_left_alone",
    ),
    (
        "extents are taken out by size, not one by one",
        "pool",
        "        for size in {extent.size for extent in slab.free}:\n"
        "            self._free[size] = [extent for extent in self._free[size] if extent.slab is not slab]\n"
        "            self._forget_if_empty(size)\n",
        "        for extent in slab.free:\n"
        "            self._free[extent.size].remove(extent)\n"
        "            self._forget_if_empty(extent.size)\n",
        f"{P}many_small_slots_are_cut_and_joined_in_good_time",
    ),
    (
        "what is given back is gone before more is asked for",
        "pool",
        "            self._release(idle.pop())\n",
        "            self._release(idle[-1])\n            idle = idle[:-1] + [gone := idle[-1]][:0]\n",
        f"{P}memory_that_is_given_back_is_gone_before_more_is_asked_for",
    ),
]

REFUSED = [
    (
        "a refused slab is asked for once more",
        "pool",
        "        if self._refused_bytes == 0 and smaller < num:\n",
        "        if False:\n",
        f"{P}a_refused_slab_is_asked_for_once_more_an_eighth_of_it",
        f"{N}smaller_slabs_will_do",
    ),
    (
        "only once more",
        "pool",
        "        if self._refused_bytes == 0 and smaller < num:\n",
        "        if smaller < num:\n",
        TWICE,
    ),
    (
        "all later slabs are as small",
        "pool",
        "            self._refused_bytes, self._max_slab_bytes = size * num, size * smaller\n",
        "            self._refused_bytes = size * num\n",
        f"{P}a_refused_slab_is_asked_for_once_more_an_eighth_of_it",
    ),
    (
        "growth asks for no more after a refusal",
        "pool",
        "if self.refusal is not None or not self._has_room(size, freed=sum(slab.pinned_bytes for slab in idle)):",
        "if not self._has_room(size, freed=sum(slab.pinned_bytes for slab in idle)):",
        f"{P}growth_that_is_refused_frees_first_and_does_not_try_again",
    ),
    (
        "reserving asks for no more after a refusal",
        "pool",
        "        if missing <= 0 or self.refusal is not None:\n",
        "        if missing <= 0:\n",
        TWICE,
    ),
    (
        "a refusal is no error",
        "pool",
        "        except RuntimeError as error:\n",
        "        except ZeroDivisionError as error:\n",
        TWICE,
        f"{N}without_room_for_a_second_slab_all_but_one_input_stay_on_the_device",
    ),
    (
        "a refusal is said once",
        "pool",
        "        self._warn_of_refusal(size * num)\n",
        "",
        f"{N}without_room_for_a_second_slab_all_but_one_input_stay_on_the_device",
    ),
    (
        "whoever gets no slot finds a budget",
        "pool",
        "            self.budget_bytes = self.bytes_pinned\n",
        "            pass\n",
        TWICE,
        f"{N}without_room_for_a_second_slab_all_but_one_input_stay_on_the_device",
    ),
]

MEMORY = [
    (
        "ranks of a host pin one at a time",
        "pinned_memory",
        "        fcntl.flock(lock, fcntl.LOCK_EX)\n",
        "        pass\n",
        f"{M}ranks_of_a_host_pin_one_at_a_time",
    ),
    (
        "a forked child does not prolong a turn",
        "pinned_memory",
        "            fcntl.flock(lock, fcntl.LOCK_UN)",
        "            pass",
        f"{M}a_child_forked_during_a_turn_does_not_prolong_it",
    ),
    (
        "the lock follows no link",
        "pinned_memory",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_RDWR | os.O_CREAT | os.O_CLOEXEC",
        f"{M}the_lock_writes_to_nothing_that_somebody_put_there",
    ),
    (
        "the lock empties no file",
        "pinned_memory",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_TRUNC",
        f"{M}the_lock_writes_to_nothing_that_somebody_put_there",
    ),
    (
        "memory is pinned without a lock file",
        "pinned_memory",
        "    except OSError:\n        return None\n    try:\n",
        "    except ZeroDivisionError:\n        return None\n    try:\n",
        WITHOUT_LOCK,
    ),
    (
        "memory is pinned on a file system without locks",
        "pinned_memory",
        "    except OSError:  # a file system without locks\n",
        "    except ZeroDivisionError:\n",
        WITHOUT_LOCK,
    ),
    (
        "pages of a refused registration are unmapped at once",
        "pinned_memory",
        "        pages.close()\n",
        "",
        LEFT_BEHIND,
    ),
    (
        "the driver's last error is taken away",
        "pinned_memory",
        "        _clear_last_error(cudart)\n",
        "",
        LEFT_BEHIND,
    ),
    (
        "a refused registration is an error",
        "pinned_memory",
        "        torch.cuda.check_error(int(error))\n",
        "        pass\n",
        f"{M}refused_registration_names_pinned_host_memory",
        f"{M}failed_unregistration_is_an_error",
    ),
    (
        "memory that is dropped is unregistered",
        "pinned_memory",
        "    unregister.atexit = False",
        "    unregister.detach()",
        f"{M}memory_that_is_dropped_is_unregistered_before_it_is_unmapped",
    ),
    (
        "the node is chosen before the touch",
        "pinned_memory",
        "        bind(buffer.data_ptr(), num_bytes)\n        touch(buffer)\n",
        "        touch(buffer)\n        bind(buffer.data_ptr(), num_bytes)\n",
        f"{M}slab_is_mapped_bound_touched_registered_and_unregistered",
    ),
    (
        "pages exist before they are registered",
        "pinned_memory",
        "        touch(buffer)\n",
        "",
        f"{M}slab_is_mapped_bound_touched_registered_and_unregistered",
    ),
    (
        "children do not inherit pinned pages",
        "pinned_memory",
        "        pages.madvise(mmap.MADV_DONTFORK)\n",
        "",
        f"{M}forked_children_do_not_inherit_pinned_pages",
    ),
    (
        "a kernel without huge pages will do",
        "pinned_memory",
        "with contextlib.suppress(OSError):  # a kernel",
        "with contextlib.suppress(ZeroDivisionError):  # a kernel",
        f"{M}a_kernel_without_huge_pages_will_do",
    ),
    (
        "the touch has threads beside torch's",
        "pinned_memory",
        "    num_threads = max(1, min(MAX_TOUCH_THREADS, num_cpus) // torch.get_num_threads())\n",
        "    num_threads = 1\n",
        f"{M}pages_are_touched_by_the_cpus_of_the_process",
        f"{M}pages_are_touched_at_the_same_time",
    ),
    (
        "the touch has no more threads than CPUs",
        "pinned_memory",
        "min(MAX_TOUCH_THREADS, num_cpus) // torch.get_num_threads()",
        "MAX_TOUCH_THREADS",
        f"{M}pages_are_touched_by_the_cpus_of_the_process",
    ),
    (
        "kernels that pin 2 GB at once are known",
        "pinned_memory",
        "(6, 11) <= tuple(map(int, version.groups())) <= (6, 13)",
        "(6, 12) <= tuple(map(int, version.groups())) <= (6, 13)",
        f"{M}largest_piece_by_kernel",
    ),
    (
        "the mask of nodes has a bit more than the kernel reads",
        "pinned_memory",
        "len(mask) * bits + 1, 0",
        "len(mask) * bits, 0",
        f"{M}mask_of_nodes",
    ),
    (
        "a full node spills",
        "pinned_memory",
        "MPOL_PREFERRED = 1\n",
        "MPOL_PREFERRED = 2\n",
        f"{M}mask_of_nodes",
    ),
    (
        "slabs come from the node asked for",
        "runtime",
        "        if self.numa_node < 0:\n",
        "        if self.numa_node < 1:\n",
        f"{M}slab_comes_from_the_node_asked_for",
        f"{M}refused_memory_policies_give_one_warning",
    ),
    (
        "a node that cannot be had is said once",
        "runtime",
        "            self.numa_node = -1\n",
        "            pass\n",
        f"{M}a_node_that_does_not_exist_gives_one_warning",
    ),
    (
        "a node that cannot be had is no error",
        "runtime",
        "        except OSError as error:\n            logger.warning(",
        "        except ZeroDivisionError as error:\n            logger.warning(",
        f"{M}a_node_that_does_not_exist_gives_one_warning",
    ),
    (
        "what fails names pinned host memory",
        "runtime",
        "        except (RuntimeError, MemoryError, OSError) as error:\n",
        "        except ZeroDivisionError as error:\n",
        f"{M}what_torch_says_of_pinned_memory_is_said_to_be_of_host_memory",
        f"{M}no_room_to_map_names_pinned_host_memory",
    ),
    (
        "a runtime for tests fails where it is told to",
        "host_runtime",
        "        if self.num_pinned_allocations in self.fail_pinned_at:\n",
        "        if False:\n",
        f"{R}pinned_allocations_fail_where_they_are_told_to",
    ),
]

RULES = RESERVED + REFUSED + MEMORY
