"""apply_offload: finds a model's blocks and puts the engine around their forwards, and selective saves into them.

Owns the choice: which modules get a hook, and what is refused. `blocks` finds them by name, `module_hooks` puts the
hooks on. The module tree, module names and state dict keys stay as they are, and `Offloader.remove` leaves nothing.
"""

import dataclasses
import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from titan_offload.blocks import (
    checkpoint_of,
    clean_fqn,
    find_blocks,
    is_compiled,
    matching_blocks,
    modules_of,
    unwrapped,
)
from titan_offload.config import OffloadConfig, SelectiveConfig
from titan_offload.engine import OffloadEngine
from titan_offload.host_runtime import HostRuntime
from titan_offload.link import LinkRates
from titan_offload.link_limit import LinkLimit
from titan_offload.module_hooks import BlockForward, HookedForward, Installed, ModelForward, entry_of, install, state_of
from titan_offload.planner.link_choice import LinkChoice
from titan_offload.pool import PinnedPool
from titan_offload.runtime import AcceleratorRuntime, Runtime
from titan_offload.save_policy import check_save_ops, matches_module
from titan_offload.save_registry import closest
from titan_offload.selective import BlockSaves, SelectiveSaves
from titan_offload.share import HostShare, current_device, share_host
from titan_offload.stats import OffloadStats
from titan_offload.tape import ModelPart

logger = logging.getLogger(__name__)

LayerTypeOf = Callable[[nn.Module], str | None]


def apply_offload(
    model: nn.Module,
    offload: OffloadConfig,
    selective: SelectiveConfig | None = None,
    *,
    blocks: str = "layers.*",
    runtime: Runtime | None = None,
    budget_bytes: int | None = None,
    layer_type_of: LayerTypeOf | None = None,
) -> "Offloader":
    """Moves the block inputs of ``model`` to pinned host memory during forward and back in time for backward, and saves
    the outputs of chosen ops in its blocks instead of recomputing them.

    Call it after activation checkpointing, compile and ``fully_shard``; each block must be wrapped by torch's
    ``checkpoint_wrapper``. Works with or without FSDP2, with or without TorchTitan.

    Args:
        model: the model, or one pipeline part of it (`Offloader.attach` adds further parts).
        offload: what to move, and how.
        selective: which op outputs to save. Default: those of registered saves (`register_mandatory_save`) only.
        blocks: glob on fully qualified module names. Wildcards do not cross dots: ``layers.*`` is each layer, and
            ``layers.1`` is not ``layers.10``.
        runtime: the device. Default: the accelerator if there is one, else `HostRuntime`.
        budget_bytes: pinned host memory of this rank, in bytes. Default: ``offload.budget_bytes``, or an equal share of
            the host's memory, see `share_host`.
        layer_type_of: the attention type of a block, such as ``"sliding_attention"``. Default: its attribute
            ``attention_type`` or ``layer_type``.

    Returns:
        The handle on it all: call its ``step_end()`` after each optimizer step.

    Where there is a process group, this is a collective over it, unless ``budget_bytes`` is given: call it on every
    rank.

    Raises:
        ValueError: no block matches, none is checkpointed, one is checkpointed in reentrant mode or has offload
            already, ``keep_last`` leaves nothing to move, or the model is compiled as a whole; ``selective`` names an
            op, module or layer type that does not exist, or asks of a compiled block what only an eager one can do; the
            host has not the memory that was asked for. The model is as it was.
    """
    if selective is not None:
        check_selective(model, selective, blocks, layer_type_of)
    offloader = make_offloader(offload, selective, runtime, budget_bytes, layer_type_of)
    if offloader.moves and budget_bytes is None:
        runtime = offloader.engine.runtime
        share = share_host(offload, selective, runtime, offloader.engine.pool, current_device(runtime))
        offloader.set_share(share)
    offloader.attach(model, blocks=blocks)
    return offloader


def make_offloader(
    offload: OffloadConfig,
    selective: SelectiveConfig | None = None,
    runtime: Runtime | None = None,
    budget_bytes: int | None = None,
    layer_type_of: LayerTypeOf | None = None,
) -> "Offloader":
    """An offloader without a model. Arguments are those of `apply_offload`, which checks ``selective`` against a model:
    call `check_selective` with the whole one if the parts to attach are less."""
    if idle := offload.keys_without_effect(selective is not None and selective.offload):
        logger.warning(
            f"activation_offload: {', '.join(idle)} set, without effect (mode {offload.mode!r}, schedule "
            f"{offload.schedule!r}, pinned_budget_gib {offload.pinned_budget_gib:g})"
        )
    if runtime is None:
        runtime = AcceleratorRuntime() if torch.accelerator.is_available() else HostRuntime()
    budget_bytes = offload.budget_bytes if budget_bytes is None else budget_bytes
    return Offloader(OffloadEngine(offload, runtime, PinnedPool(runtime, budget_bytes)), selective, layer_type_of)


class Offloader:
    """Offload of one or more model parts of a rank, which share side streams, pinned memory and budget.

    Attributes:
        engine: moves the tensors.
        selective: settings of what is saved; None: registered saves only.
        saves: decides what is saved, and says what was.
        part_fqns: for each attached part, the names of the blocks whose inputs, or saved outputs, are moved.
        share: what the ranks settled before step 1; None: nothing, the budget was given.
    """

    def __init__(
        self, engine: OffloadEngine, selective: SelectiveConfig | None = None, layer_type_of: LayerTypeOf | None = None
    ) -> None:
        self.engine = engine
        self.saves = SelectiveSaves(selective, engine)
        self.part_fqns: list[list[str]] = []
        self.selective = selective
        self.share: HostShare | None = None
        self._link_limit = LinkLimit(engine)
        self._parts: list[ModelPart] = []
        self._layer_type_of = layer_type_of or layer_type_attribute
        self._installed: list[Installed] = []
        self._stats = OffloadStats()

    def attach(self, model: nn.Module, *, blocks: str = "layers.*") -> None:
        """Adds a model part. See `apply_offload` for arguments and errors."""
        moves = self.moves
        is_asked = moves or self.selective is not None
        if not is_asked and not self.saves.policy.rules:
            return
        if is_asked and is_compiled(model):
            raise ValueError(
                f"{type(unwrapped(model)).__name__} is compiled as a whole, and offload would break its graph at each "
                "block; compile the blocks one by one instead, as TorchTitan does"
            )
        matching = find_blocks(model, blocks) if is_asked else matching_blocks(model, blocks)
        wrappers = {fqn: checkpoint_of(block) for fqn, block in matching.items()}
        moves_all = self.engine.config.mode == "all"
        found = {fqn: block for fqn, block in matching.items() if wrappers[fqn] or moves_all}
        if not found and not is_asked:
            return  # registered saves have no region to be in
        _check_blocks(found, blocks, self.engine.config.keep_last if moves else 0)
        checkpointed = {fqn: wrapper for fqn, wrapper in wrappers.items() if wrapper}
        for fqn, wrapper in checkpointed.items() if moves else ():
            _check_not_reentrant(fqn, wrapper)
        saves = {fqn: self._make_saves(fqn, found[fqn], wrapper) for fqn, wrapper in checkpointed.items()}
        is_checkpointed = [fqn in checkpointed for fqn in found]
        part = ModelPart(list(found), state_of(model, list(found.values())), is_checkpointed)
        for index, (fqn, block) in enumerate(found.items()):
            forward = BlockForward(block, self.engine, saves.get(fqn), part, index) if moves else None
            self._installed.append(install(block, wrappers[fqn], forward, saves.get(fqn)))
        if moves_all:
            self._installed.append(install(model, None, ModelForward(model, self.engine, part), None))
        if moves:
            self.part_fqns.append(part.fqns)
            self._parts.append(part)

    @property
    def moves(self) -> bool:
        """Whether anything is to be moved."""
        return self.engine.config.mode != "none" or self.saves.offloads

    @property
    def fqns_saving_all(self) -> set[str]:
        """Names of the attached blocks that are not checkpointed: all that autograd saves of them moves."""
        pairs = (pair for part in self._parts for pair in zip(part.fqns, part.is_checkpointed, strict=True))
        return {fqn for fqn, is_checkpointed in pairs if not is_checkpointed}

    def _make_saves(self, fqn: str, block: nn.Module, wrapper: CheckpointWrapper) -> BlockSaves | None:
        """Selective saves of a block; None: no rule can match in it."""
        scopes = self.saves.scopes_of(fqn, modules_of(block, fqn))
        if not scopes and all(rule.module is not None for rule in self.saves.policy.rules):
            return None
        _check_not_reentrant(fqn, wrapper)
        keywords = getattr(wrapper.checkpoint_fn, "keywords", {})
        if keywords.get("debug"):
            raise ValueError(
                f"{fqn} is checkpointed with debug=True, which torch does not allow together with selective saves, the "
                "registered ones included; set activation_checkpoint.debug = false"
            )
        if is_compiled(block) and self.selective is not None:
            _check_compiled(fqn, self.selective)
        saves = BlockSaves(
            self.saves,
            fqn,
            scopes,
            layer_type=self._layer_type_of(unwrapped(block)),
            preserves_rng_state=keywords.get("preserve_rng_state", True),
            base_context_fn=keywords.get("context_fn"),
        )
        saves.base_policy()  # raises now if there is one that cannot be joined
        self.saves.blocks[fqn] = saves
        return saves

    def step_end(self) -> OffloadStats:
        """Ends a step. Call it after the optimizer step, on every rank. Returns what the step did."""
        stats = self.engine.step_end() if self.part_fqns else OffloadStats()
        self._stats = dataclasses.replace(stats, **self.saves.step_end())
        if self.moves:
            self._link_limit.step_end(self._parts)
        return self._stats

    def set_share(self, share: HostShare) -> None:
        """What the ranks settled, see `share_host`; with the speed of the link, if it was measured."""
        self.share = share
        self.set_link(share.links.get(share.rank))

    @property
    def link(self) -> LinkRates | None:
        """Speed of this rank's link, with which ``limit = "link"`` reckons; None: not known yet."""
        return self._link_limit.rates

    def set_link(self, rates: LinkRates | None) -> None:
        """Tells ``limit = "link"`` what the link carries. Call it before the first step ends, on all ranks."""
        self._link_limit.rates = rates

    @property
    def link_choices(self) -> list[LinkChoice]:
        """For each attached part, what ``limit = "link"`` came to; empty before it did."""
        return self._link_limit.choices

    def stats(self) -> OffloadStats:
        """What the last finished step did."""
        return self._stats

    def remove(self) -> None:
        """Takes offload and selective saves away, for good; the models are as before. Graphs that hold offloaded
        tensors stay valid, and pinned memory is given back with the last of them."""
        for installed in self._installed:
            installed.undo()
        self._installed.clear()
        self.part_fqns.clear()
        self._parts.clear()
        self.engine.watch = None
        self.saves.blocks.clear()
        self.engine.pool.retire()


def check_selective(
    model: nn.Module, selective: SelectiveConfig, blocks: str = "layers.*", layer_type_of: LayerTypeOf | None = None
) -> None:
    """Raises ValueError if ``selective`` names an op, module or layer type that there is none of.

    Args:
        model: the whole model: a pipeline part need not have every module.
    """
    check_save_ops(selective.save_ops)
    found = find_blocks(model, blocks)
    inside = {name for fqn, block in found.items() for name in modules_of(block, fqn)}
    for pattern in selective.save_modules:
        if any(matches_module(name, pattern) for name in inside):
            continue
        outside = [name for name in map(clean_fqn, dict(model.named_modules())) if matches_module(name, pattern)]
        what = (
            f"matches only {', '.join(outside[:3])}, outside the blocks ({blocks})" if outside else "matches no module"
        )
        ends = {name.split(".", 2 + blocks.count("."))[-1] for name in inside - set(found)}
        raise ValueError(
            f"selective_checkpoint.save_modules = {pattern!r} {what}; closest: "
            f"{', '.join(closest(pattern.rpartition('.')[2], ends)) or ', '.join(sorted(ends)[:5])}"
        )
    types = {(layer_type_of or layer_type_attribute)(unwrapped(block)) for block in found.values()} - {None}
    known = types | set(KNOWN_LAYER_TYPES)
    for entry in selective.recompute_layer_types:
        if entry not in known:
            raise ValueError(
                f"selective_checkpoint.recompute_layer_types = {entry!r} is no layer type of this model; closest: "
                f"{', '.join(closest(entry, known)) or ', '.join(sorted(known))}"
            )


KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


def layer_type_attribute(block: nn.Module) -> str | None:
    """The type of a block that says so itself."""
    candidates = (getattr(block, name, None) for name in ("attention_type", "layer_type"))
    return next((value for value in candidates if isinstance(value, str)), None)


def _check_compiled(fqn: str, selective: SelectiveConfig) -> None:
    for key in selective.keys_for_eager_only():
        raise ValueError(
            f"selective_checkpoint.{key} = true does not work in a compiled block ({fqn}): there the compiler decides "
            "where saved tensors are. Set it to false, or leave the model eager (compile.enable = false)"
        )


def _check_not_reentrant(fqn: str, wrapper: CheckpointWrapper) -> None:
    if getattr(wrapper.checkpoint_fn, "keywords", {}).get("use_reentrant"):
        raise ValueError(
            f"{fqn} is checkpointed with use_reentrant=True, where offloading the input frees nothing and no op can be "
            "saved; wrap it with checkpoint_impl=CheckpointImpl.NO_REENTRANT"
        )


def _check_blocks(found: dict[str, nn.Module], pattern: str, keep_last: int) -> None:
    if not found:
        raise ValueError(
            f"no module matched by blocks = {pattern!r} is wrapped by torch's checkpoint_wrapper, so there is no block "
            'input to move; set activation_checkpoint.mode = "full" (or "selective"), or wrap the blocks before'
        )
    for fqn, block in found.items():
        called = block.__dict__.get(entry_of(block))
        if isinstance(called, HookedForward) and called.engine is not None:
            raise ValueError(f"{fqn} has activation offload already; call remove() on its offloader first")
    check_keep_last(keep_last, len(found))


def check_keep_last(keep_last: int, num_blocks: int) -> None:
    if keep_last >= num_blocks:
        raise ValueError(
            f"activation_offload.keep_last = {keep_last} leaves nothing to move: the model part has {num_blocks} "
            f"blocks; set it to at most {num_blocks - 1}"
        )
