"""DTensors, pending collectives and FSDP2, on gloo."""

import pytest
import torch
import torch.distributed as dist
import toy
from dtensor_toy import dtensor_model, run_dtensor
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_offload import HostRuntime
from titan_offload.saved_tensor import is_same_version


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


class WrapsItsActivation(nn.Module):
    """As with tensor parallel: what one op saves as a plain tensor, the next one saves as a DTensor."""

    mesh = None

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, dim))

    def forward(self, x, rope, mask=None):
        hidden = torch.tanh(x * rope)  # saves its result
        weight = DTensor.from_local(self.weight, self.mesh, [Replicate()], run_check=False)
        wrapped = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return x + (wrapped * weight).to_local()  # saves ``wrapped`` for the weight's gradient


def check_a_dtensor_of_a_saved_tensor(rank):
    WrapsItsActivation.mesh = init_device_mesh("cpu", (2,))
    expected, model = (toy.make_model(block=WrapsItsActivation, wrap=lambda block: block) for _ in range(2))
    offloader = toy.offload(model, mode="all")
    for m in (expected, model):
        m.loss(toy.make_tokens()).backward()
    toy.assert_same_grads(model, expected)
    stats = offloader.step_end()
    num_bytes = toy.make_tokens().numel() * toy.DIM * 4
    num_blocks = len(model.layers) - 1
    # The tokens of the embedding, and of each block what tanh made: there is no gradient to the rotary table.
    assert (stats.num_offloads, stats.offloaded_bytes) == (
        1 + num_blocks,
        toy.make_tokens().nbytes + num_blocks * num_bytes,
    )


def test_a_tensor_that_is_saved_plain_and_as_a_dtensor_moves_once(on_gloo):
    """Guards: `is_same_version`."""
    on_gloo(check_a_dtensor_of_a_saved_tensor)


@pytest.mark.parametrize(
    ("moved", "own", "is_same"),
    [
        *(((0,), (0,), True), ((0,), (1,), False), ((2, 0), (2, 0), True), ((1, 0), (0, 0), False)),
        *(((0,), (0, 0), True), ((3,), (0, 3), True), ((3,), (1, 3), False), ((0,), (0, 1), False)),
        *(((0, 3), (3,), False), ((0, 0), (0,), False)),  # the DTensor may have been changed since
        *(((), (), True), ((), (0,), False), ((), (0, 0), False), ((0, 0), (), False)),
    ],
)
def test_in_place_changes_of_a_dtensor_and_its_local_tensor_are_told_apart(moved, own, is_same):
    assert is_same_version(moved, own) is is_same


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


class LocalThenDTensor(nn.Module):
    """Saves a tensor as it is and as a DTensor, as attention under tensor parallel does with its output."""

    def __init__(self, dim):
        super().__init__()
        self.plain = nn.Parameter(torch.linspace(-1, 1, dim))
        self.weight = nn.Parameter(torch.linspace(1, 2, dim))
        self.change = lambda whole: None

    def forward(self, x, rope):
        a = torch.sin(x.to_local().detach())
        plain = a * self.plain.to_local()
        whole = DTensor.from_local(a, x.device_mesh, x.placements, run_check=False)
        with torch.no_grad():
            self.change(whole)
        return x + whole * self.weight + DTensor.from_local(plain, x.device_mesh, x.placements, run_check=False)


def check_local_then_dtensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    for change, num_moved in ((lambda whole: None, 1), (lambda whole: whole.mul_(2), 2)):
        models = [dtensor_model(mesh, block=LocalThenDTensor, wrap=lambda block: block) for _ in range(2)]
        for model in models:
            for block in model.layers.values():
                block.change = change
        offloader = toy.offload(models[0], mode="all")
        for model in models:
            run_dtensor(model, mesh, 4).backward()
        for got, expected in zip(*(model.layers.values() for model in models), strict=True):
            assert torch.equal(got.weight.grad._local_tensor, expected.weight.grad._local_tensor)
        assert offloader.step_end().num_offloads == num_moved * (toy.NUM_BLOCKS - 1)


def test_tensor_that_is_saved_plain_and_as_a_dtensor_moves_once(on_gloo):
    """Guards: `is_same_version`. A change of a DTensor does not count in the tensor that it is made of."""
    on_gloo(check_local_then_dtensor)


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
    """F26, F27, H12: a view of a gathered parameter among the inputs. Guards: `StateStorages`, and that it is
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
