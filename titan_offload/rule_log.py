"""RuleLog: what each rule of a save policy did, and a warning by name for one that did nothing.

A rule is given 64 regions to match something, and 64 recomputes to have what it saved asked for. Recompute stops once
it has what backward needs (unless ``early_stop`` is off), so a block's last projection is never run again: to save it
costs memory and gains nothing.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan_offload.config import MIB
from titan_offload.save_policy import SaveRule

logger = logging.getLogger(__name__)

NUM_REGIONS = 64


@dataclass(frozen=True)
class SavedPlace:
    """One saved output of a region, after a recompute: by which rule, of which op and module, and whether asked for."""

    rule: SaveRule
    op: str
    module: str
    index: int
    num_bytes: int
    was_asked: bool


class RuleLog:
    """Counts for one step after the other.

    Args:
        rules: all that save.
    """

    def __init__(self, rules: Sequence[SaveRule]) -> None:
        self._rules = rules
        self._matched: set[SaveRule] = set()
        self._num_regions = self._num_recomputes = 0
        self._num_saved: Counter[str] = Counter()  # in this step, by name of the rule
        self._saved_bytes: Counter[str] = Counter()
        self._asked: dict[tuple[SaveRule, str], bool] = {}
        self._unasked_bytes: dict[tuple[SaveRule, str], int] = {}

    def saved(self, rule: SaveRule, num_bytes: int) -> None:
        """``rule`` saved the outputs of one call."""
        self._matched.add(rule)
        self._num_saved[rule.name] += 1
        self._saved_bytes[rule.name] += num_bytes

    def region_ended(self) -> None:
        self._num_regions += 1
        if self._num_regions == NUM_REGIONS:
            self._warn_of_unmatched()

    def recompute_ended(self, places: Iterable[SavedPlace]) -> None:
        if self._num_recomputes == NUM_REGIONS:
            return
        for place in places:
            key = place.rule, f"{place.op} in {place.module}" if place.module else f"{place.op}, call {place.index + 1}"
            self._asked[key] = self._asked.get(key, False) or place.was_asked
            self._unasked_bytes[key] = place.num_bytes
        self._num_recomputes += 1
        if self._num_recomputes == NUM_REGIONS:
            self._warn_of_unasked()

    def step_end(self) -> dict[str, tuple[int, int]]:
        """By rule, how many calls of ops it saved the outputs of in this step, and their bytes."""
        saved = {name: (num, self._saved_bytes[name]) for name, num in self._num_saved.items()}
        self._num_saved.clear()
        self._saved_bytes.clear()
        return saved

    def _warn_of_unmatched(self) -> None:
        for rule in self._rules:
            if rule not in self._matched and not rule.is_silent:
                hint = (
                    " (the math backend of attention is many ops, and none of them)" if "attention" in rule.name else ""
                )
                logger.warning(
                    f"selective saves: {rule.name} matched no {rule.unit} in {NUM_REGIONS} regions{hint}; it does "
                    "nothing"
                )

    def _warn_of_unasked(self) -> None:
        unasked: dict[SaveRule, list[str]] = {}
        for (rule, what), asked in self._asked.items():
            if not asked and not rule.is_silent and not rule.is_mandatory:
                unasked.setdefault(rule, []).append(f"{what} ({self._unasked_bytes[rule, what] / MIB:.2f} MiB)")
        for rule, places in unasked.items():
            logger.warning(
                f"selective saves: recompute never asked for what {rule.name} saved of {', '.join(places)}: memory for "
                "nothing, because recompute stops before it"
            )
