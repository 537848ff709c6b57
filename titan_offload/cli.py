"""titan-offload: what is known of a run from outside it.

titan-offload plan X.toml    before the run: will it fit, what will it cost, what should be set
titan-offload probe          on the node: how fast its links are
titan-offload report DIR     after the run: how it ended, and what its ranks took of their hosts

Each command imports what it needs when it runs: a plan is made without torch, whose import takes seconds.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

USER_ERROR_EXIT_CODE = 2

app = tyro.extras.SubcommandApp()


@app.command
def plan(
    config: tyro.conf.Positional[Path],
    nodes: int = 1,
    gpus_per_node: int | None = None,
    gpus_per_switch: int | None = None,
    host_memory: float | None = None,
    gpu_memory: float | None = None,
    link: str = "pcie5",
    tflops: float = 500.0,
    as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
    plot: Path | None = None,
    html: Path | None = None,
    store: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Foretells whether a run fits, what its offload costs, and which keys to set. Starts nothing, needs no device.

    Args:
        config: TorchTitan train config; its sections [activation_offload] and [selective_checkpoint] may be missing.
        nodes: number of nodes.
        gpus_per_node: devices of each that the run uses. Default: 8, or those of a measured link.
        gpus_per_switch: devices that share one link to the host. Default: 1.
        host_memory: of a node, in GiB. Default: not known.
        gpu_memory: of a device, in GiB. Default: not known.
        link: between a device and its host: pcie4, pcie5, c2c, GB/s, GB/s as D2H/H2D, or the link.json of probe.
        tflops: what a device sustains in training, in TFLOP/s.
        as_json: print one JSON document, and nothing else.
        plot: also write a picture of the timelines to this PNG file.
        html: also write a page with sliders to this file.
        store: also write the plan to the dump_folder of the config, for titan-offload report to compare with.
    """
    from titan_offload.planner import make_plan, plan_report
    from titan_offload.planner.plan_input import read_plan_input
    from titan_offload.planner.plan_machine import parse_link, plan_machine

    _check_folders(plot, html)
    rates = parse_link(link)
    flags = {"nodes": nodes, "gpus_per_node": gpus_per_node, "gpus_per_switch": gpus_per_switch, "tflops": tflops}
    flags |= {"host_memory": host_memory, "gpu_memory": gpu_memory}
    machine = plan_machine(rates, **flags)
    given = read_plan_input(config, machine.num_nodes * machine.devices_per_node)
    machine = plan_machine(rates, **flags, both_ways=given.job.pipeline_parallel > 1)
    result = make_plan(given.model, given.job, machine, given.offload, given.selective)
    if as_json:
        extra = {"config": str(config), "link": {"name": rates.name, "source": rates.source}}
        extra |= {"missing": list(given.missing), "notes": list(given.notes)}
        print(json.dumps({**extra, **result.to_json()}, indent=1, allow_nan=False))
    else:
        context = plan_report.Context(str(config), f"{rates.name} ({rates.source})", given.missing, given.notes)
        plan_report.console().print(plan_report.render(result, context))
    if store:
        from titan_offload.run_folder import RunFolder

        folder = RunFolder(given.dump_folder / "offload")
        with _writing(folder.path / "plan.json"):
            folder.write_plan(result.to_json())
    if plot is not None:
        from titan_offload.planner.plan_plot import write_plot

        with _writing(plot):
            write_plot(result, plot)
    if html is not None:
        from titan_offload.planner.plan_page import write_page

        with _writing(html):
            write_page(result, html)


def _check_folders(*paths: Path | None) -> None:
    """Raises ValueError where a file could not be written, before anything is printed."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")


@contextlib.contextmanager
def _writing(path: Path):
    """Raises ValueError where ``path`` cannot be written, else says that it was."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None
    print(f"wrote {path}", file=sys.stderr)


@app.command
def probe(out: Path = Path("link.json"), seconds: float = 20.0) -> None:
    """Measures the links between this node's devices and its memory: each alone, those of a switch, all at once.

    Args:
        out: where the rates are written, for titan-offload plan --link.
        seconds: about how long copies run, in all. Starting the processes comes on top.
    """
    from titan_offload.planner import probe as probing

    _check_folders(out)
    record = probing.probe_node(seconds)
    with _writing(out):
        probing.write_record(record, out)
    probing.print_rates(record)


@app.command
def report(directory: tyro.conf.Positional[Path]) -> None:
    """Prints, as Markdown, how a run ended and what its ranks took of their hosts' memory.

    Args:
        directory: dump_folder of the run, or the folder "offload" in it.
    """
    from titan_offload import host_report
    from titan_offload.planner.foretold import foretold_lines
    from titan_offload.run_folder import RunFolder, verdict

    folder = RunFolder(directory / "offload" if (directory / "offload").is_dir() else directory)
    record = folder.budget()
    foretold, summary = folder.plan(record), folder.summary(record)
    lines = foretold_lines(foretold, summary) if foretold and summary else []
    print(host_report.markdown(record, folder.states(record), verdict(folder, record), lines), end="")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 after a mistake of the user's."""
    try:
        app.cli(prog="titan-offload", args=argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except BrokenPipeError:  # the reader, such as head, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
    return 0


if __name__ == "__main__":
    sys.exit(main())
