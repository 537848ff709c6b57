"""share_host: what the ranks of a job settle about host memory before step 1.

Owns the order of events. Each rank reads what its host has free (one snapshot, before any rank allocates), all ranks
tell each other, and each comes to the same table by the arithmetic of `budget`. Then the caller can write it down, for
a killed run to leave behind; then links are measured, if asked for; and then the ranks of a host pin their memory in
turn.

Price: one collective over the process group that exists, and one per rank of a host for each thing done in turn. A rank
that cannot go on says so in a collective, so that all stop with the same error and none waits for it.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from titan_offload import budget
from titan_offload.budget import Claim, RankBudget, RankFacts
from titan_offload.config import GIB, OFFLOAD, SELECTIVE, OffloadConfig, SelectiveConfig
from titan_offload.exchange import exchange, gather, take_turns, turn_of
from titan_offload.host_memory import HostMemory, read_host_memory
from titan_offload.link import LinkRates, measure_link
from titan_offload.need import slots_bytes
from titan_offload.pool import PinnedPool
from titan_offload.runtime import Runtime
from titan_offload.topology import Host, read_device, read_host

logger = logging.getLogger(__name__)

BLOCK_INPUTS, SELECTIVE_SAVES, ACTIVATIONS = "block inputs", "selective saves", "saved activations"
"""Names of the claims that are met from the pool."""


@dataclass(frozen=True)
class Need:
    """What a rank will take of host memory.

    Attributes:
        inputs: size in bytes and number of the block inputs that are in host memory at once.
        saves: the same of saved outputs.
        activations: the same of what else autograd saves, with mode ``"all"``.
        others: what else of the run will take host memory.
        stage: ranks with the same one do the same work.
    """

    inputs: Sequence[tuple[int, int]] = ()
    saves: Sequence[tuple[int, int]] = ()
    activations: Sequence[tuple[int, int]] = ()
    others: Sequence[Claim] = ()
    stage: str = ""

    @property
    def claims(self) -> tuple[Claim, ...]:
        own = ((BLOCK_INPUTS, self.inputs), (ACTIVATIONS, self.activations), (SELECTIVE_SAVES, self.saves))
        return (*(Claim(name, _total(slots)) for name, slots in own if slots), *self.others)


@dataclass
class HostShare:
    """What was settled, the same on all ranks.

    Attributes:
        budgets: of all ranks, by rank.
        rank: this one.
        links: measured speeds by rank; empty: not measured.
    """

    budgets: Sequence[RankBudget]
    rank: int
    links: dict[int, LinkRates] = field(default_factory=dict)

    @property
    def own(self) -> RankBudget:
        return self.budgets[self.rank]


def share_host(
    config: OffloadConfig,
    selective: SelectiveConfig | None,
    runtime: Runtime,
    pool: PinnedPool,
    device: torch.device,
    get_need: Callable[[], Need] | None = None,
    *,
    on_budget: Callable[[HostShare], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    host: Host | None = None,
    memory: HostMemory | None = None,
) -> HostShare:
    """Gives ``pool`` this rank's share of its host's memory, and pins what is needed of it. A collective over the
    default process group, if there is one: call it on every rank, once per run.

    Args:
        config, selective: settings; they must be the same on all ranks.
        runtime, pool, device: of this rank.
        get_need: what will be taken. Default: not known; then the ranks of a host get equal shares, and nothing is
            pinned ahead.
        on_budget: called when the table is known and nothing is pinned yet.
        on_progress: called with the bytes pinned so far, and in all. Default: a log line.
        host, memory: facts of the machine. Default: read from it.

    Raises:
        ValueError: on every rank, with the same text, before anything is pinned: a rank cannot go on, settings differ,
            a budget is above what its host has, or (``on_exhausted = "error"``) below the need.
    """
    host, need, failure = host or read_host(), None, None
    facts = _facts(config, selective, device, host, memory or read_host_memory())
    try:
        if get_need is not None:
            need = get_need()
            facts = _with_need(facts, need)
    except Exception as error:  # of this rank alone, perhaps: the others must not wait for it
        failure, facts = error, dataclasses.replace(facts, error=f"{type(error).__name__}: {error}")
    all_facts = exchange(facts)
    if failure is not None and not isinstance(failure, ValueError):
        raise failure  # no mistake of the user's
    budget.check(all_facts)
    budgets = budget.share(all_facts, config.host_memory_fraction, config.budget_bytes)
    share = HostShare(budgets, facts.rank)
    pool.budget_bytes = share.own.budget_bytes + share.own.spare_bytes
    runtime.numa_node = share.own.facts.device.numa_node
    if on_budget is not None:
        on_budget(share)
    budget.check_budgets(budgets)
    if config.measure_link or config.limit == "link":
        share.links = measure_links(runtime, device, host.identity)
    if need is not None:
        slots = [*need.inputs, *need.activations, *need.saves]
        take_turns(
            None,
            *turn_of([facts.host for facts in all_facts], facts.rank),
            lambda: pool.reserve(slots, on_progress or log_progress),
        )
    return share


def check_settings(config: OffloadConfig, selective: SelectiveConfig | None) -> None:
    """Refuses settings that are not the same on all ranks. A collective like `share_host`, for ranks that may not even
    agree on whether they offload.

    Raises:
        ValueError: on every rank, with the same text.
    """
    budget.check(exchange(_facts(config, selective, torch.device("cpu"), read_host(), HostMemory(()))))


def _facts(
    config: OffloadConfig, selective: SelectiveConfig | None, device: torch.device, host: Host, memory: HostMemory
) -> RankFacts:
    """Of this rank; what it needs is not known yet."""
    settings = {f"{OFFLOAD}.{key}": value for key, value in dataclasses.asdict(config).items()}
    if selective is not None:
        settings |= {f"{SELECTIVE}.{key}": value for key, value in dataclasses.asdict(selective).items()}
    return RankFacts(
        rank=rank_of_job(),
        host=host.identity,
        hostname=host.name,
        device_name=str(device),
        device=read_device(pci_address(device)),
        memory=memory,
        claims=None,
        slot_bytes=0,
        num_slots=0,
        stage="",
        config=settings,
        time=time.time(),
    )


def _with_need(facts: RankFacts, need: Need) -> RankFacts:
    slots = [*need.inputs, *need.activations] or need.saves
    return dataclasses.replace(
        facts,
        claims=need.claims,
        slot_bytes=slots_bytes(max(num_bytes for num_bytes, _ in slots)) if slots else 0,
        num_slots=sum(count for _, count in slots),
        stage=need.stage,
    )


def rank_of_job() -> int:
    """This process's rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def current_device(runtime: Runtime) -> torch.device:
    """The device of ``runtime`` that this process computes on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != runtime.device_type:
        return torch.device(runtime.device_type)
    return torch.device(runtime.device_type, torch.accelerator.current_device_index())


def pci_address(device: torch.device) -> str | None:
    """Of a CUDA device; None for another one, or where torch does not say."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return None if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def measure_links(
    runtime: Runtime, device: torch.device, host: str | None = None, seconds: float = 2.0
) -> dict[int, LinkRates]:
    """Speeds of all ranks' links, by rank. A collective like `share_host`.

    Args:
        runtime, device: of this rank.
        host: identity of its host. The ranks of a host take turns, then copy together. Default: read from it.
        seconds: upper bound on the time that it all takes, waits for late ranks aside.

    Raises:
        RuntimeError: on every rank, if it fails on one.
    """
    position, num_turns = turn_of(gather(host or read_host().identity), rank_of_job())
    failed = False

    def barrier() -> None:
        """Carries errors, so that no rank waits for one that failed."""
        nonlocal failed
        if errors := [f"rank {i}: {error}" for i, error in enumerate(gather(None)) if error is not None]:
            failed = True
            raise RuntimeError(f"the link could not be measured: {'; '.join(errors)}")

    try:
        turn = {"position": position, "num_turns": num_turns}
        own = measure_link(runtime, device, **turn, barrier=barrier, seconds=seconds)
        barrier()
    except Exception as error:
        if not failed:
            gather(f"{type(error).__name__}: {error}")
        raise
    return dict(enumerate(gather(own)))


def log_progress(done: int, total: int) -> None:
    """A line on how far the pinning of a rank's memory is, in bytes."""
    logger.info(f"pinning host memory: {done / GIB:.3f} of {total / GIB:.3f} GiB")


def _total(slots: Sequence[tuple[int, int]]) -> int:
    return sum(slots_bytes(num_bytes) * count for num_bytes, count in slots)
