"""The device that `gpu_check.py` runs on, or its emulation on a CPU.

Owns what the two do not have in common: runtimes, clocks, the allocator's figures, and sizes. Everything else in the
parts is the same code for both, so that an emulated run comes past each line that a device will.

On a CPU `HostRuntime` plays the link, at `EMULATED_GB_PER_S`, and a region of host memory the device. Its figures say
that the command works, and nothing about a device.
"""

import contextlib
import gc
import json
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpu_parts.strict_runtime import StrictAcceleratorRuntime
from titan_offload import AcceleratorRuntime, HostRuntime, Runtime
from titan_offload.host_runtime import HostLink
from titan_offload.planner.probe import driver_version

T = TypeVar("T")

EMULATED_GB_PER_S = 0.5
MAX_LATE_MS = 2.0
"""Copies of a strict runtime come up to this late: longer than the forward of a small block takes."""


@dataclass
class Peak:
    """Device memory of a stretch of a program, in bytes.

    Attributes:
        before: allocated when it began.
        allocated: most that was allocated at once, what there was before included.
        reserved: most that the allocator held of the device; on a CPU, which has none, as ``allocated``.
    """

    before: int = 0
    allocated: int = 0
    reserved: int = 0


class Device(ABC):
    """What the parts ask of the device.

    Attributes:
        type: such as ``"cuda"``.
        backends: of the process group: the first that works.
        is_emulated: whether a CPU plays the device.
    """

    type: str
    backends: tuple[str, ...]
    is_emulated: bool

    @property
    def torch_device(self) -> torch.device:
        """The one device of this process."""
        return torch.device(self.type)

    @abstractmethod
    def name(self) -> str:
        """For people."""

    @abstractmethod
    def runtimes(self, num: int = 1) -> list[Runtime]:
        """As a run has them, on one link."""

    @abstractmethod
    def strict_runtime(self) -> Runtime:
        """One whose copies come late, and which fills what is freed or not written yet with a pattern."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all that the device was given."""

    @abstractmethod
    @contextlib.contextmanager
    def peak(self) -> Iterator[Peak]:
        """Measures device memory within a ``with``; the figures are there at its end."""

    @abstractmethod
    def poison(self) -> None:
        """Fills what the allocator will hand out next with NaN, so that a read of freed memory shows."""

    def empty_cache(self) -> None:
        """Gives back all device and pinned memory that nothing uses; reference cycles are broken before."""
        gc.collect()

    def pick(self, on_device: T, emulated: T) -> T:
        """A size: the CPU's is small."""
        return emulated if self.is_emulated else on_device

    @contextlib.contextmanager
    def mesh(self) -> Iterator[DeviceMesh]:
        """A process group of this process alone, and its mesh for FSDP2.

        Raises:
            RuntimeError: no backend works.
        """
        self._init_process_group()
        try:
            yield init_device_mesh(self.type, (1,), mesh_dim_names=("fsdp",))
        finally:
            dist.destroy_process_group()

    def _init_process_group(self) -> None:
        *others, last = self.backends
        for backend in others:
            try:
                return start_process_group(backend)
            except RuntimeError as error:
                print(f"the process group does not work with {backend}: {error}", file=sys.stderr)
        start_process_group(last)

    def timed_ms(self, work: Callable[[], object]) -> float:
        """Milliseconds until the device has done ``work``."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3


class CudaDevice(Device):
    """The current CUDA device."""

    type, is_emulated = "cuda", False
    backends = ("nccl", "gloo")  # alone FSDP2 has nothing to exchange, so that either does

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def runtimes(self, num: int = 1) -> list[Runtime]:
        return [AcceleratorRuntime() for _ in range(num)]

    def strict_runtime(self) -> Runtime:
        return StrictAcceleratorRuntime(max_late_ms=MAX_LATE_MS)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    @contextlib.contextmanager
    def peak(self) -> Iterator[Peak]:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        peak = Peak(before=torch.cuda.memory_allocated())
        yield peak
        self.synchronize()
        peak.allocated, peak.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def poison(self) -> None:
        self.synchronize()
        stream = torch.cuda.current_stream().cuda_stream
        sizes = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["stream"] == stream
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
        held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sorted(sizes, reverse=True)]
        for memory in held:
            memory.fill_(0xFF)

    def empty_cache(self) -> None:
        super().empty_cache()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # what torch's own allocator has pinned, for `save_on_cpu`


class EmulatedDevice(Device):
    """A CPU in its place."""

    type, backends, is_emulated = "cpu", ("gloo",), True

    def name(self) -> str:
        return "emulated on a CPU"

    def runtimes(self, num: int = 1) -> list[Runtime]:
        link = HostLink(EMULATED_GB_PER_S)
        return [HostRuntime(link=link) for _ in range(num)]

    def strict_runtime(self) -> Runtime:
        return HostRuntime(link_gb_per_s=EMULATED_GB_PER_S, jitter_ms=MAX_LATE_MS)

    def synchronize(self) -> None:
        pass  # a step ends when its last copy was waited for

    @contextlib.contextmanager
    def peak(self) -> Iterator[Peak]:
        """From the profiler's record of every allocation, which starts here: ``before`` is 0. Pinned memory that is
        made meanwhile counts too."""
        peak = Peak()
        with torch.profiler.profile(profile_memory=True) as profiler:
            yield peak
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        made = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
        totals = [event["args"]["Total Allocated"] for event in made]
        start = totals[0] - made[0]["args"]["Bytes"]  # what profiles before this one saw made and not freed
        peak.allocated = peak.reserved = max(totals) - start

    def poison(self) -> None:
        for _ in range(4):  # what malloc hands out next is mostly what was freed last
            torch.full((2**18,), float("nan"))


def start_process_group(backend: str) -> None:
    """A process group of this process alone. Raises RuntimeError, and leaves none, if its first collective fails."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_gather_object([None], None)
    except RuntimeError:
        dist.destroy_process_group()
        raise


def find_device(is_emulated: bool) -> Device:
    """The device to run on.

    Raises:
        ValueError: there is none, and it is not to be emulated.
    """
    if is_emulated:
        return EmulatedDevice()
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device on this machine: run it on one that has, or give --emulate")
    return CudaDevice()


def facts(device: Device) -> dict[str, Any]:
    """What results are of: device, driver and versions."""
    return {
        "device": device.name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
