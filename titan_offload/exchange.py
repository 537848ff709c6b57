"""How ranks tell each other what they have, and take turns.

Owns the collectives before step 1. Relies on a process group that exists, of any backend, and makes none: torch is
imported where one is used. What is made of the facts: `budget`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from titan_offload.budget import RankFacts

T = TypeVar("T")


def exchange(own: RankFacts, group: object = None) -> list[RankFacts]:
    """The facts of all ranks, by rank: the same list on each of them.

    One collective on a process group that exists, of any backend: NCCL's takes the bytes through the current device,
    which the caller has set. Without a process group: this rank's alone. A rank that cannot go on must come here all
    the same, with its ``error``, or the others wait until the group's timeout.

    Args:
        own: taken before, so that no rank's allocations are in another's snapshot.
        group: of all ranks of the job; None: the default one.
    """
    return gather(own, group)


def turn_of(hosts: Sequence[str], rank: int) -> tuple[int, int]:
    """The position of ``rank`` on its host, and how many turns the host with most ranks needs: see `take_turns`.

    Args:
        hosts: the host of each rank.
    """
    return hosts[:rank].count(hosts[rank]), max(Counter(hosts).values())


def take_turns(group: object, position: int, num_turns: int, work: Callable[[], T]) -> T:
    """Does ``work`` on one rank of a host after the other, on all hosts at once. All ranks of ``group`` call it.

    A collective ends each turn, so the longest work of a turn must be shorter than the group's timeout.

    Args:
        group: of all ranks of the job; None: the default one.
        position, num_turns: see `turn_of`.
        work: what is done in this rank's turn; its result is returned.

    Raises:
        RuntimeError: the work of a rank raised; the same text on all ranks, after that turn, and no further turn.
    """
    result = None
    for turn in range(num_turns):
        failure: Exception | None = None
        if turn == position:
            try:
                result = work()
            except Exception as error:
                failure = error
        texts = gather(f"{type(failure).__name__}: {failure}" if failure else None, group)
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]:
            raise RuntimeError("; ".join(failed)) from failure
    return result


def gather(value: T, group: object = None) -> list[T]:
    """``value`` of each rank of the group (None: the default one), by rank; of this one alone where there is none."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
