"""The rules of compiled and of saved models, for `break_rules`."""

C, A = "test_compile::test_", "test_apply::test_"

RULES = [
    (
        "the hooks of a block compiled in place are outside of what is compiled",
        "module_hooks",
        'return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"',
        'return "forward"',
        f"{C}same_bits_and_graphs[compile_in_place-aot_eager-all]",
    ),
    (
        "selective saves know a block compiled in place",
        "blocks",
        "return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None",
        "return isinstance(module, OptimizedModule)",
        f"{C}selective_saves_of_a_block_compiled_in_place",
    ),
    (
        "a model compiled as a whole is refused",
        "apply",
        "if is_asked and is_compiled(model):",
        "if False:",
        f"{C}a_model_compiled_as_a_whole_is_refused",
    ),
    (
        "a model that is saved whole is loaded without offload",
        "module_hooks",
        'return getattr, (self._module(), "forward")',
        "return object.__reduce_ex__(self, 2)",
        f"{A}a_model_that_is_saved_whole_is_loaded_without_offload",
    ),
]
