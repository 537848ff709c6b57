"""What `soak` measures of a process between steps, and which of it must stay as it was.

    device      bytes of storages that Python tensors hold; slabs of pinned memory (a CPU's are tensors too) left out
    heap        bytes that malloc has handed out, on a CPU those of tensors that only autograd's graph holds included;
                slabs left out
    pinned      bytes of the pool's slabs
    handles     handles, payloads, regions and tapes that are alive, the collector asked, not the engine
    slots       of the pool, in use
    files       open file descriptors
    threads     of the process
    rss         resident memory of the process, in bytes, slabs included
    objects     Python objects that the collector knows

Between steps there is no graph: handles and slots must be 0, and everything else what it was at `FLAT_FROM`. Where the
interpreter, malloc, the data loader and TorchTitan's own lists have their part in it, `SLACK` says how much more it may
be; it is far less than one tensor left behind in each step would be. Less than before is never wrong.
"""

import ctypes
import gc
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch

from titan_offload import Offloader
from titan_offload.host_memory import read_process_memory
from titan_offload.tape import Handle, Payload, Region, Tape

MIB = 1024**2
FLAT_FROM = 50
SLACK = {"heap": 16 * MIB, "rss": 128 * MIB, "objects": 2000}
IN_MIB = ("device", "heap", "pinned", "rss")


@dataclass(frozen=True)
class Sample:
    """One process after ``step``; see above."""

    step: int
    device: int
    heap: int
    pinned: int
    handles: int
    slots: int
    files: int
    threads: int
    rss: int
    objects: int


QUANTITIES = tuple(field.name for field in fields(Sample))[1:]


def take_sample(step: int, offloader: Offloader | None) -> Sample:
    objects = gc.get_objects()
    pool = offloader.engine.pool if offloader is not None else None
    pinned = pool.bytes_pinned if pool is not None else 0
    storages = {
        storage._cdata: storage.nbytes()
        for tensor in objects
        if isinstance(tensor, torch.Tensor) and (storage := _storage_of(tensor)) is not None
    }
    process = read_process_memory()
    return Sample(
        step,
        device=sum(storages.values()) - pinned,
        heap=heap_bytes() - pinned,
        pinned=pinned,
        handles=sum(isinstance(found, Handle | Payload | Region | Tape) for found in objects),
        slots=pool.num_slots_in_use if pool is not None else 0,
        files=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        rss=process.rss_anon_bytes + process.rss_file_bytes + process.rss_shmem_bytes,
        objects=len(objects),
    )


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None: a wrapper (such as a DTensor) whose parts are tensors of their own."""
    return None if torch._C._has_storage(tensor) is False or tensor.is_meta else tensor.untyped_storage()


_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def heap_bytes() -> int:
    """Bytes that malloc has handed out, in all arenas and by mmap. glibc alone (from 2.33) can say; else 0."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def find_problems(samples: Sequence[Sample], where: str) -> list[str]:
    """What is not flat. ``samples`` are those of one process, in order; the first is that of `FLAT_FROM`."""
    first, problems = samples[0], []
    for name in QUANTITIES:
        allowed = 0 if name in ("handles", "slots") else getattr(first, name) + SLACK.get(name, 0)
        worst = max(samples, key=lambda sample: getattr(sample, name))
        if getattr(worst, name) > allowed:
            problems.append(
                f"{where}: {name} {getattr(worst, name)} after step {worst.step}, at most {allowed} allowed"
            )
    return problems


def make_rows(samples_of_ranks: Sequence[Sequence[Sample]]) -> list[tuple[str, ...]]:
    """For each quantity and rank: at the first sample, the most of all, the last."""
    rows = []
    for rank, samples in enumerate(samples_of_ranks):
        for name in QUANTITIES:
            values = [getattr(sample, name) for sample in samples]
            cells = [f"{value / MIB:.2f} MiB" if name in IN_MIB else str(value) for value in _ends(values)]
            rows.append((str(rank), name, *cells))
    return rows


def _ends(values: Sequence[int]) -> tuple[int, int, int]:
    return values[0], max(values), values[-1]


def as_json(samples: Sequence[Sample]) -> list[dict[str, int]]:
    return [asdict(sample) for sample in samples]
