"""Train twice and compare losses and gradient norms of every step, bit for bit.

    python scripts/compare_loss.py A.toml B.toml --steps 10
    python scripts/compare_loss.py A.toml A.toml --set-b activation_offload.mode=none -- --training.seq_len 128

Offloading moves activations and must not change a number, so two runs that differ only in it must agree to the last
bit. Both runs get the same seed and deterministic algorithms, unless their TOML says otherwise. Flags after ``--`` go
to both.

TorchTitan's log rounds to five digits, so the numbers are read from its TensorBoard events. Those hold float32, and
that is all there is: the losses and the gradient norm are float32 tensors until ``.item()``. They are compared as the
shortest strings that tell float32 numbers apart. Validation losses are compared too where a run has any.

Exit code: 0 if all numbers are the same, 1 if not, 2 if the input is bad, a run failed, or a loss is not finite.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# Tags of TorchTitan's metrics that are compared, by the name they get in the table.
METRICS = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm", "val_loss": "validation_metrics/loss"}
SEED = 42
LOG_TAIL_LINES = 80

# step -> metric -> value as text
Curve = dict[int, dict[str, str]]


class InputError(Exception):
    """The comparison can't be made; the text says why."""


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split section.key=value into (["section", "key"], value); a value that is not TOML is taken as a string."""
    key, separator, value = text.partition("=")
    path = key.strip().split(".")
    if not separator or len(path) < 2 or not all(path):
        raise InputError(f"an override must look like section.key=value, got {text!r}")
    try:
        return path, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return path, value


def load_config(path: Path, overrides: list[str], steps: int | None, dump_folder: Path) -> dict[str, Any]:
    """The TOML with overrides, and with what a comparison needs: seed, determinism, a metric at every step."""
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"can't read {path}: {error}") from error
    for sections, value in map(parse_override, overrides):
        table = config
        for section in sections[:-1]:
            table = table.setdefault(section, {})
        table[sections[-1]] = value
    config["debug"] = {"seed": SEED, "deterministic": True} | config.get("debug", {})
    config.setdefault("metrics", {}).update(log_freq=1, enable_tensorboard=True, save_for_all_ranks=False)
    config.setdefault("job", {})["dump_folder"] = str(dump_folder)
    if steps is not None:
        config.setdefault("training", {})["steps"] = steps
    return config


def format_toml(table: dict[str, Any], path: str = "") -> str:
    """TOML text of nested tables whose leaves are numbers, strings and lists, which JSON writes alike."""

    def format_leaf(value: Any) -> str:
        # Unlike JSON, TOML takes no surrogate pair and no bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    lines = [f"[{path}]"] if path else []
    lines += [f"{key} = {format_leaf(value)}" for key, value in table.items() if not isinstance(value, dict)]
    tables = [(key, value) for key, value in table.items() if isinstance(value, dict)]
    return "\n".join(lines + [format_toml(value, f"{path}.{key}" if path else key) for key, value in tables])


def train(config: dict[str, Any], folder: Path, nproc: int, flags: list[str]) -> None:
    """Run the config under torchrun; InputError with the end of its log if that fails."""
    config_file = folder / "config.toml"
    config_file.write_text(format_toml(config) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    command += ["-m", "titan_offload.titan.train", "--job.config_file", str(config_file), *flags]
    log_file = folder / "log.txt"
    with open(log_file, "wb") as log:
        exit_code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if exit_code != 0:
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        mistakes = [line for line in lines if line.startswith("error: ")]
        if mistakes:  # of the user, told by titan_offload.titan.train; far above the end, which is torchrun's
            raise InputError(mistakes[0].removeprefix("error: "))
        tail = "\n".join(lines[-LOG_TAIL_LINES:])
        raise InputError(f"training ended with exit code {exit_code}; the end of its log:\n{tail}")


def read_curve(folder: Path) -> Curve:
    """The compared metrics of all TensorBoard event files below a folder."""
    curve: Curve = {}
    for events in sorted(folder.rglob("events.out.tfevents*")):
        accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
        accumulator.Reload()
        for metric, tag in METRICS.items():
            if tag not in accumulator.Tags()["scalars"]:
                continue
            for event in accumulator.Scalars(tag):
                if not math.isfinite(event.value):
                    raise InputError(f"{metric} of step {event.step} is {event.value}: nothing to compare")
                curve.setdefault(event.step, {})[metric] = str(numpy.float32(event.value))
    if not curve:
        raise InputError("the run wrote no losses to TensorBoard")
    return curve


def compare(a: Curve, b: Curve) -> tuple[str, int | None]:
    """A table of all steps side by side, and the first step that differs (None: there is none)."""
    metrics = [name for name in METRICS if any(name in values for curve in (a, b) for values in curve.values())]
    first = None
    rows = [["step", *(f"{name} {side}" for name in metrics for side in "AB"), ""]]
    for step in sorted(a.keys() | b.keys()):
        of_a, of_b = a.get(step, {}), b.get(step, {})
        mark = "same" if of_a == of_b else "differs"
        if of_a != of_b and first is None:
            first, mark = step, "<-- first difference"
        values = [values.get(name, "-") for name in metrics for values in (of_a, of_b)]
        rows.append([str(step), *values, mark])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines), first


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    argv, flags = argv[:split], argv[split + 1 :]
    parser = argparse.ArgumentParser(description="Train with two configs and compare every step bit for bit.")
    parser.add_argument("a", type=Path, metavar="A.toml")
    parser.add_argument("b", type=Path, metavar="B.toml")
    parser.add_argument("--nproc", type=int, default=2, help="ranks of each run (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="training steps of each run (default: as the TOML says)")
    for side in "ab":
        help_text = f"change a value of {side.upper()}.toml; may be given several times"
        parser.add_argument(f"--set-{side}", action="append", default=[], metavar="SECTION.KEY=VALUE", help=help_text)
    args = parser.parse_args(argv)
    curves = []
    for name, path, overrides in (("A", args.a, args.set_a), ("B", args.b, args.set_b)):
        with tempfile.TemporaryDirectory(prefix="compare_loss_") as temporary:
            folder = Path(temporary)
            try:
                config = load_config(path, overrides, args.steps, folder)
                print(f"training {name}: {path} {' '.join(overrides)}".rstrip(), file=sys.stderr, flush=True)
                train(config, folder, args.nproc, flags)
                curves.append(read_curve(folder))
            except InputError as error:
                print(f"error: {name}: {error}", file=sys.stderr)
                return 2
    table, first = compare(*curves)
    print(table)
    if first is not None:
        print(f"the runs differ from step {first} on")
        return 1
    print(f"all {len(curves[0])} steps are identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
