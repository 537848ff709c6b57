"""as_savable_op: makes a torch op of a kernel that exists only as a ``torch.autograd.Function``.

Owns the ops ``titan_offload::<name>``, one for each function that was registered. Relies on `save_policy` for the group
"attention"; `selective` saves such an op as it does any other.

How it works. A dispatch mode sees ops. It does not see a Function, so every recompute runs its forward again, and only
that forward has the log-sum-exp that it saves for backward. So a subclass of the function is made that differs in
forward alone: its forward calls the op, and the op's kernel calls the function's forward with that ctx. The op returns
what the function's forward made (outputs, and tensors saved for backward that are neither inputs nor outputs) and
numbers that say which tensor is which. A region saves both. In a recompute it returns them instead of running the op,
and ctx is given the same tensors in the same order. Attributes that forward put on its ctx are missing there: backward
runs on the ctx of the original forward.

Price: some thirty microseconds of the host for each call.
"""

import inspect
import re
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from titan_offload.save_policy import ATTENTION_OPS
from titan_offload.saved_tensor import shared_version_counters, storage_id

Function = torch.autograd.Function

NAMESPACE = "titan_offload"

# Which tensor is which, as positions in (the arguments of forward, tensors, None).
_RETURNS = "(Tensor[] tensors, int[] outputs, int[] saved, int[] non_differentiable, bool is_tuple)"

_EXAMPLE = '"(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, int?[] window_size)"'


@dataclass(eq=False)
class _Savable:
    """One registered function. The op exists as long as ``library`` does."""

    settings: tuple[type[Function], str | None, bool]
    library: torch.library.Library
    call: Callable


_registered: dict[str, _Savable] = {}

_running: ContextVar[tuple[object, tuple, AbstractContextManager] | None] = ContextVar("_running", default=None)
"""What an op cannot pass to its kernel: ctx, all arguments as they are, autocast."""


def as_savable_op(
    function: type[Function], *, name: str, schema: str | None = None, is_attention: bool = True
) -> Callable:
    """Registers an autograd Function as the op ``titan_offload::<name>``, so that selective saves can save its results.

    Saved are its outputs and the tensors that its forward saves for backward and that are neither inputs nor outputs,
    such as the log-sum-exp. A recompute then skips its forward. Outputs and gradients are, bit by bit, those of
    ``function.apply``, with and without activation checkpointing.

    Example: FlashAttention 4, whose class takes more arguments than these six; the others keep working. (This was run
    with functions of the same form, not with FlashAttention 4 itself.) ::

        from flash_attn.cute.interface import FlashAttnFunc

        attention = as_savable_op(
            FlashAttnFunc,
            name="flash_attention_4",
            schema="(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, int?[] window_size)",
        )
        out, lse = attention(q, k, v, *rest)  # q: (batch, seq, heads, head_dim); rest as for FlashAttnFunc.apply

    Args:
        function: what is registered. Its forward returns tensors of its own or None: one, or a tuple of any number. A
            tensor that it saves and that is a view of an input keeps the memory of that input.
        name: of the op, an identifier. ``save_ops`` and `register_preferred_save` know it as ``titan_offload::<name>``.
        schema: the arguments that the op shows to selective saves, in the syntax of torch's op schemas: names of
            parameters of forward, with types. Default: all of them, by the annotations of forward. Forward gets all of
            its arguments as they are, also those not named here, which may be of any type. Name the tensors, and what
            bounds the window (``window_size`` or ``window_size_left``): ``save_sliding_window`` goes by it. Default
            values are those of forward.
        is_attention: whether the op is one of the group "attention" of ``save_ops``.

    Returns:
        A callable with the arguments and results of ``function.apply``. Under torch.compile it runs uncompiled.

    Raises:
        ValueError: ``name`` is no identifier or is registered otherwise; ``schema`` is not valid, or is needed and not
            given. In a call: an output is an input or a view of one, or forward modifies an input.
        TypeError: ``function`` is not an autograd Function. In a call: an output is neither a tensor nor None.
    """
    if not (isinstance(function, type) and issubclass(function, Function)):
        raise TypeError(f"as_savable_op takes a subclass of torch.autograd.Function, got {function!r}")
    if not name.isidentifier():
        raise ValueError(f"name = {name!r} must be an identifier, such as 'flash_attention_4'")
    settings = (function, schema, is_attention)
    if name in _registered:
        if _registered[name].settings != settings:
            raise ValueError(
                f"name = {name!r} is registered already, with (function, schema, is_attention) = "
                f"{_registered[name].settings}; got {settings}. Choose another name, or give the same"
            )
        return _registered[name].call
    signature = _signature(function)
    arguments = _arguments(function, signature, name, schema)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    # Whether it draws random numbers (dropout) is not known. If it does, skipping it must not shift those drawn later.
    library.define(f"{name}{arguments} -> {_RETURNS}", tags=(torch.Tag.nondeterministic_seeded,))
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    positions = [list(signature.parameters).index(argument.name) for argument in op._schema.arguments]
    library.impl(name, _kernel(function, positions), "CompositeExplicitAutograd")
    call = torch.compiler.disable(_subclass(function, signature, op, positions).apply)
    _registered[name] = _Savable(settings, library, call)
    if is_attention:
        ATTENTION_OPS.add(f"{NAMESPACE}::{name}")
    return call


def _subclass(
    function: type[Function], signature: inspect.Signature, op: torch._ops.OpOverload, positions: list[int]
) -> type[Function]:
    """The same function, with a forward that calls the op."""

    def forward(ctx, *args):
        values = args if len(args) == len(signature.parameters) else _with_defaults(signature, args)
        running = _running.set((ctx, values, _autocast(values)))
        try:
            tensors, outputs, saved, non_differentiable, is_tuple = op(*(values[i] for i in positions))
        finally:
            _running.reset(running)
        known = (*values, *tensors, None)
        # Again, if the kernel ran: the dispatcher may have given it, and may have made of its results, other objects.
        ctx.save_for_backward(*(known[i] for i in saved))
        ctx.mark_non_differentiable(*(known[i] for i in non_differentiable))
        results = tuple(known[i] for i in outputs)
        return results if is_tuple else results[0]

    # Forward has a ctx here, whether or not it has one in ``function``.
    own = {"forward": staticmethod(forward), "setup_context": staticmethod(Function.setup_context)}
    return type(function.__name__, (function,), own)


def _kernel(function: type[Function], positions: list[int]) -> Callable:
    def kernel(*op_args):
        running = _running.get()
        if running is None:
            raise RuntimeError(f"call what as_savable_op returned for {function.__name__}, not its op")
        ctx, values, autocast = running
        args = list(values)
        for i, arg in zip(positions, op_args, strict=True):
            if isinstance(arg, torch.Tensor):  # others lose their type on the way: a tuple comes as a list
                args[i] = arg
        # Below a dispatch mode there is no autocast, and a view has its own version counter. Here both are as in apply.
        with autocast, shared_version_counters():
            if _takes_ctx(function):
                results = function.forward(ctx, *args)
            else:
                results = function.forward(*args)
                function.setup_context(ctx, tuple(args), results)
        is_tuple = isinstance(results, tuple)
        results = results if is_tuple else (results,)
        _check(function, ctx, args, results)
        tensors = []
        numbers = {id(arg): i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)} | {id(None): -1}

        def number(tensor: torch.Tensor | None) -> int:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(args) + len(tensors)
                tensors.append(tensor)
            return numbers[id(tensor)]

        outputs = [number(result) for result in results]
        saved = [number(tensor) for tensor in ctx.to_save or ()]
        marked = {id(tensor) for tensor in ctx.non_differentiable or ()}
        non_differentiable = [i for i, result in zip(outputs, results, strict=True) if id(result) in marked]
        return tensors, outputs, saved, non_differentiable, is_tuple

    return kernel


def _check(function: type[Function], ctx: object, args: list, results: tuple) -> None:
    if ctx.dirty_tensors:
        raise ValueError(
            f"{function.__name__} modifies an input (mark_dirty): such a function cannot be saved as an op"
        )
    inputs = {storage_id(arg) for arg in args if isinstance(arg, torch.Tensor)}
    for i, result in enumerate(results):
        if result is None:
            continue
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"output {i} of {function.__name__} is {result!r}: an op returns tensors or None")
        if storage_id(result) in inputs:
            raise ValueError(f"output {i} of {function.__name__} is an input or a view of one: return a clone of it")


def _with_defaults(signature: inspect.Signature, args: tuple) -> tuple:
    bound = signature.bind(*args)
    bound.apply_defaults()
    return bound.args


def _autocast(args: tuple) -> AbstractContextManager:
    """Autocast as it is now, on the device of the arguments, to be entered later."""
    device = next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=torch.is_autocast_cache_enabled())


def _takes_ctx(function: type[Function]) -> bool:
    return function.setup_context is Function.setup_context


def _signature(function: type[Function]) -> inspect.Signature:
    """Of forward, without ctx."""
    signature = inspect.signature(function.forward)
    first = 1 if _takes_ctx(function) else 0
    return signature.replace(parameters=list(signature.parameters.values())[first:])


def _arguments(function: type[Function], signature: inspect.Signature, name: str, schema: str | None) -> str:
    """The arguments of the op, in torch's syntax."""
    if schema is None:
        schema = _inferred(function, signature)
    # The dispatcher leaves out arguments that have their default value, which would hide a default window.
    arguments = re.sub(r"""\s*=\s*(\[[^]]*\]|"[^"]*"|'[^']*'|[^,()]+)""", "", schema)
    try:
        parsed = torch._C.parse_schema(f"{name}{arguments} -> ()").arguments
    except RuntimeError as error:
        raise ValueError(f"schema = {schema!r} is not the arguments of an op, such as {_EXAMPLE}: {error}") from None
    valid = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if unknown := [arg.name for arg in parsed if arg.name not in valid or arg.kwarg_only or arg.alias_info]:
        raise ValueError(
            f"schema = {schema!r}: {', '.join(unknown)} must be a positional argument of {function.__name__}.forward "
            f"that is not modified; valid: {', '.join(valid)}"
        )
    return arguments


def _inferred(function: type[Function], signature: inspect.Signature) -> str:
    forward = inspect.unwrap(function.forward)
    # infer_schema evaluates annotations that are strings among the globals of what it is given.
    prototype = types.FunctionType(forward.__code__, forward.__globals__)
    prototype.__signature__ = signature.replace(return_annotation=torch.Tensor)
    try:
        return torch.library.infer_schema(prototype, mutates_args=()).rpartition(" -> ")[0]
    except ValueError as error:
        raise ValueError(
            f"the op's arguments do not follow from the annotations of {function.__name__}.forward ({error}). Pass "
            f"them as schema, such as schema={_EXAMPLE}"
        ) from None
