"""What one block costs: time of its forward and backward, bytes that it moves and holds, time of its copies.

Owns the formulas, each with its source. Relies on `need` for bytes, so that a plan and a run's own need are the same
arithmetic; no torch. All of it is first order: copies at the link's full rate, compute at one sustained rate, nothing
of embedding, head, loss, optimizer and collectives.
"""

from dataclasses import dataclass

from titan_offload import need
from titan_offload.config import OffloadConfig, SelectiveConfig
from titan_offload.need import attention_save_bytes, block_input_bytes
from titan_offload.planner.shapes import Job, LayerShape, Machine, ModelShape

ALL_OVER_INPUT = 17
"""Bytes of all activations of a block over those of its input, if nothing better is known: 34 per element of the
residual stream against 2, in 16 bits. Source: Korthikanti et al., arXiv 2205.05198, equation 1 without its attention
matrix, which fused attention never stores. With tensor and sequence parallel both are divided alike (equation 4). It is
a GPT block's, with an MLP of four times ``dim``; gated MLPs and experts differ."""

STATE_BYTES, GRADIENT_BYTES = 12, 4
"""Per parameter: float32 weight and AdamW's two states; its gradient. What TorchTitan keeps, whatever it computes in
(Rajbhandari et al., arXiv 1910.02054, section 3.1, less the 16-bit copies, which FSDP2 makes per block)."""

LOSS_BYTES = 8
"""Per logit, besides itself: float32 copy and log-softmax of TorchTitan's ``cross_entropy_loss``."""

UNSHARDED_BLOCKS = 2
"""Blocks whose parameters FSDP2 has whole at once: the one that runs and the one that is gathered ahead."""


@dataclass(frozen=True)
class BlockCosts:
    """One block on one rank, in one way to run a step.

    Attributes:
        forward_ms, attention_ms, backward_ms: of one pass; attention's products are part of ``forward_ms``, recompute
            is part of ``backward_ms``.
        inputs, saves: bytes of each tensor that moves to the host: its input, or each activation; saved outputs.
        stays_bytes: what it holds on the device from forward to backward in any case.
        recomputed_bytes: what its recompute makes, until its backward is over.
    """

    forward_ms: float
    attention_ms: float
    backward_ms: float
    inputs: tuple[int, ...]
    saves: tuple[int, ...]
    stays_bytes: int
    recomputed_bytes: int

    @property
    def moved_bytes(self) -> int:
        """In one pass, to the host and back."""
        return sum(self.inputs) + sum(self.saves)

    def d2h_ms(self, machine: Machine) -> float:
        """Its copies to the host, while all that share the link copy."""
        return copy_ms(self.moved_bytes, machine.d2h_gb_per_s, machine.devices_per_link)

    def h2d_ms(self, machine: Machine) -> float:
        """And back."""
        return copy_ms(self.moved_bytes, machine.h2d_gb_per_s, machine.devices_per_link)


def copy_ms(num_bytes: int, gb_per_s: float, devices_per_link: int = 1) -> float:
    """Time of a copy over a link that is divided evenly among the devices behind it."""
    return num_bytes / (gb_per_s / devices_per_link * 1e6)


def matmul_flop(layer: LayerShape, job: Job) -> float:
    """Of one forward pass of a block on one rank: 2 for each token and parameter. Context and tensor parallel divide.

    Source: Narayanan et al., arXiv 2104.04473, appendix "Floating-point operations".
    """
    return 2 * job.batch * job.seq_len * layer.params / (job.context_parallel * job.tensor_parallel)


def attention_flop(layer: LayerShape, job: Job) -> float:
    """Of attention's two products in the same, causal: half of ``4 x batch x seq^2 x width``.

    Source: as of `matmul_flop`, halved for the causal mask. With a window of w tokens the first w see a triangle, the
    others w each: ``seq x w - w^2 / 2`` pairs instead of ``seq^2 / 2``. Context parallel divides evenly, since
    TorchTitan balances it.
    """
    seq, window = job.seq_len, min(layer.window or job.seq_len, job.seq_len)
    pairs = seq * window - window**2 / 2
    widths = layer.attention_width + layer.output_width
    return 2 * job.batch * pairs * widths / (job.context_parallel * job.tensor_parallel)


def flop_ms(flop: float, machine: Machine) -> float:
    """Time that a device computes."""
    return flop / (machine.tflops * 1e9)


def input_bytes(model: ModelShape, job: Job) -> int:
    """Bytes of a block's input on the rank that has most, see `need.block_input_bytes`."""
    return block_input_bytes(
        *(job.batch, job.seq_len, model.dim, job.itemsize), job.context_parallel, job.tensor_parallel
    )


def saves_attention(layer: LayerShape, selective: SelectiveConfig | None) -> bool:
    """Whether attention of this block is saved: not over a window or chunk, unless asked for. None: the defaults."""
    selective = selective or SelectiveConfig()
    return "attention" in selective.save_ops and (layer.window is None or selective.save_sliding_window)


def saved_sizes(layer: LayerShape, job: Job, selective: SelectiveConfig | None) -> tuple[int, ...]:
    """Bytes of each output that selective checkpointing saves of a block on a rank: attention's output and its
    log-sum-exp, and what else the layer names. Tensor parallel divides the heads."""
    sizes = [job.tokens * per_token for per_token in layer.other_saves]
    if saves_attention(layer, selective):
        heads = -(-layer.num_heads // job.tensor_parallel)
        both = attention_save_bytes(1, job.tokens, heads, layer.output_width // layer.num_heads, job.itemsize)
        lse = attention_save_bytes(1, job.tokens, heads, 0, job.itemsize)
        sizes = [both - lse, lse, *sizes]
    return tuple(sizes)


def activation_sizes(layer: LayerShape, model: ModelShape, job: Job) -> tuple[int, ...]:
    """Bytes of each tensor that autograd saves of a block without checkpointing, on the rank that has most. Their sum
    alone, see `ALL_OVER_INPUT`, where the layout of the block is not known, and for a job with AC, in whose plan they
    are something to compare with."""
    if job.is_checkpointed or not layer.activations:
        return (ALL_OVER_INPUT * input_bytes(model, job),)
    return tuple(round(job.tokens * per_token) for per_token in layer.activations)


def stem_bytes(job: Job, offload: OffloadConfig) -> int:
    """Bytes that mode "all" moves of what a pass saves before the first block, see `need.stem_bytes`."""
    num_views = job.num_forwards if job.pipeline_parallel > 1 else 1
    return need.stem_bytes(job.tokens, num_views, offload.min_offload_bytes)


def block_costs(
    layer: LayerShape,
    model: ModelShape,
    job: Job,
    machine: Machine,
    offload: OffloadConfig,
    selective: SelectiveConfig | None,
    variant: str,
) -> BlockCosts:
    """Of one block with ``variant``, one of `plan.VARIANTS`.

    With AC a step is four forwards of each block: forward, recompute, and a backward of two. Attention that is saved is
    not recomputed, so its time is taken off once (Korthikanti et al., arXiv 2205.05198, section 5).
    """
    attention = flop_ms(attention_flop(layer, job), machine)
    forward = flop_ms(matmul_flop(layer, job), machine) + attention
    size, activations = input_bytes(model, job), activation_sizes(layer, model, job)
    if variant == "all_without_ac":
        inputs = tuple(s for s in activations if s >= offload.min_offload_bytes)
        return BlockCosts(forward, attention, 2 * forward, inputs, (), sum(activations) - sum(inputs), 0)
    backward, saved = 3 * forward, ()
    if variant.startswith("overlap_selective"):
        saved = saved_sizes(layer, job, selective)
        backward -= attention if saves_attention(layer, selective) else 0.0
    inputs = () if variant == "ac" or offload.mode == "none" else (size,)
    moving = saved if variant == "overlap_selective_host" else ()
    inputs, moving = (tuple(s for s in sizes if s >= offload.min_offload_bytes) for sizes in (inputs, moving))
    stays = size + sum(saved) - sum(inputs) - sum(moving)
    return BlockCosts(forward, attention, backward, inputs, moving, stays, sum(activations))


def shared_among(job: Job) -> int:
    """Devices that share one copy of parameters and optimizer states: by FSDP2, and by tensor and pipeline parallel."""
    return job.num_devices // job.data_parallel_replicate


def logits_bytes(model: ModelShape, job: Job) -> int:
    """Logits of a pass and what the loss makes of them, on the rank with the head; 0: not known. Tensor parallel
    divides the vocabulary (TorchTitan's loss parallel)."""
    return -(-job.tokens * (model.vocab_size or 0) * (job.itemsize + LOSS_BYTES) // job.tensor_parallel)


def unsharded_bytes(model: ModelShape, job: Job) -> int:
    """Parameters that FSDP2 has gathered at once; 0: not known. Blocks are taken to be alike."""
    if model.num_params is None or shared_among(job) == job.tensor_parallel * job.pipeline_parallel:
        return 0
    return UNSHARDED_BLOCKS * model.num_params * job.itemsize // (len(model.layers) * job.tensor_parallel)
