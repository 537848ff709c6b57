"""Activation offload for TorchTitan and FSDP2: block inputs wait in pinned host memory while the device computes."""

from titan_offload.apply import Offloader, apply_offload
from titan_offload.config import OffloadConfig, SelectiveConfig
from titan_offload.host_runtime import HostRuntime
from titan_offload.runtime import AcceleratorRuntime, Runtime
from titan_offload.savable_op import as_savable_op
from titan_offload.save_registry import register_mandatory_save, register_preferred_save
from titan_offload.stats import OffloadStats

__all__ = [
    # What to move, and moving it
    "OffloadConfig",
    "Offloader",
    "OffloadStats",
    "apply_offload",
    # What to save instead of recomputing it
    "SelectiveConfig",
    "register_mandatory_save",
    "register_preferred_save",
    "as_savable_op",
    # Where it runs
    "AcceleratorRuntime",
    "HostRuntime",
    "Runtime",
]
