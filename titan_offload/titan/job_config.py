"""TorchTitan's JobConfig with two more sections.

A train config names this module in ``[job] custom_config_module``; TorchTitan merges the fields below into its own and
makes each a command line flag. ``[activation_offload]`` is `OffloadConfig` itself, so that keys, defaults, checks and
help texts exist once.
"""

from dataclasses import dataclass, field, fields

from titan_offload.config import OffloadConfig


@dataclass(frozen=True, kw_only=True)
class SelectiveCheckpoint:
    """Selective saves. The keys are reserved; none is built yet, and setting one is an error."""

    enable: bool = False
    """Not built yet."""
    save_ops: list[str] = field(default_factory=lambda: ["attention"])
    """Not built yet."""
    save_modules: list[str] = field(default_factory=list)
    """Not built yet."""
    save_matmul_min_k: int = 0
    """Not built yet."""
    save_sliding_window: bool = False
    """Not built yet."""
    recompute_layer_types: list[str] = field(default_factory=lambda: ["sliding_attention", "chunked_attention"])
    """Not built yet."""
    offload: bool = False
    """Not built yet."""

    def __post_init__(self) -> None:
        for key in fields(self):
            default = key.default_factory() if callable(key.default_factory) else key.default
            if (value := getattr(self, key.name)) != default:
                raise ValueError(
                    f"selective_checkpoint.{key.name} = {value!r}: selective saves are not built yet; remove the "
                    'section and use activation_checkpoint.mode = "full" or "selective"'
                )


@dataclass
class JobConfig:
    """What TorchTitan merges into its own JobConfig."""

    activation_offload: OffloadConfig = field(default_factory=OffloadConfig)
    selective_checkpoint: SelectiveCheckpoint = field(default_factory=SelectiveCheckpoint)
