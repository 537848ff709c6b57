"""The rules of launchers and of plans in the heads of train configs, for `break_rules`. Places are paths of files."""

L, C = "test_launch::test_", "test_train_configs::test_"
NODE, SLURM = "launch/torchrun_node.sh", "launch/slurm_multinode.sbatch"
DRY_RUN, FOLLOWS = f"{L}srun_line_of_a_dry_run", f"{L}srun_line_follows_the_job"
BINDING, BY_HAND = f"{L}no_numa_binding_where_it_would_fail_or_do_nothing", f"{L}host_memory_by_hand"
OLD_HEAD = f"{C}check_notices_a_head_that_is_old"

RULES = [
    (
        "an allocator setting by its old name holds",
        NODE,
        "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}",
        "${PYTORCH_ALLOC_CONF:-}",
        f"{L}allocator_settings_of_the_user_hold",
    ),
    (
        "segments can grow",
        NODE,
        "    command+=(PYTORCH_ALLOC_CONF=expandable_segments:True)\n",
        "    true\n",
        f"{L}one_node",
    ),
    ("ranks are bound", NODE, '[ "$numa" = none ] || ', '[ "$numa" = node ] || ', f"{L}one_node"),
    (
        "several nodes meet",
        NODE,
        ' --rdzv-id "$RDZV_ID"',
        "",
        f"{L}one_of_several_nodes",
        f"{L}from_sbatch_to_torchrun",
    ),
    ("several nodes need a meeting place", NODE, '[ -n "${RDZV_ENDPOINT:-}" ]', "true", f"{L}one_node_refuses"),
    ("flags keep their words", NODE, '"$TRAIN_CONFIG" "$@")', '"$TRAIN_CONFIG" $@)', f"{L}one_node"),
    (
        "a dry run runs nothing",
        NODE,
        "if $dry_run",
        "if false",
        f"{L}dry_run_of_one_node_shows_the_command_and_runs_nothing",
    ),
    ("a config that is not there", "launch/checks.sh", '[ -f "$TRAIN_CONFIG" ]', "true", f"{L}one_node_refuses"),
    (
        "what is no flag of TorchTitan",
        "launch/checks.sh",
        "[[ $flag != --* || $flag == --*.* ]]",
        "true",
        f"{L}one_node_refuses",
        f"{L}slurm_refuses",
    ),
    ("errors exit with 2", "launch/checks.sh", "exit 2", "exit 1", f"{L}one_node_refuses", f"{L}slurm_refuses"),
    (
        "the repository is where the job was submitted",
        SLURM,
        "${SLURM_SUBMIT_DIR:-$(dirname",
        "${NOTHING:-$(dirname",
        f"{L}from_sbatch_to_torchrun",
    ),
    ("one task per node", SLURM, " --ntasks-per-node 1)", ")", DRY_RUN),
    ("a task has all CPUs", SLURM, "--cpus-per-task", "--cpus-per-gpu", DRY_RUN),
    ("srun binds nothing", SLURM, "--cpu-bind none", "--cpu-bind cores", DRY_RUN),
    ("memory by CPU or GPU goes without --mem", SLURM, "${SLURM_MEM_PER_CPU:-}${SLURM_MEM_PER_GPU:-}", "", FOLLOWS),
    ("a requeued job meets elsewhere", SLURM, " + ${SLURM_RESTART_COUNT:-0}) %", ") %", FOLLOWS),
    (
        "a requeued job has its own name",
        SLURM,
        "${SLURM_JOB_ID:-0}.${SLURM_RESTART_COUNT:-0}",
        "${SLURM_JOB_ID:-0}.0",
        FOLLOWS,
    ),
    (
        "as many hosts as nodes",
        SLURM,
        '[ "${#hosts[@]}" -eq "$SLURM_JOB_NUM_NODES" ]',
        "true",
        f"{L}slurm_refuses",
    ),
    ("binding needs two nodes", "launch/node_facts.py", "if len(nodes) < 2", "if not nodes", BINDING),
    ("binding needs numactl", "launch/node_facts.py", "if numactl is None", "if numactl is False", BINDING),
    ("binding needs to know the node", "launch/node_facts.py", '== "unknown"', '== "none"', BINDING),
    ("binding needs CPUs of the node", "launch/node_facts.py", '== "remote"', '== "none"', BINDING),
    (
        "memory: a fraction of what is free",
        "launch/node_memory.py",
        "(1 / fraction - 1)",
        "(1 - fraction)",
        BY_HAND,
        f"{L}kubernetes_memory_is_what_the_plan_needs",
    ),
    (
        "memory: copies of parameters are whole in each replica",
        "launch/node_memory.py",
        ' // plan["job"]["data_parallel_replicate"]',
        "",
        BY_HAND,
    ),
    ("memory: each rank stages", "launch/node_memory.py", "name: ranks * num_bytes", "name: num_bytes", BY_HAND),
    ("memory: no staging without saving", "launch/node_memory.py", 'checkpoint.get("enable") and ', "", BY_HAND),
    ("--check writes nothing", "scripts/write_plans.py", "if not args.check:", "if True:", OLD_HEAD),
    ("--check tells", "scripts/write_plans.py", "if args.check and stale", "if not args.check and stale", OLD_HEAD),
    ("every config has a plan", "scripts/write_plans.py", "} ^ set(MACHINES)", "} & set()", OLD_HEAD),
    (
        "a plan takes the place of the old one",
        "scripts/write_plans.py",
        'END)}\\n", "", text',
        'END)}x\\n", "", text',
        f"{C}a_head_goes_to_the_end_of_the_opening_comment",
    ),
]
