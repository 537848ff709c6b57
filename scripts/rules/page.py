"""The rules of a plan's picture and page, for `break_rules`. Those of the page need node, some chromium too."""

G, H = "test_plan_plot::test_", "test_plan_page::test_"
FORMULAS, SCRIPT, MARKUP = "planner/plan_page_formulas.js", "planner/plan_page.js", "planner/plan_page.html"
SAME = f"{H}formulas_are_the_planners"
SHOWN = f"{H}figures_on_the_page_are_the_planners_wherever_the_controls_stand"
LINKS, ADDRESS = f"{H}links_are_those_known_and_the_plans_own", f"{H}the_address_has_the_setting"
NO_SENSE = f"{H}an_address_that_makes_no_sense_is_what_was_asked_about"
READABLE = f"{H}the_page_is_readable_at_any_width_and_in_both_color_schemes"
LABELS = f"{H}labels_of_the_timelines_do_not_overlap"
BARS, TEXTS = f"{G}each_interval_is_a_bar_and_each_wait_a_hatched_one", f"{G}no_text_lies_on_another_or_outside"

PICTURE = [
    ("waits of compute are drawn", "planner/plan_plot", 'if lane == "compute" and', "if not lane and", BARS),
    (
        "a bar is as long as its interval",
        "planner/plan_plot",
        "interval.end_ms - interval.start_ms)",
        "interval.end_ms)",
        BARS,
    ),
    (
        "both schedules have one axis",
        "planner/plan_plot",
        ", sharex=True",
        "",
        f"{G}both_schedules_have_one_time_axis_in_ms",
    ),
    ("a label needs room in its bar", "planner/plan_plot", "if width <= right - left:", "if True:", TEXTS),
    (
        "a label beside its bar needs room before the next",
        "planner/plan_plot",
        "width <= limit - right and",
        "True and",
        TEXTS,
    ),
    (
        "a narrow copy has its label beside it",
        "planner/plan_plot",
        'lane != "compute":',
        "not lane:",
        f"{G}labels_stand_in_bars_and_beside_narrow_copies",
    ),
    (
        "a shared link is said",
        "planner/plan_plot",
        "if machine.devices_per_link > 1",
        "if machine.devices_per_link > 9",
        f"{G}the_title_has_what_was_planned_and_its_cost",
    ),
    (
        "colors are told apart with any color vision",
        "planner/plan_plot",
        '"reload": "#009E73"',
        '"reload": "#D50000"',
        f"{G}colors_are_told_apart_with_any_color_vision",
    ),
    (
        "the suffix is one that is known",
        "planner/plan_plot",
        "if path.suffix.lower() not in SUFFIXES:",
        "if False:",
        f"{G}bad_paths_are_refused",
    ),
]

DATA = [
    (
        "the page has no slot left",
        "planner/plan_page",
        '        ("{{data}}", _as_script_text(page_data(plan))),  # last: it has names that others chose\n',
        "",
        f"{H}the_page_is_one_file_that_asks_for_nothing",
    ),
    (
        "a name cannot end the script",
        "planner/plan_page",
        '.replace("<", "\\\\u003c")',
        "",
        f"{H}a_name_cannot_break_out_of_the_data",
    ),
    (
        "the plan's own model is there once",
        "planner/plan_page",
        "if (model.dim, model.layers) == (plan.model.dim, plan.model.layers):",
        "if False:",
        f"{H}models_are_the_plans_own_and_those_that_its_pipeline_can_divide",
    ),
    (
        "other models are divided anew",
        "planner/plan_page",
        "replace(plan.job, stage_layers=None), []",
        "plan.job, []",
        f"{H}models_are_the_plans_own_and_those_that_its_pipeline_can_divide",
    ),
    (
        "a combination of passes that is larger counts",
        "planner/plan_page",
        "if not any(_includes",
        "if any(_includes",
        f"{SAME}[interleaved]",
    ),
    (
        "sequences are multiples of what TorchTitan takes",
        "planner/plan_page",
        "max(1, round(length / multiple)) * multiple",
        "round(length)",
        f"{H}stops_are_what_torchtitan_takes",
    ),
    (
        "only whole nodes' ranks are added up",
        "planner/plan_page",
        "end = min(start + machine.devices_per_node, job.num_devices)",
        "end = job.num_devices",
        f"{SAME}[1F1B]",
    ),
    (
        "a pipeline has its bubble",
        "planner/plan_page",
        "return (job.pipeline_parallel - 1) / pipeline.stages_per_rank(job)",
        "return float(job.pipeline_parallel - 1)",
        f"{SAME}[interleaved]",
    ),
]

COSTS = [
    ("devices behind a link share it", FORMULAS, "(gbPerS / devicesPerLink * 1e6)", "(gbPerS * 1e6)", f"{SAME}[plain]"),
    ("attention is causal", FORMULAS, "seq * window - window ** 2 / 2", "seq * window", f"{SAME}[plain]"),
    (
        "a window bounds attention",
        FORMULAS,
        "Math.min(layer.window ?? seq, seq)",
        "seq",
        f"{SAME}[layers that differ]",
    ),
    (
        "small tensors stay",
        FORMULAS,
        "bytes >= constants.min_offload_bytes",
        "bytes >= 0",
        f"{SAME}[small ones stay]",
    ),
    (
        "with mode none no input moves",
        FORMULAS,
        'variant === "ac" || offload.mode === "none"',
        'variant === "ac"',
        f"{SAME}[saves on the device]",
    ),
    (
        "attention that is saved is not recomputed",
        FORMULAS,
        "isSelective && layer.saves_attention ? attentionMs : 0",
        "0",
        f"{SAME}[plain]",
    ),
    (
        "tensor parallel cuts logits",
        FORMULAS,
        "(job.itemsize + constants.loss_bytes) / job.tensor_parallel",
        "(job.itemsize + constants.loss_bytes)",
        f"{SAME}[parallel]",
    ),
]

SIMULATION = [
    (
        "the stash is limited",
        FORMULAS,
        "while (maxInflightOffloads && this.stash.length >= maxInflightOffloads) this.dropOldest();",
        "",
        f"{SAME}[plain]",
    ),
    (
        "a pass ends when its compute ends",
        SCRIPT,
        '.filter((i) => i.lane === "compute")',
        "",
        f"{H}a_pass_ends_when_its_compute_ends",
    ),
    (
        "copies back wait for copies out",
        FORMULAS,
        "Math.max(h2dFree, this.now, this.onHost[j])",
        "Math.max(h2dFree, this.now)",
        f"{SAME}[no prefetch, no limit]",
        f"{SAME}[deep prefetch]",
    ),
    (
        "copies back are ahead by the lookahead",
        FORMULAS,
        "Math.max(0, k - prefetchLookahead)",
        "Math.max(0, k - 1)",
        f"{SAME}[deep prefetch]",
    ),
    (
        "what is still on the device is not copied back",
        FORMULAS,
        "|| resident.has(j)",
        "",
        f"{SAME}[plain]",
        f"{SAME}[memory not known]",
        f"{SAME}[no prefetch, no limit]",
    ),
    (
        "in a pipeline copies end before backward",
        FORMULAS,
        "if (rules.isBackwardLater) clock.letCopiesEnd();",
        "",
        f"{SAME}[1F1B]",
        f"{SAME}[interleaved]",
        f"{SAME}[V-shaped]",
    ),
    (
        "copies of a link limit leave in time",
        FORMULAS,
        "end <= start",
        "end < Infinity",
        f"{SAME}[limited by the link]",
    ),
    (
        "a link limit asks whether copies are out when forward ends",
        FORMULAS,
        "if (isOut && clock.now",
        "if (clock.now",
        f"{SAME}[limited by the link]",
    ),
]

STEPS = [
    (
        "other rows overlap",
        FORMULAS,
        '      this.offload = { ...this.offload, mode: this.movesAll ? "all" : "block_inputs", limit };\n',
        "      this.offload = { ...this.offload, limit };\n",
        f"{SAME}[nothing moves]",
    ),
    (
        "rounding is no slow-down",
        FORMULAS,
        "if (step_ms <= compute_ms * (1 + constants.rounding)) step_ms = compute_ms;",
        "step_ms *= 1 + 1e-6;",
        f"{SAME}[plain]",
    ),
    ("slots are whole", FORMULAS, "Math.ceil(bytes / 512) * 512", "bytes", f"{SAME}[sizes that are odd]"),
    (
        "newest blocks need no slot",
        FORMULAS,
        "Math.max(0, part.costs.length - this.offload.keep_last)))",
        "part.costs.length))",
        f"{SAME}[plain]",
    ),
    (
        "with a bound passes count at most",
        FORMULAS,
        "Math.min(passes * largest(weights), job.num_forwards * sum(weights))",
        "passes * sum(weights)",
        f"{SAME}[V-shaped]",
    ),
    (
        "gradients are there as backward goes on",
        FORMULAS,
        "(num - 1 - k) / num",
        "0",
        f"{SAME}[plain]",
        f"{SAME}[parallel]",
    ),
    (
        "the longest sequence is a multiple",
        FORMULAS,
        "return low * multiple;",
        "return low * multiple + 1;",
        f"{SAME}[plain]",
    ),
    (
        "at least one block of the picture moves",
        FORMULAS,
        "Math.min(offload.keep_last, blocks.length - 1)",
        "0",
        f"{SAME}[plain]",
    ),
]

PAGE = [
    ("a slider of speeds sets both directions", SCRIPT, "({ link: OWN, rate:", "({ rate:", SHOWN),
    ("tables follow", SCRIPT, "  showTables();\n", "", SHOWN),
    (
        "the verdict follows",
        SCRIPT,
        "  showVerdict();\n",
        "  if (!by('verdict').children.length) showVerdict();\n",
        SHOWN,
    ),
    ("GiB are powers of 1024", SCRIPT, "const GIB = 2 ** 30;", "const GIB = 1e9;", SHOWN),
    (
        "both directions of a link count",
        SCRIPT,
        "d2h_gb_per_s, h2d_gb_per_s, devices_per_link }",
        "d2h_gb_per_s, h2d_gb_per_s: d2h_gb_per_s, devices_per_link }",
        LINKS,
    ),
    ("memory that is not known is not guessed", SCRIPT, "!isKnown ? `give ${flag}`", "!isKnown ? `any`", LINKS),
    ("the address has the speed", SCRIPT, 'said.set("rate", state.rate)', 'said.set("rate", 1)', ADDRESS),
    ("the address is read", SCRIPT, "state = fromAddress();\nshow();", "state = { ...asked };\nshow();", ADDRESS),
    ("a model of the address is known", SCRIPT, "&& Number(text) in data.models", "", NO_SENSE),
    ("an amount of the address is one", SCRIPT, "Number(text) > 0 && Number(text) < Infinity", "true", NO_SENSE),
    (
        "keys are of what was asked",
        SCRIPT,
        "JSON.stringify(state) === JSON.stringify(asked)",
        "true",
        f"{H}keys_are_marked_as_of_what_was_asked_when_the_controls_move",
    ),
    (
        "a slider says its value",
        SCRIPT,
        'by(id).setAttribute("aria-valuetext", text);',
        "",
        f"{H}controls_work_with_the_keyboard_and_have_names",
    ),
    ("a label needs room in its bar", SCRIPT, "right - left >= room", "right - left >= 0", LABELS),
    ("a label needs room beside its bar", SCRIPT, "next - right >= room", "next - right >= -9", LABELS),
    (
        "both timelines have one scale",
        SCRIPT,
        "drawTimeline(by(name), plan.timelines[name], last);",
        "drawTimeline(by(name), plan.timelines[name], endOf(plan.timelines[name]));",
        f"{H}both_timelines_have_one_scale",
    ),
    ("a narrow page has no wide tables", MARKUP, "(max-width: 1100px)", "(max-width: 1px)", READABLE),
    ("dark text is for light pages", MARKUP, "--text: #e8ebee; --soft", "--text: #1b1f24; --soft", READABLE),
]

RULES = PICTURE + DATA + COSTS + SIMULATION + STEPS + PAGE
