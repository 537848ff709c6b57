"""How a pipeline divides a model, and how many forward passes each of its ranks has alive at once.

Owns the order of each schedule, as far as it matters for memory. No torch: a run counts in torch's own list
(`need.max_in_flight`), a plan has none, so its formulas are tested against that.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from titan_offload.need import in_flight_1f1b
from titan_offload.planner.shapes import Job, ModelShape

SINGLE_STAGE = ("1F1B", "GPipe")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
BOUNDED = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules of which only an upper bound is known here, see `passes_in_flight`."""

ALL_AT_ONCE = ("GPipe", "LoopedBFS")
"""Schedules that do all forwards before the first backward."""

Action = tuple[int, str, int]


def stages_per_rank(job: Job) -> int:
    """Parts of the model that a pipeline rank has."""
    if job.pipeline_parallel == 1:
        return 1
    if job.stages_per_rank is None:
        return 1 if job.schedule in SINGLE_STAGE else 2
    return job.stages_per_rank


def stage_layers(num_layers: int, num_stages: int, input_weight: int = 1, output_weight: int = 1) -> tuple[int, ...]:
    """Blocks of each stage, as TorchTitan divides them: embedding and head count as ``input_weight`` and
    ``output_weight`` blocks, what does not divide goes to the first stages.

    Source: TorchTitan 0.2.2, ``distributed/pipeline_parallel.py``, ``generate_llm_fqn_per_model_part``.

    Raises:
        ValueError: some stage would have no block, or the first or last one less than the weight says.
    """
    if num_stages == 1:
        return (num_layers,)
    each, extra = divmod(num_layers + input_weight + output_weight, num_stages)
    sizes = [each + (stage < extra) for stage in range(num_stages)]
    sizes[0] -= input_weight
    sizes[-1] -= output_weight
    if each < max(1, input_weight, output_weight):
        raise ValueError(
            f"{num_layers} blocks cannot be divided among {num_stages} pipeline stages, of which the first counts "
            f"{input_weight} more and the last {output_weight} more: lower the pipeline parallel degree"
        )
    return tuple(sizes)


def blocks_of_stages(model: ModelShape, job: Job) -> list[range]:
    """For each stage of the whole pipeline, the indices of its blocks.

    Raises:
        ValueError: ``job.stage_layers`` does not fit the model or the number of stages.
    """
    num_stages = job.pipeline_parallel * stages_per_rank(job)
    sizes = job.stage_layers or stage_layers(len(model.layers), num_stages)
    if len(sizes) != num_stages or sum(sizes) != len(model.layers):
        raise ValueError(
            f"job stage_layers = {list(sizes)} does not divide {len(model.layers)} blocks among {num_stages} stages: "
            "give as many numbers as there are stages, with the blocks as their sum"
        )
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def stages_of_rank(job: Job, rank: int) -> tuple[int, ...]:
    """Stages of a pipeline rank: every ``pipeline_parallel``-th, or with V-shaped schedules one from each end.

    Source: TorchTitan 0.2.2, ``distributed/pipeline_parallel.py``, ``pipeline_module_split``.
    """
    degree, num = job.pipeline_parallel, stages_per_rank(job)
    if job.schedule in V_SHAPED and degree > 1:
        return rank, 2 * degree - 1 - rank
    return tuple(rank + turn * degree for turn in range(num))


def is_bound(job: Job) -> bool:
    """Whether what `most_in_flight` says may be too much."""
    return job.pipeline_parallel > 1 and job.schedule in BOUNDED


def most_in_flight(job: Job, rank: int, weights: Mapping[int, int]) -> int:
    """The most that a pipeline rank has alive at once of what each forward pass of its stages leaves behind.

    Exact where the schedule's order is known. Else the number of passes alive times what weighs most, or all.

    Args:
        weights: of each of its stages, what one forward pass leaves.
    """
    if job.pipeline_parallel == 1:
        return sum(weights.values())
    if job.schedule == "Interleaved1F1B":
        stages = stages_of_rank(job, rank)
        sums = (sum(n * weights[s] for s, n in zip(stages, alive, strict=True)) for alive in _alive(job, rank))
        return max(sums)
    everything = job.num_forwards * sum(weights.values())
    if job.schedule in ALL_AT_ONCE:
        return everything
    return min(passes_in_flight(job, rank) * max(weights.values()), everything)


def passes_in_flight(job: Job, rank: int) -> int:
    """Most forward passes that a pipeline rank has alive at once, a pass of each of its stages counted by itself.

    Sources: of 1F1B, `need.in_flight_1f1b`; of interleaved 1F1B, `interleaved_actions`; interleaved zero bubble warms
    up by half of it for each rank behind and puts off the weights' backward by ``rank`` actions, so it is the same for
    all ranks (torch's ``ScheduleInterleavedZeroBubble``); ZB-V: two for each rank of the pipeline (Qi et al., arXiv
    2401.10241, section 6); DualPipeV: one more (DeepSeek-V3 technical report, arXiv 2412.19437, table 2); GPipe and
    breadth-first (Lamy-Poirier, arXiv 2211.05953): all of them.
    """
    if job.pipeline_parallel == 1:
        return 1
    degree, num_stages = job.pipeline_parallel, stages_per_rank(job)
    if job.schedule == "1F1B":
        return in_flight_1f1b(degree, rank, job.num_forwards)
    if job.schedule == "Interleaved1F1B":
        return most_in_flight(job, rank, dict.fromkeys(stages_of_rank(job, rank), 1))
    everything = job.num_forwards * num_stages
    if job.schedule == "InterleavedZeroBubble":
        return min((num_stages - 1) * _per_round(job) + degree, everything)
    return min(2 * degree + (job.schedule == "DualPipeV"), everything) if job.schedule in V_SHAPED else everything


def interleaved_actions(job: Job, rank: int) -> list[Action]:
    """What a rank of interleaved 1F1B does, in order, as `need.max_in_flight` has it: forwards to warm up, then a
    forward and a backward in turn, then the backwards that are left.

    Source: torch's ``ScheduleInterleaved1F1B`` and ``_get_warmup_ops`` (after Narayanan et al., arXiv 2104.04473,
    section 2.2).
    """
    stages, per_round, num = stages_of_rank(job, rank), _per_round(job), job.num_forwards
    forwards, backwards = _turns(stages, per_round, num), _turns(stages[::-1], per_round, num)
    warm_up = min((len(stages) - 1) * per_round + 2 * (job.pipeline_parallel - 1 - rank), len(forwards))
    actions = [(stage, "F", i) for stage, i in forwards[:warm_up]]
    num_turns = len(forwards) - warm_up
    for (stage, i), (stage_back, i_back) in zip(forwards[warm_up:], backwards[:num_turns], strict=True):
        actions += [(stage, "F", i), (stage_back, "B", i_back)]
    return actions + [(stage, "B", i) for stage, i in backwards[num_turns:]]


def _alive(job: Job, rank: int) -> frozenset[tuple[int, ...]]:
    """How many passes of each of its stages a rank of interleaved 1F1B has alive, at any time."""
    return _alive_of_shape(replace(job, seq_len=1, batch=1, stage_layers=None), rank)


@lru_cache(maxsize=1024)
def _alive_of_shape(job: Job, rank: int) -> frozenset[tuple[int, ...]]:
    """The same for each sequence, so it is counted once for all."""
    stages, alive, seen = stages_of_rank(job, rank), Counter(), set()
    for stage, kind, _ in interleaved_actions(job, rank):
        alive[stage] += 1 if kind == "F" else -1
        seen.add(tuple(alive[stage] for stage in stages))
    return frozenset(seen)


def _turns(stages: Sequence[int], per_round: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Round by round, each stage its part of the microbatches."""
    rounds = range(0, num_microbatches, per_round)
    return [(stage, i) for start in rounds for stage in stages for i in range(start, start + per_round)]


def _per_round(job: Job) -> int:
    """Microbatches that an interleaved schedule gives each stage in turn.

    Source: torch's ``ScheduleInterleaved1F1B``.

    Raises:
        ValueError: torch would refuse the number of microbatches.
    """
    num_rounds = max(1, job.num_forwards // job.pipeline_parallel)
    if job.num_forwards % num_rounds:
        raise ValueError(
            f"job num_forwards = {job.num_forwards} microbatches cannot be divided into {num_rounds} rounds, as "
            f"schedule {job.schedule} needs: set it to a multiple of {num_rounds}, such as "
            f"{num_rounds * job.pipeline_parallel}"
        )
    return job.num_forwards // num_rounds
