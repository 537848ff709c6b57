"""The matrix: what is trained, and what must be seen. Data only.

A row is one way to run TorchTitan; each of its variants is one training. Whatever the variant, losses and gradient
norms are those of ``off``, to the last digit.
"""

from dataclasses import dataclass

LLAMA3 = "--job.config_file train_configs/debug_cpu.toml"
MOE = "--job.config_file train_configs/debug_moe_cpu.toml --training.local_batch_size 4"
MOVE_ALL_SIZES = "--activation_offload.min_offload_mib 0.01"
NO_AC = "--activation_checkpoint.mode none"

VARIANTS = {
    "off": "--activation_offload.mode none",
    "block_inputs": f"{MOVE_ALL_SIZES} --activation_offload.prefetch_lookahead 2",
    "block_inputs, sync": f"{MOVE_ALL_SIZES} --activation_offload.schedule sync",
    "all": f"{MOVE_ALL_SIZES} --activation_offload.mode all",
    "all, no AC": f"{MOVE_ALL_SIZES} --activation_offload.mode all {NO_AC}",
}
INPUTS_ONLY = ("off", "block_inputs", "block_inputs, sync")
NO_SYNC = ("off", "block_inputs", "all", "all, no AC")
EXTREMES = ("off", "block_inputs", "all, no AC")


@dataclass(frozen=True)
class Row:
    """One way to run TorchTitan.

    Attributes:
        flags: of TorchTitan, see `runs.train_rows`.
        blocks: for each rank of the pipeline (without one: once), how many blocks each of its model parts has under
            offload.
        num_forwards: forward passes of each part in a step: gradient accumulation, or microbatches of a pipeline.
        ranks: processes.
        variants: which of `VARIANTS` it is trained with.
        keep_last: as in the flags.
        saved_per_block: how many tensors of a block move that is not checkpointed, of each rank in turn; 0: it depends
            on the data.
        is_slow: behind the marker ``slow``.
    """

    flags: str
    blocks: tuple[tuple[int, ...], ...] = ((6,),)
    num_forwards: int = 1
    ranks: int = 2
    variants: tuple[str, ...] = tuple(VARIANTS)
    keep_last: int = 1
    saved_per_block: int = 15
    is_slow: bool = False

    @property
    def is_pipeline(self) -> bool:
        return "pipeline_parallel" in self.flags

    @property
    def splits_backward(self) -> bool:
        return any(schedule in self.flags for schedule in ("ZeroBubble", "DualPipeV"))

    def num_inputs(self, rank: int) -> int:
        """Block inputs of ``rank`` that move in a step."""
        parts = self.blocks[rank * len(self.blocks) // self.ranks]
        return self.num_forwards * sum(num_blocks - self.keep_last for num_blocks in parts)

    def num_saved(self, rank: int) -> int:
        """Tensors of ``rank`` that move in a step without AC; 0: it depends on the data."""
        return self.num_inputs(rank) * self.saved_per_block


# Without AC a llama3 block saves 15 tensors that move. Of each of two norms: its input, that as normed before it is
# multiplied with the weights, and after. Of attention: q, k, v, its output and its log-sum-exp. Of the feed-forward:
# w1's output, the same activated, w3's output, their product. The log-sum-exp is too small with tensor parallel, with
# context parallel, and of a microbatch of one sequence. With context parallel the first rank merges attention's output
# from two pieces, so that it is laid out anew for `wo`: one more.


def parallel(**degrees: int) -> str:
    return " ".join(f"--parallelism.{name}_degree {degree}" for name, degree in degrees.items())


def pipeline(schedule: str, **degrees: int) -> str:
    return f"{parallel(pipeline_parallel=2, **degrees)} --parallelism.pipeline_parallel_schedule {schedule}"


EIGHT_BLOCKS = (
    "--model.flavor debugmodel_8_blocks --parallelism.pipeline_parallel_first_stage_less_layers 0 "
    "--parallelism.pipeline_parallel_last_stage_less_layers 0"
)
"""Of four pipeline stages each has two."""

REPLICATED = "--parallelism.data_parallel_shard_degree 1"

ROWS = {
    "llama3 FSDP2": Row(LLAMA3),
    "deepseek_v3 FSDP2": Row(MOE, variants=INPUTS_ONLY),
    "deepseek_v3 FSDP2, accumulation": Row(
        f"{MOE} --training.global_batch_size 16", num_forwards=2, variants=INPUTS_ONLY
    ),
    "llama3 FSDP2, accumulation, validation": Row(
        f"{LLAMA3} --training.global_batch_size 16 --validation.enable --validation.freq 2 --validation.seq_len 64",
        num_forwards=2,
        variants=EXTREMES,
    ),
    "llama3 FSDP2, bfloat16": Row(f"{LLAMA3} --training.mixed_precision_param bfloat16", variants=INPUTS_ONLY),
    "llama3 TP, stock Trainer": Row(
        f"stock {LLAMA3} {parallel(tensor_parallel=2)} {REPLICATED}",
        saved_per_block=14,
    ),
    "llama3 PP 1F1B": Row(
        f"{LLAMA3} {pipeline('1F1B')} {REPLICATED}", blocks=((3,), (3,)), num_forwards=4, saved_per_block=14
    ),
    "llama3 FSDP2, selective AC of ops": Row(
        f"{LLAMA3} --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op",
        variants=INPUTS_ONLY,
    ),
    "llama3 FSDP2, every second block": Row(
        f"{LLAMA3} --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option 2",
        blocks=((3,),),
        variants=INPUTS_ONLY,
    ),
    "llama3 FSDP2, reshard always": Row(
        f"{LLAMA3} --parallelism.fsdp_reshard_after_forward always", variants=EXTREMES, is_slow=True
    ),
    "llama3 FSDP2, reshard never": Row(
        f"{LLAMA3} --parallelism.fsdp_reshard_after_forward never", variants=EXTREMES, is_slow=True
    ),
    "llama3 FSDP2, parameters on the CPU": Row(
        f"{LLAMA3} --training.enable_cpu_offload", variants=EXTREMES, is_slow=True
    ),
    "llama3 DDP": Row(f"{LLAMA3} {parallel(data_parallel_replicate=2)} {REPLICATED}", variants=EXTREMES),
    "llama3 CP": Row(
        f"{LLAMA3} {parallel(context_parallel=2)} {REPLICATED}",
        variants=NO_SYNC,
    ),
    "llama3 FSDP2 x CP": Row(f"{LLAMA3} {parallel(context_parallel=2)}", ranks=4, variants=NO_SYNC, is_slow=True),
    "llama3 no parallelism": Row(LLAMA3, ranks=1, variants=EXTREMES),
    "deepseek_v3 FSDP2, expert parallel": Row(
        f"{MOE} {parallel(expert_parallel=2)}", variants=NO_SYNC, saved_per_block=0
    ),
    "llama3 FSDP2 x TP": Row(
        f"{LLAMA3} {parallel(tensor_parallel=2)}", ranks=4, variants=NO_SYNC, saved_per_block=14, is_slow=True
    ),
    "llama3 HSDP": Row(f"{LLAMA3} {parallel(data_parallel_replicate=2)}", ranks=4, variants=NO_SYNC, is_slow=True),
    "llama3 PP 1F1B x FSDP2": Row(
        f"{LLAMA3} {pipeline('1F1B')}",
        blocks=((3,), (3,)),
        num_forwards=4,
        saved_per_block=14,
        ranks=4,
        variants=NO_SYNC,
        is_slow=True,
    ),
    "llama3 PP GPipe": Row(
        f"{LLAMA3} {pipeline('GPipe')}",
        blocks=((3,), (3,)),
        num_forwards=4,
        saved_per_block=14,
        variants=NO_SYNC,
        is_slow=True,
    ),
}
for schedule in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
    # DualPipeV's overlap of experts' exchange takes an accelerator's streams.
    extra = "--parallelism.no_pipeline_parallel_expert_parallel_overlap" if schedule == "DualPipeV" else ""
    ROWS[f"llama3 PP {schedule}"] = Row(
        f"{LLAMA3} {EIGHT_BLOCKS} {pipeline(schedule)} {extra}",
        blocks=((2, 2), (2, 2)),
        num_forwards=4,
        saved_per_block=14,
        variants=NO_SYNC,
        is_slow=True,
    )
