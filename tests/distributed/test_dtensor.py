"""DTensors, pending collectives and FSDP2, on gloo."""

import torch
import torch.distributed as dist
import toy
from dtensor_toy import dtensor_model, run_dtensor
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from titan_offload import HostRuntime


class Elementwise(nn.Module):
    """Matmuls refuse uneven shards; this takes them."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, dim))

    def forward(self, x, rope):
        return x + torch.tanh(x * self.weight) * rope


def check_dtensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    batch = 3  # 2 on one rank, 1 on the other: host bytes must be local ones
    expected, model = dtensor_model(mesh, block=Elementwise), dtensor_model(mesh, block=Elementwise)
    offloader = toy.offload(model)
    run_dtensor(expected, mesh, batch).backward()
    run_dtensor(model, mesh, batch).backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad._local_tensor, q.grad._local_tensor)
        assert p.grad is None or p.grad.placements == q.grad.placements
    stats = offloader.step_end()
    local_bytes = (2 if rank == 0 else 1) * toy.SEQ * toy.DIM * 4
    assert (stats.num_offloads, stats.offloaded_bytes) == (5, 5 * local_bytes)
    assert toy.slots_in_use(offloader) == 0


def test_dtensor_inputs_move_as_local_tensors(on_gloo):
    """F19, F62, H18: bytes of the local shard, uneven; the spec comes back. Guards: `local_tensor`, `rebuilder`."""
    on_gloo(check_dtensor)


def check_dtensor_in_place(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = dtensor_model(mesh)
    offloader = toy.offload(model, max_inflight_offloads=0)
    offloader.engine.runtime.query = lambda event: False
    inputs = []
    model.between = lambda i, h: (inputs.append(h), h)[1]
    loss = run_dtensor(model, mesh, 2)
    with torch.no_grad():
        inputs[1].add_(1)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("an in-place change of a packed DTensor was not noticed")


def test_in_place_change_of_a_packed_dtensor_raises(on_gloo):
    """Guards: that `version_of` asks the DTensor too."""
    on_gloo(check_dtensor_in_place)


def check_pending_collective(rank):
    mesh = init_device_mesh("cpu", (2,))
    group = dist.group.WORLD
    waited = []
    wait = AsyncCollectiveTensor.trigger_wait
    AsyncCollectiveTensor.trigger_wait = lambda self: (waited.append(self.elem.data_ptr()), wait(self))[1]

    def pending(h):
        return all_reduce(h * 0.5, "sum", group)

    def run(model, where):
        h = torch.ones(2, 4, toy.DIM) * torch.arange(1, toy.DIM + 1)
        for block in model.layers.values():
            x = pending(h._local_tensor.detach() if isinstance(h, DTensor) else h.detach())
            assert isinstance(x, AsyncCollectiveTensor)
            if where == "inside a DTensor":
                x = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
                assert isinstance(x._local_tensor, AsyncCollectiveTensor)
            h = block(x, model.rope)
        h = h.to_local() if isinstance(h, DTensor) else h
        return h.square().sum()

    for where in ("at the top", "inside a DTensor"):
        make = dtensor_model if where == "inside a DTensor" else lambda mesh: toy.make_model()
        expected, model = make(mesh), make(mesh)
        run(expected, where).backward()
        offloader = toy.offload(model, keep_last=0)
        runtime = offloader.engine.runtime
        copy, copied = runtime.copy, []

        def spy(dst, src, stream, copy=copy, copied=copied):
            if stream.name == "d2h":
                copied.append(src.data_ptr() in waited)
            copy(dst, src, stream)

        runtime.copy = spy
        waited.clear()
        run(model, where).backward()
        assert copied == [True] * toy.NUM_BLOCKS, (where, copied)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            local = [g._local_tensor if isinstance(g, DTensor) else g for g in (p.grad, q.grad)]
            assert (local[0] is None) == (local[1] is None)
            assert local[0] is None or torch.equal(*local)
        assert toy.slots_in_use(offloader) == 0


def test_pending_collective_is_waited_for_before_the_copy(on_gloo):
    """F03, F61, H19: at the top and inside a DTensor. Guards: `trigger_wait` in `local_tensor`."""
    on_gloo(check_pending_collective)


def fsdp_model(**kwargs):
    model = toy.make_model(**kwargs)
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


class Scaled(toy.Block):
    """Takes a parameter of the root as a positional input."""

    def forward(self, x, rope, scale):
        return super().forward(x * scale, rope)


def check_fsdp(rank):
    tokens = toy.make_tokens(rank)
    expected, model = fsdp_model(block=Scaled), fsdp_model(block=Scaled)
    for m in (expected, model):
        m.call = lambda block, h, rope, m=m: block(h, rope, m.head.weight[0])
    keys = list(model.state_dict())
    offloader = toy.offload(model, keep_last=0)
    assert list(model.state_dict()) == keys
    for _ in range(2):
        for m in (expected, model):
            m.zero_grad()
            m.loss(tokens).backward()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad._local_tensor, q.grad._local_tensor)
        stats = offloader.step_end()
        assert (stats.num_offloads, stats.offloaded_bytes) == (toy.NUM_BLOCKS, toy.NUM_BLOCKS * toy.INPUT_BYTES)
        assert toy.slots_in_use(offloader) == 0


def test_fsdp2_parameters_and_their_views_never_move(on_gloo):
    """F26, F27, H12: a view of a gathered parameter among the inputs. Guards: `_storages_of_state`, and that it is
    asked anew for each forward."""
    on_gloo(check_fsdp)


def check_fsdp_graph_after_reshard(rank):
    """Two microbatches alive at once under FSDP2, first in, first out."""
    batches = [toy.make_tokens(2 * i + rank) for i in range(2)]
    expected, model = fsdp_model(), fsdp_model()
    offloader = toy.offload(model, runtime=HostRuntime(link_gb_per_s=0.01))
    for m in (expected, model):
        losses = [m.loss(tokens) for tokens in batches]
        while losses:
            losses.pop(0).backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad._local_tensor, q.grad._local_tensor)
    assert toy.slots_in_use(offloader) == 0


def test_fsdp2_with_two_microbatches_alive(on_gloo):
    on_gloo(check_fsdp_graph_after_reshard)
