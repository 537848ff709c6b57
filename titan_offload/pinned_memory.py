"""Host memory of the exact size, from a chosen NUMA node, page-locked by the driver.

Owns the system calls behind a slab: mapping, NUMA policy, first touch, registration, and the turn that the ranks of a
host take. Relies on Linux and on torch's bindings of the CUDA runtime; knows nothing of slots or budgets.

How it works. torch's own pinned allocator rounds each request up to a power of two, so pages are mapped here and
registered with the driver afterwards. Pages come into being when they are first written, on the node that the policy
names then, so the policy comes first. They are written by several threads, because the driver would do it with one.
Price: 0.1 to 0.5 s per GiB, once. What fails leaves nothing behind: the pages are unmapped before the error is raised,
not when its traceback dies, for the next thing that a caller does is to try again with less.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import re
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

MAX_BYTES = 64 * 1024**3
"""One registration of 512 GiB or more fails on current drivers (https://github.com/vllm-project/vllm/issues/51080)."""

MAX_BYTES_OF_OLD_KERNELS = 2 * 1000**3
"""Linux 6.11 to 6.13 cannot pin more than 2 GiB in one call (https://github.com/NVIDIA/NV-Kernels/pull/108)."""

MAX_TOUCH_THREADS = 8
"""Threads that write fresh pages. More only wait for the kernel."""

HUGE_PAGE = 2 * 1024**2
"""No two threads touch the same one."""

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of this process, as torch registers it."""

MPOL_PREFERRED = 1
"""Memory policy: from this node, and from others once it is full."""

MBIND = {"x86_64": 237, "aarch64": 235}
"""System call number of mbind by machine."""


def max_pinned_bytes(kernel_release: str | None = None) -> int:
    """The largest piece that the machine page-locks at once, in bytes.

    Args:
        kernel_release: such as ``"6.12.3-generic"``. Default: that of the running kernel.
    """
    version = re.match(r"(\d+)\.(\d+)", platform.release() if kernel_release is None else kernel_release)
    is_old = version is not None and (6, 11) <= tuple(map(int, version.groups())) <= (6, 13)
    return MAX_BYTES_OF_OLD_KERNELS if is_old else MAX_BYTES


def map_and_register(num_bytes: int, bind: Callable[[int, int], None]) -> tuple[torch.Tensor, Callable[[], object]]:
    """Page-locked memory (uint8, one dimension, zeros), and what ends its page lock.

    The lock ends by itself with the memory's last reference: a driver that still holds unmapped pages refuses whatever
    is mapped at their address later (https://github.com/MoonshotAI/checkpoint-engine/issues/67). Nobody knows then
    which copies are under way, so the device is waited for. Whoever ends the lock knows that there are none.

    Args:
        num_bytes: its size.
        bind: called with address and size of the pages before they are touched.

    Raises:
        OSError: there is no room to map so much.
        RuntimeError: the driver refuses. Its error state is as if nobody had asked.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = None
    try:
        # A forked data loader worker must neither inherit these pages nor make them copy-on-write under a running DMA.
        pages.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        bind(buffer.data_ptr(), num_bytes)
        touch(buffer)
        _register(buffer)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they have the buffer too, and it must not outlive its memory
        del buffer
        pages.close()
        raise
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()
    dropped = weakref.finalize(buffer.untyped_storage(), _unregister_dropped, cudart, address)
    dropped.atexit = False  # the driver is gone by then, or ends it all at once
    return buffer, lambda: dropped.detach() and _unregister(cudart, address)


def _register(buffer: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    _check(cudart, cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), PORTABLE))


def _unregister(cudart: Any, address: int) -> None:
    _check(cudart, cudart.cudaHostUnregister(address))


def _unregister_dropped(cudart: Any, address: int) -> None:
    try:
        torch.cuda.synchronize()
    finally:
        _unregister(cudart, address)


def _check(cudart: Any, error: int) -> None:
    try:
        torch.cuda.check_error(int(error))
    except RuntimeError:
        _clear_last_error(cudart)
        raise


def _clear_last_error(cudart: Any) -> None:
    """A failed call stays behind as its thread's last error, and torch's next kernel launch would raise it as its own
    (https://github.com/pytorch/pytorch/issues/167414)."""
    if hasattr(cudart, "cudaGetLastError"):  # not in every torch: https://github.com/pytorch/pytorch/pull/165990
        cudart.cudaGetLastError()
        return
    with contextlib.suppress(RuntimeError):  # so let a launch raise it whose result nobody needs
        torch.ones(1, device="cuda")


def touch(buffer: torch.Tensor) -> None:
    """Writes zeros, so that the pages exist. torchrun leaves torch one thread per rank (OMP_NUM_THREADS=1), but ranks
    take turns here: the one whose turn it is uses the CPUs that it may run on."""
    num_cpus = len(os.sched_getaffinity(0))
    num_threads = max(1, min(MAX_TOUCH_THREADS, num_cpus) // torch.get_num_threads())
    pieces = buffer.split(_round_up(-(-buffer.numel() // num_threads), HUGE_PAGE))
    with ThreadPoolExecutor(len(pieces)) as threads:
        list(threads.map(torch.Tensor.zero_, pieces))


def bind_to_node(address: int, num_bytes: int, node: int) -> None:
    """Has the kernel take pages that do not exist yet from NUMA node ``node``, and from others once that is full.

    Args:
        address: start of a page.
        num_bytes: size; the last page counts as a whole.
        node: its number.

    Raises:
        OSError: there is no such node for this process, or system calls of memory policy are not allowed or not known.
    """
    number = MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"the number of mbind on {platform.machine()} is not known here")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # The kernel takes off one from the number of bits.
    arguments = (address, _round_up(num_bytes, mmap.PAGESIZE), MPOL_PREFERRED, ctypes.addressof(mask))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*map(ctypes.c_long, (number, *arguments, len(mask) * bits + 1, 0))) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def one_rank_at_a_time() -> Iterator[None]:
    """A turn among the processes of this user that see the same temporary folder; without one where there is none."""
    lock = _open_lock()
    try:
        yield
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a child that was forked meanwhile has it too
            os.close(lock)


def _open_lock() -> int | None:
    """The file whose lock is the turn, locked. The kernel drops the lock of a process that dies."""
    try:
        path = Path(tempfile.gettempdir()) / f"titan_offload_pin_{os.getuid()}.lock"
        # Anybody may have put something else there: follow no link and write nothing.
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        os.close(lock)
        return None
    return lock


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
