"""titan-offload probe: how fast the links of this node's devices are, before any run.

Owns the rounds of a measurement and the processes that make it. Relies on `link` for the measurement of a round, on
`topology` for which devices share a link, and on the caller for what a device is: a test gives `HostRuntime`.

How it works. One process per device. In the first round of `link.measure_link` each device copies alone, then all at
once; then for each switch that has some of the devices, but not all, there is a round among them. The others wait. A
barrier of the ``multiprocessing`` module keeps the processes in step, so that nothing is set up that could fail: no
process group, no port. Rates go to the parent through a pipe, and whatever fails in one process ends all.

Price: the time asked for, the start of a process with torch per device, and what `link` takes of memory.
"""

import json
import math
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.multiprocessing import spawn as spawn_processes

from titan_offload.link import Barrier, LinkRates, measure_link
from titan_offload.planner.plan_machine import FORMAT
from titan_offload.runtime import AcceleratorRuntime, Runtime
from titan_offload.share import pci_address
from titan_offload.topology import Device, read_device, switch_groups

MakeRuntime = Callable[[int], tuple[Runtime, torch.device]]
"""Of a device by its index. It is called in that device's process, so it must be found by name: a function of a module,
or a ``functools.partial`` of one."""

OnProgress = Callable[[int, int, str], None]
"""Steps done, steps in all, and what is measured now."""

POLL_S = 0.05


@dataclass(frozen=True)
class NodeDevice:
    """A device to measure.

    Attributes:
        name: of its model, for people.
        place: where it hangs.
    """

    name: str
    place: Device


@dataclass(frozen=True)
class Round:
    """A measurement in which some devices take part: each alone, then all of these at once.

    Attributes:
        members: their indices.
        seconds: for all of it.
        is_of_all: whether no device is left out.
    """

    members: tuple[int, ...]
    seconds: float
    is_of_all: bool = True

    @property
    def num_steps(self) -> int:
        """Calls of its barrier, see `link.measure_link`."""
        return len(self.members) + 4

    def text(self, step: int) -> str:
        """What is measured after this many of them."""
        who = "all devices" if self.is_of_all else f"devices {_listed(self.members)}"
        if 1 <= step <= len(self.members):
            return f"device {self.members[step - 1]} alone"
        return f"{who} at once" if step else "setting up"


# This node


def probe_node(seconds: float) -> dict[str, Any]:
    """Measures this node with a progress bar on standard error. Returns what ``link.json`` holds.

    Raises:
        ValueError: there is no accelerator, the time is not allowed, or the driver refuses.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds {seconds:g} is not allowed: set it to a number above 0")
    if not torch.accelerator.is_available():
        raise ValueError("there is no accelerator on this machine: run titan-offload probe on a node that has one")
    devices = [accelerator(index) for index in range(torch.accelerator.device_count())]
    try:
        with _progress_bar() as on_progress:
            return probe(devices, accelerator_runtime, seconds, on_progress)
    except RuntimeError as error:
        raise ValueError(f"the links could not be measured: {error}") from None


def accelerator(index: int) -> NodeDevice:
    """What is known of one of this node's devices."""
    device = torch.device(torch.accelerator.current_accelerator().type, index)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return NodeDevice(name, read_device(pci_address(device)))


def accelerator_runtime(index: int) -> tuple[Runtime, torch.device]:
    """For a process that measures the device ``index``."""
    torch.accelerator.set_device_index(index)
    return AcceleratorRuntime(), torch.device(torch.accelerator.current_accelerator().type, index)


# Measuring


def rounds_of(places: Sequence[Device], seconds: float) -> list[Round]:
    """All devices first; then those of each link that some share, but not all. Time is divided by what there is to do:
    a box for each device alone, and one for all at once."""
    everyone = tuple(range(len(places)))
    members = [everyone, *(g for g in sorted(set(switch_groups(places))) if 1 < len(g) < len(places))]
    boxes = sum(len(group) + 1 for group in members)
    return [Round(group, seconds * (len(group) + 1) / boxes, group == everyone) for group in members]


def probe(
    devices: Sequence[NodeDevice],
    make_runtime: MakeRuntime,
    seconds: float = 20.0,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Measures the links of devices, each in a process of its own.

    Args:
        devices: what to measure.
        make_runtime: see `MakeRuntime`.
        seconds: upper bound on the time that it all takes, starting processes aside.
        on_progress: see `OnProgress`.

    Returns:
        What ``link.json`` holds.

    Raises:
        RuntimeError: a process failed; the others are ended.
    """
    rounds = rounds_of([device.place for device in devices], seconds)
    spawning = multiprocessing.get_context("spawn")
    reports = spawning.SimpleQueue()
    barriers = [spawning.Barrier(len(r.members)) for r in rounds], spawning.Barrier(len(devices))
    arguments = (rounds, [device.place for device in devices], make_runtime, barriers, reports)
    context = spawn_processes(_run_process, arguments, nprocs=len(devices), join=False, daemon=True)
    try:
        rates = _collect(context, reports, rounds, on_progress or (lambda *_: None))
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.terminate()  # of one that has ended: nothing
            process.join()
    return _record(devices, rounds, rates, seconds)


def measure_device(
    index: int,
    rounds: Sequence[Round],
    runtime: Runtime,
    device: torch.device,
    barriers: Sequence[Barrier],
    everyone: Barrier,
    on_step: Callable[[int, int], None] = lambda number, step: None,
) -> dict[int, LinkRates]:
    """One device's part of all rounds. Call it for each device at once.

    Args:
        index: of the device.
        rounds: see `rounds_of`.
        runtime, device: of this device.
        barriers: for each round, among its members.
        everyone: among all devices: no round starts before the last one has ended.
        on_step: called by the first member of a round with the round's number and the steps done.

    Returns:
        Its rates by number of the round.
    """
    rates = {}
    for number, (each, barrier) in enumerate(zip(rounds, barriers, strict=True)):
        everyone()
        if index not in each.members:
            continue
        step = 0

        def wait(number: int = number, barrier: Barrier = barrier, is_first: bool = index == each.members[0]) -> None:
            nonlocal step
            barrier()
            step += 1
            if is_first:
                on_step(number, step)

        turn = {"position": each.members.index(index), "num_turns": len(each.members)}
        rates[number] = measure_link(runtime, device, **turn, barrier=wait, seconds=each.seconds)
    return rates


def _run_process(
    index: int,
    rounds: Sequence[Round],
    places: Sequence[Device],
    make_runtime: MakeRuntime,
    barriers: tuple[Sequence[Any], Any],
    reports: SimpleQueue,
) -> None:
    try:
        runtime, device = make_runtime(index)
        runtime.numa_node = places[index].numa_node
        among, everyone = barriers
        rates = measure_device(
            *(index, rounds, runtime, device, [barrier.wait for barrier in among], everyone.wait),
            on_step=lambda number, step: reports.put(("step", number, step)),
        )
        reports.put(("rates", index, rates))
    except Exception as error:  # of whatever class: the parent tells it, and ends the others
        reports.put(("error", index, f"{type(error).__name__}: {error}"))


def _collect(context: Any, reports: SimpleQueue, rounds: Sequence[Round], on_progress: OnProgress) -> dict[int, Any]:
    """Rates of all devices, by device and number of the round."""
    rates: dict[int, dict[int, LinkRates]] = {}
    total = sum(each.num_steps for each in rounds)
    while len(rates) < len(context.processes):
        if reports.empty():
            _check_processes(context)
            time.sleep(POLL_S)
            continue
        kind, number, what = reports.get()
        if kind == "error":
            raise RuntimeError(f"device {number}: {what}")
        if kind == "rates":
            rates[number] = what
        else:
            done = sum(each.num_steps for each in rounds[:number]) + what
            on_progress(done, total, rounds[number].text(what))
    return rates


def _check_processes(context: Any) -> None:
    try:
        context.join(timeout=0)
    except (ProcessExitedException, ProcessRaisedException) as error:
        raise RuntimeError(f"device {error.error_index}: its process ended: {error}") from None


# The record


def _record(
    devices: Sequence[NodeDevice], rounds: Sequence[Round], rates: dict[int, dict[int, LinkRates]], seconds: float
) -> dict[str, Any]:
    groups = switch_groups([device.place for device in devices])
    records = []
    for index, device in enumerate(devices):
        number = next((n for n, each in enumerate(rounds) if n and index in each.members), None)
        records.append(
            {
                "index": index,
                "name": device.name,
                "pci_address": device.place.pci_address,
                "numa_node": device.place.numa_node,
                "pci_link": asdict(device.place.link),
                "switch_group": list(groups[index]),
                "alone": asdict(rates[index][0].alone),
                "switch": None if number is None else asdict(rates[index][number].shared),
                "shared": asdict(rates[index][0].shared),
            }
        )
    return {
        "format": FORMAT,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hostname": socket.gethostname(),
        "torch": torch.__version__,
        "driver": driver_version(),
        "seconds": seconds,
        "devices": records,
    }


def write_record(record: dict[str, Any], path: Path) -> None:
    """Writes ``link.json``. Raises OSError."""
    path.write_text(json.dumps(record, indent=1) + "\n")


def driver_version() -> str | None:
    """Of NVIDIA's driver; None: there is none, or it does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # of whatever class: no package, no library, no driver, no permission
        return None


# For people


@contextmanager
def _progress_bar() -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("starting a process per device", total=None)
        yield lambda done, total, text: progress.update(task, completed=done, total=total, description=text)


def rates_table(record: dict[str, Any]) -> Table:
    """What was measured."""
    table = Table(title="Links in GB/s, D2H / H2D", title_justify="left", title_style="bold")
    for heading in ("device", "name", "PCI address", "NUMA", "switch group", "alone", "its switch", "all at once"):
        table.add_column(heading, no_wrap=True)
    for device in record["devices"]:
        group = device["switch_group"]
        table.add_row(
            str(device["index"]),
            device["name"],
            device["pci_address"] or "-",
            str(device["numa_node"]) if device["numa_node"] >= 0 else "unknown",
            "alone" if len(group) == 1 else _listed(group),
            *(_rates_text(device[kind]) for kind in ("alone", "switch", "shared")),
        )
    return table


def print_rates(record: dict[str, Any]) -> None:
    """The table, on standard output."""
    out = Console(highlight=False)
    out = out if out.is_terminal else Console(highlight=False, width=140)
    out.print(rates_table(record))


def _rates_text(port: dict[str, float] | None) -> str:
    return "-" if port is None else "{d2h_gb_per_s:.1f} / {h2d_gb_per_s:.1f}".format(**port)


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
