"""The machine that a plan is made for: its nodes, and how fast the link between a device and its host is, by name, as a
number, or measured by ``titan-offload probe``.

Owns the named links, the form of ``link.json`` and the checks of ``titan-offload plan``'s flags. Relies on the standard
library alone. Rates are in GB/s, 1e9 bytes per second, for each direction by itself.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_offload.planner.shapes import Machine

GPUS_PER_NODE = 8
"""Where neither a flag nor a ``link.json`` says."""

FORMAT = 1
"""Of ``link.json``."""

DIRECTIONS = ("d2h_gb_per_s", "h2d_gb_per_s", "both_d2h_gb_per_s", "both_h2d_gb_per_s")
"""What ``link.json`` has of a link, see `link.PortRates`."""


@dataclass(frozen=True)
class PlanLink:
    """A link as a plan counts with it.

    Attributes:
        name: as the user gave it.
        d2h_gb_per_s, h2d_gb_per_s: one direction at a time.
        source: where the rates are from, for people.
        both_gb_per_s: D2H and H2D while the other direction is busy too; None: not known.
        num_devices: devices that copied at once when it was measured: the rates are what each got. None: it was not
            measured, and the rates are those of a device that copies alone.
    """

    name: str
    d2h_gb_per_s: float
    h2d_gb_per_s: float
    source: str
    both_gb_per_s: tuple[float, float] | None = None
    num_devices: int | None = None

    def rates(self, both_ways: bool) -> tuple[float, float]:
        """D2H and H2D in GB/s.

        Args:
            both_ways: whether forward and backward passes alternate, as in a pipeline, so that copies of both
                directions meet.
        """
        if both_ways and self.both_gb_per_s is not None:
            return self.both_gb_per_s
        return self.d2h_gb_per_s, self.h2d_gb_per_s


NAMED = {
    link.name: link
    for link in (
        PlanLink("pcie4", 31.0, 31.0, "PCIe 4 x16 in theory; 24 to 26 were measured on A100 nodes"),
        PlanLink("pcie5", 55.43, 55.43, "PCIe 5 x16, measured H2D on a node of 8 H200; D2H was 55.06 there"),
        PlanLink("c2c", 450.0, 450.0, "NVLink-C2C as quoted; 170 D2H and 411 H2D were measured on GH200: 170/411"),
    )
}
"""Links by name. Rates: Stas Bekman's ml-engineering book, as the planner's figures quote it, the same in both
directions. What users measured is in their ``source``, and can be given as a pair."""


def parse_link(text: str) -> PlanLink:
    """A link from the command line.

    Args:
        text: a name of `NAMED`, GB/s of each direction, GB/s as ``D2H/H2D``, or the path of a ``link.json``.

    Raises:
        ValueError: it is none of these.
    """
    if text in NAMED:
        return NAMED[text]
    numbers = [_number(part) for part in text.split("/")]
    if len(numbers) <= 2 and None not in numbers:
        if not all(0 < number < math.inf for number in numbers):
            raise ValueError(f"--link {text} is not allowed: set it to GB/s above 0")
        return PlanLink(text, numbers[0], numbers[-1], "as given")
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        return read_link(path)
    raise ValueError(
        f"--link {text!r} is no link: give {', '.join(NAMED)}, a number of GB/s such as 50, D2H/H2D such as 170/411, "
        "or the link.json of titan-offload probe"
    )


def read_link(path: Path) -> PlanLink:
    """What ``titan-offload probe`` measured: of each direction, the slowest device's rate while all copy. All ranks of
    a job wait for the slowest.

    Raises:
        ValueError: there is no such file, or it is not one.
    """
    repair = "write one with titan-offload probe --out link.json"
    try:
        record = json.loads(path.read_bytes())
        ports = [device["shared"] for device in record["devices"]]
        rates = [min(_rate(port, direction) for port in ports) for direction in DIRECTIONS]
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: {repair}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no link.json ({type(error).__name__}: {error}): {repair}") from None
    source = f"{path}, the slowest of {len(ports)} devices while all copy, on {record.get('hostname', 'some host')}"
    return PlanLink(str(path), *rates[:2], source, both_gb_per_s=(rates[2], rates[3]), num_devices=len(ports))


def _rate(port: Mapping[str, Any], direction: str) -> float:
    rate = port[direction]
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ValueError(f"{direction} = {rate!r} is not above 0")
    return rate


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def plan_machine(
    link: PlanLink,
    *,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    gpus_per_switch: int | None = None,
    host_memory: float | None = None,
    gpu_memory: float | None = None,
    tflops: float = 500.0,
    both_ways: bool = False,
) -> Machine:
    """The machine of these flags.

    Args:
        link: see `parse_link`.
        nodes: how many.
        gpus_per_node: default: the devices of a measured link, or 8.
        gpus_per_switch: devices that share a link; default 1. Not with a measured link, whose rates are shared.
        host_memory, gpu_memory: of a node, of a device, in GiB. None: not known.
        tflops: what a device sustains.
        both_ways: see `PlanLink.rates`.

    Raises:
        ValueError: a number is not allowed, or they do not go together.
    """
    if gpus_per_node is None:
        gpus_per_node = link.num_devices or GPUS_PER_NODE
    if gpus_per_switch is not None and link.num_devices is not None:
        raise ValueError(
            f"--gpus-per-switch {gpus_per_switch} does not go with the measured --link {link.name}, whose rates are "
            "those of devices that share their links already: leave it out"
        )
    sharing = 1 if gpus_per_switch is None else gpus_per_switch
    counts = {"--nodes": nodes, "--gpus-per-node": gpus_per_node, "--gpus-per-switch": sharing}
    for flag, count in counts.items():
        if count < 1:
            raise ValueError(f"{flag} {count} is not allowed: set it to a whole number >= 1")
    amounts = {"--host-memory": host_memory, "--gpu-memory": gpu_memory, "--tflops": tflops}
    for flag, amount in amounts.items():
        if amount is not None and not 0 < amount < math.inf:
            raise ValueError(f"{flag} {amount:g} is not allowed: set it to a number above 0")
    if sharing > gpus_per_node:
        raise ValueError(
            f"--gpus-per-switch {sharing} is more than --gpus-per-node {gpus_per_node}: the devices of a switch are on "
            f"one node, so set it to at most {gpus_per_node}"
        )
    d2h, h2d = link.rates(both_ways)
    return Machine(
        d2h_gb_per_s=d2h,
        h2d_gb_per_s=h2d,
        devices_per_link=sharing,
        tflops=tflops,
        devices_per_node=gpus_per_node,
        num_nodes=nodes,
        host_memory_gib=host_memory,
        device_memory_gib=gpu_memory,
    )
