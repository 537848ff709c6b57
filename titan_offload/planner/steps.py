"""One way to run a step, on all ranks of a job: its time, its pinned memory, its peak on the device.

Owns how costs of blocks become those of ranks and nodes. Relies on `costs`, on `pipeline` for what a rank holds at
once, on `simulation` for waits. Passes of a pipeline are simulated one by one: copies of one do not meet those of
another, which they do on a real link only where both directions disturb each other.

Price: each part of the model that differs is simulated once, a few hundred steps of arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from titan_offload.config import OffloadConfig, SelectiveConfig
from titan_offload.need import slots_bytes
from titan_offload.planner.costs import (
    GRADIENT_BYTES,
    STATE_BYTES,
    BlockCosts,
    block_costs,
    logits_bytes,
    shared_among,
    stem_bytes,
    unsharded_bytes,
)
from titan_offload.planner.link_choice import choose_link_limit
from titan_offload.planner.pipeline import (
    BOUNDED,
    blocks_of_stages,
    most_in_flight,
    passes_in_flight,
    stages_of_rank,
    stages_per_rank,
)
from titan_offload.planner.plan import Moment, RankMemory, StepCost
from titan_offload.planner.shapes import Job, Machine, ModelShape
from titan_offload.planner.simulation import ROUNDING, SimulatedStep, overlap_slowdown, simulate_step, sync_slowdown


@dataclass(frozen=True)
class Part:
    """A pipeline stage on the rank that has it.

    Attributes:
        rank, stage: pipeline rank, and which stage of the whole pipeline.
        blocks: indices in the model.
        costs: of each of them.
        step: one pass and its backward.
        num_moved: blocks that move, the earliest ones.
        num_arrived: see `link_choice.LinkChoice`; None: ``max_inflight_offloads`` holds.
    """

    rank: int
    stage: int
    blocks: range
    costs: tuple[BlockCosts, ...]
    step: SimulatedStep
    num_moved: int
    num_arrived: tuple[int, ...] | None = None

    def held_bytes(self, is_last_pass: bool = True) -> int:
        """On the device when its forward ends. Of a pass that is not the last, all copies have ended since."""
        first = self.num_moved - self.step.num_resident if is_last_pass else self.num_moved
        return sum(cost.stays_bytes for cost in self.costs) + sum(cost.moved_bytes for cost in self.costs[first:])

    def held_in_backward(self, k: int, prefetch_lookahead: int) -> int:
        """On the device while block ``k`` is recomputed and has its backward: what the blocks before it left, as far as
        it stayed or is back."""
        first_on_device = min(self.num_moved - self.step.num_resident, k - prefetch_lookahead)
        stays = sum(cost.stays_bytes for cost in self.costs[: k + 1])
        return stays + sum(cost.moved_bytes for cost in self.costs[max(first_on_device, 0) : k + 1])


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Attributes:
        model, job, machine, offload, selective: see `planner.make_plan`.
        variant: one of `plan.VARIANTS`.
        schedule: of the copies. Default: the one that the variant is named after.
    """

    model: ModelShape
    job: Job
    machine: Machine
    offload: OffloadConfig
    selective: SelectiveConfig | None
    variant: str
    schedule: str = ""

    def __post_init__(self) -> None:
        if not self.schedule:
            object.__setattr__(self, "schedule", "sync" if self.variant == "sync" else "overlap")

    @property
    def moves_all(self) -> bool:
        """Whether blocks are not checkpointed, and all that autograd saves of them moves."""
        return self.variant == "all_without_ac"

    @cached_property
    def blocks(self) -> tuple[BlockCosts, ...]:
        """Costs of each block of the model."""
        of_layer = {
            layer: block_costs(*(layer, self.model, self.job, self.machine, self.offload, self.selective, self.variant))
            for layer in dict.fromkeys(self.model.layers)
        }
        return tuple(of_layer[layer] for layer in self.model.layers)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Of all pipeline ranks."""
        parts, steps, choices = [], {}, {}
        for rank in range(self.job.pipeline_parallel):
            is_later = passes_in_flight(self.job, rank) > 1
            for stage in stages_of_rank(self.job, rank):
                blocks = self._stages[stage]
                costs = tuple(self.blocks[k] for k in blocks)
                if (costs, is_later) not in steps:
                    choices[costs] = choice = choices[costs] if costs in choices else self._choose(costs)
                    steps[costs, is_later] = self._simulate(costs, choice, is_later)
                parts.append(Part(rank, stage, blocks, costs, steps[costs, is_later], *choices[costs]))
        return tuple(parts)

    @cached_property
    def _stages(self) -> list[range]:
        return blocks_of_stages(self.model, self.job)

    def _choose(self, costs: Sequence[BlockCosts]) -> tuple[int, tuple[int, ...] | None]:
        """How many of these blocks move; and with ``limit = "link"``, what must have arrived when each starts."""
        config, machine = self.offload, self.machine
        if self.variant == "ac":
            return 0, None
        most = max(0, len(costs) - config.keep_last)
        if config.limit == "memory" or self.schedule == "sync":
            return most, None
        choice = choose_link_limit(
            [cost.forward_ms / 1e3 for cost in costs],
            [cost.moved_bytes for cost in costs],
            machine.d2h_gb_per_s / machine.devices_per_link * 1e9,
            machine.h2d_gb_per_s / machine.devices_per_link * 1e9,
            keep_last=len(costs) - most,
            prefetch_lookahead=config.prefetch_lookahead,
            max_inflight_offloads=config.max_inflight_offloads,
        )
        return choice.num_moved, choice.num_arrived

    def _simulate(
        self,
        costs: Sequence[BlockCosts],
        choice: tuple[int, tuple[int, ...] | None],
        is_backward_later: bool,
        reloads_all: bool = False,
    ) -> SimulatedStep:
        """One pass of these blocks and its backward."""
        return simulate_step(
            len(costs),
            [cost.forward_ms for cost in costs],
            [cost.d2h_ms(self.machine) for cost in costs],
            [cost.h2d_ms(self.machine) for cost in costs],
            backward=[cost.backward_ms for cost in costs],
            schedule=self.schedule,
            keep_last=0,
            num_moved=choice[0],
            num_arrived=choice[1],
            prefetch_lookahead=self.offload.prefetch_lookahead,
            max_inflight_offloads=self.offload.max_inflight_offloads,
            is_backward_later=is_backward_later,
            reloads_all=reloads_all,
        )

    def _bound_ms(self, part: Part) -> float:
        """The longest that one pass of this part can take, see ``reloads_all`` of `simulation.simulate_step`."""
        if not part.step.num_resident:
            return part.step.step
        return self._simulate(part.costs, (part.num_moved, part.num_arrived), False, reloads_all=True).step

    # Time

    def step_ms(self, time_of: Callable[[Part], float]) -> float:
        """All passes of the slowest pipeline rank, of which ``time_of`` gives a part's, and the pipeline's bubble.

        Of the bubble: ``(degree - 1) / stages_per_rank`` more passes (Narayanan et al., arXiv 2104.04473, section
        2.2). Zero-bubble and V-shaped schedules are taken to have none.
        """
        bubble = 0.0
        if self.job.pipeline_parallel > 1 and self.job.schedule not in BOUNDED:
            bubble = (self.job.pipeline_parallel - 1) / stages_per_rank(self.job)
        passes = [sum(time_of(part) for part in parts) for parts in self._parts_of_ranks]
        return (self.job.num_forwards + bubble) * max(passes)

    def closed_form_percent(self, max_inflight_offloads: int) -> float:
        """Slow-down where each block moves and has as many like it before and behind it as matter."""
        over = total = 0.0
        for cost in self.blocks:
            d2h, h2d = cost.d2h_ms(self.machine) / cost.forward_ms, cost.h2d_ms(self.machine) / cost.forward_ms
            backward = cost.backward_ms / cost.forward_ms
            slowdown = (
                sync_slowdown(d2h, h2d, backward)
                if self.schedule == "sync"
                else overlap_slowdown(d2h, max_inflight_offloads, h2d, backward)
            )
            over += slowdown * (cost.forward_ms + cost.backward_ms)
            total += cost.forward_ms + cost.backward_ms
        return over / total * 100

    # Host memory

    def pinned_bytes(self, rank: int) -> int:
        """Pinned memory that a pipeline rank needs, in slots: of each size, the most that is there at once. As
        `titan.need` counts."""
        counts: dict[tuple[str, int], dict[int, int]] = {}
        stages = stages_of_rank(self.job, rank)
        for stage in stages:
            blocks = self._stages[stage]
            for k in blocks[: max(0, len(blocks) - self.offload.keep_last)]:
                for slot in _slots(self.blocks[k]):
                    counts.setdefault(slot, dict.fromkeys(stages, 0))[stage] += 1
        if self._stem_bytes and 0 in stages:
            counts.setdefault(("input", self._stem_bytes), dict.fromkeys(stages, 0))[0] += 1
        return sum(
            slots_bytes(size) * most_in_flight(self.job, rank, by_stage) for (_, size), by_stage in counts.items()
        )

    @property
    def _stem_bytes(self) -> int:
        """What moves of each pass besides blocks, on the rank with the first one."""
        if self.offload.mode != "all" or self.variant == "ac":
            return 0
        return stem_bytes(self.job, self.offload)

    def pinned_node_bytes(self) -> int:
        """Of all ranks of the node that needs most."""
        return self.most_of_a_node([self.pinned_bytes(rank) for rank in range(self.job.pipeline_parallel)])

    def most_of_a_node(self, of_pipeline_ranks: Sequence[int]) -> int:
        """The sum over a node's ranks, of the node that has most. Ranks of a pipeline stage are neighbours, as in
        TorchTitan's mesh, whose first dim is the pipeline's."""
        num, per_node = self.job.num_devices, self.machine.devices_per_node
        per_stage = num // self.job.pipeline_parallel
        nodes = [range(start, min(start + per_node, num)) for start in range(0, num, per_node)]
        return max(sum(of_pipeline_ranks[rank // per_stage] for rank in node) for node in nodes)

    def rank_memory(self) -> tuple[RankMemory, ...]:
        """For each pipeline rank."""
        return tuple(
            RankMemory(
                rank,
                tuple(len(self._stages[stage]) for stage in stages_of_rank(self.job, rank)),
                passes_in_flight(self.job, rank),
                self.pinned_bytes(rank),
            )
            for rank in range(self.job.pipeline_parallel)
        )

    # Device memory

    def held_bytes(self, rank: int) -> int:
        """Block inputs and saved outputs on the device of a pipeline rank when forward ends."""
        parts = self._parts_of_ranks[rank]
        return max(self._held_by_others(part) + part.held_bytes() for part in parts)

    @cached_property
    def peak(self) -> Moment:
        """When most is on the device, on the rank that has most."""
        return max((moment for part in self.parts for moment in self._moments(part)), key=lambda m: m.num_bytes)

    def _held_by_others(self, part: Part) -> int:
        """By the other passes that its rank has alive, while one of this part ends its forward."""
        held = {p.stage: p.held_bytes(is_last_pass=False) for p in self._parts_of_ranks[part.rank]}
        return max(0, most_in_flight(self.job, part.rank, held) - held[part.stage])

    def _moments(self, part: Part) -> Iterator[Moment]:
        """End of forward, where logits are; each block's backward, with the gradients that are there by then. From the
        second pass of a step on, all gradients are there."""
        others, num = self._held_by_others(part), len(part.costs)
        lookahead = 0 if self.schedule == "sync" else self.offload.prefetch_lookahead
        if self.moves_all:  # what is reloaded for the next blocks takes the place of what this one is done with
            lookahead = max(0, lookahead - 1)
        gradients = GRADIENT_BYTES * (self.model.num_params or 0) // shared_among(self.job)
        has_all = self.job.num_forwards > 1
        logits = logits_bytes(self.model, self.job) if part.blocks.stop == len(self.model.layers) else 0
        yield self._moment(
            "end of forward", others + part.held_bytes(), logits=logits, gradients=gradients if has_all else 0
        )
        for k in range(num):
            done = 1 if has_all else (num - 1 - k) / num
            yield self._moment(
                f"backward of block {part.blocks[k]}",
                others + part.held_in_backward(k, lookahead),
                recomputed=part.costs[k].recomputed_bytes,
                gradients=int(gradients * done),
            )

    def _moment(self, name: str, held: int, recomputed: int = 0, logits: int = 0, gradients: int = 0) -> Moment:
        states = STATE_BYTES * (self.model.num_params or 0) // shared_among(self.job)
        parts = {
            "activations" if self.moves_all else "block inputs and saved outputs": held,
            "one block's recompute": recomputed,
            "logits": logits,
            "gradients": gradients,
            "parameters and optimizer states": states,
            "unsharded parameters": unsharded_bytes(self.model, self.job),
        }
        return Moment(name, {what: num_bytes for what, num_bytes in parts.items() if num_bytes})

    @cached_property
    def _parts_of_ranks(self) -> list[list[Part]]:
        ranks = range(self.job.pipeline_parallel)
        return [[part for part in self.parts if part.rank == rank] for rank in ranks]

    # All of it

    def cost(self, ac_step_ms: float | None = None) -> StepCost:
        """What a plan tells of it.

        Args:
            ac_step_ms: step time with AC alone. None: this is AC alone.
        """
        compute_ms = self.step_ms(lambda part: sum(cost.forward_ms + cost.backward_ms for cost in part.costs))
        step_ms = self.step_ms(lambda part: part.step.step)
        if step_ms <= compute_ms * (1 + ROUNDING):
            step_ms = compute_ms
        moved = [
            sum(cost.moved_bytes for part in parts for cost in part.costs[: part.num_moved])
            + sum(self._stem_bytes for part in parts if part.stage == 0)
            for parts in self._parts_of_ranks
        ]
        return StepCost(
            variant=self.variant,
            step_ms=step_ms,
            step_bound_ms=max(step_ms, self.step_ms(self._bound_ms)),
            compute_ms=compute_ms,
            simulated_percent=(step_ms / compute_ms - 1) * 100,
            closed_form_unlimited_percent=self.closed_form_percent(0),
            closed_form_limited_percent=self.closed_form_percent(1),
            vs_ac_percent=(step_ms / (ac_step_ms or step_ms) - 1) * 100,
            d2h_ms=max(cost.d2h_ms(self.machine) for cost in self.blocks),
            h2d_ms=max(cost.h2d_ms(self.machine) for cost in self.blocks),
            moved_bytes=self.job.num_forwards * max(moved),
            held_bytes=max(self.held_bytes(rank) for rank in range(self.job.pipeline_parallel)),
            peak=self.peak,
            pinned_bytes=max(self.pinned_bytes(rank) for rank in range(self.job.pipeline_parallel)),
            pinned_node_bytes=self.pinned_node_bytes(),
        )


def _slots(cost: BlockCosts) -> Iterator[tuple[str, int]]:
    yield from (("input", size) for size in cost.inputs)
    yield from (("save", size) for size in cost.saves)
