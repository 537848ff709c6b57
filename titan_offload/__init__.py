"""Activation offload for TorchTitan and FSDP2: block inputs wait in pinned host memory while the device computes.

The public names below are imported when they are first asked for (PEP 562): most need torch, whose import takes
seconds, and ``titan-offload plan`` does without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_offload.apply import Offloader, apply_offload
    from titan_offload.config import OffloadConfig, SelectiveConfig
    from titan_offload.host_runtime import HostRuntime
    from titan_offload.runtime import AcceleratorRuntime, Runtime
    from titan_offload.savable_op import as_savable_op
    from titan_offload.save_registry import register_mandatory_save, register_preferred_save
    from titan_offload.stats import OffloadStats

_MODULES = {
    **dict.fromkeys(("Offloader", "apply_offload"), "apply"),
    **dict.fromkeys(("OffloadConfig", "SelectiveConfig"), "config"),
    "HostRuntime": "host_runtime",
    **dict.fromkeys(("AcceleratorRuntime", "Runtime"), "runtime"),
    "as_savable_op": "savable_op",
    **dict.fromkeys(("register_mandatory_save", "register_preferred_save"), "save_registry"),
    "OffloadStats": "stats",
}
"""Where each public name is: the same as above, for those who run it."""

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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # from now on it is found without asking here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
