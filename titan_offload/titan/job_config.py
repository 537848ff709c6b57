"""TorchTitan's JobConfig with two more sections.

A train config names this module in ``[job] custom_config_module``; TorchTitan merges the fields below into its own and
makes each a command line flag. The sections are `OffloadConfig` and `SelectiveConfig` themselves, so that keys,
defaults, checks and help texts exist once; only the switch of the second is added here.
"""

from dataclasses import dataclass, field

from titan_offload.config import OffloadConfig, SelectiveConfig


@dataclass(frozen=True, kw_only=True)
class SelectiveCheckpoint(SelectiveConfig):
    """Which op outputs of a block are saved instead of recomputed. Needs activation_checkpoint.mode = "full".

    Args:
        enable: whether the other keys of the section apply. What is registered, such as the MoE router, is saved in any
            case.
    """

    enable: bool = False


@dataclass
class JobConfig:
    """What TorchTitan merges into its own JobConfig."""

    activation_offload: OffloadConfig = field(default_factory=OffloadConfig)
    selective_checkpoint: SelectiveCheckpoint = field(default_factory=SelectiveCheckpoint)
