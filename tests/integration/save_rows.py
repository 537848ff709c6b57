"""Rows of runs with selective saves: what each saves and moves. Data only, see `rows`."""

from rows import LLAMA3, VARIANTS, pipeline

LLAMA4 = f"{LLAMA3} --model.name llama4"
GPT_OSS = f"{LLAMA3} --model.name gpt_oss"


def router_saves(num: int, gate: str = "mm", score: str = "_softmax") -> dict[str, int]:
    """The registered saves of ``num`` runs of a router, and how often each saved something."""
    return {f"registered mandatory save aten::{op} in TokenChoiceTopKRouter": num for op in (gate, score, "topk")}


EXCHANGED_SIZES = {
    "registered mandatory save _c10d_functional::all_to_all_single in MoE": 5,
    # What TorchTitan's padding reads on the CPU: for each of four experts, where it starts; and of either rank, where
    # its tokens start and how many they are.
    "registered mandatory save aten::_local_scalar_dense in MoE": 5 * 4 * (1 + 2 * 2),
}

# Rows of a model with routers -> what is saved in a step without being asked for
REGISTERED = {
    "deepseek_v3 FSDP2": router_saves(5),  # five of the six blocks have a router
    "deepseek_v3 FSDP2, accumulation": router_saves(10),
    "deepseek_v3 FSDP2, expert parallel": router_saves(5) | EXCHANGED_SIZES,
}

NO_MOVE = VARIANTS["off"]
MOVE = "--activation_offload.min_offload_mib 0.001"  # also what a router saves, 8 KiB


def saving(moves: str, **keys: object) -> str:
    """Flags of a run with selective saves; a key that is True is a switch."""
    switches = {key: "" if value is True else value for key, value in keys.items()}
    return f"{moves} --selective_checkpoint.enable " + " ".join(
        f"--selective_checkpoint.{key} {value}" for key, value in switches.items()
    )


# name of the row -> its flags (None: as in ROWS), and runs: name -> flags, how often each rule saves in a step, and
# number of tensors of rank 0 that move in a step
ATTENTION, WO, MIN_K = 'save_ops "attention"', 'save_modules "wo"', "save_matmul_min_k 256"
SPLIT_BACKWARD = "llama3 PP, split backward"
LLAMA3_ALL = saving(MOVE, save_modules="wo", save_matmul_min_k=256, offload=True)
SAVES = {
    "llama3 FSDP2": (  # six blocks of seven linears; attention has two outputs; the last block keeps all
        None,
        {
            "attention": (saving(NO_MOVE, save_ops="attention"), {ATTENTION: 6}, 0),
            "wo, nothing else moves": (
                saving(f"{NO_MOVE} {MOVE}", save_ops="", save_modules="wo", offload=True),
                {WO: 6},
                5,
            ),
            "min_k": (saving(MOVE, save_ops="", save_matmul_min_k=256), {MIN_K: 6 * 7}, 5),
            "all saved": (LLAMA3_ALL, {ATTENTION: 6, WO: 6, MIN_K: 6 * 6}, 5 * (1 + 2 + 7)),
        },
    ),
    "llama3 FSDP2, bfloat16": (
        None,
        {"all saved": (LLAMA3_ALL, {ATTENTION: 6, WO: 6, MIN_K: 6 * 6}, 5 * (1 + 2 + 7))},
    ),
    "llama3 TP, stock Trainer": (
        None,
        {"all saved": (LLAMA3_ALL, {ATTENTION: 6, WO: 6, MIN_K: 6 * 6}, 5 * (1 + 2 + 7))},
    ),
    "llama3 PP 1F1B": (  # three blocks a rank, four microbatches
        None,
        {"all saved": (LLAMA3_ALL, {ATTENTION: 12, WO: 12, MIN_K: 12 * 6}, 8 * (1 + 2 + 7))},
    ),
    SPLIT_BACKWARD: (  # three blocks a rank, four microbatches; a region is recomputed several times
        f"{LLAMA3} {pipeline('InterleavedZeroBubble')}",
        {
            "all saved": (
                saving(f"{MOVE} --activation_offload.keep_last 0", save_modules="wo", offload=True),
                {ATTENTION: 12, WO: 12},
                12 * (1 + 2 + 1),
            )
        },
    ),
    "deepseek_v3 FSDP2": (
        None,
        {
            "all saved": (
                saving(
                    MOVE,
                    # For heads of these sizes the CPU takes attention apart, into two bmm; a third adds up the experts.
                    save_ops="attention aten::bmm",
                    save_modules="wo",
                    save_matmul_min_k=512,  # attention's wkv_b; w2 of the dense block and of the shared experts
                    offload=True,
                    check_routing=True,
                ),
                {'save_ops "aten::bmm"': 6 * 2 + 5, WO: 6, "save_matmul_min_k 512": 6 * 2, **router_saves(5)},
                5 * (1 + 2 + 1 + 2) + 4 * (1 + 4),  # top-k has two outputs
            ),
            "TorchTitan's list of ops": (
                f"{NO_MOVE} --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op "
                "--activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns moe.router.gate",
                # Of 4 + 3 * 8 + 3 linears besides the gate it saves every second.
                {"the block's own selective checkpointing": 5 * 16, **router_saves(5)},
                0,
            ),
        },
    ),
    "deepseek_v3 FSDP2, expert parallel": (
        None,
        {
            "exchange": (  # of tokens, there and back
                saving(NO_MOVE, save_ops="_c10d_functional::all_to_all_single"),
                {'save_ops "_c10d_functional::all_to_all_single"': 5 * 2, **router_saves(5), **EXCHANGED_SIZES},
                0,
            ),
            "all saved": (
                saving(MOVE, save_ops="aten::bmm", save_modules="wo", offload=True, check_routing=True),
                {'save_ops "aten::bmm"': 6 * 2 + 5, WO: 6, **router_saves(5), **EXCHANGED_SIZES},
                5 * (1 + 2 + 1) + 4 * (1 + 4),
            ),
        },
    ),
    "llama4 FSDP2": (
        LLAMA4,  # of six blocks, every second has a router
        {
            "attention": (
                saving(MOVE, save_ops="attention", check_routing=True),
                {ATTENTION: 6, **router_saves(3, score="sigmoid")},
                5,
            ),
            "all saved": (
                saving(MOVE, save_modules="wo", save_matmul_min_k=512, offload=True, check_routing=True),
                {
                    ATTENTION: 6,
                    WO: 6,
                    "save_matmul_min_k 512": 3 + 3 * (8 + 1),  # w2: of a dense block, of eight experts and a shared one
                    **router_saves(3, score="sigmoid"),
                },
                5 * (1 + 2 + 1) + 3 * 1 + 2 * (9 + 3),  # top-k's values are too small to move
            ),
        },
    ),
    "gpt_oss FSDP2": (
        GPT_OSS,  # of four blocks, the first and the third have a sliding window
        {
            "attention": (saving(NO_MOVE), {ATTENTION: 2, **router_saves(4, gate="addmm")}, 0),
            "all saved": (
                saving(MOVE, save_modules="wo", save_sliding_window=True, offload=True, check_routing=True),
                {ATTENTION: 4, WO: 4, **router_saves(4, gate="addmm")},
                3 * (1 + 3 + 1 + 4),
            ),
        },
    ),
}

# Where rules name ops whose outputs nobody can foretell: attention taken apart, experts; and FlexAttention's maxima.
NEED_NOT_EXACT = {
    ("deepseek_v3 FSDP2", "all saved"),
    ("deepseek_v3 FSDP2, expert parallel", "all saved"),
    ("llama4 FSDP2", "all saved"),
    ("gpt_oss FSDP2", "all saved"),
}
