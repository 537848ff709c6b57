"""The rules of inputs that FSDP2 casts, for `break_rules`."""

T = "test_cast_inputs::test_"
SAME = "return storage is not None and known.storage() is storage and known.version == given.version"

RULES = [
    (
        "blocks share a cast",
        "cast_inputs",
        "            return known.tensor\n",
        "            return value\n",
        f"{T}blocks_share_one_cast_of_their_table",
    ),
    (
        "a shared cast is of the same storage, which is alive",
        "cast_inputs",
        SAME,
        "return known.version == given.version",
        f"{T}a_table_with_the_identity_of_a_dead_one_is_another",
    ),
    (
        "a shared cast is of the same version of its source",
        "cast_inputs",
        SAME,
        "return storage is not None and known.storage() is storage",
        f"{T}a_table_that_changes_between_blocks_is_cast_again",
    ),
    (
        "a shared cast is of the same view of a storage",
        "cast_inputs",
        "        key = (given.view, view_id(value)[1:])\n",
        "        key = (given.view[0], value.dtype)\n",
        f"{T}a_view_of_a_table_is_another_table",
    ),
    (
        "a shared cast is as it was made",
        "cast_inputs",
        " and known.tensor._version == known.version:",
        ":",
        f"{T}a_cast_that_a_block_changes_is_no_other_blocks",
    ),
    (
        "what another hook makes of an input is not shared",
        "module_hooks",
        "        self._given = () if has_others else look(args)\n",
        "        self._given = look(args)\n",
        f"{T}what_another_hook_makes_of_a_table_is_not_shared",
    ),
    (
        "a pass shares its own casts only, and keeps them until its backward is over",
        "cast_inputs",
        "        self._casts: dict[tuple, Cast] = {}\n",
        "        self._casts = type(self).__dict__.get('all') or setattr(type(self), 'all', {}) or type(self).all\n",
        f"{T}each_forward_pass_has_its_own_and_none_is_left",
    ),
    (
        "remove takes the look at inputs away",
        "module_hooks",
        "            self.pre_hook.remove()\n",
        "            pass\n",
        f"{T}remove_takes_the_hook_away",
    ),
]
