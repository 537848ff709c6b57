"""Activation offload for TorchTitan and FSDP2: block inputs wait in pinned host memory while the device computes."""

from titan_offload.apply import Offloader, apply_offload
from titan_offload.config import OffloadConfig
from titan_offload.host_runtime import HostRuntime
from titan_offload.runtime import AcceleratorRuntime, Runtime
from titan_offload.stats import OffloadStats

__all__ = [
    # What to move, and moving it
    "OffloadConfig",
    "Offloader",
    "OffloadStats",
    "apply_offload",
    # Where it runs
    "AcceleratorRuntime",
    "HostRuntime",
    "Runtime",
]
