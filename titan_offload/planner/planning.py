"""The cost model: what a job will take of time, of the host and of the device, before it takes any.

Owns the plan: which ways to run a step are compared, what is told of them, which sequence is the longest that fits.
Relies on `steps` for each way, on `advice` for the verdict. No torch: it runs on a laptop. First order throughout: see
`costs` for the formulas and their sources.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from titan_offload.config import GIB, OffloadConfig, SelectiveConfig
from titan_offload.planner.advice import give_advice
from titan_offload.planner.costs import activation_sizes, copy_ms, input_bytes, saved_sizes
from titan_offload.planner.pipeline import is_bound
from titan_offload.planner.plan import VARIANTS, LayerTimes, Longest, Plan, Verdict
from titan_offload.planner.shapes import Job, Machine, ModelShape
from titan_offload.planner.simulation import Interval, simulate_step
from titan_offload.planner.steps import Way

TIMELINE_BLOCKS = 4
"""Blocks of the picture."""

LONGEST = 2**40
"""Tokens: no sequence is longer."""


def make_plan(
    model: ModelShape,
    job: Job,
    machine: Machine,
    offload: OffloadConfig,
    selective: SelectiveConfig | None = None,
) -> Plan:
    """What a job will take, and what to set.

    Args:
        model, job, machine: see `shapes`.
        offload: the settings that are asked about. With mode ``"none"`` the other keys still hold for the rows of the
            ways to offload.
        selective: and those of selective checkpointing; None: off. The rows with selective saves are then what saving
            attention would bring.

    Raises:
        ValueError: the numbers do not go together, such as more devices than the nodes have; the text names them and
            how to repair it.
    """
    if job.num_devices > machine.devices_per_node * machine.num_nodes:
        raise ValueError(
            f"job num_devices = {job.num_devices} is more than {machine.num_nodes} nodes of {machine.devices_per_node} "
            f"devices have: give at least {-(-job.num_devices // machine.devices_per_node)} nodes"
        )
    question = _Question(model, job, machine, offload, selective)
    ac = question.way("ac")
    ac_cost = ac.cost()
    ways = {variant: question.way(variant) for variant in VARIANTS}
    host_budget_bytes = _host_budget(job, machine, offload)
    input_ranks = [ac.held_bytes(rank) for rank in range(job.pipeline_parallel)]
    return Plan(
        *(model, job, machine, offload, selective),
        variant=question.planned,
        layers=_layer_times(question, ways[question.planned]),
        steps={variant: way.cost(ac_cost.step_ms) for variant, way in ways.items()},
        block_inputs_bytes=max(input_ranks),
        block_inputs_node_bytes=ac.most_of_a_node(input_ranks),
        ranks=ways[question.planned].rank_memory(),
        in_flight_is_bound=is_bound(job),
        host_budget_bytes=host_budget_bytes,
        longest=_longest(question, host_budget_bytes),
        verdict=_verdict(question, ac, host_budget_bytes),
        timelines={schedule: _timeline(question.pictured, schedule) for schedule in ("sync", "overlap")},
    )


def planned_variant(offload: OffloadConfig, selective: SelectiveConfig | None, is_checkpointed: bool = True) -> str:
    """Which of `plan.VARIANTS` a run with these settings is."""
    if selective is not None:
        return "overlap_selective_host" if selective.offload else "overlap_selective_device"
    if offload.mode == "none":
        return "ac"
    if offload.mode == "all" and not is_checkpointed:
        return "all_without_ac"
    return offload.schedule


@dataclass(frozen=True)
class _Question:
    """What was asked."""

    model: ModelShape
    job: Job
    machine: Machine
    offload: OffloadConfig
    selective: SelectiveConfig | None

    @property
    def planned(self) -> str:
        return planned_variant(self.offload, self.selective, self.job.is_checkpointed)

    def way(self, variant: str) -> Way:
        """A row of the table: the settings that were asked about, as far as they go with it."""
        if variant == self.planned:
            schedule = "" if variant == "ac" else self.offload.schedule
            return Way(self.model, self.job, self.machine, self.offload, self.selective, variant, schedule)
        mode = "all" if variant == "all_without_ac" else "block_inputs"
        limit = "memory" if mode == "all" else self.offload.limit
        offload = replace(self.offload, mode=mode, limit=limit, schedule="overlap")
        return Way(self.model, self.job, self.machine, offload, self.selective, variant)

    @property
    def pictured(self) -> Way:
        """What the timelines are of."""
        return self.way("all_without_ac" if self.planned == "all_without_ac" else "overlap")

    def at(self, seq_len: int) -> "_Question":
        """The same with another sequence."""
        return replace(self, job=replace(self.job, seq_len=seq_len))


def _host_budget(job: Job, machine: Machine, offload: OffloadConfig) -> int | None:
    """What a node's ranks may pin, of a host that has nothing else in memory; None: not known. See `budget.share`."""
    if machine.host_memory_gib is None:
        return None
    total = int(machine.host_memory_gib * GIB)
    if offload.budget_bytes is not None:
        return min(total, offload.budget_bytes * min(machine.devices_per_node, job.num_devices))
    return int(total * offload.host_memory_fraction)


def _layer_times(question: _Question, way: Way) -> tuple[LayerTimes, ...]:
    """Blocks in a row that are alike as one entry."""
    model, job, machine = question.model, question.job, question.machine
    size, saves_all = input_bytes(model, job), way.variant == "all_without_ac"
    starts = [k for k, layer in enumerate(model.layers) if k == 0 or layer != model.layers[k - 1]]
    times = []
    for first, end in zip(starts, [*starts[1:], len(model.layers)], strict=True):
        cost, layer = way.blocks[first], model.layers[first]
        saved = activation_sizes(layer, model, job) if saves_all else saved_sizes(layer, job, question.selective)
        moved = cost.moved_bytes if saves_all else size
        d2h = copy_ms(moved, machine.d2h_gb_per_s, machine.devices_per_link)
        h2d = copy_ms(moved, machine.h2d_gb_per_s, machine.devices_per_link)
        ratio = max(d2h, h2d) / cost.forward_ms
        times.append(
            LayerTimes(
                *(first, end - first, cost.forward_ms, cost.attention_ms, d2h, h2d, ratio),
                input_bytes=size,
                saved_bytes=sum(saved),
            )
        )
    return tuple(times)


def _verdict(question: _Question, ac: Way, host_budget_bytes: int | None) -> Verdict:
    """On the settings that were asked about; with mode ``"none"``, on those with offload."""
    offload = question.offload if question.offload.mode == "all" else replace(question.offload, mode="block_inputs")
    asked = replace(question, offload=offload)
    selective_ways = {}
    if question.selective is None and asked.planned != "all_without_ac":
        selective_ways = {place: asked.way(f"overlap_selective_{place}") for place in ("device", "host")}
    return give_advice(asked.way(asked.planned), selective_ways, ac, host_budget_bytes)


def _longest(question: _Question, host_budget_bytes: int | None) -> Longest:
    """By bisection: all that is held grows with the sequence."""
    multiple, planned, device = question.job.seq_len_divisor, question.planned, question.machine.device_memory_gib

    def host_fits(seq_len: int) -> bool:
        return question.at(seq_len).way(planned).pinned_node_bytes() <= host_budget_bytes

    def device_fits(variant: str) -> Callable[[int], bool]:
        return lambda seq_len: question.at(seq_len).way(variant).peak.num_bytes <= device * GIB

    return Longest(
        multiple,
        host=None if host_budget_bytes is None else _largest(host_fits, multiple),
        device_ac=None if device is None else _largest(device_fits("ac"), multiple),
        device=None if device is None else _largest(device_fits(planned), multiple),
    )


def _largest(fits: Callable[[int], bool], multiple: int) -> int | None:
    """The largest multiple that fits; None: all do up to `LONGEST`."""
    low, high = 0, 1
    while fits(high * multiple):
        low, high = high, high * 2
        if high * multiple > LONGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * multiple) else (low, middle)
    return low * multiple


def _timeline(way: Way, schedule: str) -> tuple[Interval, ...]:
    """One pass of the first few blocks; of them, at least one moves."""
    blocks, config = way.blocks[:TIMELINE_BLOCKS], way.offload
    return simulate_step(
        len(blocks),
        [cost.forward_ms for cost in blocks],
        [cost.d2h_ms(way.machine) for cost in blocks],
        [cost.h2d_ms(way.machine) for cost in blocks],
        backward=[cost.backward_ms for cost in blocks],
        schedule=schedule,
        keep_last=min(config.keep_last, len(blocks) - 1),
        prefetch_lookahead=config.prefetch_lookahead,
        max_inflight_offloads=config.max_inflight_offloads,
        is_recorded=True,
    ).intervals
