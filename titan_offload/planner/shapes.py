"""What a plan is asked about: a model, a job and a machine, as frozen dataclasses that refuse bad values.

Owns every number that a plan needs and their checks; what they mean for time and memory: `costs`, `pipeline`. Relies on
nothing but the standard library.
"""

import math
from dataclasses import dataclass

SCHEDULES = (
    *("1F1B", "GPipe"),
    *("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
)
"""Pipeline schedules whose passes in flight are known; those of torch 2.11 to 2.14, by TorchTitan's names."""


@dataclass(frozen=True)
class LayerShape:
    """One TransformerBlock.

    Attributes:
        params: parameters of its matmuls that one token uses. Of a mixture of experts the active ones: those of
            ``top_k`` routed experts, of the shared ones and of the router.
        attention_width: ``num_heads x head_dim`` of queries and keys.
        num_heads: query heads.
        window: how many tokens attention looks back, itself included; None: all of them. Of chunked attention, half of
            the chunk: on average a token sees that much.
        value_width: ``num_heads x value_head_dim``, the width of attention's output; None: ``attention_width``. Another
            one in DeepSeek's latent attention.
        other_saves: bytes per token of each tensor besides attention's that ``[selective_checkpoint]`` saves here, such
            as scores (``num_experts x 4``), top-k values and indices (``top_k x 4``, ``top_k x 8``) of a router.
        activations: bytes per token of each tensor that autograd saves if the block is not checkpointed, see
            `saved_activations`. Empty: not known.
    """

    params: int
    attention_width: int
    num_heads: int
    window: int | None = None
    value_width: int | None = None
    other_saves: tuple[int, ...] = ()
    activations: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("params", "attention_width", "num_heads"):
            _check_count("layer", name, getattr(self, name))
        for name in ("window", "value_width"):
            if getattr(self, name) is not None:
                _check_count("layer", name, getattr(self, name))
        if self.output_width % self.num_heads:
            raise ValueError(
                f"layer num_heads = {self.num_heads} does not divide its attention's width {self.output_width}: set "
                "the width to heads x head dim"
            )

    @property
    def output_width(self) -> int:
        """Width of attention's output."""
        return self.attention_width if self.value_width is None else self.value_width


@dataclass(frozen=True)
class ModelShape:
    """A model, as far as its training costs time and memory.

    Attributes:
        name: for people.
        dim: of the hidden state.
        layers: its blocks, in order.
        vocab_size: for the logits' memory; None: not known, then they are not counted.
        num_params: all parameters, of a mixture of experts all experts', embeddings included. For the memory of
            gradients and optimizer states; None: not known, then they are not counted.
    """

    name: str
    dim: int
    layers: tuple[LayerShape, ...]
    vocab_size: int | None = None
    num_params: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        _check_count("model", "dim", self.dim)
        for name in ("vocab_size", "num_params"):
            if getattr(self, name) is not None:
                _check_count("model", name, getattr(self, name))
        if not self.layers:
            raise ValueError(f"model {self.name} has no layers: give at least one")


@dataclass(frozen=True)
class Job:
    """How the model is trained.

    Attributes:
        seq_len: tokens of a whole sequence; context and tensor parallel divide it.
        batch: sequences of one forward pass on a rank: with pipeline parallel a microbatch's.
        itemsize: bytes per element of the hidden state: 2 for bf16.
        num_forwards: forward passes of a step on a rank: gradient accumulation, or with pipeline parallel microbatches.
        context_parallel, tensor_parallel, pipeline_parallel: degrees.
        schedule: of the pipeline, one of `SCHEDULES`.
        num_devices: of the whole job.
        stages_per_rank: parts of the model that a pipeline rank has; None: 1, or 2 with schedules of several stages, as
            in TorchTitan.
        stage_layers: blocks of each of the ``pipeline_parallel x stages_per_rank`` stages; None: as TorchTitan divides
            them, see `pipeline.stage_layers`.
        data_parallel_replicate: how many copies of parameters and optimizer states there are (HSDP); the rest of the
            devices shares one.
        is_checkpointed: whether blocks are under activation checkpointing (AC).
    """

    seq_len: int
    batch: int = 1
    itemsize: int = 2
    num_forwards: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    schedule: str = "1F1B"
    num_devices: int = 8
    stages_per_rank: int | None = None
    stage_layers: tuple[int, ...] | None = None
    data_parallel_replicate: int = 1
    is_checkpointed: bool = True

    def __post_init__(self) -> None:
        for name in (
            *("seq_len", "batch", "itemsize", "num_forwards", "num_devices"),
            *("context_parallel", "tensor_parallel", "pipeline_parallel", "data_parallel_replicate"),
        ):
            _check_count("job", name, getattr(self, name))
        if self.schedule not in SCHEDULES:
            choices = ", ".join(f'"{choice}"' for choice in SCHEDULES)
            raise ValueError(f"job schedule = {self.schedule!r} is not known: set it to one of {choices}")
        degrees = self.context_parallel * self.tensor_parallel * self.pipeline_parallel * self.data_parallel_replicate
        if self.num_devices % degrees:
            raise ValueError(
                f"job num_devices = {self.num_devices} is no multiple of {degrees}, the product of context "
                f"({self.context_parallel}), tensor ({self.tensor_parallel}), pipeline ({self.pipeline_parallel}) and "
                f"replicate ({self.data_parallel_replicate}) parallel: give a multiple, or lower a degree"
            )

    @property
    def tokens(self) -> int:
        """Of one forward pass on a rank inside a block, where only context parallel cuts the sequence."""
        return self.batch * -(-self.seq_len // self.context_parallel)

    @property
    def seq_len_divisor(self) -> int:
        """What TorchTitan wants ``seq_len`` to be a multiple of: tensor parallel degree x twice the context parallel
        one, if there is any (``ParallelDims.seq_len_divisor``)."""
        return self.tensor_parallel * self.context_parallel * 2


@dataclass(frozen=True)
class Machine:
    """What it is trained on.

    Attributes:
        d2h_gb_per_s, h2d_gb_per_s: what a device's link to the host carries in each direction if no other device
            copies, in 1e9 bytes per second.
        devices_per_link: devices that share this link and copy at once.
        tflops: what a device sustains in training, in 1e12 floating point operations per second.
        devices_per_node: the job's devices of one node.
        num_nodes: how many.
        host_memory_gib: of a node, in GiB; None: not known.
        device_memory_gib: of a device, in GiB; None: not known.
    """

    d2h_gb_per_s: float
    h2d_gb_per_s: float
    devices_per_link: int = 1
    tflops: float = 500.0
    devices_per_node: int = 8
    num_nodes: int = 1
    host_memory_gib: float | None = None
    device_memory_gib: float | None = None

    def __post_init__(self) -> None:
        for name in ("devices_per_link", "devices_per_node", "num_nodes"):
            _check_count("machine", name, getattr(self, name))
        for name in ("d2h_gb_per_s", "h2d_gb_per_s", "tflops", "host_memory_gib", "device_memory_gib"):
            _check_amount("machine", name, getattr(self, name), or_none=name.endswith("_gib"))
        if self.devices_per_link > self.devices_per_node:
            raise ValueError(
                f"machine devices_per_link = {self.devices_per_link} is more than devices_per_node = "
                f"{self.devices_per_node}: a link's devices are on one node, so set it to at most that"
            )


def _check_count(what: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} {name} = {value!r} is not allowed: set it to a whole number >= 1")


def _check_amount(what: str, name: str, value: object, or_none: bool) -> None:
    if or_none and value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{what} {name} = {value!r} is not allowed: set it to a number above 0")
