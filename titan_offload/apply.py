"""apply_offload: finds a model's blocks and puts the engine around their forwards, and selective saves into them.

Owns everything that knows modules by name. The hook is an instance attribute ``forward`` of the block as it is after
tensor parallel, checkpointing, compile and ``fully_shard``: inside FSDP2's own forward hooks, so that it sees inputs as
cast and parameters as gathered, and outside the checkpoint and any compiled region. Selective saves are the
``context_fn`` of the block's checkpoint. The module tree, module names and state dict keys stay as they are, and
`Offloader.remove` leaves nothing behind.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

from titan_offload.config import OffloadConfig, SelectiveConfig
from titan_offload.engine import OffloadEngine
from titan_offload.host_runtime import HostRuntime
from titan_offload.link import LinkRates
from titan_offload.link_limit import LinkLimit
from titan_offload.planner.link_choice import LinkChoice
from titan_offload.pool import PinnedPool
from titan_offload.runtime import AcceleratorRuntime, Runtime
from titan_offload.save_policy import check_save_ops, matches_module
from titan_offload.save_registry import closest
from titan_offload.saved_tensor import storage_id
from titan_offload.selective import BlockSaves, SelectiveSaves
from titan_offload.share import HostShare, current_device, share_host
from titan_offload.stats import OffloadStats
from titan_offload.tape import ModelPart

logger = logging.getLogger(__name__)

_WRAPPER_SEGMENTS = ("_checkpoint_wrapped_module", "_orig_mod")
"""Name segments that checkpointing and compile add, and that users do not write."""

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
            already, or ``keep_last`` leaves nothing to move; ``selective`` names an op, module or layer type that does
            not exist, or asks of a compiled block what only an eager one can do; the host has not the memory that was
            asked for. The model is as it was.
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
        self._installed: list[_Installed] = []
        self._stats = OffloadStats()

    def attach(self, model: nn.Module, *, blocks: str = "layers.*") -> None:
        """Adds a model part. See `apply_offload` for arguments and errors."""
        moves = self.moves
        is_asked = moves or self.selective is not None
        if not is_asked and not self.saves.policy.rules:
            return
        matching = find_blocks(model, blocks) if is_asked else _matching_blocks(model, blocks)
        wrappers = {fqn: _checkpoint_of(block) for fqn, block in matching.items()}
        found = {fqn: block for fqn, block in matching.items() if wrappers[fqn]}
        if not found and not is_asked:
            return  # registered saves have no region to be in
        _check_blocks(found, blocks, self.engine.config.keep_last if moves else 0)
        for fqn in found if moves else ():
            _check_not_reentrant(fqn, wrappers[fqn])
        block_saves = {fqn: self._make_saves(fqn, block, wrappers[fqn]) for fqn, block in found.items()}
        part = ModelPart(list(found), _storages_of_state(model))
        for index, (fqn, block) in enumerate(found.items()):
            saves = block_saves[fqn]
            forward = _BlockForward(block, self.engine, saves, part, index) if moves else None
            self._installed.append(_install(block, wrappers[fqn], forward, saves))
        if moves:
            self.part_fqns.append(part.fqns)
            self._parts.append(part)

    @property
    def moves(self) -> bool:
        """Whether anything is to be moved."""
        return self.engine.config.mode != "none" or self.saves.offloads

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
        if isinstance(block, OptimizedModule) and self.selective is not None:
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


def find_blocks(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The outermost modules whose cleaned names match ``pattern``, in the order in which the model holds them.

    Raises:
        ValueError: nothing matches.
    """
    found = _matching_blocks(model, pattern)
    if not found:
        names = [clean_fqn(name) for name, _ in model.named_modules()]
        containers = sorted({f"{fqn.rsplit('.', 1)[0]}.*" for fqn in names if fqn.rsplit(".", 1)[-1].isdigit()})
        raise ValueError(
            f"blocks = {pattern!r} matches no module of {type(model).__name__}; set it to a glob on module names, such "
            f"as {', '.join(containers) or ', '.join(name for name in names[1:6])}"
        )
    return found


def _matching_blocks(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        fqn = clean_fqn(name)
        if fqn and fqn not in found and _matches(fqn, pattern):
            found[fqn] = module
    return found


def clean_fqn(name: str) -> str:
    """A module name as users write it."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPER_SEGMENTS)


def modules_of(block: nn.Module, fqn: str) -> dict[str, nn.Module]:
    """The block and its modules by fully qualified name; of a wrapped one, the wrapper."""
    modules: dict[str, nn.Module] = {}
    for name, module in block.named_modules():
        modules.setdefault(clean_fqn(".".join(part for part in (fqn, name) if part)), module)
    return modules


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of compile and checkpointing."""
    while isinstance(module, OptimizedModule | CheckpointWrapper):
        module = module._orig_mod if isinstance(module, OptimizedModule) else module._checkpoint_wrapped_module
    return module


def _matches(fqn: str, pattern: str) -> bool:
    segments, globs = fqn.split("."), pattern.split(".")
    return len(segments) == len(globs) and all(map(fnmatchcase, segments, globs))


def _checkpoint_of(block: nn.Module) -> CheckpointWrapper | None:
    """The block's checkpoint wrapper, below a compiled module if there is one."""
    wrapper = block._orig_mod if isinstance(block, OptimizedModule) else block
    return wrapper if isinstance(wrapper, CheckpointWrapper) else None


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
        if isinstance(block.__dict__.get("forward"), _BlockForward) and block.__dict__["forward"].engine is not None:
            raise ValueError(f"{fqn} has activation offload already; call remove() on its offloader first")
    check_keep_last(keep_last, len(found))


def check_keep_last(keep_last: int, num_blocks: int) -> None:
    if keep_last >= num_blocks:
        raise ValueError(
            f"activation_offload.keep_last = {keep_last} leaves nothing to move: the model part has {num_blocks} "
            f"blocks; set it to at most {num_blocks - 1}"
        )


class _BlockForward:
    """A block's ``forward`` inside a region of the engine. Holds the block weakly: the block holds it."""

    def __init__(
        self,
        block: nn.Module,
        engine: OffloadEngine | None,
        saves: BlockSaves | None,
        part: ModelPart | None,
        index: int,
    ) -> None:
        self.engine = engine
        self._saves = saves
        self._block = weakref.ref(block)
        self._own_forward = block.__dict__.get("forward")  # of a compiled module
        self._part = part
        self._index = index

    def __call__(self, *args: object, **kwargs: object) -> object:
        block = self._block()
        forward = self._own_forward or functools.partial(type(block).forward, block)
        if self.engine is None or not torch.is_grad_enabled() or not block.training:
            return forward(*args, **kwargs)
        args, kwargs = self._make_inputs_positional(block, args, kwargs)
        with contextlib.ExitStack() as stack:
            region = stack.enter_context(self.engine.region(self._part, self._index, args))
            if self._saves is not None:
                stack.enter_context(self._saves.in_region(region))
            return forward(*args, **kwargs)

    def _make_inputs_positional(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Saved-tensor hooks never see keyword tensors; a hidden state given by keyword becomes positional."""
        if any(map(_needs_grad, args)) or not any(map(_needs_grad, kwargs.values())):
            return args, kwargs
        kwargs = dict(kwargs)
        for name in _parameter_names(block)[len(args) :]:
            if name not in kwargs or not any(map(_needs_grad, kwargs.values())):
                break
            args = (*args, kwargs.pop(name))
        return args, kwargs

    def __deepcopy__(self, memo: dict) -> "_BlockForward":
        # The copy must run the copy's weights. It is not under offload: nobody could remove it there.
        return _BlockForward(memo[id(self._block())], None, None, None, self._index)


def _needs_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _parameter_names(block: nn.Module) -> list[str]:
    parameters = inspect.signature(unwrapped(block).forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


@dataclass
class _Installed:
    """What was changed on one block, and how to change it back."""

    block: nn.Module
    own_forward: object
    wrapper: CheckpointWrapper
    checkpoint_fn: Callable
    saves: BlockSaves | None

    def undo(self) -> None:
        self.block.__dict__.pop("forward", None)
        if self.own_forward is not None:
            self.block.__dict__["forward"] = self.own_forward
        self.wrapper.checkpoint_fn = self.checkpoint_fn
        if self.saves is not None:
            self.saves.unfollow_modules()


def _install(
    block: nn.Module, wrapper: CheckpointWrapper, forward: _BlockForward | None, saves: BlockSaves | None
) -> _Installed:
    installed = _Installed(block, block.__dict__.get("forward"), wrapper, wrapper.checkpoint_fn, saves)
    if forward is not None:
        block.__dict__["forward"] = forward
    is_compiled = isinstance(block, OptimizedModule)
    if saves is not None:
        context_fn = saves.compiled_context_fn() if is_compiled else saves.context_fn
        wrapper.checkpoint_fn = functools.partial(wrapper.checkpoint_fn, context_fn=context_fn)
    if (
        forward is not None
        and not is_compiled
        and "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    ):
        # From torch 2.14 checkpoint warns when selective saves meet saved-tensor hooks, and later it will pass them to
        # the hooks; only the block's inputs are ours (https://github.com/pytorch/pytorch/pull/191236).
        wrapper.checkpoint_fn = functools.partial(wrapper.checkpoint_fn, respect_saved_tensors_hooks=False)
    if saves is not None and not is_compiled:
        saves.follow_modules(modules_of(block, saves.fqn))
    return installed


def _storages_of_state(model: nn.Module) -> Callable[[], set[int]]:
    """A function that returns the storages of the model's parameters and buffers as they are when it is called: FSDP2
    puts gathered parameters in place of the sharded ones and takes them out again."""
    slots = [
        (tensors, name)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]

    def storages() -> Iterator[int]:
        return (storage_id(tensor) for tensors, name in slots if (tensor := tensors.get(name)) is not None)

    return lambda: set(storages())
