"""A module's forward under offload: what stands around it, how it is put on the module and taken off again.

Owns the hook: an instance attribute ``forward`` of the module (of one that ``module.compile()`` compiled, the compiled
call), as the module is after tensor parallel, checkpointing, compile and ``fully_shard``. So it is inside FSDP2's own
forward hooks, sees inputs as cast and parameters as gathered, and is outside the checkpoint and any compiled region.
Selective saves are the ``context_fn`` of a block's checkpoint. Owns also what of a module is state: parameters and
buffers, which never move. Relies on `apply` to choose the modules, and on the engine and `selective` for the rest.
"""

import contextlib
import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from titan_offload.blocks import is_compiled, modules_of, unwrapped
from titan_offload.cast_inputs import Given, casts_inputs, look
from titan_offload.engine import OffloadEngine
from titan_offload.saved_tensor import storage_id
from titan_offload.selective import BlockSaves
from titan_offload.tape import STEM, ModelPart

NUM_PRE_HOOKS = 2
"""On a block whose inputs FSDP2 casts and nothing else changes: FSDP2's, and the one that looks at them before."""


def entry_of(module: nn.Module) -> str:
    """The attribute that is called outside all that is compiled: ``module.compile()`` compiles the call of the module,
    and ``forward`` in it."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


class HookedForward:
    """A module's ``forward`` under offload. Holds the module weakly: the module holds it.

    Attributes:
        engine: None: not under offload.
    """

    def __init__(self, module: nn.Module, engine: OffloadEngine | None, part: ModelPart | None) -> None:
        self.engine = engine
        self._module = weakref.ref(module)
        self._own_forward = module.__dict__.get(entry_of(module))  # of a compiled module
        self._part = part

    def __call__(self, *args: object, **kwargs: object) -> object:
        module = self._module()
        forward = self._own_forward or functools.partial(type(module).forward, module)
        if self.engine is None or not torch.is_grad_enabled() or not module.training:
            return forward(*args, **kwargs)
        return self._offloaded(forward, args, kwargs)

    def __deepcopy__(self, memo: dict) -> "HookedForward":
        # The copy must run the copy's weights, and hold the copy weakly as this does. It is not under offload: nobody
        # could remove it there.
        return HookedForward(memo[id(self._module())], None, None)

    def __reduce__(self) -> tuple:
        # Loaded, a module is not under offload, and without this package: when this runs it has its class's forward.
        return getattr, (self._module(), "forward")


class ModelForward(HookedForward):
    """The forward of a model part, in whose blocks and before them all that is saved may move."""

    def _offloaded(self, forward: Callable, args: tuple, kwargs: dict) -> object:
        with self.engine.around_blocks(self._part):
            return forward(*args, **kwargs)


class BlockForward(HookedForward):
    """A block's ``forward`` inside a region of the engine."""

    def __init__(
        self, block: nn.Module, engine: OffloadEngine, saves: BlockSaves | None, part: ModelPart, index: int
    ) -> None:
        super().__init__(block, engine, part)
        self._saves = saves
        self._index = index
        self._given: Sequence[Given | None] = ()

    def look_at_inputs(self, block: nn.Module, args: tuple) -> None:
        """A forward pre-hook, before FSDP2's: notes what is about to be cast."""
        # What other hooks make of an input may be anything.
        has_others = len(block._forward_pre_hooks) > NUM_PRE_HOOKS
        self._given = () if has_others else look(args)

    def _offloaded(self, forward: Callable, args: tuple, kwargs: dict) -> object:
        given, self._given = self._given, ()
        num_given = len(args)
        args, kwargs = self._make_inputs_positional(self._module(), args, kwargs)
        # No ExitStack: an error on the way out of one would be in a cycle with its frame, and keep the graph.
        with (
            self.engine.region(self._part, self._index, args) as region,
            contextlib.nullcontext() if self._saves is None else self._saves.in_region(region),
        ):
            if given and region is not None:
                args = (*region.tape.casts.share(given, args[:num_given]), *args[num_given:])
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


def _needs_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _parameter_names(block: nn.Module) -> list[str]:
    parameters = inspect.signature(unwrapped(block).forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


@dataclass
class Installed:
    """What was changed on one module, and how to change it back."""

    module: nn.Module
    entry: str
    own_forward: object
    wrapper: CheckpointWrapper | None
    checkpoint_fn: Callable | None
    saves: BlockSaves | None
    pre_hook: RemovableHandle | None = None

    def undo(self) -> None:
        if self.pre_hook is not None:
            self.pre_hook.remove()
        self.module.__dict__.pop(self.entry, None)
        if self.own_forward is not None:
            self.module.__dict__[self.entry] = self.own_forward
        if self.wrapper is not None:
            self.wrapper.checkpoint_fn = self.checkpoint_fn
        if self.saves is not None:
            self.saves.unfollow_modules()


def install(
    module: nn.Module, wrapper: CheckpointWrapper | None, forward: HookedForward | None, saves: BlockSaves | None
) -> Installed:
    checkpoint_fn = None if wrapper is None else wrapper.checkpoint_fn
    entry = entry_of(module)
    installed = Installed(module, entry, module.__dict__.get(entry), wrapper, checkpoint_fn, saves)
    if forward is not None:
        module.__dict__[entry] = forward
    compiled = is_compiled(module)
    if isinstance(forward, BlockForward) and wrapper is not None and not compiled and casts_inputs(module):
        installed.pre_hook = module.register_forward_pre_hook(forward.look_at_inputs, prepend=True)
    if saves is not None:
        context_fn = saves.compiled_context_fn() if compiled else saves.context_fn
        wrapper.checkpoint_fn = functools.partial(wrapper.checkpoint_fn, context_fn=context_fn)
    if (
        forward is not None
        and wrapper is not None
        and not compiled
        and "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    ):
        # From torch 2.14 checkpoint warns when selective saves meet saved-tensor hooks, and later it will pass them to
        # the hooks; only the block's inputs are ours (https://github.com/pytorch/pytorch/pull/191236).
        wrapper.checkpoint_fn = functools.partial(wrapper.checkpoint_fn, respect_saved_tensors_hooks=False)
    if saves is not None and not compiled:
        saves.follow_modules(modules_of(module, saves.fqn))
    return installed


class StateStorages:
    """Contains the storages of the parameters and buffers of ``modules`` as they are whenever it is asked: FSDP2 puts
    gathered parameters in place of the sharded ones and takes them out again."""

    def __init__(self, slots: Iterable[tuple[dict[str, torch.Tensor | None], str]]) -> None:
        self._slots = slots
        self._tensors: list[torch.Tensor | None] = []
        self._storages: set[int | None] = set()

    def __contains__(self, storage: int | None) -> bool:
        tensors = [tensors.get(name) for tensors, name in self._slots]
        if len(tensors) != len(self._tensors) or any(map(operator.is_not, tensors, self._tensors)):
            self._tensors = tensors
            self._storages = {storage_id(tensor) for tensor in tensors if tensor is not None}
        return storage in self._storages


def state_of(model: nn.Module, blocks: Sequence[nn.Module]) -> Callable[[int], StateStorages]:
    """See `ModelPart.state_of`."""
    inside = [list(block.modules()) for block in blocks]
    in_any = {module for modules in inside for module in modules}
    outside = _slots_of(module for module in model.modules() if module not in in_any)
    slots = {index: outside + _slots_of(modules) for index, modules in enumerate(inside)} | {STEM: outside}
    return lambda index: StateStorages(slots[index])


def _slots_of(modules: Iterable[nn.Module]) -> list[tuple[dict[str, torch.Tensor | None], str]]:
    """Where parameters and buffers are: a dictionary of a module, and a name in it."""
    return [
        (tensors, name)
        for module in modules
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
