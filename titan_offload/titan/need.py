"""How much host memory a rank will take, from TorchTitan's job config, before the first step.

Owns the sizes of what moves: block inputs exactly, what autograd saves of other blocks where the planner knows that to
the byte (mode "all"), saved outputs of ops by the rules of `save_policy` and the shapes
that TorchTitan's models give them; how many of them a pipeline schedule holds at once; and what else of the run takes
host memory from then on. The first step's real bytes are compared with it.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import TokenChoiceTopKRouter

from titan_offload.apply import Offloader
from titan_offload.blocks import find_blocks, modules_of, unwrapped
from titan_offload.budget import Claim
from titan_offload.need import (
    block_input_bytes,
    cpu_offload_bytes,
    data_loader_bytes,
    max_in_flight,
    staging_bytes,
    stem_bytes,
)
from titan_offload.planner.costs import activation_sizes
from titan_offload.planner.model_shape import FAMILIES, model_shape
from titan_offload.planner.plan_input import why_estimate
from titan_offload.planner.shapes import Job
from titan_offload.planner.titan_job import job_of
from titan_offload.planner.titan_source import TrainSpec
from titan_offload.save_policy import Call
from titan_offload.saved_tensor import local_tensor
from titan_offload.selective import BlockSaves
from titan_offload.share import Need

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default  # any attention forward: the rules are the same


class NeedOfJob:
    """The need of one rank of a TorchTitan job.

    Args:
        job_config, parallel_dims: of the run.
        model_args: sizes of the model.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any) -> None:
        self._job_config = job_config
        self._dims = parallel_dims
        self._model_args = model_args
        training = job_config.training
        self._batch = training.local_batch_size
        if parallel_dims.pp_enabled:
            self._batch = job_config.parallelism.pipeline_parallel_microbatch_size
        dtype = training.mixed_precision_param if parallel_dims.fsdp_enabled else training.dtype
        self._itemsize = TORCH_DTYPE_MAP[dtype].itemsize
        # Of attention: tensor parallel divides its heads.
        self._local_seq_len = -(-training.seq_len // parallel_dims.cp)

    @property
    def block_input_bytes(self) -> int:
        """Of one block on this rank. Context parallel divides the sequence, and so does tensor parallel: TorchTitan
        always joins it with sequence parallel between blocks."""
        return block_input_bytes(
            self._batch,
            self._job_config.training.seq_len,
            self._model_args.dim,
            self._itemsize,
            context_parallel=self._dims.cp,
            tensor_parallel=self._dims.tp,
        )

    def why_unknown(self, offloader: Offloader) -> str | None:
        """Why nobody can say before the first step what will move; None: `NeedOfJob` can."""
        if not offloader.fqns_saving_all:
            return None
        if self._family is None:
            return "the planner does not know this model"
        try:
            return why_estimate(self._job_config, self._family, self._model_args, self._job)
        except ValueError as error:  # a pipeline schedule that it does not know, say
            return str(error)

    @property
    def _family(self) -> str | None:
        """Of `model_shape`: whose blocks the model has. Anybody may add a flavor, so the class of its args says so."""
        path = type(self._model_args).__module__.split(".")
        return path[2] if path[:2] == ["torchtitan", "models"] and path[2] in FAMILIES else None

    @cached_property
    def _job(self) -> Job:
        spec = TrainSpec(self._family, {}, has_pipeline=True)
        job = job_of(self._job_config, spec, self._model_args, self._dims.world_size)
        return replace(job, is_checkpointed=False)  # those of its blocks that are asked about

    def __call__(self, offloader: Offloader, parts: Sequence[nn.Module], schedule: Any = None) -> Need:
        """The need of this rank.

        Args:
            offloader: attached to all parts.
            parts: the model, or the parts of a pipeline that this rank has.
            schedule: torch's pipeline schedule; None: no pipeline.
        """
        config = offloader.engine.config
        moving = [fqns[: max(0, len(fqns) - config.keep_last)] for fqns in offloader.part_fqns]
        saving_all = offloader.fqns_saving_all
        sizes: list[Counter[tuple[str, int]]] = []  # per part: what is moved of one forward pass, by size
        for part, fqns in zip(parts, moving, strict=True):
            sizes.append(Counter())
            checkpointed = [fqn for fqn in fqns if fqn not in saving_all]
            if config.mode == "block_inputs" or (config.mode == "all" and checkpointed):
                sizes[-1]["input", self.block_input_bytes] = len(checkpointed)
            if config.mode == "all":
                others = self._activation_sizes(offloader, part, set(fqns) - set(checkpointed))
                sizes[-1].update(("activation", num_bytes) for num_bytes in others)
            if offloader.saves.offloads:
                blocks = find_blocks(part, "layers.*")
                for fqn in fqns:
                    for num_bytes in self._saved_sizes(blocks[fqn], offloader.saves.blocks.get(fqn)):
                        sizes[-1]["save", num_bytes] += 1
        slots = {}
        for kind, num_bytes in dict.fromkeys(key for part_sizes in sizes for key in part_sizes):
            if 0 < num_bytes >= config.min_offload_bytes:
                counts = [part_sizes[kind, num_bytes] for part_sizes in sizes]
                slots[kind, num_bytes] = _in_flight(counts, schedule, self._dims)
        return Need(
            inputs=[(num_bytes, count) for (kind, num_bytes), count in slots.items() if kind == "input"],
            saves=[(num_bytes, count) for (kind, num_bytes), count in slots.items() if kind == "save"],
            activations=[(num_bytes, count) for (kind, num_bytes), count in slots.items() if kind == "activation"],
            others=self._other_claims(parts),
            stage=" ".join(fqn for fqns in offloader.part_fqns for fqn in fqns),
        )

    def _activation_sizes(self, offloader: Offloader, part: nn.Module, fqns: Collection[str]) -> Iterator[int]:
        """Bytes of each tensor that moves of one forward pass, besides block inputs: what autograd saves before the
        first block, and in the blocks ``fqns``."""
        if getattr(part, "tok_embeddings", None) is not None:
            num_views = self._job_config.training.local_batch_size // self._batch if self._dims.pp_enabled else 1
            minimum = offloader.engine.config.min_offload_bytes
            yield stem_bytes(self._batch * self._local_seq_len, num_views, minimum)
        if fqns:
            job = self._job
            model = model_shape(
                *(self._family, self._family, self._model_args),
                itemsize=job.itemsize,
                tensor_parallel=job.tensor_parallel,
                batch=job.batch,
                on_cpu=offloader.engine.runtime.device_type == "cpu",
            )
            layers = (model.layers[int(fqn.rpartition(".")[2])] for fqn in fqns)
            yield from (size for layer in layers for size in activation_sizes(layer, model, job))

    # Saved outputs

    def _saved_sizes(self, block: nn.Module, saves: BlockSaves | None) -> Iterator[int]:
        """Bytes of each output that one forward of ``block`` saves."""
        if saves is None:
            return
        if _rule(saves, "", ATTENTION):
            yield from self._attention_sizes()
        tokens = self._batch * self._local_seq_len
        for name, module in modules_of(unwrapped(block), "").items():
            if isinstance(module, nn.Linear):
                left = torch.empty(1, module.in_features, device="meta")
                if _rule(saves, name, torch.ops.aten.mm.default, left, left.t()):
                    yield tokens * module.out_features // self._column_degree(module) * self._itemsize
            elif isinstance(module, TokenChoiceTopKRouter):
                yield from _router_sizes(saves, name, module, tokens)

    def _attention_sizes(self) -> Iterator[int]:
        """Of the two tensors that `need.attention_save_bytes` counts together."""
        args = self._model_args
        head_dim = getattr(args, "v_head_dim", None) or getattr(args, "head_dim", None) or args.dim // args.n_heads
        num_rows = self._batch * self._local_seq_len * (args.n_heads // self._dims.tp)
        yield num_rows * head_dim * self._itemsize
        yield num_rows * torch.float32.itemsize

    def _column_degree(self, linear: nn.Linear) -> int:
        """By what tensor parallel divides the features of a linear's output."""
        weight = linear.weight
        names = weight.device_mesh.mesh_dim_names if isinstance(weight, DTensor) else None
        if not names or "tp" not in names:
            return 1
        return self._dims.tp if weight.placements[names.index("tp")].is_shard(0) else 1

    # What else takes host memory

    def _other_claims(self, parts: Sequence[nn.Module]) -> list[Claim]:
        training, checkpoint = self._job_config.training, self._job_config.checkpoint
        parameters = [p for part in parts for p in part.parameters()]
        trained = [local_tensor(p).nbytes for p in parameters if p.requires_grad]
        parameter_bytes = sum(local_tensor(p).nbytes for p in parameters)
        batch_bytes = 2 * training.local_batch_size * training.seq_len * torch.int64.itemsize  # tokens and labels
        claims = {}
        if training.enable_cpu_offload:
            claims["gradients and optimizer state (FSDP2 CPU offload)"] = cpu_offload_bytes(trained)
        if checkpoint.enable and checkpoint.async_mode != "disabled":
            claims["staging of asynchronous checkpoints"] = staging_bytes(parameter_bytes)
        if (loader := training.dataloader).num_workers:
            num_bytes = data_loader_bytes(loader.num_workers, batch_bytes, loader.prefetch_factor)
            claims["data loader workers"] = num_bytes
        return [Claim(name, num_bytes, is_offload=False) for name, num_bytes in claims.items()]


def _router_sizes(saves: BlockSaves, name: str, router: TokenChoiceTopKRouter, tokens: int) -> Iterator[int]:
    scores = torch.ops.aten.sigmoid.default if router.score_func == "sigmoid" else torch.ops.aten._softmax.default
    if _rule(saves, name, scores):
        yield tokens * router.num_experts * torch.float32.itemsize
    if _rule(saves, name, torch.ops.aten.topk.default):
        yield tokens * router.top_k * torch.float32.itemsize
        yield tokens * router.top_k * torch.int64.itemsize


def _rule(saves: BlockSaves, name: str, op: Any, *args: object) -> bool:
    """Whether a call of ``op`` in the module ``name`` of the block would be saved."""
    parts = name.split(".")
    above = ["", *(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))]
    scopes = [saves.scopes[scope] for scope in dict.fromkeys(above) if scope in saves.scopes]
    return saves.saves.policy.rule_for(Call(op, args, {}, scopes, saves.layer_type)) is not None


# In flight


def _in_flight(counts: Sequence[int], schedule: Any, dims: ParallelDims) -> int:
    """The most tensors that are in host memory at once, of ``counts`` per forward pass of each part."""
    if schedule is None:
        return sum(counts)
    rank = dims.get_mesh("pp").get_local_rank()
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    by_stage = {stage.stage_index: count for stage, count in zip(stages, counts, strict=True)}
    return max_in_flight(actions_of(schedule.pipeline_order[rank]), by_stage)


def actions_of(order: Sequence[Any]) -> list[tuple[int, str, int]]:
    """One rank's actions of torch's pipeline schedule that compute: stage, kind (F, B, I or W), microbatch."""
    actions = []
    for action in order:
        for step in () if action is None else getattr(action, "sub_actions", None) or (action,):
            if step.computation_type.value in ("F", "B", "I", "W"):
                actions.append((step.stage_index, step.computation_type.value, step.microbatch_index))
    return actions
