"""FSDP2 on one device, with what ranks settle before step 1: budget, speed of the link, and pinned memory."""

import pytest
import torch
import torch.distributed as dist
import toy
from gpu_machine import step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titan_offload import OffloadConfig, apply_offload
from titan_offload.apply import make_offloader
from titan_offload.share import Need, current_device, share_host

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")]

MOVED = toy.NUM_BLOCKS - 1
EVERYTHING = {"min_offload_mib": 0.0}


@pytest.fixture(scope="module")
def mesh(machine):
    """Of a process group that is made on the fly, for a world of one rank."""
    dist.init_process_group(machine.pick("nccl", "gloo"), store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(machine.device.type, (1,))
    dist.destroy_process_group()


def sharded(machine, mesh, **kwargs):
    model = machine.model(**kwargs)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def assert_same_shards(model, other):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        gradients = [x.grad.to_local() for x in (p, q)]
        assert torch.isfinite(gradients[1]).all(), name
        assert torch.equal(*gradients), name


class Scaled(toy.Block):
    """Takes a parameter of the root as a positional input."""

    def forward(self, x, rope, scale):
        return super().forward(x * scale, rope)


@pytest.mark.parametrize("is_strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize(
    ("mode", "schedule"), [("block_inputs", "overlap"), ("block_inputs", "sync"), ("all", "overlap")]
)
def test_gradients_are_bitwise_equal(machine, mesh, mode, schedule, is_strict):
    """Gathered parameters and views of them never move. FSDP2's own streams copy beside those of offload."""
    model, other = sharded(machine, mesh, block=Scaled), sharded(machine, mesh, block=Scaled)
    for m in (model, other):
        m.call = lambda block, h, rope, m=m: block(h, rope, m.head.weight[0])
    config = OffloadConfig(mode=mode, schedule=schedule, keep_last=0, **EVERYTHING)
    offloader = apply_offload(model, config, runtime=machine.runtime(is_strict))
    for seed, seq in enumerate(machine.seqs):
        tokens = machine.tokens(seed, seq)
        stats = step(model, offloader, tokens)
        other.zero_grad()
        other.loss(tokens).backward()
        assert_same_shards(model, other)
        outside = (tokens.nbytes,) if mode == "all" else ()  # what the embedding saves
        assert stats.num_offloads == toy.NUM_BLOCKS + len(outside)
        assert stats.offloaded_bytes == toy.NUM_BLOCKS * machine.input_bytes(seq) + sum(outside)
    assert toy.slots_in_use(offloader) == 0


@pytest.mark.parametrize("is_strict", [False, True], ids=["plain", "strict"])
def test_two_microbatches_alive(machine, mesh, is_strict):
    """First in, first out: parameters of the graph that waits are gathered again meanwhile."""
    batches = [machine.tokens(seed, seq) for seed, seq in enumerate(machine.seqs[:2])]
    model, other = sharded(machine, mesh), sharded(machine, mesh)
    offloader = apply_offload(model, OffloadConfig(**EVERYTHING), runtime=machine.runtime(is_strict))
    for _ in range(2):
        for m in (model, other):
            m.zero_grad()
            losses = [m.loss(tokens) for tokens in batches]
            while losses:
                losses.pop(0).backward()
        assert_same_shards(model, other)
        assert offloader.step_end().num_offloads == 2 * MOVED
    assert toy.slots_in_use(offloader) == 0


def test_a_budget_is_settled_and_the_link_measured_before_step_1(machine, mesh):
    """Without ``budget_bytes`` it is this rank's share of the host; the link is measured where the config says so."""
    model, other = sharded(machine, mesh), sharded(machine, mesh)
    config = OffloadConfig(measure_link=True, **EVERYTHING)
    offloader = apply_offload(model, config, runtime=machine.runtime())
    pool = offloader.engine.pool
    assert offloader.share.own.facts.device_name == str(current_device(offloader.engine.runtime)) == str(machine.device)
    assert pool.budget_bytes >= offloader.share.own.budget_bytes > 0
    assert pool.bytes_pinned == 0  # nobody said what will be needed
    ports = (offloader.link.alone, offloader.link.shared)
    assert min(rate for port in ports for rate in (*port.bytes_per_s(False), *port.bytes_per_s(True))) > 0
    stats = step(model, offloader, machine.tokens())
    other.loss(machine.tokens()).backward()
    assert_same_shards(model, other)
    assert (stats.num_offloads, stats.pinned_total_bytes) == (MOVED, MOVED * machine.input_bytes())


def test_what_is_needed_is_pinned_before_step_1(machine, mesh):
    """In one slab of the exact size: no step makes another."""
    config, need = OffloadConfig(**EVERYTHING), Need(inputs=[(machine.input_bytes(), MOVED)], stage="all")
    offloader = make_offloader(config, runtime=machine.runtime())
    pool, runtime = offloader.engine.pool, offloader.engine.runtime
    progress = []
    share = share_host(
        config,
        None,
        runtime,
        pool,
        current_device(runtime),
        lambda: need,
        on_progress=lambda *done: progress.append(done),
    )
    offloader.set_share(share)
    num_bytes = MOVED * machine.input_bytes()
    assert (pool.bytes_pinned, pool.num_slabs, progress) == (num_bytes, 1, [(num_bytes, num_bytes)])
    assert share.own.need_bytes == share.own.budget_bytes == num_bytes
    model, other = sharded(machine, mesh), sharded(machine, mesh)
    offloader.attach(model)
    for seed in range(2):
        tokens = machine.tokens(seed)
        stats = step(model, offloader, tokens)
        other.zero_grad()
        other.loss(tokens).backward()
        assert_same_shards(model, other)
        assert (stats.num_offloads, pool.num_grown) == (MOVED, 1)
    offloader.remove()
    assert (pool.bytes_pinned, pool.num_slabs) == (0, 0)
