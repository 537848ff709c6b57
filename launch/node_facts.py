"""Prints what launch/torchrun_node.sh asks of a node: how many devices it has, and which NUMA binding torchrun can do.

One line: the number, and ``node`` or ``none``. Why not ``node`` is said on stderr, where a node has devices at all.
torchrun's ``--numa-binding`` (torch >= 2.9) fails, and the run with it, where the machine lacks what it needs; so that
is looked at first: CUDA devices whose NUMA node sysfs knows, CPUs there that this process may use, and numactl.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from titan_offload.machine_files import MachineFiles
from titan_offload.topology import NODES, read_device


def why_no_binding(addresses: Sequence[str | None], root: Path | str = "/", numactl: str | None = None) -> str | None:
    """Why torchrun cannot bind ranks to the NUMA nodes of their devices, or need not; None: it can.

    Args:
        addresses: PCI addresses of the devices, in the order of local ranks; None: not known.
        root: directory that stands for ``/``.
        numactl: where the program is; None: nowhere.
    """
    files = MachineFiles(root)
    nodes = [path.parent.name for path in sorted(files.path(NODES).glob("node*/cpulist")) if path.read_text().strip()]
    if len(nodes) < 2:
        return "the machine has one NUMA node"
    if numactl is None:
        return "numactl is not installed, which torchrun wants (Debian, Ubuntu: apt install numactl)"
    for index, address in enumerate(addresses):
        device = read_device(address, root)
        if device.cpu_affinity == "unknown":
            return f"the NUMA node of device {index} ({address}) is not known"
        if device.cpu_affinity == "remote":
            return f"no CPU of NUMA node {device.numa_node}, where device {index} hangs, is among those this job has"
    return None


def pci_addresses() -> list[str | None]:
    """Of all CUDA devices that this process sees."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
            if hasattr(properties, "pci_bus_id")
            else None
        )
    return found


def main() -> None:
    """See the module's docstring."""
    num_devices = torch.accelerator.device_count()
    addresses = pci_addresses()
    reason = why_no_binding(addresses, numactl=shutil.which("numactl")) if addresses else "no CUDA device"
    if reason and num_devices:
        print(f"==> ranks are not bound to NUMA nodes: {reason}", file=sys.stderr)
    print(num_devices, "none" if reason else "node")


if __name__ == "__main__":
    main()
