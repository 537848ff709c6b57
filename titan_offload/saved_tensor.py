"""How a tensor that autograd saves is taken apart into bytes, and put together again: pure functions, no engine state.

Owns what is known about kinds of tensors: views, strides, version counters, DTensors and pending collectives.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of ``tensor`` or of its local part; a pending collective is not waited for."""
    return local_elem(tensor).untyped_storage()


def storage_id(tensor: torch.Tensor) -> int | None:
    """Identity of the storage of ``tensor`` or of its local part; another storage may get it once this one is freed.
    None: a layout that has no storage, such as a sparse one."""
    return storage_of(tensor)._cdata if local_elem(tensor).layout is torch.strided else None


def view_id(tensor: torch.Tensor) -> tuple:
    """Identity of a plain strided tensor as a view of its storage."""
    return storage_id(tensor), tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def num_bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of ``tensor`` or of its local part; 0 for a layout that is not strided."""
    tensor = local_elem(tensor)
    return tensor.nbytes if tensor.layout is torch.strided else 0


def local_elem(tensor: torch.Tensor) -> torch.Tensor:
    """The plain local tensor; of a pending collective its result, not waited for: to be looked at, not read."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def input_storages(inputs: Sequence[object]) -> set[int]:
    """Storages of a block's inputs: of what needs a gradient; if nothing does (the embedding is frozen), of what a
    gradient is computed from."""
    tensors = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
    chosen = [tensor for tensor in tensors if tensor.requires_grad]
    chosen = chosen or [tensor for tensor in tensors if tensor.is_floating_point()]
    return {storage_id(tensor) for tensor in chosen}


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The plain local tensor. A pending collective, here or inside a DTensor, is waited for on the compute stream."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def rebuilder(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    if not isinstance(tensor, DTensor):
        return None
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return lambda local: DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def version_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Counts of in-place changes; a DTensor and its local tensor count apart."""
    tensors = (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,)
    return tuple(tensor._version for tensor in tensors if not tensor.is_inference())


def is_same_version(moved: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether a tensor at version ``own`` holds what a tensor on the same storage held at version ``moved``: it is that
    tensor, or a DTensor that was made of it and not changed. Not the other way round: what is done in place to a
    DTensor does not count in the tensor that it has."""
    return own == moved or (len(moved) == 1 and own == (0, *moved))


def shared_version_counters() -> AbstractContextManager:
    """A dispatch mode runs below the layer that makes an alias share the version counter: this switches it on again."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def check_version(tensor: torch.Tensor, version: tuple[int, ...]) -> None:
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype} {list(tensor.shape)}], which activation offload moves, "
            f"is at version {version_of(tensor)}; expected version {version} instead"
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element of a plain strided tensor has a place of its own in memory."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def gather(tensor: torch.Tensor) -> torch.Tensor:
    # On the compute stream: a kernel on a copy stream would wait for free multiprocessors.
    return tensor.clone(memory_format=torch.contiguous_format)


@dataclass(eq=False, slots=True)
class View:
    """How a tensor lies in a payload's storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_gathered: bool


def as_view(storage: torch.UntypedStorage, view: View) -> torch.Tensor:
    """The tensor that was saved: same values, same strides."""
    tensor = torch.empty(0, dtype=view.dtype, device=storage.device)
    if not view.is_gathered:
        return tensor.set_(storage, view.offset, view.size, view.stride)
    # Backward's kernels depend on strides, and bits on kernels: the gaps come back too.
    spread = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=storage.device)
    return spread.copy_(tensor.set_(storage).view(view.size))
