"""How much host memory a run will take, by formula, before it takes any.

Owns the arithmetic of needs: what the pool of pinned memory will hold (block inputs, saved attention outputs, times the
forward passes in flight), and what else of a run fills host memory. Relies on its arguments alone, numbers of one rank,
so that a planner can ask for machines that are not there. How what is free is divided: `budget`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from titan_offload.config import MIB

LOADER_WORKER_BYTES = 384 * MIB
"""Memory of one data loader worker of its own, besides the batches that it has ready.

Measured on TorchTitan 0.2.2's text data loader with torch 2.13 for CPUs (private memory in ``smaps_rollup`` after 20
batches of 2048 tokens): 333 MiB of a spawned worker; 16 MiB of a forked one, which had 317 MiB in common with its
parent. These come apart page by page as reference counts are written: the figure is a spawned worker's, rounded up.
"""


def slots_bytes(num_bytes: int, alignment: int = 512) -> int:
    """What a tensor of ``num_bytes`` takes of `PinnedPool`, whose slots start and end at multiples of 512 bytes."""
    return -(-num_bytes // alignment) * alignment


def block_input_bytes(
    batch: int, seq_len: int, dim: int, itemsize: int, context_parallel: int = 1, tensor_parallel: int = 1
) -> int:
    """Bytes of one block's input on this rank: ``batch x seq_len x dim``, its sequence cut in parts.

    TorchTitan hands hidden states from block to block as ``Shard(1)``: context parallel cuts the sequence, and with
    tensor parallel the sequence parallel norms do so again. Where it does not divide, the first ranks have one token
    more (as DTensor shards): they are what is counted.

    Args:
        batch: sequences of one forward pass: a microbatch's, with pipeline parallel.
        seq_len: tokens of a whole sequence.
        dim: of the hidden state.
        itemsize: bytes per element: 2 for bf16, in which FSDP2's mixed precision has it.
        context_parallel: degree.
        tensor_parallel: degree; 1 where hidden states are replicated between blocks.
    """
    return batch * -(-seq_len // (context_parallel * tensor_parallel)) * dim * itemsize


def stem_bytes(tokens: int, num_views: int = 1, min_offload_bytes: int = 0) -> int:
    """Bytes that mode "all" moves of what one forward pass saves before the first block: the tokens that the embedding
    looked up, as int64.

    Args:
        tokens: of the pass.
        num_views: passes whose tokens are views of one batch, as microbatches of a pipeline are: of two, each moves the
            whole batch; of more, its view (`OffloadEngine` gathers what is less than half of a storage).
        min_offload_bytes: of a smaller view nothing moves.
    """
    num_bytes = tokens * 8
    return 0 if num_bytes < min_offload_bytes else num_bytes * (2 if num_views == 2 else 1)


def attention_save_bytes(batch: int, seq_len: int, num_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes that saving one attention call takes: its output, and a float32 log-sum-exp per head and token.

    That is what flash, cuDNN and FlexAttention forwards return and their backward needs. The tokens and heads are those
    of this rank. As two tensors they take two slots: round each with `slots_bytes` for an exact figure.
    """
    return batch * seq_len * num_heads * (head_dim * itemsize + 4)


def max_in_flight(
    actions: Iterable[tuple[int, str, int]], num_regions: Mapping[int, int], frees: Collection[str] = ("B", "W")
) -> int:
    """The most regions that a pipeline rank has alive at once.

    Args:
        actions: what the rank does, in order: stage, kind and microbatch. Kinds as torch's schedules name them: ``"F"``
            forward, ``"B"`` backward, ``"I"`` and ``"W"`` the two halves of a split backward, towards the input and
            the weights. Others do not matter. Of actions that run at once, the forward first: both are alive.
        num_regions: for each stage, its regions that are moved: its blocks less ``keep_last``.
        frees: the kinds that end a region: its graph lives until its weights have their gradients.

    Microbatches are counted, not told apart: torch 2.13 numbers those of the last stage of its 1F1B from 1 in forward
    and from 0 in backward.
    """
    alive: Counter[int] = Counter()
    most = 0
    for stage, kind, _ in actions:
        if kind == "F":
            alive[stage] += 1
        elif kind in frees:
            assert alive[stage] > 0, f"backward of stage {stage} without a forward"
            alive[stage] -= 1
        most = max(most, sum(num * num_regions[stage] for stage, num in alive.items()))
    return most


def in_flight_1f1b(num_stages: int, stage: int, num_microbatches: int) -> int:
    """Forward passes alive at once on one stage of a 1F1B schedule: a stage runs ahead by one microbatch for itself and
    each stage behind it, and then does one backward for each forward. (GPipe: ``num_microbatches``.)"""
    return min(num_stages - stage, num_microbatches)


def cpu_offload_bytes(parameter_bytes: Iterable[int], num_states: int = 2, is_pinned: bool = True) -> int:
    """Host memory that FSDP2's CPU offload of parameters still takes after the model is initialized on the CPU.

    To come are a gradient per parameter and the optimizer's states, in the parameters' dtype. With pinning (FSDP2's
    default) torch's pinned allocator rounds each parameter, at the first forward, and each gradient up to a power of
    two: at most twice the bytes.

    Args:
        parameter_bytes: of each parameter, the bytes of this rank's shard.
        num_states: tensors of a parameter's size that the optimizer keeps: AdamW 2.
        is_pinned: whether the offload policy pins.
    """
    total = 0
    for num_bytes in parameter_bytes:
        held = 1 << (num_bytes - 1).bit_length() if is_pinned and num_bytes else num_bytes
        total += (held - num_bytes) + held + num_states * num_bytes
    return total


def staging_bytes(parameter_bytes: int, num_states: int = 2) -> int:
    """Host memory of asynchronous saving: a copy of this rank's shards of parameters and optimizer states.

    TorchTitan's ``checkpoint.async_mode = "async"`` holds it while a state dict is written, pageable;
    ``"async_with_pinned_mem"`` from the first save to the end of the run, in shared memory that it registers at exact
    size. Shards that CPU offload has on the host are copied too.

    Args:
        parameter_bytes: all parameters of this rank's shard together.
        num_states: tensors of a parameter's size that the optimizer keeps: AdamW 2.
    """
    return (1 + num_states) * parameter_bytes


def data_loader_bytes(
    num_workers: int, batch_bytes: int, prefetch_factor: int | None = None, worker_bytes: int = LOADER_WORKER_BYTES
) -> int:
    """Host memory of a rank's data loader: each worker's own, and the batches that it has ready.

    Args:
        num_workers: 0: the rank loads in its own process, which is no claim.
        batch_bytes: of one batch; of text, tokens and labels as int64: ``batch x seq_len x 16``.
        prefetch_factor: batches that each worker loads ahead. None: torch's default, 2.
        worker_bytes: see `LOADER_WORKER_BYTES`. Datasets that keep much in memory need more.
    """
    return num_workers * ((prefetch_factor or 2) * batch_bytes + worker_bytes)
