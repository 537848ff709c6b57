"""OffloadConverter: where TorchTitan and `apply_offload` meet.

TorchTitan 0.2.2 calls ``convert`` once, on the whole model on the meta device, before tensor parallel, checkpointing,
compile and FSDP2, and a pipeline deep-copies that model afterwards. So ``convert`` only records the intent, in a way
that copies carry along: it gives the model an attribute, and a class whose ``train()`` attaches offload. TorchTitan
calls ``train()`` on each model part when it is final: parallelized, on its device, with its weights.
"""

import functools
import inspect

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.tools.logging import logger

from titan_offload import report
from titan_offload.apply import Offloader, check_keep_last, check_selective, make_offloader
from titan_offload.blocks import find_blocks
from titan_offload.config import GIB, OffloadConfig, SelectiveConfig
from titan_offload.share import check_settings, current_device, share_host
from titan_offload.titan.metrics import OffloadLogger
from titan_offload.titan.models import layer_type
from titan_offload.titan.need import NeedOfJob


class OffloadConverter(ModelConverter):
    """Model converter ``"titan_offload"``: settings come from ``[activation_offload]`` and ``[selective_checkpoint]``.

    Raises:
        ValueError: the settings contradict the rest of the job config.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        if not hasattr(job_config, "activation_offload"):
            raise ValueError(
                "the converter titan_offload needs the section [activation_offload]; set job.custom_config_module = "
                '"titan_offload.titan.job_config"'
            )
        self.config: OffloadConfig = job_config.activation_offload
        self.selective: SelectiveConfig | None = _selective_of(job_config)
        self._job_config = job_config
        self._parallel_dims = parallel_dims
        self._offloader: Offloader | None = None
        self._attached: list[nn.Module] = []
        self._need: NeedOfJob | None = None
        self._trainer: Stateful | None = None
        self._logger: OffloadLogger | None = None
        if self.config.mode == "block_inputs":
            _check_activation_checkpoint(job_config.activation_checkpoint.mode)

    def convert(self, model: nn.Module) -> None:
        check_settings(self.config, self.selective)
        moves = self.config.mode != "none" or (self.selective is not None and self.selective.offload)
        if not moves and self._job_config.activation_checkpoint.mode not in ("full", "selective"):
            return
        if moves:
            check_keep_last(self.config.keep_last, len(find_blocks(model, "layers.*")))
        if self.selective is not None:
            check_selective(model, self.selective, layer_type_of=layer_type)
        if moves:
            self._need = NeedOfJob(self._job_config, self._parallel_dims, model.model_args)
            self._check_budget()
        self._trainer = _calling_trainer()
        model._offload_converter = self
        model.__class__ = _class_that_attaches(type(model))

    def __deepcopy__(self, memo: dict[int, object]) -> "OffloadConverter":
        """A pipeline copies the model for each of its parts: all lead to the same converter."""
        return self

    def attach(self, part: nn.Module) -> None:
        """Puts offload on a model part that is final. Called again, it does nothing."""
        if any(part is attached for attached in self._attached) or any(p.is_meta for p in part.parameters()):
            return
        if self._offloader is None:
            self._offloader = make_offloader(self.config, self.selective, layer_type_of=layer_type)
        known = set(self._offloader.saves.blocks)
        self._offloader.attach(part)
        self._attached.append(part)
        if saving := [fqn for fqn in self._offloader.saves.blocks if fqn not in known]:
            logger.info(report.save_block(self._offloader.saves.save_list(saving)))
        is_active = self._offloader.part_fqns or self._offloader.saves.blocks
        if is_active and self._trainer is not None and self._logger is None:
            metrics = self._trainer.metrics_processor
            self._logger = OffloadLogger(metrics.logger, self._offloader, self._job_config)
            metrics.logger = self._logger
        if self._need is not None and len(self._attached) == self._num_parts():
            self._share_host()

    def _num_parts(self) -> int:
        """How many parts of the model this rank trains."""
        if self._parallel_dims.pp_enabled and self._trainer is not None:
            return len(self._trainer.model_parts)
        return 1

    def _share_host(self) -> None:
        """All parts are there: divides the host among its ranks, and says what will move."""
        offloader, schedule = self._offloader, getattr(self._trainer, "pp_schedule", None)
        knows_need = not self._parallel_dims.pp_enabled or schedule is not None
        if why := self._need.why_unknown(offloader):
            knows_need = False
            logger.info(
                f"Activation offload: what blocks save without checkpointing is not known before step 1, since {why}: "
                "the ranks of a host get equal shares of its memory, and step 1 pins what it needs"
            )
        share = share_host(
            self.config,
            self.selective,
            offloader.engine.runtime,
            offloader.engine.pool,
            current_device(offloader.engine.runtime),
            (lambda: self._need(offloader, self._attached, schedule)) if knows_need else None,
            on_budget=None if self._logger is None else self._logger.start,
            on_progress=None if self._logger is None else self._logger.pinning,
        )
        offloader.set_share(share)
        for fqns in offloader.part_fqns:
            text = report.start_block(fqns, self.config, share.own.budget_bytes, self._need.block_input_bytes)
            logger.info(text)
        if self._logger is not None and share.links:
            self._logger.links(share)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        if self._offloader is None:
            return
        if self._logger is None:
            self._offloader.step_end()
            return
        self._logger.step_end(self._trainer.step)

    def _check_budget(self) -> None:
        budget_bytes, needed = self.config.budget_bytes, self._need.block_input_bytes
        if self.config.mode == "block_inputs" and budget_bytes is not None and budget_bytes < needed:
            raise ValueError(
                f"activation_offload.pinned_budget_gib = {self.config.pinned_budget_gib:g} is smaller than one block "
                f"input ({needed / GIB:.6g} GiB on this rank); set it to a multiple of that, or to 0 for a share "
                "of the host"
            )


def _selective_of(job_config: JobConfig) -> SelectiveConfig | None:
    """The section, if it is enabled and does not contradict the rest of the job config."""
    section, mode = job_config.selective_checkpoint, job_config.activation_checkpoint.mode
    given = [key for key in section.changed_keys() if key != "enable"]
    if mode != "full" and (section.enable or given):
        key = given[0] if given else "save_ops"
        why = {
            "selective": "TorchTitan's own selective checkpointing decides what is saved",
            "none": "nothing is recomputed",
            "memory_budget": "the compiler decides what is saved",
        }.get(mode, "it is not known")
        raise ValueError(
            f"selective_checkpoint.{key} = {getattr(section, key)!r} does not go with activation_checkpoint.mode = "
            f'"{mode}": {why}. Set activation_checkpoint.mode to "full", or remove [selective_checkpoint]'
        )
    if not section.enable:
        if given:
            logger.warning(
                f"[selective_checkpoint] {', '.join(given)} set, without effect: set selective_checkpoint.enable = true"
            )
        return None
    if job_config.compile.enable and "model" in job_config.compile.components:
        for key in section.keys_for_eager_only():
            raise ValueError(
                f"selective_checkpoint.{key} = true does not go with compile.enable = true: in a compiled block the "
                "compiler decides where saved tensors are. Set one of them to false"
            )
    return section


def _check_activation_checkpoint(mode: str) -> None:
    if mode not in ("full", "selective"):
        why = {
            "none": "without activation checkpointing there is no block input to move",
            "memory_budget": "the compiler decides what is saved, and no block is checkpointed as such",
        }.get(mode, "it is not known")
        raise ValueError(
            f'activation_checkpoint.mode = "{mode}" does not go with activation_offload.mode = "block_inputs": {why}. '
            'Set activation_checkpoint.mode to "full" (or "selective"), or activation_offload.mode to "all" or "none"'
        )


@functools.cache
def _class_that_attaches(cls: type[nn.Module]) -> type[nn.Module]:
    """One class for all models of a class, and none knows a converter: FSDP2 keeps each class that it was given for the
    life of the process, and what the class leads to with it, up to the trainer and its parameters."""

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        cls.train(self, mode)
        self._offload_converter.attach(self)
        return self

    # The name stays: it is printed and logged.
    return type(cls.__name__, (cls,), {"train": train, "__module__": cls.__module__, "__doc__": cls.__doc__})


def _calling_trainer() -> Stateful | None:
    """The Trainer on the call stack.

    TorchTitan 0.2.2 gives a converter neither the step nor the metric logger, and its Trainer has no hook that would.
    The Trainer calls ``convert`` from its ``__init__``, so it is the ``self`` of a frame above this one.
    """
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Stateful) and hasattr(candidate, "train_spec"):
            return candidate
        frame = frame.f_back
    return None
