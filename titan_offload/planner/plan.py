"""What a plan says, as plain data.

Owns the form of a plan and of its JSON. How its figures come about: `planner.make_plan`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from titan_offload.config import GIB, OffloadConfig, SelectiveConfig
from titan_offload.planner.shapes import Job, Machine, ModelShape
from titan_offload.planner.simulation import Interval

FORMAT = 1

VARIANTS = ("ac", "sync", "overlap", "overlap_selective_device", "overlap_selective_host", "all_without_ac")
"""Ways to run a step, in the order in which a table has them:

- ``ac``: activation checkpointing (AC) alone.
- ``sync``, ``overlap``: block inputs move to the host, with this schedule.
- ``overlap_selective_device``: as overlap, and attention is not recomputed: its outputs stay on the device.
- ``overlap_selective_host``: the same, and they move to the host.
- ``all_without_ac``: nothing is recomputed, every activation moves to the host.
"""


@dataclass(frozen=True)
class LayerTimes:
    """What one block costs on a rank. Blocks in a row that are alike are one entry.

    Attributes:
        first, count: the blocks.
        forward_ms: of one forward pass.
        attention_ms: the part of it that attention's two products take.
        d2h_ms, h2d_ms: time to copy its input to the host, and back, while all that share the link copy. With variant
            all_without_ac: all that moves of it.
        copy_over_forward: the slower of the two over ``forward_ms``.
        input_bytes: its input.
        saved_bytes: what selective checkpointing saves of it, on the device or in host memory. With variant
            all_without_ac: all that autograd saves.
    """

    first: int
    count: int
    forward_ms: float
    attention_ms: float
    d2h_ms: float
    h2d_ms: float
    copy_over_forward: float
    input_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Moment:
    """What is on the device at one moment of a step.

    Attributes:
        name: for people: ``"end of forward"``, ``"backward of block 3"``.
        parts: bytes by what they are: ``"block inputs and saved outputs"`` (with variant all_without_ac
            ``"activations"``), ``"one block's recompute"``, ``"logits"``, ``"gradients"``, ``"parameters and optimizer
            states"``, ``"unsharded parameters"``. Only what is known and is there at that moment.
    """

    name: str
    parts: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepCost:
    """One way to run a step, on the slowest rank of the job. Pipeline bubbles are in the times.

    Attributes:
        variant: one of `VARIANTS`.
        step_ms: forward and backward of all blocks, for all passes, by the simulation. Embedding, head, loss, optimizer
            and collectives are not in it.
        step_bound_ms: at most that long, whatever of the inputs backward finds on the device. Where ``step_ms`` is
            less, a slightly slower link may shorten the step; this one it never does.
        compute_ms: the same without any wait for a copy.
        simulated_percent: how much longer ``step_ms`` is than ``compute_ms``, never negative. Right with few blocks,
            ``keep_last``, ``prefetch_lookahead``, blocks that differ.
        closed_form_unlimited_percent, closed_form_limited_percent: the same in the limit of many blocks that all move,
            without and with a finite ``max_inflight_offloads``.
        vs_ac_percent: how much longer ``step_ms`` is than with AC alone; negative: shorter, since less is recomputed.
        d2h_ms, h2d_ms: of the block that copies most, all that it moves, in one pass.
        moved_bytes: to the host in one step, and back in the same.
        held_bytes: of block inputs and saved outputs, on the device when the last forward before a backward ends.
        peak: the moment at which most is on the device, on the rank that then has most.
        pinned_bytes: pinned memory of the rank that needs most.
        pinned_node_bytes: pinned memory of all ranks of the node that needs most.
    """

    variant: str
    step_ms: float
    step_bound_ms: float
    compute_ms: float
    simulated_percent: float
    closed_form_unlimited_percent: float
    closed_form_limited_percent: float
    vs_ac_percent: float
    d2h_ms: float
    h2d_ms: float
    moved_bytes: int
    held_bytes: int
    peak: Moment
    pinned_bytes: int
    pinned_node_bytes: int


@dataclass(frozen=True)
class RankMemory:
    """Pinned memory that the ranks of one pipeline rank need, with the variant that is planned.

    Attributes:
        pipeline_rank: 0 without a pipeline.
        num_layers: of each of its stages.
        passes_in_flight: most forward passes that it has alive at once, over all its stages.
        pinned_bytes: of each such rank.
    """

    pipeline_rank: int
    num_layers: tuple[int, ...]
    passes_in_flight: int
    pinned_bytes: int


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, in multiples of ``multiple``; 0: not even one does. None: the memory is not
    known, or there is no longest, since nothing of it grows with the sequence.

    Attributes:
        multiple: see `Job.seq_len_divisor`.
        host: whose pinned memory fits ``host_memory_gib x host_memory_fraction`` of each node.
        device_ac: whose peak, as far as it is known, fits ``device_memory_gib`` with AC alone.
        device: and as planned.
    """

    multiple: int
    host: int | None
    device_ac: int | None
    device: int | None


@dataclass(frozen=True)
class Setting:
    """A key of a train config, its value, and why, for people."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Verdict:
    """What comes first. Of the run with ``settings``, where they differ from what was asked about.

    Attributes:
        pays: whether offload is of use here.
        fits_host, fits_device: whether it fits; None: the memory is not known. ``fits_device`` counts what is known.
        fits_device_ac: whether it would fit the device without offload.
        slowdown_percent: of the step, against AC alone; not below 0.
        freed_bytes: what leaves the device, at the end of forward: block inputs, or with variant all_without_ac
            activations, against the same run without offload.
        peak_drop_bytes: by what the peak falls, as far as it is known; the same.
        settings: three keys to set; where saved outputs move or several keys must change, as many as that takes; one
            where offload does not pay.
        text: sentences for people, the most important first.
        unknown: what the peak does not count, for people.
    """

    pays: bool
    fits_host: bool | None
    fits_device: bool | None
    fits_device_ac: bool | None
    slowdown_percent: float
    freed_bytes: int
    peak_drop_bytes: int
    settings: tuple[Setting, ...]
    text: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All that is foretold of a job.

    Attributes:
        model, job, machine, offload, selective: what was asked about.
        variant: which of ``steps`` that is.
        layers: see `LayerTimes`.
        steps: by variant, in the order of `VARIANTS`.
        block_inputs_bytes: inputs of all blocks of the passes in flight, of the rank that has most: on its device with
            AC alone.
        block_inputs_node_bytes: of all ranks of the node that has most.
        ranks: for each pipeline rank.
        in_flight_is_bound: whether the passes in flight are an upper bound instead of the schedule's own order.
        host_budget_bytes: what a node's ranks may pin; None: not known.
        longest: see `Longest`.
        verdict: see `Verdict`.
        timelines: by schedule, ``"sync"`` and ``"overlap"``: one pass of the first few blocks, for a picture.
    """

    model: ModelShape
    job: Job
    machine: Machine
    offload: OffloadConfig
    selective: SelectiveConfig | None
    variant: str
    layers: tuple[LayerTimes, ...]
    steps: Mapping[str, StepCost]
    block_inputs_bytes: int
    block_inputs_node_bytes: int
    ranks: tuple[RankMemory, ...]
    in_flight_is_bound: bool
    host_budget_bytes: int | None
    longest: Longest
    verdict: Verdict
    timelines: Mapping[str, tuple[Interval, ...]]

    def to_json(self) -> dict[str, Any]:
        """Plain data: dicts, lists, strings, numbers, None. Beside each key ``X_bytes`` stands ``X_gib``, unrounded.

        Keys::

            format                     1
            model                      {name, dim, num_layers, vocab_size, num_params}
            job, machine               the fields of `Job`, `Machine`
            offload, selective         the fields of `OffloadConfig`, `SelectiveConfig` (or None)
            variant                    which of steps is the one that was asked about
            layers                     [the fields of `LayerTimes`]
            steps                      {variant: the fields of `StepCost`}, where
                peak                   {name, num_bytes, num_gib, parts_bytes: {what: bytes}, parts_gib: {what: GiB}}
            memory
                block_inputs_bytes     block_inputs_gib, block_inputs_node_bytes, block_inputs_node_gib
                pinned_bytes           pinned_gib, pinned_node_bytes, pinned_node_gib: as planned
                host_budget_bytes      host_budget_gib (or None)
                ranks                  [the fields of `RankMemory`]
                in_flight_is_bound
            longest                    {multiple, host, device_ac, device}: tokens of a sequence (or None)
            verdict                    the fields of `Verdict`, where
                settings               [{key, value, why}]
                text, unknown          [sentences]
            timelines                  {sync, overlap: [{lane, name, start_ms, end_ms}]}, lane: compute, d2h, h2d
        """
        model = {"name": self.model.name, "dim": self.model.dim, "num_layers": len(self.model.layers)}
        model |= {"vocab_size": self.model.vocab_size, "num_params": self.model.num_params}
        cost = self.steps[self.variant]
        memory = {
            "block_inputs_bytes": self.block_inputs_bytes,
            "block_inputs_node_bytes": self.block_inputs_node_bytes,
            "pinned_bytes": cost.pinned_bytes,
            "pinned_node_bytes": cost.pinned_node_bytes,
            "host_budget_bytes": self.host_budget_bytes,
            "ranks": [asdict(rank) for rank in self.ranks],
            "in_flight_is_bound": self.in_flight_is_bound,
        }
        document = {
            "format": FORMAT,
            "model": model,
            "job": asdict(self.job),
            "machine": asdict(self.machine),
            "offload": asdict(self.offload),
            "selective": None if self.selective is None else asdict(self.selective),
            "variant": self.variant,
            "layers": [asdict(layer) for layer in self.layers],
            "steps": {variant: _step_json(step) for variant, step in self.steps.items()},
            "memory": memory,
            "longest": asdict(self.longest),
            "verdict": asdict(self.verdict),
            "timelines": {name: [asdict(interval) for interval in line] for name, line in self.timelines.items()},
        }
        return _plain(document)


def _step_json(step: StepCost) -> dict[str, Any]:
    peak = {"name": step.peak.name, "num_bytes": step.peak.num_bytes, "parts_bytes": step.peak.parts}
    return {**asdict(step), "peak": peak}


def _plain(data: Any) -> Any:
    """``data`` with lists for tuples, and with GiB beside bytes."""
    if isinstance(data, Mapping):
        plain = {}
        for key, value in data.items():
            plain[key] = _plain(value)
            if key.endswith("_bytes"):
                plain[key.removesuffix("bytes") + "gib"] = _in_gib(value)
        return plain
    return [_plain(item) for item in data] if isinstance(data, list | tuple) else data


def _in_gib(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _in_gib(part) for name, part in value.items()}
    return None if value is None else value / GIB
