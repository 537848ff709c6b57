"""apply_offload: finds a model's blocks and puts the engine around their forwards.

Owns everything that knows modules by name. The hook is an instance attribute ``forward`` of the block as it is after
tensor parallel, checkpointing, compile and ``fully_shard``: inside FSDP2's own forward hooks, so that it sees inputs as
cast and parameters as gathered, and outside the checkpoint and any compiled region. The module tree, module names and
state dict keys stay as they are, and `Offloader.remove` leaves nothing behind.
"""

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

from titan_offload.config import OffloadConfig
from titan_offload.engine import OffloadEngine
from titan_offload.host_runtime import HostRuntime
from titan_offload.pool import PinnedPool
from titan_offload.runtime import AcceleratorRuntime, Runtime
from titan_offload.saved_tensor import storage_id
from titan_offload.stats import OffloadStats
from titan_offload.tape import ModelPart

logger = logging.getLogger(__name__)

_WRAPPER_SEGMENTS = ("_checkpoint_wrapped_module", "_orig_mod")
"""Name segments that checkpointing and compile add, and that users do not write."""


def apply_offload(
    model: nn.Module,
    offload: OffloadConfig,
    *,
    blocks: str = "layers.*",
    runtime: Runtime | None = None,
    budget_bytes: int | None = None,
) -> "Offloader":
    """Moves the block inputs of ``model`` to pinned host memory during forward and back in time for backward.

    Call it after activation checkpointing, compile and ``fully_shard``; each block to move must be wrapped by torch's
    ``checkpoint_wrapper``. Works with or without FSDP2, with or without TorchTitan.

    Args:
        model: the model, or one pipeline part of it (`Offloader.attach` adds further parts).
        offload: what to move, and how.
        blocks: glob on fully qualified module names. Wildcards do not cross dots: ``layers.*`` is each layer, and
            ``layers.1`` is not ``layers.10``.
        runtime: the device. Default: the accelerator if there is one, else `HostRuntime`.
        budget_bytes: pinned host memory of this rank, in bytes. Default: ``offload.budget_bytes``.

    Returns:
        The handle on it all: call its ``step_end()`` after each optimizer step.

    Raises:
        ValueError: no block matches, none is checkpointed, one is checkpointed in reentrant mode or has offload
            already, or ``keep_last`` leaves nothing to move. The model is as it was.
    """
    if idle := offload.keys_without_effect():
        logger.warning(
            f"activation_offload: {', '.join(idle)} set, without effect (mode {offload.mode!r}, schedule "
            f"{offload.schedule!r}, pinned_budget_gib {offload.pinned_budget_gib:g})"
        )
    if runtime is None:
        runtime = AcceleratorRuntime() if torch.accelerator.is_available() else HostRuntime()
    budget_bytes = offload.budget_bytes if budget_bytes is None else budget_bytes
    offloader = Offloader(OffloadEngine(offload, runtime, PinnedPool(runtime, budget_bytes)))
    offloader.attach(model, blocks=blocks)
    return offloader


class Offloader:
    """Offload of one or more model parts of a rank, which share side streams, pinned memory and budget.

    Attributes:
        engine: moves the tensors.
        part_fqns: for each attached part, the names of the blocks under offload.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
        self.part_fqns: list[list[str]] = []
        self._installed: list[_Installed] = []
        self._stats = OffloadStats()

    def attach(self, model: nn.Module, *, blocks: str = "layers.*") -> None:
        """Adds a model part. See `apply_offload` for arguments and errors."""
        if self.engine.config.mode == "none":
            return
        found = {fqn: block for fqn, block in find_blocks(model, blocks).items() if _checkpoint_of(block, fqn)}
        _check_blocks(found, blocks, self.engine.config.keep_last)
        part = ModelPart(list(found), _storages_of_state(model))
        self._installed += [
            _install(block, _BlockForward(block, self.engine, part, index))
            for index, block in enumerate(found.values())
        ]
        self.part_fqns.append(part.fqns)

    def step_end(self) -> OffloadStats:
        """Ends a step. Call it after the optimizer step, on every rank. Returns what the step did."""
        if self.engine.config.mode != "none":
            self._stats = self.engine.step_end()
        return self._stats

    def stats(self) -> OffloadStats:
        """What the last finished step did."""
        return self._stats

    def remove(self) -> None:
        """Takes offload away, for good; the models are as before. Graphs that hold offloaded tensors stay valid, and
        pinned memory is given back with the last of them."""
        for installed in self._installed:
            installed.undo()
        self._installed.clear()
        self.part_fqns.clear()
        self.engine.pool.retire()


def find_blocks(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The outermost modules whose cleaned names match ``pattern``, in the order in which the model holds them.

    Raises:
        ValueError: nothing matches.
    """
    found: dict[str, nn.Module] = {}
    names = []
    for name, module in model.named_modules():
        fqn = ".".join(segment for segment in name.split(".") if segment not in _WRAPPER_SEGMENTS)
        names.append(fqn)
        if fqn and fqn not in found and _matches(fqn, pattern):
            found[fqn] = module
    if not found:
        containers = sorted({f"{fqn.rsplit('.', 1)[0]}.*" for fqn in names if fqn.rsplit(".", 1)[-1].isdigit()})
        raise ValueError(
            f"blocks = {pattern!r} matches no module of {type(model).__name__}; set it to a glob on module names, such "
            f"as {', '.join(containers) or ', '.join(name for name in names[1:6])}"
        )
    return found


def _matches(fqn: str, pattern: str) -> bool:
    segments, globs = fqn.split("."), pattern.split(".")
    return len(segments) == len(globs) and all(map(fnmatchcase, segments, globs))


def _checkpoint_of(block: nn.Module, fqn: str) -> CheckpointWrapper | None:
    """The block's checkpoint wrapper, below a compiled module if there is one."""
    wrapper = block._orig_mod if isinstance(block, OptimizedModule) else block
    if not isinstance(wrapper, CheckpointWrapper):
        return None
    if getattr(wrapper.checkpoint_fn, "keywords", {}).get("use_reentrant"):
        raise ValueError(
            f"{fqn} is checkpointed with use_reentrant=True, where offloading the input frees nothing; wrap it with "
            "checkpoint_impl=CheckpointImpl.NO_REENTRANT"
        )
    return wrapper


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

    def __init__(self, block: nn.Module, engine: OffloadEngine | None, part: ModelPart | None, index: int) -> None:
        self.engine = engine
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
        with self.engine.region(self._part, self._index, args):
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
        return _BlockForward(memo[id(self._block())], None, None, self._index)


def _needs_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _parameter_names(block: nn.Module) -> list[str]:
    while isinstance(block, OptimizedModule | CheckpointWrapper):
        block = block._orig_mod if isinstance(block, OptimizedModule) else block._checkpoint_wrapped_module
    parameters = inspect.signature(block.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


@dataclass
class _Installed:
    """What was changed on one block, and how to change it back."""

    block: nn.Module
    own_forward: object
    checkpoint_fn: Callable | None

    def undo(self) -> None:
        self.block.__dict__.pop("forward")
        if self.own_forward is not None:
            self.block.__dict__["forward"] = self.own_forward
        if self.checkpoint_fn is not None:
            self.block.checkpoint_fn = self.checkpoint_fn


def _install(block: nn.Module, forward: _BlockForward) -> _Installed:
    installed = _Installed(block, block.__dict__.get("forward"), None)
    block.__dict__["forward"] = forward
    if (
        isinstance(block, CheckpointWrapper)
        and "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    ):
        # From torch 2.14 checkpoint warns when selective saves meet saved-tensor hooks, and later it will pass them to
        # the hooks; only the block's inputs are ours (https://github.com/pytorch/pytorch/pull/191236).
        installed.checkpoint_fn = block.checkpoint_fn
        block.checkpoint_fn = functools.partial(block.checkpoint_fn, respect_saved_tensors_hooks=False)
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
