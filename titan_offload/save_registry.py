"""Ops whose outputs are saved whatever a train config says, and the names that ops go by.

Owns the process's list of registered saves. *Mandatory* is for correctness: an op whose recompute could come out
another way than its forward did, such as a router's top-k, whose near ties would send tokens to other experts.
*Preferred* only trades memory for time. `apply_offload` reads the list when it is called; what is registered later
applies to later calls.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

Op = OpOverload | OpOverloadPacket | HigherOrderOperator | str


@dataclass(frozen=True)
class RegisteredSave:
    """An op in the list.

    Attributes:
        op: qualified name: ``aten::topk`` (every overload) or ``aten::topk.values`` (that one).
        module: where it applies: inside modules of that class, or that `matches_module` finds by name. None: anywhere.
        reason: why it must not, or should not, be recomputed.
        is_mandatory: whether the gradients depend on it.
        is_builtin: registered by this package: it says nothing if a model does not run the op.
        only_sizes: only calls whose outputs are whole numbers, on the host or on their way to other ranks.
    """

    op: str
    module: str | type[nn.Module] | None
    reason: str
    is_mandatory: bool
    is_builtin: bool = False
    only_sizes: bool = False

    def remove(self) -> None:
        """Takes it out of the list."""
        _registered.remove(self)

    def __str__(self) -> str:
        where = self.module.__name__ if isinstance(self.module, type) else self.module
        return self.op if where is None else f"{self.op} in {where}"


_registered: list[RegisteredSave] = []


def register_mandatory_save(op: Op, module: str | type[nn.Module] | None = None, *, reason: str) -> RegisteredSave:
    """Every activation checkpoint under this package saves the outputs of ``op`` and never recomputes them.

    Forward keeps a clone and recompute gets a clone, so an in-place edit after the op cannot reach the saved copy.

    Args:
        op: an op, or its qualified name (``"aten::topk"`` for all overloads).
        module: only inside these modules: a class, or a name as in ``selective_checkpoint.save_modules``. Default:
            anywhere in a block.
        reason: why recompute would go wrong; shown at start-up.

    Returns:
        What was registered; its ``remove()`` takes it back.

    Raises:
        ValueError: no such op, or the op is registered for that module already, with another reason.
    """
    return _register(RegisteredSave(_resolve(op), module, reason, is_mandatory=True))


def register_preferred_save(
    op: Op, module: str | type[nn.Module] | None = None, *, reason: str = "expensive to recompute"
) -> RegisteredSave:
    """Every activation checkpoint under this package saves the outputs of ``op``: memory for time, no more.

    Arguments, result and errors are those of `register_mandatory_save`. Outputs are not cloned; an in-place edit of one
    is an error in backward.
    """
    return _register(RegisteredSave(_resolve(op), module, reason, is_mandatory=False))


def register_builtin_save(op: str, module: type[nn.Module], *, reason: str, only_sizes: bool = False) -> RegisteredSave:
    """A mandatory save of this package's own: ``op`` need not exist in this process."""
    return _register(RegisteredSave(op, module, reason, is_mandatory=True, is_builtin=True, only_sizes=only_sizes))


def registered_saves() -> list[RegisteredSave]:
    """What is registered now: mandatory saves first, each kind in the order of registration."""
    return sorted(_registered, key=lambda save: not save.is_mandatory)


def _register(new: RegisteredSave) -> RegisteredSave:
    for old in _registered:
        if (old.op, old.module) != (new.op, new.module):
            continue
        if (old.reason, old.is_mandatory) == (new.reason, new.is_mandatory):
            return old
        kinds = ["mandatory" if save.is_mandatory else "preferred" for save in (old, new)]
        raise ValueError(
            f"{new} is registered already, as {kinds[0]}, with reason {old.reason!r}; got {kinds[1]}, {new.reason!r}. "
            "Call remove() on the first, or give both the same reason"
        )
    _registered.append(new)
    return new


# Names of ops


def packet_name(op: OpOverload | HigherOrderOperator) -> str:
    """Qualified name without the overload: ``aten::topk``; ``higher_order::flex_attention``."""
    return f"higher_order::{op.name()}" if isinstance(op, HigherOrderOperator) else op._schema.name


def qualified_name(op: OpOverload | HigherOrderOperator) -> str:
    """With the overload, where it has a name: ``aten::topk.values``."""
    return packet_name(op) if isinstance(op, HigherOrderOperator) else op.name()


def known_op_names() -> set[str]:
    """Qualified names of all ops of this process, with their overloads."""
    higher_order = (f"higher_order::{name}" for name in torch._ops._higher_order_ops)
    return {*torch._C._dispatch_get_all_op_names(), *higher_order}


def closest(name: str, valid: Iterable[str], num: int = 5) -> list[str]:
    """The names most like ``name``; the part after ``::`` counts alone as well."""
    valid = sorted(set(valid))
    short = {candidate.rpartition("::")[2]: candidate for candidate in valid}
    found = difflib.get_close_matches(name, valid, num, cutoff=0.5)
    found += [short[match] for match in difflib.get_close_matches(name.rpartition("::")[2], short, num, cutoff=0.5)]
    return list(dict.fromkeys(found))[:num]


def _resolve(op: Op) -> str:
    if isinstance(op, OpOverload | HigherOrderOperator):
        return qualified_name(op)
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name
    known = known_op_names()
    if op in known or any(name.partition(".")[0] == op for name in known):
        return op
    raise ValueError(
        f"no op is called {op!r}: give its qualified name, such as {', '.join(closest(op, known)) or 'aten::topk'}; an "
        "op of a library exists once the library is imported"
    )
