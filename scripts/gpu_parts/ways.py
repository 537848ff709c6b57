"""TorchTitan's own model under FSDP2, and the ways to run a step of it that are compared.

Owns what a way is: with activation checkpointing (AC) or without, offloaded by us, by
``torch.autograd.graph.save_on_cpu`` or not at all. Relies on TorchTitan's own functions for AC and FSDP2. The world is
one process; the vocabulary is small, so that blocks are nearly all of a step, and tokens are random.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh

from gpu_parts.device import Device
from titan_offload import OffloadConfig, Offloader, OffloadStats, Runtime, SelectiveConfig, apply_offload
from titan_offload.blocks import clean_fqn
from titan_offload.titan.train import reduce_gradients_by_plain_sums, repair_for_cpu

repair_for_cpu()  # before anything else of TorchTitan is imported

from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.config.job_config import ActivationCheckpoint  # noqa: E402
from torchtitan.distributed.activation_checkpoint import apply_ac  # noqa: E402
from torchtitan.models.llama4.infra.parallelize import apply_fsdp  # noqa: E402  # of qwen3 too
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, qwen3_args  # noqa: E402
from torchtitan.tools.utils import set_default_dtype  # noqa: E402

FAMILY, VOCAB_SIZE = "qwen3", 1024


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Attributes:
        name: for people and in results.
        variant: of `planner.plan.VARIANTS`, what a plan calls it; None: a plan does not know it.
        is_checkpointed: whether blocks are under AC.
        offload: settings; None: nothing of ours.
        selective: which op outputs are saved.
        saves_on_cpu: whether ``save_on_cpu(pin_memory=True)`` stands around each checkpointed block.
    """

    name: str
    variant: str | None = None
    is_checkpointed: bool = True
    offload: OffloadConfig | None = None
    selective: SelectiveConfig | None = None
    saves_on_cpu: bool = False


def _config(device: Device, **settings: Any) -> OffloadConfig:
    return OffloadConfig(min_offload_mib=device.pick(1.0, 0.001), on_exhausted="error", **settings)


def ways_of(device: Device) -> dict[str, Way]:
    """All ways by name. AC alone, what others are compared with, is the first."""
    overlap = _config(device)
    on_device, on_host = SelectiveConfig(), SelectiveConfig(offload=True)
    everything = _config(device, mode="all")
    ways = (
        Way("ac", "ac"),
        Way("save_on_cpu", saves_on_cpu=True),
        Way("sync", "sync", offload=_config(device, schedule="sync")),
        Way("overlap", "overlap", offload=overlap),
        Way("attention_on_device", "overlap_selective_device", offload=overlap, selective=on_device),
        Way("attention_on_host", "overlap_selective_host", offload=overlap, selective=on_host),
        Way("all_with_ac", "overlap", offload=everything),
        Way("all_without_ac", "all_without_ac", is_checkpointed=False, offload=everything),
        Way("no_ac", is_checkpointed=False),
    )
    return {way.name: way for way in ways}


def model_args(device: Device, flavor: str, num_blocks: int, seq_len: int) -> Qwen3ModelArgs:
    """TorchTitan's model args of a flavor of Qwen3, with fewer blocks and a small vocabulary. Emulated: narrow ones."""
    sizes = {"n_layers": num_blocks, "max_seq_len": seq_len, "vocab_size": VOCAB_SIZE, "enable_weight_tying": False}
    if device.is_emulated:
        sizes |= {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 128, "vocab_size": 64}
    return replace(qwen3_args[flavor], **sizes)


def build_model(device: Device, mesh: DeviceMesh, args: Qwen3ModelArgs, is_checkpointed: bool) -> nn.Module:
    """The model in bf16, the same weights each time, in TorchTitan's order: AC, then FSDP2, then weights."""
    with torch.device("meta"), set_default_dtype(torch.bfloat16):
        model = Qwen3Model(args)
    if is_checkpointed:
        apply_ac(model, ActivationCheckpoint(mode="full"))
    apply_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
    if device.is_emulated:
        reduce_gradients_by_plain_sums([model])
    model.to_empty(device=device.torch_device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(device.torch_device)
    return model.train()


def make_tokens(device: Device, args: Qwen3ModelArgs, seq_len: int, seed: int = 0) -> torch.Tensor:
    """One sequence, ``1 x seq_len``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(args.vocab_size, (1, seq_len), generator=generator).to(device.torch_device)


class Running:
    """A model that is trained one way.

    Args:
        device, mesh, args: see `build_model`.
        way: how.
        runtime: for the engine. Default: as a run has it.
        budget_bytes: pinned memory, in bytes. Default: this rank's share of the host, as in a run.

    Attributes:
        model: of which this is the only reference.
        offloader: None: nothing of ours.
        stats: of the last step.
    """

    def __init__(
        self,
        device: Device,
        mesh: DeviceMesh,
        args: Qwen3ModelArgs,
        way: Way,
        runtime: Runtime | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        self.way = way
        self.model = build_model(device, mesh, args, way.is_checkpointed)
        self.offloader: Offloader | None = None
        self.stats = OffloadStats()
        if way.saves_on_cpu:
            for block in self.model.layers.values():
                block.forward = saving_on_cpu(block.forward)
        if way.offload is not None:
            runtime = runtime or device.runtimes()[0]
            settings = {"runtime": runtime, "budget_bytes": budget_bytes}
            self.offloader = apply_offload(self.model, way.offload, way.selective, **settings)

    def backward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward and backward. Returns the loss."""
        loss = cross_entropy_loss(self.model(tokens), tokens)
        loss.backward()
        return loss.detach()

    def step_end(self, learning_rate: float = 0.0, keeps_gradients: bool = False) -> None:
        """Ends the step: plain gradient descent, which keeps no state.

        Args:
            learning_rate: 0: weights stay.
            keeps_gradients: set to 0, where otherwise their memory is given back.
        """
        if learning_rate:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.sub_(parameter.grad, alpha=learning_rate)
        self.model.zero_grad(set_to_none=not keeps_gradients)
        if self.offloader is not None:
            self.stats = self.offloader.step_end()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of each parameter, this rank's shard, which is all of it."""
        for name, parameter in self.model.named_parameters():
            yield clean_fqn(name), parameter.grad.to_local()

    def close(self) -> None:
        """Gives back what the way took, as far as this object holds it."""
        if self.offloader is not None:
            self.offloader.remove()
        self.offloader = self.model = None


@contextlib.contextmanager
def running(device: Device, *args: Any, **kwargs: Any) -> Iterator[Running]:
    """`Running`, whose memory is free again at the end."""
    runs = Running(device, *args, **kwargs)
    try:
        yield runs
    finally:
        runs.close()
        device.empty_cache()


def saving_on_cpu(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with the offload of Hugging Face Transformers around it: every saved tensor is copied to pinned
    memory of torch's own allocator, on the compute stream."""

    def forward_saving_on_cpu(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return forward(*args, **kwargs)

    return forward_saving_on_cpu
