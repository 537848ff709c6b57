"""The rules of mode "all" in plans, needs and texts, for `break_rules`: arguments of its ``rule``."""

P, S, N = "test_plan_all::test_", "test_saved_activations::test_", "test_job_need::test_"
CPU, DEVICE = f"{S}dense_blocks_on_a_cpu", f"{S}dense_blocks_on_an_accelerator"
BY_HAND, PAGE = f"{S}sizes_of_a_known_model_by_hand", "test_plan_page::test_formulas_are_the_planners"
ACTIVATIONS, STEM = "planner/saved_activations", f"{P}what_is_saved_before_the_blocks_moves_too"

SAVED = [
    ("a norm's input is float32 on a CPU", ACTIVATIONS, "(FLOAT32 if on_cpu else itemsize)", "itemsize", CPU),
    ("and so is what it makes", ACTIVATIONS, "    if on_cpu:\n        yield", "    if False:\n        yield", CPU),
    (
        "on an accelerator it is one kernel",
        ACTIVATIONS,
        "    if on_cpu:\n        yield",
        "    if True:\n        yield",
        DEVICE,
    ),
    ("a norm saves a number per row", ACTIVATIONS, "num_rows * FLOAT32", "num_rows * itemsize", CPU, DEVICE),
    ("keys may be fewer", ACTIVATIONS, "keys = values = wk.out_features / degree", "pass", CPU, DEVICE),
    ("norms of heads save too", ACTIVATIONS, "    if block.has_qk_norm:", "    if False:", CPU, DEVICE),
    ("rotary tables are cast", ACTIVATIONS, "if block.copies_rope and", "if False and", CPU, DEVICE),
    ("once for all sequences", ACTIVATIONS, "head_dim * itemsize / batch", "head_dim * itemsize", CPU, DEVICE),
    ("tensor parallel cuts norms by tokens", ACTIVATIONS, "tokens = 1 / tensor_parallel", "tokens = 1", BY_HAND),
    (
        "and gathers what goes into linears",
        ACTIVATIONS,
        "        dim * itemsize,  # to the projections",
        "        tokens * dim * itemsize,",
        BY_HAND,
    ),
]

PLANS = [
    (
        "without AC all moves",
        "planner/planning",
        'if offload.mode == "all" and not is_checkpointed:',
        "if False:",
        f"{P}blocks_move_what_is_not_too_small",
    ),
    (
        "what is too small stays",
        "planner/costs",
        "inputs = tuple(s for s in activations if s >= offload.min_offload_bytes)",
        "inputs = activations",
        f"{P}blocks_move_what_is_not_too_small",
    ),
    (
        "a job with AC is compared with the literature",
        "planner/costs",
        "if job.is_checkpointed or not layer.activations:",
        "if not layer.activations:",
        f"{P}a_job_with_ac_is_compared_with_what_the_literature_counts",
    ),
    ("tokens are pinned", "planner/steps", "if self._stem_bytes and 0 in stages:", "if False:", STEM),
    (
        "tokens move",
        "planner/steps",
        "+ sum(self._stem_bytes for part in parts if part.stage == 0)",
        "",
        STEM,
    ),
    ("only with mode all", "planner/steps", 'if self.offload.mode != "all" or self', "if self", STEM),
    (
        "half of a batch moves with it",
        "need",
        "(2 if num_views == 2 else 1)",
        "1",
        f"{P}microbatches_of_a_pipeline_move_their_tokens_with_the_batch_if_they_are_half_of_it",
        "test_need::test_tokens_of_the_embedding",
    ),
    (
        "reloads take the place of what is done with",
        "planner/steps",
        "            lookahead = max(0, lookahead - 1)\n",
        "            pass\n",
        f"{P}a_window_of_one_region_is_on_the_device_in_backward",
    ),
    (
        "memory is compared with all activations on the device",
        "planner/advice",
        "    if not way.moves_all:\n        return ac.cost()",
        "    if True:\n        return ac.cost()",
        f"{P}copies_that_hide_are_advised",
    ),
    (
        "a slow link is worse than to recompute",
        "planner/advice",
        "    if way.moves_all and slowdown > HIDES_PERCENT:",
        "    if False:",
        f"{P}where_copies_take_longer_than_a_recompute_that_is_advised",
    ),
    (
        "limit link does not go with mode all",
        "planner/advice",
        '    if way.offload.mode == "all":\n        return fastest\n',
        "",
        f"{P}limit_link_is_never_advised",
    ),
    (
        "routers make an estimate",
        "planner/plan_input",
        "if any(block.router is not None for block in blocks):",
        "if False:",
        f"{P}where_it_is_an_estimate_the_plan_says_so",
    ),
    (
        "compiled blocks make one",
        "planner/plan_input",
        'if config.compile.enable and "model" in config.compile.components:',
        "if False:",
        f"{P}where_it_is_an_estimate_the_plan_says_so",
    ),
    (
        "autocast makes one",
        "planner/plan_input",
        "if is_cast and training.mixed_precision_param != training.dtype:",
        "if False:",
        f"{P}where_it_is_an_estimate_the_plan_says_so",
    ),
    (
        "block inputs need AC",
        "planner/plan_input",
        'if settings and offload.mode == "block_inputs" and mode not in ("full", "selective"):',
        "if False:",
        f"{P}what_does_not_go_together_is_refused",
    ),
    (
        "AC is not asked for where nothing is checkpointed",
        "planner/plan_input",
        'if job.is_checkpointed and config.activation_checkpoint.mode != "full":',
        'if config.activation_checkpoint.mode != "full":',
        f"{P}a_config_without_ac",
    ),
]

NEEDS = [
    (
        "tokens are needed",
        "titan/need",
        'if getattr(part, "tok_embeddings", None) is not None:',
        "if False:",
        f"{N}need_of_all_that_blocks_save",
    ),
    (
        "blocks that are not checkpointed have no input to move",
        "titan/need",
        'if config.mode == "block_inputs" or (config.mode == "all" and checkpointed):',
        'if config.mode != "none":',
        f"{N}need_of_all_that_blocks_save",
    ),
    (
        "where nobody knows the need there is a reason",
        "titan/need",
        "return why_estimate(self._job_config, self._family, self._model_args, self._job)",
        "return None",
        f"{N}where_no_need_is_known_there_is_a_reason",
    ),
    (
        "checkpointed blocks keep their input's need",
        "titan/need",
        "        if not offloader.fqns_saving_all:\n            return None\n",
        "",
        f"{N}need_of_the_input_of_checkpointed_blocks_and_of_tokens",
    ),
    (
        "activations are pinned ahead",
        "share",
        "slots = [*need.inputs, *need.activations, *need.saves]",
        "slots = [*need.inputs, *need.saves]",
        "distributed/test_share::test_activations_are_pinned_with_what_else_moves",
    ),
    (
        "the largest of them is what less is of no use for",
        "share",
        "slots = [*need.inputs, *need.activations] or need.saves",
        "slots = need.inputs or need.saves",
        "distributed/test_share::test_activations_are_pinned_with_what_else_moves",
    ),
]

RULES = [*SAVED, *PLANS, *NEEDS]
