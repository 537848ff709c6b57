"""The blocks of a model: found by name, and told whether they are checkpointed or compiled.

Owns what is known of module names and of the wrappers that checkpointing and compile put around modules.
"""

from fnmatch import fnmatchcase

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

_WRAPPER_SEGMENTS = ("_checkpoint_wrapped_module", "_orig_mod")
"""Name segments that checkpointing and compile add, and that users do not write."""


def find_blocks(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The outermost modules whose cleaned names match ``pattern``, in the order in which the model holds them.

    Raises:
        ValueError: nothing matches.
    """
    found = matching_blocks(model, pattern)
    if not found:
        names = [clean_fqn(name) for name, _ in model.named_modules()]
        containers = sorted({f"{fqn.rsplit('.', 1)[0]}.*" for fqn in names if fqn.rsplit(".", 1)[-1].isdigit()})
        raise ValueError(
            f"blocks = {pattern!r} matches no module of {type(model).__name__}; set it to a glob on module names, such "
            f"as {', '.join(containers) or ', '.join(name for name in names[1:6])}"
        )
    return found


def matching_blocks(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        fqn = clean_fqn(name)
        if fqn and fqn not in found and _matches(fqn, pattern):
            found[fqn] = module
    return found


def clean_fqn(name: str) -> str:
    """A module name as users write it."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPER_SEGMENTS)


def modules_of(block: nn.Module, fqn: str) -> dict[str, nn.Module]:
    """The block and its modules by fully qualified name; of a wrapped one, the wrapper."""
    modules: dict[str, nn.Module] = {}
    for name, module in block.named_modules():
        modules.setdefault(clean_fqn(".".join(part for part in (fqn, name) if part)), module)
    return modules


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of compile and checkpointing."""
    while isinstance(module, OptimizedModule | CheckpointWrapper):
        module = module._orig_mod if isinstance(module, OptimizedModule) else module._checkpoint_wrapped_module
    return module


def _matches(fqn: str, pattern: str) -> bool:
    segments, globs = fqn.split("."), pattern.split(".")
    return len(segments) == len(globs) and all(map(fnmatchcase, segments, globs))


def checkpoint_of(block: nn.Module) -> CheckpointWrapper | None:
    """The block's checkpoint wrapper, below a compiled module if there is one."""
    wrapper = block._orig_mod if isinstance(block, OptimizedModule) else block
    return wrapper if isinstance(wrapper, CheckpointWrapper) else None


def is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
