"""Text and data for people: what will be moved, what a step did, what each rank used.

Pure functions over the plain data that the engine returns; nothing here is measured or decided.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from titan_offload.config import GIB, MIB, OffloadConfig, SelectiveConfig
from titan_offload.planner.link_choice import LinkChoice
from titan_offload.stats import OffloadStats, SaveList


@dataclass
class RankReport:
    """What one rank did over a run.

    Attributes:
        rank, host, device: who and where.
        num_blocks: blocks under offload, ``keep_last`` ones included.
        num_steps: finished steps.
        step_ms: median time of the last steps, the first left out; 0: not known.
        offloaded_bytes, reloaded_bytes, num_prefetch_hits, num_misses, h2d_wait_ms, d2h_wait_ms: sums over all steps.
        peak_kept_bytes: most block input bytes of one step that stayed on the device.
        pinned_peak_bytes: most pinned memory in use at once.
        pinned_total_bytes: pinned memory taken of the host.
        budget_bytes: what it may take; None: no limit.
        need_bytes: what was expected before step 1; None: not known.
        last_step: statistics of the last finished step.
    """

    rank: int
    host: str
    device: str
    num_blocks: int
    budget_bytes: int | None
    need_bytes: int | None = None
    num_steps: int = 0
    step_ms: float = 0.0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    num_prefetch_hits: int = 0
    num_misses: int = 0
    h2d_wait_ms: float = 0.0
    d2h_wait_ms: float = 0.0
    peak_kept_bytes: int = 0
    pinned_peak_bytes: int = 0
    pinned_total_bytes: int = 0
    last_step: OffloadStats = field(default_factory=OffloadStats)

    def add_step(self, stats: OffloadStats) -> None:
        self.num_steps += 1
        for name in (
            "offloaded_bytes",
            "reloaded_bytes",
            "num_prefetch_hits",
            "num_misses",
            "h2d_wait_ms",
            "d2h_wait_ms",
        ):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        self.peak_kept_bytes = max(self.peak_kept_bytes, stats.kept_bytes)
        self.pinned_peak_bytes = max(self.pinned_peak_bytes, stats.pinned_peak_bytes)
        self.pinned_total_bytes = max(self.pinned_total_bytes, stats.pinned_total_bytes)
        self.last_step = stats


def start_block(fqns: Sequence[str], config: OffloadConfig, budget_bytes: int | None, block_input_bytes: int) -> str:
    """What will be moved of one model part.

    Args:
        fqns: the blocks under offload, in order.
        config: the settings.
        budget_bytes: pinned memory of this rank; None: no limit.
        block_input_bytes: expected size of one block input on this rank.
    """
    moved = len(fqns) - config.keep_last
    budget = "no limit" if budget_bytes is None else f"{gib(budget_bytes)} GiB"
    what = {"none": "saved outputs", "block_inputs": "inputs", "all": "saved activations"}[config.mode]
    and_head = ", what comes after them" if config.mode == "all" else ""
    lines = [
        f"Activation offload: {what} of {moved} of {len(fqns)} blocks ({fqns[0]} .. {fqns[moved - 1]}) go to pinned "
        "host memory",
    ]
    if config.mode == "block_inputs":
        total = gib(moved * block_input_bytes)
        lines.append(f"  each {block_input_bytes / MIB:.2f} MiB, together {total} GiB per microbatch")
    lines += [
        f"  pinned budget of this rank: {budget}; on_exhausted {config.on_exhausted}",
        f"  schedule: {config.schedule}, prefetch_lookahead {config.prefetch_lookahead}, max_inflight_offloads "
        f"{config.max_inflight_offloads or 'unlimited'}",
        f"  on the device stay: the last {config.keep_last} of each microbatch in flight{and_head}, and whatever is "
        f"under {config.min_offload_mib:g} MiB",
    ]
    return "\n".join(lines)


def save_block(saves: SaveList) -> str:
    """What is saved of a model part instead of being recomputed."""
    where = "in pinned host memory" if saves.offloads else "on the device"
    blocks = saves.fqns[0] if len(saves.fqns) == 1 else f"{saves.fqns[0]} .. {saves.fqns[-1]}"
    lines = [
        f"Selective saves in {len(saves.fqns)} blocks ({blocks}), kept {where}; the first that matches an op decides:"
    ]
    for name, modules, reason in saves.rules:
        lines.append(f"  {name}{' in ' + ', '.join(modules) if modules else ''}{' (' + reason + ')' if reason else ''}")
    for layer_type, fqns in saves.recomputed_attention.items():
        lines.append(f"  not attention in blocks of type {layer_type}, which is recomputed: {', '.join(fqns)}")
    if saves.has_own:
        lines.append(
            '  then what activation_checkpoint.mode = "selective" saves; its list of matmuls to recompute holds for no '
            "registered one"
        )
    return "\n".join(lines)


def step_line(stats: OffloadStats) -> str:
    """One line on one step, to stand beside TorchTitan's own."""
    return (
        f"offload: out {gib(stats.offloaded_bytes)} GiB  back {gib(stats.reloaded_bytes)} GiB  "
        f"kept on device {gib(stats.kept_bytes)} GiB  prefetch {stats.num_prefetch_hits} hit {stats.num_misses} missed"
        f"  wait {stats.h2d_wait_ms + stats.d2h_wait_ms:.1f} ms  pinned {gib(stats.pinned_in_use_bytes)} GiB in use, "
        f"peak {gib(stats.pinned_peak_bytes)} of {gib(stats.pinned_total_bytes)} GiB"
    )


def save_line(stats: OffloadStats) -> str:
    """One line on what selective saves did in one step; registered saves are one."""
    totals: dict[str, tuple[int, int]] = {}
    for rule, (num, num_bytes) in stats.saved.items():
        name = "registered" if rule.startswith("registered ") else rule
        before = totals.get(name, (0, 0))
        totals[name] = before[0] + num, before[1] + num_bytes
    parts = [f"{name} {num} outputs, {gib(num_bytes)} GiB" for name, (num, num_bytes) in totals.items()]
    line = f"saved instead of recomputed: {'; '.join(parts) or 'nothing'}"
    if stats.num_rerouted:
        counts = [f"{fqn} {num}" for fqn, num in stats.num_rerouted.items() if num]
        line += f"; tokens that recompute would have re-routed: {', '.join(counts) or 'none'}"
    return line


def save_scalars(stats: OffloadStats) -> dict[str, float]:
    """What selective saves did in one step, as TensorBoard scalars."""
    saved_bytes = sum(num_bytes for _, num_bytes in stats.saved.values())
    rerouted = {f"selective/rerouted_tokens/{fqn}": num for fqn, num in stats.num_rerouted.items()}
    return {"selective/saved(GiB)": saved_bytes / GIB, **rerouted}


def scalars(stats: OffloadStats) -> dict[str, float]:
    """One step as TensorBoard scalars; the tags carry the unit."""
    return {
        "offload/offloaded(GiB)": stats.offloaded_bytes / GIB,
        "offload/reloaded(GiB)": stats.reloaded_bytes / GIB,
        "offload/kept_on_device(GiB)": stats.kept_bytes / GIB,
        "offload/prefetch_hits": stats.num_prefetch_hits,
        "offload/prefetch_misses": stats.num_misses,
        "offload/resident": stats.num_resident,
        "offload/h2d_wait(ms)": stats.h2d_wait_ms,
        "offload/d2h_wait(ms)": stats.d2h_wait_ms,
        "offload/pinned_in_use(GiB)": stats.pinned_in_use_bytes / GIB,
        "offload/pinned_peak(GiB)": stats.pinned_peak_bytes / GIB,
        "offload/pinned_total(GiB)": stats.pinned_total_bytes / GIB,
    }


def link_line(fqns: Sequence[str], choice: LinkChoice) -> str:
    """What ``limit = "link"`` came to for one model part."""
    costs, num_moved = choice.costs, choice.num_moved
    blocks = f"{num_moved} of {len(fqns)} blocks" + (f" ({fqns[0]} .. {fqns[num_moved - 1]})" if num_moved else "")
    return (
        f'activation_offload.limit = "link": {blocks} go on moving, {gib(choice.hidden_bytes)} GiB per forward, '
        f"which hide: out {costs.d2h_bytes_per_s / 1e9:.2f} and back {costs.h2d_bytes_per_s / 1e9:.2f} GB/s while all "
        f"ranks of the host copy, a block's forward takes {sum(costs.forward_s) / len(fqns) * 1e3:.2f} ms; to "
        f"move all would stall each {choice.ac_step_s * 1e3:.1f} ms of blocks by {choice.stall_s_if_all * 1e3:.1f} ms"
    )


def rank_table(reports: Sequence[RankReport]) -> Table:
    """All ranks, a row each."""
    table = Table(title="Activation offload per rank (GiB of this rank)")
    for heading in ("rank", "host", "device", "blocks", "steps"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "out\nper step",
        "back\nper step",
        "kept on\ndevice",
        "prefetch\nhit/missed",
        "wait\nms/step",
        "pinned\nin use",
        "pinned\ntaken",
        "pinned\nbudget",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        steps = max(1, report.num_steps)
        table.add_row(
            str(report.rank),
            report.host,
            report.device,
            str(report.num_blocks),
            str(report.num_steps),
            gib(report.offloaded_bytes / steps),
            gib(report.reloaded_bytes / steps),
            gib(report.peak_kept_bytes),
            f"{report.num_prefetch_hits}/{report.num_misses}",
            f"{(report.h2d_wait_ms + report.d2h_wait_ms) / steps:.1f}",
            gib(report.pinned_peak_bytes),
            gib(report.pinned_total_bytes),
            "none" if report.budget_bytes is None else gib(report.budget_bytes),
        )
    return table


def summary(
    reports: Sequence[RankReport],
    config: OffloadConfig,
    selective: SelectiveConfig | None,
    world_size: int,
    torch_version: str,
) -> dict:
    """The run as data for ``summary.json``."""
    return {
        "format": 1,
        "torch": torch_version,
        "world_size": world_size,
        "config": asdict(config),
        "selective": None if selective is None else asdict(selective),
        "ranks": [asdict(report) for report in reports],
    }


def gib(num_bytes: float) -> str:
    """A number of bytes in GiB, as text."""
    return f"{num_bytes / GIB:.3f}"
