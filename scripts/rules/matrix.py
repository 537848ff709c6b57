"""The rules that the matrix of trainings brought up, for `break_rules`."""

C = "test_converter::test_"
MOVES_ONCE = "distributed/test_dtensor::test_tensor_that_is_saved_plain_and_as_a_dtensor_moves_once"
ATTACHES = "        model.__class__ = _class_that_attaches(type(model))\n"

RULES = [
    (
        "what is saved plain and as a DTensor moves once",
        "saved_tensor",
        "return own == moved or (len(moved) == 1 and own == (0, *moved))",
        "return own == moved",
        MOVES_ONCE,
    ),
    (
        "a DTensor that was changed in place is not what it was made of",
        "saved_tensor",
        "return own == moved or (len(moved) == 1 and own == (0, *moved))",
        "return own == moved or own[1:] == moved",
        MOVES_ONCE,
    ),
    (
        "no class that FSDP2 keeps leads to a converter",
        "titan/converter",
        ATTACHES,
        f"{ATTACHES}        model.__class__.kept = self\n",
        f"{C}a_run_leaves_nothing_behind_in_the_process",
    ),
    (
        "a class is made once for all models of a class",
        "titan/converter",
        "@functools.cache\n",
        "",
        f"{C}a_run_leaves_nothing_behind_in_the_process",
    ),
    (
        "the copies of a pipeline lead to one converter",
        "titan/converter",
        '        """A pipeline copies the model for each of its parts: all lead to the same converter."""\n'
        "        return self\n",
        "        return OffloadConverter(self._job_config, self._parallel_dims)\n",
        f"{C}every_model_of_torchtitan_gets_its_blocks[llama3]",
    ),
]
