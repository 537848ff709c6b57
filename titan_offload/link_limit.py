"""LinkLimit: ``limit = "link"``, by which only what hides behind compute is moved.

Owns the choice: when it is made, from what, and by whom. In the first steps all that the budget allows is moved, and
the forwards of blocks are timed; then all ranks tell each other what they found, and `link_choice` says how many of the
earliest blocks of each model part go on moving. Ranks with the same blocks do the same: the slowest decides.

Price: three collectives in all; until then, two timed events per forward.
"""

import logging
from collections.abc import Sequence

from titan_offload.engine import OffloadEngine
from titan_offload.exchange import gather
from titan_offload.link import LinkRates
from titan_offload.planner.link_choice import LinkChoice, PartCosts, agree_on_link_limit
from titan_offload.report import link_line
from titan_offload.share import current_device, measure_links, rank_of_job
from titan_offload.tape import ModelPart

logger = logging.getLogger(__name__)

NUM_WATCHED_STEPS = 3
"""Steps before anything is limited: one that compiles and pins, and two that are timed."""


class LinkLimit:
    """Limits what the engine moves, once, if ``activation_offload.limit`` is ``"link"``.

    Args:
        engine: whose `OffloadEngine.watch` times the forwards.

    Attributes:
        rates: speed of this rank's link; None: not known. If one rank does not know it at the end of the first step,
            all ranks measure.
        choices: for each model part, what was chosen; empty before.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self.rates: LinkRates | None = None
        self.choices: list[LinkChoice] = []
        self._engine = engine
        self._num_steps = 0

    def step_end(self, parts: Sequence[ModelPart]) -> None:
        """A step has ended. Until the choice is made this is a collective, so that all ranks of the default process
        group come to the same, whatever parts they have."""
        if self._engine.watch is None:
            return
        self._num_steps += 1
        if self._num_steps == 1 and None in gather(self.rates):
            self.rates = measure_links(self._engine.runtime, current_device(self._engine.runtime))[rank_of_job()]
        if self._num_steps < NUM_WATCHED_STEPS:
            return
        ranks = gather({tuple(part.fqns): self._costs_of(part) for part in parts})
        if any(costs is None for rank in ranks for costs in rank.values()):
            return  # no step with a backward was timed: again after the next one
        self._engine.watch = None
        for part in parts:
            self._limit(part, [rank[tuple(part.fqns)] for rank in ranks if tuple(part.fqns) in rank])

    def _costs_of(self, part: ModelPart) -> PartCosts | None:
        costs = self._engine.watch.costs(part, len(part.fqns))
        if costs is None:
            return None
        # Where several forward passes are alive, as in a pipeline, backward of one runs beside forward of another.
        return PartCosts(*costs, *self.rates.shared.bytes_per_s(both_ways=self._engine.tapes.max_alive > 1))

    def _limit(self, part: ModelPart, costs: Sequence[PartCosts]) -> None:
        config = self._engine.config
        choice = agree_on_link_limit(
            costs,
            keep_last=config.keep_last,
            prefetch_lookahead=config.prefetch_lookahead,
            max_inflight_offloads=config.max_inflight_offloads,
        )
        part.num_moved, part.num_arrived = choice.num_moved, choice.num_arrived
        self.choices.append(choice)
        logger.info(link_line(part.fqns, choice))
