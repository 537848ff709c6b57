"""Streams, events, copies and pinned memory: the seam between the engine and a machine.

`Runtime` is what the engine may ask of a device. `AcceleratorRuntime` answers through ``torch.accelerator``,
``torch.Stream`` and ``torch.Event``, with CUDA calls only for host registration. `host_runtime.HostRuntime` answers on
a CPU, so that every rule of the engine is tested without a device.

Three streams matter: the *compute stream*, which belongs to the caller and is asked for anew each time, and one side
stream per direction and device. Nothing here blocks the host except `synchronize` and the making of pinned memory.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from titan_offload import pinned_memory
from titan_offload.config import GIB

logger = logging.getLogger(__name__)

Stream = Any
"""torch.Stream, or host_runtime.HostStream."""

Event = Any
"""torch.Event, or host_runtime.HostEvent."""

Wait = Callable[[], float | None]
"""Milliseconds that a stream stood still at a wait; None while the device has not come past it."""


class Runtime(ABC):
    """What the engine asks of a device: order (streams, events), copies, device and pinned memory.

    Attributes:
        device_type: such as ``"cuda"``.
        numa_node: where pinned memory comes from, as far as the machine can tell. -1: from wherever. May be set until
            the first allocation.
        max_pinned_bytes: most that `allocate_pinned` should be asked for at once. One tensor may need more.
    """

    device_type: str
    numa_node: int = -1
    max_pinned_bytes: int = pinned_memory.MAX_BYTES

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lives on this runtime's device."""
        return tensor.device.type == self.device_type

    @abstractmethod
    def compute_stream(self, device: torch.device) -> Stream:
        """The stream that the caller computes on now. Ask before entering any stream context, and never keep it."""

    @abstractmethod
    def d2h_stream(self, device: torch.device) -> Stream:
        """The side stream of copies to the host."""

    @abstractmethod
    def h2d_stream(self, device: torch.device) -> Stream:
        """The side stream of copies to the device."""

    @abstractmethod
    def record_event(self, stream: Stream) -> Event:
        """An event that is done once ``stream`` has done all it was given so far."""

    @abstractmethod
    def wait_event(self, stream: Stream, event: Event) -> None:
        """What ``stream`` is given from now on starts after ``event``."""

    @abstractmethod
    def timed_wait(self, stream: Stream, event: Event) -> Wait:
        """`wait_event`, measured."""

    @abstractmethod
    def record_timed_event(self, stream: Stream) -> Event:
        """`record_event`, of an event that `elapsed_ms` can take."""

    @abstractmethod
    def elapsed_ms(self, start: Event, end: Event) -> float | None:
        """Milliseconds from ``start`` to ``end``, both of `record_timed_event` on one device and done in this order;
        None while ``end`` is not done."""

    @abstractmethod
    def query(self, event: Event) -> bool:
        """Whether ``event`` is done."""

    @abstractmethod
    def synchronize(self, event: Event) -> None:
        """Blocks the host until ``event`` is done."""

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Copies ``src`` to ``dst`` (uint8, one dimension, same length) on ``stream``. Neither may be freed or
        written elsewhere before an event recorded on ``stream`` afterwards is done."""

    @abstractmethod
    def empty(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Device memory (uint8, one dimension) of the compute stream's own pool: freed in that stream's order."""

    @abstractmethod
    def lend(self, buffer: torch.Tensor, stream: Stream) -> None:
        """``buffer``, of one compute stream's pool, is used on another one: it is freed after both."""

    @abstractmethod
    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """Page-locked host memory (uint8, one dimension).

        Raises:
            RuntimeError: the driver or the host refuses; the text names pinned host memory.
        """

    @abstractmethod
    def free_pinned(self, buffer: torch.Tensor) -> None:
        """Gives back what `allocate_pinned` returned. No copy may be under way on it."""

    def pinned_bytes(self, num_bytes: int) -> int:
        """Host memory that ``allocate_pinned(num_bytes)`` really takes, in bytes."""
        return num_bytes

    def scrub(self, buffer: torch.Tensor, event: Event) -> Event:
        """A slot was freed and may be written again after ``event``: the event to wait for from now on.

        A runtime made for tests overwrites the slot here, so that a read after free shows.
        """
        return event


class AcceleratorRuntime(Runtime):
    """The current accelerator, through torch's device-independent streams and events.

    Args:
        device_type: such as ``"cuda"``. Default: the current accelerator.

    Raises:
        RuntimeError: there is no accelerator.
    """

    def __init__(self, device_type: str | None = None) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise RuntimeError("there is no accelerator on this machine; use HostRuntime")
        self.device_type = device_type or accelerator.type
        self._streams: dict[tuple[str, torch.device], torch.Stream] = {}
        self._unregister: dict[int, Callable[[], object]] = {}  # by address of the memory
        # Registration gives slabs of the exact size; torch's own pinned allocator rounds each request up to a power
        # of two (https://github.com/pytorch/pytorch/issues/95823).
        self._registers = self.device_type == "cuda"
        self.max_pinned_bytes = pinned_memory.max_pinned_bytes()

    def compute_stream(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def d2h_stream(self, device: torch.device) -> torch.Stream:
        return self._side_stream("d2h", device)

    def h2d_stream(self, device: torch.device) -> torch.Stream:
        return self._side_stream("h2d", device)

    def _side_stream(self, direction: str, device: torch.device) -> torch.Stream:
        key = (direction, device)
        if key not in self._streams:
            self._streams[key] = torch.Stream(device=device)
        return self._streams[key]

    def record_event(self, stream: torch.Stream) -> torch.Event:
        return stream.record_event()

    def wait_event(self, stream: torch.Stream, event: torch.Event) -> None:
        stream.wait_event(event)

    def timed_wait(self, stream: torch.Stream, event: torch.Event) -> Wait:
        if event.query():
            stream.wait_event(event)
            return lambda: 0.0
        start = self.record_timed_event(stream)
        stream.wait_event(event)
        end = self.record_timed_event(stream)
        return lambda: self.elapsed_ms(start, end)

    def record_timed_event(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=stream.device, enable_timing=True)
        stream.record_event(event)
        return event

    def elapsed_ms(self, start: torch.Event, end: torch.Event) -> float | None:
        return start.elapsed_time(end) if end.query() else None

    def query(self, event: torch.Event) -> bool:
        return event.query()

    def synchronize(self, event: torch.Event) -> None:
        event.synchronize()

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: torch.Stream) -> None:
        device = dst.device if dst.device.type == self.device_type else src.device
        # Entering the stream that is current already would be harmless in eager mode, but breaks Inductor's stream
        # handling (https://github.com/PrimeIntellect-ai/prime-rl/pull/3458).
        on_stream = contextlib.nullcontext() if stream == self.compute_stream(device) else stream
        with on_stream:
            dst.copy_(src, non_blocking=True)

    def empty(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def lend(self, buffer: torch.Tensor, stream: torch.Stream) -> None:
        buffer.record_stream(stream)  # rare, so its price (memory that comes back late) does not matter

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        try:
            # Drivers hold machine-wide locks while they pin; ranks that pin at once stall each other for minutes.
            with pinned_memory.one_rank_at_a_time():
                if not self._registers:
                    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                buffer, unregister = pinned_memory.map_and_register(num_bytes, self._bind)
                self._unregister[buffer.data_ptr()] = unregister
                return buffer
        except (RuntimeError, MemoryError, OSError) as error:
            said = str(error).partition("\n")[0] or type(error).__name__  # torch appends lines on how to debug kernels
            raise RuntimeError(
                f"no {num_bytes / GIB:.2f} GiB of pinned host memory (host memory, not device memory): {said}"
            ) from error

    def _bind(self, address: int, num_bytes: int) -> None:
        if self.numa_node < 0:
            return
        try:
            pinned_memory.bind_to_node(address, num_bytes, self.numa_node)
        except OSError as error:
            logger.warning(
                f"pinned memory cannot be taken from NUMA node {self.numa_node}, the device's ({error}): it comes from "
                "wherever the threads of this process run, which can halve the speed of copies; start each rank on its "
                "node (numactl), and allow mbind in the container (Docker: --cap-add SYS_NICE)"
            )
            self.numa_node = -1

    def free_pinned(self, buffer: torch.Tensor) -> None:
        if self._registers:
            self._unregister.pop(buffer.data_ptr())()

    def pinned_bytes(self, num_bytes: int) -> int:
        return num_bytes if self._registers else 1 << (num_bytes - 1).bit_length()
