"""Writes what the planner says of each train config into the config's head.

Run by hand after a change of a config or of the planner: ``python scripts/write_plans.py``. With ``--check`` nothing is
written, and the exit code is 1 if a head is not what the planner says now. `MACHINES` names the machine that each is
planned for. The head is told by ``titan-offload plan --json``, and stands between two lines that are not to be edited.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_offload import cli

FOLDER = Path("train_configs")
BEGIN = "# ---- plan, by scripts/write_plans.py ----"
END = "# ---- end of plan ----"


@dataclass(frozen=True)
class PlannedMachine:
    """What a config is planned for.

    Attributes:
        text: for people.
        nodes, devices: how many, and devices of each.
        link, tflops: as ``titan-offload plan`` takes them; of a node's link, what one device gets of it alone.
        host_gib, device_gib: memory of a node and of a device; None: not said.
    """

    text: str
    nodes: int
    devices: int
    link: str
    tflops: float
    host_gib: int | None = None
    device_gib: int | None = None

    def flags(self) -> list[str]:
        """Of ``titan-offload plan``."""
        flags = ["--nodes", self.nodes, "--gpus-per-node", self.devices, "--link", self.link, "--tflops", self.tflops]
        flags += [] if self.host_gib is None else ["--host-memory", self.host_gib]
        flags += [] if self.device_gib is None else ["--gpu-memory", self.device_gib]
        return [f"{flag:g}" if isinstance(flag, float) else str(flag) for flag in flags]


def h100_nodes(nodes: int) -> PlannedMachine:
    """Nodes of eight H100, each device with a PCIe link of its own."""
    return PlannedMachine(f"{nodes} x 8 H100 80 GB", nodes, 8, "pcie5", 500.0, 2048, 79)


# The speed at which HostRuntime copies and two CPU cores compute, in round numbers: it is no measurement.
CPU = PlannedMachine("2 ranks on two CPU cores", 1, 2, "5", 0.05)

MACHINES = {
    "debug_cpu": CPU,
    "debug_moe_cpu": CPU,
    "debug_selective_cpu": CPU,
    "llama3_8b_128k": h100_nodes(1),
    "llama3_70b_1m": h100_nodes(8),
    "qwen3_8b_128k": h100_nodes(1),
    "qwen3_30b_a3b_64k": h100_nodes(2),
    "deepseek_v3_16b_32k": h100_nodes(1),
}


def ask_plan(config: Path, machine: PlannedMachine) -> dict[str, Any]:
    """What ``titan-offload plan`` says of a config.

    Raises:
        SystemExit: it refuses, and has said why.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(["plan", str(config), *machine.flags(), "--json"])
    if code:
        raise SystemExit(code)
    return json.loads(out.getvalue())


def head(config: Path, machine: PlannedMachine, plan: Mapping[str, Any]) -> list[str]:
    """The lines between the two that enclose them, without ``#``."""
    memory = plan["memory"]
    keys = "; ".join(f"{setting['key']} = {json.dumps(setting['value'])}" for setting in plan["verdict"]["settings"])
    lines = [
        f"titan-offload plan {config.as_posix()} {' '.join(machine.flags())}",
        f"Assumed: {', '.join(_assumed(machine, plan['machine']))}.",
        f"As it stands: {'; '.join(_as_it_stands(plan))}.",
        f"Pinned: {memory['pinned_gib']:.6g} GiB per rank, {memory['pinned_node_gib']:.6g} GiB per node.",
        f"Verdict, with {keys}: {' '.join(plan['verdict']['text'])}",
    ]
    return [part for line in lines for part in textwrap.wrap(line, 118, subsequent_indent="  ", break_on_hyphens=False)]


def _assumed(machine: PlannedMachine, told: Mapping[str, Any]) -> list[str]:
    """The machine; ``told`` is what the plan has of it."""
    link = f"link of {told['d2h_gb_per_s']:g} GB/s out and {told['h2d_gb_per_s']:g} GB/s back per device"
    assumed = [machine.text, link, f"{told['tflops']:g} TFLOP/s sustained"]
    if told["host_memory_gib"] is not None:
        assumed.append(f"{told['host_memory_gib']:g} GiB of host memory per node")
    return assumed


def _as_it_stands(plan: Mapping[str, Any]) -> list[str]:
    """Of the config's own settings, which need not be those that the verdict has."""
    memory, steps, told = plan["memory"], plan["steps"], plan["machine"]
    row, alone = steps[plan["variant"]], steps["ac"]
    said = [
        f"the blocks of a step take {_time(row['step_ms'])}, {row['vs_ac_percent']:+.1f} % against checkpointing alone "
        f"({steps['sync']['vs_ac_percent']:+.1f} % with schedule sync)",
        f"{row['held_gib']:.4g} GiB of block inputs and saved outputs stay on the device instead of "
        f"{alone['held_gib']:.4g}",
        f"its peak is {row['peak']['num_gib']:.4g} GiB instead of {alone['peak']['num_gib']:.4g}, as far as known",
    ]
    for name, needed, has in (
        ("host", memory["pinned_node_gib"], memory["host_budget_gib"]),
        ("device", row["peak"]["num_gib"], told["device_memory_gib"]),
    ):
        if has is not None:
            said.insert(0, f"it {'fits' if needed <= has else 'does not fit'} the {name}")
    return said


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.4g} s" if milliseconds >= 1000 else f"{milliseconds:.4g} ms"


def with_head(text: str, lines: Sequence[str]) -> str:
    """A config's text with the plan at the end of its opening comment, in place of one that is there."""
    block = "\n".join([BEGIN, *(f"# {line}" for line in lines), END])
    text = re.sub(rf"#\n{re.escape(BEGIN)}\n.*?{re.escape(END)}\n", "", text, flags=re.DOTALL)
    comment = re.match(r"(#.*\n)+", text)
    at = comment.end() if comment else 0
    return f"{text[:at]}#\n{block}\n{text[at:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if a head was checked and differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a head differs")
    args = parser.parse_args(argv)
    if odd := {path.stem for path in FOLDER.glob("*.toml")} ^ set(MACHINES):
        print(f"{', '.join(sorted(odd))}: a config without a machine in MACHINES, or the reverse", file=sys.stderr)
        return 1
    stale = []
    for stem, machine in MACHINES.items():
        path = FOLDER / f"{stem}.toml"
        text = path.read_text()
        wanted = with_head(text, head(path, machine, ask_plan(path, machine)))
        if wanted != text:
            stale.append(path.as_posix())
            if not args.check:
                path.write_text(wanted)
    if args.check and stale:
        print(f"not what the planner says now: {', '.join(stale)}; run python scripts/write_plans.py", file=sys.stderr)
        return 1
    print(f"{len(MACHINES)} plans, {len(stale)} written" if not args.check else f"{len(MACHINES)} plans checked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
