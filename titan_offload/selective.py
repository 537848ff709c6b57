"""Selective saves: what a checkpointed block keeps of its forward, and what its recompute takes instead of running ops.

Owns the two dispatch modes of a region, the record that they share, and which modules an op runs inside. Relies on
`SavePolicy` to say what is saved, and on the engine to move it.

How it works. ``context_fn`` of a block's checkpoint makes two modes around one `RegionSaves`. `_SaveMode` is on while
forward runs: it asks the policy about each op and keeps the outputs. `_RecallMode` is on while backward runs the
forward again: the n-th call of an op, in the same module and with the same shapes, gets what forward's n-th call
returned. Each recompute starts from the first entry, and entries live as long as the graph does, so there may be any
number of recomputes: a retained graph, a schedule that splits backward. Only ops that a rule may match are counted, so
what a profiler or FSDP2 does in one of the two passes only does not disturb the count.

torch's own selective checkpointing is not used in eager mode: it allows one recompute, keeps everything on the device,
and counts every op. A block that is compiled as a whole uses it, with the same policy: there the compiler traces both
passes together, and none of this exists when the block runs.

In-place edits of what was saved: see `saved_output`. They are errors in backward, always, also if the copy to the host
was faster; except those of mandatory outputs, which are cloned.

Random numbers. An op that draws some and is not run again leaves the generator as if it had.

Price: about four microseconds of the host for each op of a region, in forward and in recompute, as torch's own.
"""

import contextlib
import functools
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx.traceback
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle

from titan_offload.config import SelectiveConfig
from titan_offload.engine import OffloadEngine
from titan_offload.routing import RoutingCheck
from titan_offload.rule_log import RuleLog, SavedPlace
from titan_offload.save_policy import AnyOp, Call, SavePolicy, SaveRule, draws_random_numbers, matches_module
from titan_offload.save_registry import packet_name, registered_saves
from titan_offload.saved_output import SavedOutput, Watched, keep, rng_states, set_rng_states
from titan_offload.saved_tensor import num_bytes_of
from titan_offload.stats import SaveList
from titan_offload.tape import Region

ContextFn = Callable[[], tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]]
TorchPolicy = Callable[..., CheckpointPolicy | bool]
Key = tuple[AnyOp, str, tuple[torch.Size, ...]]  # op, module, shapes

BLOCK = ""
"""The name of a block within itself."""

BASE_RULE = SaveRule("the block's own selective checkpointing", lambda op: True, is_silent=True)
"""What TorchTitan's activation_checkpoint.mode = "selective" saves. It is asked last."""


class SelectiveSaves:
    """Selective saves of any number of blocks under one policy.

    Args:
        selective: settings. None: registered saves only.
        engine: moves what is saved, if ``selective.offload``.

    Attributes:
        policy: what is saved.
        offloads: whether what is saved goes to the host.
        blocks: those that were added, by name.
        log: what the rules did.
        routing: counts re-routed tokens. None: ``selective.check_routing`` is off.
    """

    def __init__(self, selective: SelectiveConfig | None, engine: OffloadEngine) -> None:
        self.policy = SavePolicy(selective, registered_saves())
        self.engine = engine
        self.offloads = selective is not None and selective.offload
        self.blocks: dict[str, BlockSaves] = {}
        self.log = RuleLog(self.policy.rules)
        self.routing = RoutingCheck() if selective is not None and selective.check_routing else None
        self._local = threading.local()

    def passes(self) -> list["_Pass"]:
        """The regions that this thread is running, outermost first."""
        if not hasattr(self._local, "passes"):
            self._local.passes = []
        return self._local.passes

    def scopes_of(self, fqn: str, modules: dict[str, nn.Module]) -> dict[str, frozenset[SaveRule]]:
        """For each of a block's modules that rules are limited to: its name within the block, and those rules."""
        scopes = {}
        for name, module in modules.items():
            if rules := frozenset(rule for rule in self.policy.rules if _is_limited_to(rule, name, module)):
                scopes[_within_block(name, fqn)] = rules
        return scopes

    def save_list(self, fqns: Sequence[str]) -> SaveList:
        """What is saved in the blocks ``fqns``."""
        blocks = [self.blocks[fqn] for fqn in fqns]
        names: dict[tuple, list[str]] = {}
        for rule in self.policy.rules:
            modules = dict.fromkeys(name for block in blocks for name, rules in block.scopes.items() if rule in rules)
            if rule.module is None or modules:
                kind = f"registered, {'mandatory' if rule.is_mandatory else 'preferred'}: " if rule.op else ""
                names.setdefault((kind, tuple(modules), rule.reason), []).append(rule.op or rule.name)
        rules = [(kind + ", ".join(ops), list(modules), reason) for (kind, modules, reason), ops in names.items()]
        recomputed: dict[str, list[str]] = {}
        for block in blocks:
            if block.layer_type in self.policy.recomputed_layer_types:
                recomputed.setdefault(block.layer_type, []).append(block.fqn)
        has_own = any(block.base_context_fn is not None for block in blocks)
        return SaveList(list(fqns), rules, recomputed, has_own, self.offloads)

    def step_end(self) -> dict[str, dict]:
        """Ends a step: the fields of `OffloadStats` that are of selective saves."""
        return {
            "saved": self.log.step_end(),
            "num_rerouted": {} if self.routing is None else self.routing.step_end(),
        }


@dataclass(eq=False)
class BlockSaves:
    """Selective saves of one block.

    Attributes:
        saves: of all blocks.
        fqn: of the block.
        scopes: see `SelectiveSaves.scopes_of`.
        layer_type: such as ``sliding_attention``; None: not known.
        preserves_rng_state: whether the checkpoint gives recompute the random numbers of forward.
        base_context_fn: of the block's own selective checkpointing, if it has one.
        region: the engine's, while the block's forward runs.
    """

    saves: SelectiveSaves
    fqn: str
    scopes: dict[str, frozenset[SaveRule]]
    layer_type: str | None = None
    preserves_rng_state: bool = True
    base_context_fn: ContextFn | None = None
    region: Region | None = None
    _hooks: list[RemovableHandle] = field(default_factory=list)
    _records: "weakref.WeakSet[RegionSaves]" = field(default_factory=weakref.WeakSet)  # of graphs that are alive

    def context_fn(self) -> tuple["_SaveMode", "_RecallMode"]:
        """For ``torch.utils.checkpoint``, which calls it once per forward of the block."""
        record = RegionSaves(self)
        self._records.add(record)
        return _SaveMode(record), _RecallMode(record)

    def compiled_context_fn(self) -> ContextFn:
        """The same for a block that is compiled as a whole.

        The compiler shares code between blocks that look alike; it tells those with other rules apart by the argument
        of the partial.
        """
        rules = {name: sorted(rule.name for rule in rules) for name, rules in self.scopes.items()}

        def contexts(kind: str) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
            return create_selective_checkpoint_contexts(functools.partial(self._decide_traced, self.base_policy()))

        return functools.partial(contexts, repr((self.layer_type, rules)))

    def base_policy(self) -> TorchPolicy | None:
        """The policy of the block's own selective checkpointing, for one region: it may count calls."""
        if self.base_context_fn is None:
            return None
        forward_context, _ = self.base_context_fn()
        policy = getattr(forward_context, "policy_fn", None)
        if policy is None:
            raise ValueError(
                f"{self.fqn} is checkpointed with a context_fn of its own, which selective saves cannot be joined with "
                "unless torch.utils.checkpoint.create_selective_checkpoint_contexts made it; remove it"
            )
        return policy

    def rule_for(self, op: AnyOp, args: tuple, kwargs: dict, scopes: list[str]) -> SaveRule | None:
        rules_in_scope = [self.scopes[name] for name in scopes if name in self.scopes]
        return self.saves.policy.rule_for(Call(op, args, kwargs, rules_in_scope, self.layer_type))

    def _decide_traced(
        self, base: TorchPolicy | None, context: SelectiveCheckpointContext, op: AnyOp, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        rule = self.rule_for(op, args, kwargs, _modules_being_traced())
        if rule is not None:
            self.saves.log.saved(rule, 0)
        elif base is None or not _says_save(base(context, op, *args, **kwargs)):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    def follow_modules(self, modules: dict[str, nn.Module]) -> None:
        """Keeps track of when the modules with rules of their own run; ``modules`` are the block's, by name."""
        for name, module in modules.items():
            scope = _within_block(name, self.fqn)
            if scope in self.scopes and scope != BLOCK:
                self._hooks += _follow(module, scope, self.saves.passes)
                if self.saves.routing is not None and any(map(_saves_topk, self.scopes[scope])):
                    self._hooks += self.saves.routing.install(module, self.fqn, self.saves.passes)

    def unfollow_modules(self) -> None:
        """Takes the hooks away: now, or once the last graph is gone whose recompute needs them."""
        alive = list(self._records)
        for record in alive:
            weakref.finalize(record, self.unfollow_modules).atexit = False
        if not alive:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    @contextlib.contextmanager
    def in_region(self, region: Region | None) -> Iterator[None]:
        self.region = region
        try:
            yield
        finally:
            self.region = None

    def __deepcopy__(self, memo: dict) -> "BlockSaves":
        return self  # copies of the block share it, as they share the policy


@dataclass(eq=False, slots=True)
class _Entry:
    """What one call returned: ``outputs`` has a `SavedOutput` in place of each tensor."""

    outputs: object
    rule: SaveRule
    num_bytes: int
    rng_states: list[tuple[torch.device, torch.Tensor]] = field(default_factory=list)


class RegionSaves:
    """What one forward of a block left for its recomputes."""

    def __init__(self, block: BlockSaves) -> None:
        self.block = block
        self.region = block.region
        self.engine = block.saves.engine if block.saves.offloads and block.region is not None else None
        self._save_on_host = None if self.engine is None else functools.partial(self.engine.save, self.region)
        self.base_policy = block.base_policy()
        self.num_calls: Counter[Key] = Counter()
        self.entries: dict[tuple[Key, int], _Entry] = {}
        self.ops: set[AnyOp] = set()  # those with an entry
        self._watched = Watched()

    def save(self, run: "_Pass", op: AnyOp, args: tuple, kwargs: dict, outputs: object) -> None:
        """``op`` ran in forward."""
        self._watched.op_returned(outputs)
        if self.base_policy is None and not self.block.saves.policy.candidates(op):
            return
        rule = self.block.rule_for(op, args, kwargs, run.scopes)
        if rule is None and self.base_policy is not None:
            context = SelectiveCheckpointContext(is_recompute=False)
            context.op_output = outputs  # torch 2.11 has no argument for it
            rule = BASE_RULE if _says_save(self.base_policy(context, op, *args, **kwargs)) else None
        place = run.count(op, args)
        self.num_calls[place[0]] += 1
        if rule is not None:
            self.ops.add(op)
            self.entries[place] = self._make_entry(rule, op, outputs)

    def _make_entry(self, rule: SaveRule, op: AnyOp, outputs: object) -> _Entry:
        if packet_name(op).startswith("_c10d_functional") and (rule.is_mandatory or self.engine is not None):
            # The collective may still be writing. What reads it here must wait, as its later users will.
            outputs = tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, outputs)
        entry = _Entry(None, rule, 0)
        devices = set()

        def keep_one(output: torch.Tensor) -> SavedOutput:
            entry.num_bytes += num_bytes_of(output)
            devices.add(output.device)
            saved = keep(output, rule.is_mandatory, self._save_on_host)
            if not saved.is_cloned:
                self._watched.add(output, saved)
            return saved

        entry.outputs = tree_map_only(torch.Tensor, keep_one, outputs)
        if draws_random_numbers(op) and self.block.preserves_rng_state:
            entry.rng_states = rng_states(devices)
        self.block.saves.log.saved(rule, entry.num_bytes)
        return entry

    def recall(self, run: "_Pass", op: AnyOp, args: tuple) -> _Entry | None:
        """The entry of forward's counterpart of this call; None: the op is to be run."""
        key, index = place = run.count(op, args)
        if index >= self.num_calls[key]:
            raise RuntimeError(self._text_of_mismatch(key, index))
        entry = self.entries.get(place)
        if entry is not None:
            run.asked.add(place)
        return entry

    def outputs_of(self, entry: _Entry, op: AnyOp) -> object:
        """What the call returned, as new tensors."""
        set_rng_states(entry.rng_states)
        return tree_map_only(SavedOutput, lambda saved: self._take(saved, entry.rule, op), entry.outputs)

    def _take(self, saved: SavedOutput, rule: SaveRule, op: AnyOp) -> torch.Tensor:
        if saved.is_edited():
            raise RuntimeError(
                f"an output of {packet_name(op)} that {rule.name} saved in {self.block.fqn} was modified by an "
                "in-place operation afterwards. Take the op out of that rule, or keep a clone: register_mandatory_save"
            )
        return saved.take(self.block.saves.engine.unpack)

    def _text_of_mismatch(self, key: Key, index: int) -> str:
        op, module, shapes = key
        place = f"{self.block.fqn}.{module}" if module else self.block.fqn
        return (
            f"recompute of {self.block.fqn} went another way than its forward: call {index + 1} of {packet_name(op)} "
            f"in {place} with shapes {', '.join(str(list(shape)) for shape in shapes)} has no counterpart there. "
            "Something before it comes out differently each time: save that with register_mandatory_save"
        )


@dataclass(eq=False)
class _Pass:
    """One run of a region: its forward, or a recompute.

    Attributes:
        scopes: names of the followed modules that it is inside of, outermost first.
        asked: the entries that it took.
        is_paused, topk, trial: see `routing.Pass`.
    """

    record: RegionSaves
    is_recompute: bool
    scopes: list[str] = field(default_factory=list)
    asked: set[tuple[Key, int]] = field(default_factory=set)
    is_paused: bool = False
    topk: torch.Tensor | None = None
    trial: torch.Tensor | None = None
    _num_calls: Counter[Key] = field(default_factory=Counter)

    def count(self, op: AnyOp, args: tuple) -> tuple[Key, int]:
        """The next call of ``op``: what identifies it in every pass of the region."""
        key = (
            op,
            self.scopes[-1] if self.scopes else "",
            tuple(arg.shape for arg in args if isinstance(arg, torch.Tensor)),
        )
        index = self._num_calls[key]
        self._num_calls[key] += 1
        return key, index


class _RegionMode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would leave compiled parts of a block, such as FlexAttention, uncompiled

    def __init__(self, record: RegionSaves, is_recompute: bool) -> None:
        super().__init__()
        self.record = record
        self._is_recompute = is_recompute
        self._passes: list[_Pass] = []

    def __enter__(self) -> "_RegionMode":
        # The block itself is not followed: its own forward calls the checkpoint, and so begins before the region.
        scopes = [BLOCK] if BLOCK in self.record.block.scopes else []
        self._passes.append(_Pass(self.record, self._is_recompute, scopes))
        self.record.block.saves.passes().append(self._passes[-1])
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.record.block.saves.passes().pop()
        self._ended(self._passes.pop())


class _SaveMode(_RegionMode):
    """On during the forward of a region."""

    def __init__(self, record: RegionSaves) -> None:
        super().__init__(record, is_recompute=False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        self.record.save(self._passes[-1], func, args, kwargs, outputs)
        return outputs

    def _ended(self, run: _Pass) -> None:
        self.record.block.saves.log.region_ended()


class _RecallMode(_RegionMode):
    """On during a recompute of a region."""

    def __init__(self, record: RegionSaves) -> None:
        super().__init__(record, is_recompute=True)

    def __enter__(self) -> "_RecallMode":
        if self.record.engine is not None:
            self.record.engine.start_recompute(self.record.region)
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        run, record = self._passes[-1], self.record
        entry = record.recall(run, func, args) if func in record.ops and not run.is_paused else None
        outputs = func(*args, **(kwargs or {})) if entry is None else record.outputs_of(entry, func)
        if record.block.saves.routing is not None and packet_name(func) == "aten::topk":
            run.topk = outputs[1]
        return outputs

    def _ended(self, run: _Pass) -> None:
        self.record.block.saves.log.recompute_ended(
            SavedPlace(
                entry.rule, packet_name(op), module, index, entry.num_bytes, ((op, module, shapes), index) in run.asked
            )
            for ((op, module, shapes), index), entry in self.record.entries.items()
        )


# Modules


def _follow(module: nn.Module, name: str, passes: Callable[[], list[_Pass]]) -> list[RemovableHandle]:
    """Hooks are functions: a deep copy of the model shares them, and does not copy what they refer to."""

    def enter(module: nn.Module, args: tuple) -> None:
        if runs := passes():
            runs[-1].scopes.append(name)

    def leave(module: nn.Module, args: tuple, outputs: object) -> None:
        if (runs := passes()) and runs[-1].scopes[-1:] == [name]:
            runs[-1].scopes.pop()

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),  # also if forward raises, and the block goes on
    ]


def _within_block(name: str, fqn: str) -> str:
    """The name of a module of the block ``fqn`` within it."""
    return name.removeprefix(fqn).removeprefix(".")


def _is_limited_to(rule: SaveRule, name: str, module: nn.Module) -> bool:
    if isinstance(rule.module, type):
        for wrapped in ("_orig_mod", "_checkpoint_wrapped_module"):  # by compile, by checkpointing
            module = getattr(module, wrapped, module)
        return isinstance(module, rule.module)
    return rule.module is not None and matches_module(name, rule.module)


def _saves_topk(rule: SaveRule) -> bool:
    return rule.is_mandatory and rule.may_match(torch.ops.aten.topk.default)


def _modules_being_traced() -> list[str]:
    """Names within the checkpointed block of the modules that the op being traced runs inside, outermost first."""
    stack = torch.fx.traceback.get_current_meta().get("nn_module_stack") or {}
    paths = (path.rpartition("_checkpoint_wrapped_module")[2] for path, _ in stack.values())
    return [re.sub(r"^\W+", "", path) for path in paths]  # L['self']..._checkpoint_wrapped_module'].attention.wq


def _says_save(decision: CheckpointPolicy | bool) -> bool:
    return decision in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
