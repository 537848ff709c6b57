"""What the user may set, as frozen dataclasses that refuse bad values at construction.

Owns every allowed value, default and error text of ``[activation_offload]`` and ``[selective_checkpoint]``. Relies on
nothing but the standard library, so that a planner or a test can import it without torch.
"""

import math
from dataclasses import dataclass, fields

MIB = 1024**2
GIB = 1024**3

OFFLOAD, SELECTIVE = "activation_offload", "selective_checkpoint"
"""The sections of a train config."""

MODES = ("none", "block_inputs", "all")
SCHEDULES = ("overlap", "sync")
ON_EXHAUSTED = ("keep", "error")
LIMITS = ("memory", "link")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of activation offload; the same names as in the ``[activation_offload]`` section of a train config.

    Args:
        mode: what moves. ``"none"``: nothing. ``"block_inputs"``, with activation_checkpoint.mode ``"full"`` (or
            ``"selective"``): the tensor that checkpointing keeps of each TransformerBlock, its input; blocks are
            recomputed in backward as without offload. ``"all"`` with activation_checkpoint.mode ``"none"``: every
            activation that autograd saves, and nothing is recomputed. ``"all"`` with ``"full"``: each block's input,
            and what is saved outside the blocks. In every mode what comes after the last block (final norm, output
            head) stays on the device, and so do parameters and buffers.
        schedule: ``"overlap"`` copies on side streams and reloads ahead of backward. ``"sync"`` copies on the compute
            stream: the baseline to compare with.
        keep_last: number of newest blocks of a model part whose tensors stay on the device. Backward needs them first.
            Of each microbatch in flight: with 0, what a pipeline stage holds on the device is independent of these.
        prefetch_lookahead: number of regions reloaded ahead of the one that backward works on. Where a block is not
            checkpointed: how much is reloaded ahead of its use, as the bytes of this many regions.
        max_inflight_offloads: number of tensors that may wait on the device for their copy to end. Before one more
            copy starts, the compute stream waits for the oldest. 0: no limit: forward never waits, and a tensor leaves
            the device once the host sees its copy done, which costs device memory the further the host runs ahead.
            Of blocks that are not checkpointed, and so save many tensors each, it counts the blocks.
        min_offload_mib: tensors smaller than this many MiB stay on the device.
        pinned_budget_gib: pinned host memory that each rank may use, in GiB. 0: its share of the host's memory, see
            ``host_memory_fraction``.
        host_memory_fraction: of the host memory that is free at start, under every limit that holds for the job, the
            fraction that all ranks of a host may take together. Divided among them by need.
        on_exhausted: what happens to a tensor for which the budget has no room. ``"keep"``: it stays on the
            device, is counted and reported. ``"error"``: all ranks stop before step 1 if that is known then, else a
            RuntimeError.
        limit: what bounds the block inputs that move. ``"memory"``: the pinned budget alone. ``"link"``: also the link:
            after the first steps only as many go on moving, the earliest of each pass, as hide behind compute. Not with
            mode ``"all"``.
        measure_link: whether the speed of each device's link, alone and shared with the other ranks of its host, is
            measured before step 1 and reported. ``limit = "link"`` measures it in any case.

    Raises:
        ValueError: a value is not allowed; the text names key, value, what is allowed and how to repair it.
    """

    mode: str = "block_inputs"
    schedule: str = "overlap"
    keep_last: int = 1
    prefetch_lookahead: int = 1
    max_inflight_offloads: int = 2
    min_offload_mib: float = 1.0
    pinned_budget_gib: float = 0.0
    host_memory_fraction: float = 0.8
    on_exhausted: str = "keep"
    limit: str = "memory"
    measure_link: bool = False

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, MODES)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("on_exhausted", self.on_exhausted, ON_EXHAUSTED)
        _check_choice("limit", self.limit, LIMITS)
        for key in ("keep_last", "prefetch_lookahead", "max_inflight_offloads"):
            _check_count(key, getattr(self, key))
        for key in ("min_offload_mib", "pinned_budget_gib"):
            _check_size(key, getattr(self, key))
        _check_fraction("host_memory_fraction", self.host_memory_fraction)
        _check_switch("measure_link", self.measure_link, OFFLOAD)
        if self.limit == "link" and self.schedule == "sync":
            raise ValueError(
                f'{OFFLOAD}.limit = "link" does not go with {OFFLOAD}.schedule = "sync", in which no copy hides behind '
                'compute: set schedule to "overlap", or limit to "memory"'
            )
        if self.limit == "link" and self.mode == "all":
            raise ValueError(
                f'{OFFLOAD}.limit = "link" does not go with {OFFLOAD}.mode = "all": it reckons with the recompute of '
                'each block. Set mode to "block_inputs", or limit to "memory"'
            )

    def keys_without_effect(self, moves_saved_outputs: bool = False) -> list[str]:
        """Keys that were changed from their defaults and do nothing beside the others.

        Args:
            moves_saved_outputs: whether ``selective_checkpoint.offload`` is on.
        """
        idle = []
        if self.mode == "none" and not moves_saved_outputs:
            idle = [key.name for key in fields(self) if key.name != "mode"]
        elif self.schedule == "sync":
            idle = ["prefetch_lookahead", "max_inflight_offloads"]
        if self.pinned_budget_gib != 0:
            idle.append("host_memory_fraction")
        return [key.name for key in fields(self) if key.name in idle and getattr(self, key.name) != key.default]

    @property
    def min_offload_bytes(self) -> int:
        """Smallest tensor that is moved, in bytes."""
        return math.ceil(self.min_offload_mib * MIB)

    @property
    def budget_bytes(self) -> int | None:
        """``pinned_budget_gib`` in bytes; None: this rank's share of the host's memory."""
        return None if self.pinned_budget_gib == 0 else int(self.pinned_budget_gib * GIB)


@dataclass(frozen=True, kw_only=True)
class SelectiveConfig:
    """Which op outputs of a checkpointed block are saved instead of recomputed; the same names as in the
    ``[selective_checkpoint]`` section of a train config.

    Args:
        save_ops: the group ``"attention"`` (every attention forward that torch 2.11 to 2.14, TorchTitan 0.2.2 and
            flash-attn dispatch), or substrings of qualified op names, such as ``"aten::mm"``.
        save_modules: the matmuls that run inside these modules of a block: fully qualified name, the end of one from a
            dot on, or with ``*``, ``?`` or ``[`` a glob on all of it.
        save_matmul_min_k: the matmuls whose contraction dim, of a linear its ``in_features``, is at least this.
            0: off.
        save_sliding_window: whether attention over a sliding window or chunk is saved like any other. It is cheap to
            recompute.
        recompute_layer_types: blocks of these types have their attention recomputed, unless ``save_sliding_window``.
        offload: whether what is saved goes to pinned host memory, under the settings of ``[activation_offload]``, in
            every mode of it. Default: it stays on the device.
        check_routing: whether each recompute also runs the MoE routers again, on the side, to count the tokens that
            would have gone to other experts had the routers not been saved. For debugging; it costs that time.

    Raises:
        ValueError: a value is not allowed; the text names key, value, what is allowed and how to repair it.
    """

    save_ops: tuple[str, ...] = ("attention",)
    save_modules: tuple[str, ...] = ()
    save_matmul_min_k: int = 0
    save_sliding_window: bool = False
    recompute_layer_types: tuple[str, ...] = ("sliding_attention", "chunked_attention")
    offload: bool = False
    check_routing: bool = False

    def __post_init__(self) -> None:
        for key in ("save_ops", "save_modules", "recompute_layer_types"):
            value = getattr(self, key)
            if isinstance(value, str) or not all(isinstance(entry, str) and entry for entry in value):
                raise ValueError(f"{SELECTIVE}.{key} = {value!r} is not allowed: set it to a list of non-empty strings")
            object.__setattr__(self, key, tuple(value))  # TOML has lists
        for key in ("save_sliding_window", "offload", "check_routing"):
            _check_switch(key, getattr(self, key), SELECTIVE)
        _check_count("save_matmul_min_k", self.save_matmul_min_k, SELECTIVE)

    def keys_for_eager_only(self) -> list[str]:
        """Keys that are on and that a compiled block cannot do."""
        return [key for key in ("offload", "check_routing") if getattr(self, key)]

    def changed_keys(self) -> list[str]:
        """Keys that were changed from their defaults."""
        return [key.name for key in fields(self) if getattr(self, key.name) != key.default]


def _check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(f'"{choice}"' for choice in allowed)
        raise ValueError(f"{OFFLOAD}.{key} = {value!r} is not known: set it to one of {choices}")


def _check_count(key: str, value: object, section: str = OFFLOAD) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{section}.{key} = {value!r} is not allowed: set it to a whole number >= 0")


def _check_size(key: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{OFFLOAD}.{key} = {value!r} is not allowed: set it to a number >= 0")


def _check_fraction(key: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ValueError(f"{OFFLOAD}.{key} = {value!r} is not allowed: set it to a number above 0 and at most 1")


def _check_switch(key: str, value: object, section: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{section}.{key} = {value!r} is not allowed: set it to true or false")
