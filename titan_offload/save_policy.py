"""SavePolicy: which op outputs of a block are saved instead of recomputed.

Owns the order of decisions, and what is known about ops: which are attention, which are matmuls and with what
contraction dim, which look at a bounded window. Pure functions of one call of an op and of where it runs; what is done
with the answer is up to `selective`.

    1. registered mandatory saves        4. save_ops
    2. registered preferred saves        5. save_modules
    3. sliding-window attention: no      6. save_matmul_min_k

The first rule that matches a call decides; a call that none matches is recomputed. Price: a dictionary look-up for an
op that no rule can match; about a microsecond for one that a rule may match.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch._ops import HigherOrderOperator, OpOverload

from titan_offload.config import SelectiveConfig
from titan_offload.save_registry import RegisteredSave, closest, known_op_names, packet_name, qualified_name

AnyOp = OpOverload | HigherOrderOperator

ATTENTION = "attention"
"""The only group that `SelectiveConfig.save_ops` knows."""

ATTENTION_OPS = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    # One op only where something keeps it whole, such as inference mode; training takes it apart into matmuls.
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_attention_math_for_mps",
    # What nested tensors and varlen attention call.
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "torch_attn::_varlen_attn",
    "higher_order::flex_attention",
    # TorchTitan 0.2.2 compiles FlexAttention, and nothing else, in such a region, and calls the region as one op.
    "higher_order::inductor_compiled_code",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::fwd",
    "flash_attn_3::_flash_attn_forward",
}
"""Attention forwards by qualified name, without overload: torch 2.11 to 2.14, TorchTitan 0.2.2, flash-attn 2 and 3.
`as_savable_op` adds to it."""

MATMULS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::_grouped_mm": 0,
    "aten::_scaled_mm": 0,
    "aten::_scaled_grouped_mm": 0,
    "aten::linear": 0,
}
"""Matmuls by qualified name, and the position of the left operand, whose last dim is the contraction dim K."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of an op in forward, and where it was made.

    Attributes:
        op, args, kwargs: as dispatched.
        rules_in_scope: for each module with rules of its own that the call runs inside, those rules.
        layer_type: of the block, such as ``sliding_attention``; None: not known.
    """

    op: AnyOp
    args: Sequence[object]
    kwargs: dict[str, object]
    rules_in_scope: Sequence[frozenset["SaveRule"]]
    layer_type: str | None = None

    def argument(self, name: str) -> object:
        """The value of an argument by the name that the op's schema has for it; None: there is no such name."""
        if name in self.kwargs or isinstance(self.op, HigherOrderOperator):
            return self.kwargs.get(name)
        for position, arg in enumerate(self.op._schema.arguments):
            if arg.name == name:  # the dispatcher leaves out what has its default value
                return self.args[position] if position < len(self.args) else arg.default_value
        return None


@dataclass(eq=False)
class SaveRule:
    """One reason to save outputs, or (``saves`` false) to recompute them after all.

    Attributes:
        name: as its user knows it: ``save_ops "attention"``.
        may_match: by the op alone.
        matches: by the call.
        module: the modules it is limited to: a class or a name as in ``save_modules``. None: no limit.
        is_mandatory: outputs are cloned.
        is_silent: no warning if it does nothing.
        saves: whether it saves.
        op, reason: which and why, if it was registered.
        unit: what it looks for, for the warning that it found none.
    """

    name: str
    may_match: Callable[[AnyOp], bool]
    matches: Callable[[Call], bool] = field(default=lambda call: True)
    module: str | type | None = None
    is_mandatory: bool = False
    is_silent: bool = False
    saves: bool = True
    op: str = ""
    reason: str = ""
    unit: str = "op"

    def decides(self, call: Call) -> bool:
        return (self.module is None or any(self in rules for rules in call.rules_in_scope)) and self.matches(call)


class SavePolicy:
    """The rules of one `apply_offload`, in the order in which they are asked.

    Args:
        selective: settings. None: registered saves only.
        registered: see `save_registry.registered_saves`.

    Attributes:
        rules: those that save, in order.
        recomputed_layer_types: types of blocks whose attention they do not save.
    """

    def __init__(self, selective: SelectiveConfig | None, registered: Sequence[RegisteredSave]) -> None:
        ordered = [_registered_rule(save) for save in registered]
        if selective is not None:
            if not selective.save_sliding_window:
                ordered.append(_sliding_window_rule(selective.recompute_layer_types))
            ordered += [_ops_rule(entry) for entry in selective.save_ops]
            ordered += [_modules_rule(entry) for entry in selective.save_modules]
            ordered += [_min_k_rule(selective.save_matmul_min_k)] if selective.save_matmul_min_k else []
        self.rules = [rule for rule in ordered if rule.saves]
        self.recomputed_layer_types = ()
        if selective is not None and not selective.save_sliding_window:
            self.recomputed_layer_types = selective.recompute_layer_types
        self._ordered = ordered
        self._by_op: dict[AnyOp, tuple[SaveRule, ...]] = {}

    def candidates(self, op: AnyOp) -> tuple[SaveRule, ...]:
        """The rules that may match a call of ``op``."""
        rules = self._by_op.get(op)
        if rules is None:
            rules = tuple(rule for rule in self._ordered if rule.may_match(op)) if _has_outputs_to_save(op) else ()
            rules = self._by_op[op] = rules if any(rule.saves for rule in rules) else ()
        return rules

    def rule_for(self, call: Call) -> SaveRule | None:
        """The rule that saves the outputs of ``call``; None: recompute."""
        rule = next((rule for rule in self.candidates(call.op) if rule.decides(call)), None)
        return rule if rule is not None and rule.saves and _is_fresh(call) else None


def check_save_ops(entries: Iterable[str]) -> None:
    """Raises ValueError for an entry that is neither a group nor a part of the name of an op that can be saved."""
    known = {name for name in known_op_names() if "backward" not in name}
    for entry in entries:
        if entry == ATTENTION or any(entry in name for name in (*known, *ATTENTION_OPS)):
            continue
        likely = closest(entry, {ATTENTION, *(name.partition(".")[0] for name in known)})
        raise ValueError(
            f"selective_checkpoint.save_ops = {entry!r} is neither the group {ATTENTION!r} nor part of the name of any "
            f"op's forward; closest: {', '.join(likely) or 'none'}"
        )


def matches_module(fqn: str, pattern: str) -> bool:
    """Whether ``pattern`` is the name ``fqn``, is its end from a dot on, or (with ``*``, ``?`` or ``[``) is a glob on
    all of it, whose wildcards cross dots."""
    if any(wildcard in pattern for wildcard in "*?["):
        return fnmatchcase(fqn, pattern)
    return fqn == pattern or fqn.endswith(f".{pattern}")


# Rules


def _registered_rule(save: RegisteredSave) -> SaveRule:
    return SaveRule(
        f"registered {'mandatory' if save.is_mandatory else 'preferred'} save {save}",
        lambda op: save.op in (packet_name(op), qualified_name(op)),
        is_of_sizes if save.only_sizes else lambda call: True,
        module=save.module,
        is_mandatory=save.is_mandatory,
        is_silent=save.is_builtin,
        op=save.op,
        reason=save.reason,
    )


def _sliding_window_rule(layer_types: Sequence[str]) -> SaveRule:
    def matches(call: Call) -> bool:
        return call.layer_type in layer_types or has_bounded_window(call)

    return SaveRule("sliding window", is_attention, matches, saves=False)


def _ops_rule(entry: str) -> SaveRule:
    def may_match(op: AnyOp) -> bool:
        name = qualified_name(op)
        return is_attention(op) if entry == ATTENTION else entry in name and "backward" not in name

    return SaveRule(f'save_ops "{entry}"', may_match)


def _modules_rule(pattern: str) -> SaveRule:
    return SaveRule(f'save_modules "{pattern}"', is_matmul, is_of_a_linear, module=pattern, unit="matmul")


def _min_k_rule(min_k: int) -> SaveRule:
    def matches(call: Call) -> bool:
        return contraction_dim(call) >= min_k and is_of_a_linear(call)

    return SaveRule(f"save_matmul_min_k {min_k}", is_matmul, matches, unit="matmul")


# Ops


def is_attention(op: AnyOp) -> bool:
    return packet_name(op) in ATTENTION_OPS


def is_matmul(op: AnyOp) -> bool:
    return packet_name(op) in MATMULS


def contraction_dim(call: Call) -> int:
    """K of a matmul; of a linear, its ``in_features``."""
    return call.args[MATMULS[packet_name(call.op)]].shape[-1]


def is_of_a_linear(call: Call) -> bool:
    """Whether a matmul multiplies by a weight. A ``bmm`` does where a linear expanded its weight over the batch; else
    it is attention taken apart."""
    return packet_name(call.op) != "aten::bmm" or call.args[1].stride(0) == 0


def is_of_sizes(call: Call) -> bool:
    """Whether a call hands on whole numbers: to the host, if it copies."""
    tensor = call.args[0]
    stays_there = packet_name(call.op) == "aten::_to_copy" and (
        tensor.device.type == "cpu" or torch.device(call.kwargs.get("device") or tensor.device).type != "cpu"
    )
    return not tensor.is_floating_point() and not stays_there


def has_bounded_window(call: Call) -> bool:
    """Whether attention looks back a bounded number of tokens: as its window arguments say (-1 and None: no bound)."""
    window = call.argument("window_size")
    left = next(iter(window), None) if isinstance(window, Sequence) else window
    bounds = (left, call.argument("window_size_left"), call.argument("attention_chunk") or None)
    return any(bound is not None and bound >= 0 for bound in bounds)


# Added in one of the two passes only, by checkpointing itself (detach) or its determinism check (metadata); or not an
# op in this sense: waiting for a collective hands back its argument.
_NEVER_SAVED = {
    "aten::detach",
    "_c10d_functional::wait_tensor",
    *(
        f"aten::{name}"
        for name in ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "dim", "size", "stride")
    ),
    *("aten::is_contiguous", "aten::is_strides_like_format", "aten::is_non_overlapping_and_dense", "aten::numel"),
    *("prim::device", "prim::layout"),
}


def _has_outputs_to_save(op: AnyOp) -> bool:
    name = packet_name(op)
    return name not in _NEVER_SAVED and not name.startswith("profiler::")


def _is_fresh(call: Call) -> bool:
    """Whether the outputs are memory of their own: the op neither returns a view of an argument nor writes to one."""
    if isinstance(call.op, HigherOrderOperator):
        return True
    aliased = (arg.name for arg in call.op._schema.arguments if arg.alias_info is not None)
    return all(call.argument(name) is None for name in aliased)


def draws_random_numbers(op: AnyOp) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
