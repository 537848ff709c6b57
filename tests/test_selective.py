"""Selective saves: the same gradients to the last bit, less work in backward, and the bytes that were promised."""

import contextlib
import copy
import gc
import logging
import threading
import weakref

import attention_toy as at
import pytest
import torch
import toy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from toy import slow_link

from titan_offload import (
    HostRuntime,
    OffloadConfig,
    SelectiveConfig,
    apply_offload,
    register_mandatory_save,
    register_preferred_save,
    save_policy,
    save_registry,
    saved_output,
)
from titan_offload import selective as selective_module
from titan_offload.rule_log import NUM_REGIONS, RuleLog, SavedPlace
from titan_offload.save_policy import SaveRule
from titan_offload.save_registry import register_builtin_save, registered_saves
from titan_offload.selective import RegionSaves

TOKENS = toy.make_tokens()
MOVE_ALL = OffloadConfig(min_offload_mib=0.0)
ONLY_SAVES = OffloadConfig(mode="none", min_offload_mib=0.0)
ON_DEVICE = OffloadConfig(mode="none")

# Where what is saved goes; the engine's settings, and whether it is offloaded.
PLACES = {
    "on the device": (ON_DEVICE, False),
    "on the device, inputs moved": (MOVE_ALL, False),
    "moved": (ONLY_SAVES, True),
    "moved, inputs too": (MOVE_ALL, True),
    "moved, keep_last 0, lookahead 2": (OffloadConfig(min_offload_mib=0.0, keep_last=0, prefetch_lookahead=2), True),
    "moved, sync": (OffloadConfig(min_offload_mib=0.0, schedule="sync"), True),
    "moved, budget for half": (OffloadConfig(min_offload_mib=0.0, pinned_budget_gib=40_000 / 1024**3), True),
}
OPTIONS = {
    "attention": {},
    "wo": {"save_ops": (), "save_modules": ("wo",)},
    "glob": {"save_ops": (), "save_modules": ("layers.*.feed_forward.w?",)},
    "min_k": {"save_ops": (), "save_matmul_min_k": 64},
    "all matmuls": {"save_ops": ("aten::mm", "aten::addmm")},
    "everything": {"save_ops": ("aten::",)},
    "combined": {"save_ops": ("attention", "tanh"), "save_modules": ("wq", "feed_forward.w1"), "save_matmul_min_k": 64},
}


def selective(place: str, **options) -> tuple[OffloadConfig, SelectiveConfig]:
    offload, moves = PLACES[place]
    return offload, SelectiveConfig(offload=moves, **options)


def without_ac(model: toy.Model) -> toy.Model:
    for name, block in list(model.layers.items()):
        model.layers[name] = block._checkpoint_wrapped_module
    return model


def backward(model: toy.Model, tokens: torch.Tensor = TOKENS) -> toy.Model:
    model.loss(tokens).backward()
    return model


@pytest.fixture
def router_saves():
    saves = [
        register_mandatory_save(op, "router", reason="tokens would go to other experts")
        for op in ("aten::mm", "aten::_softmax", "aten::topk")
    ]
    with at.removed_afterwards(*saves):
        yield saves


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Other tests import what registers saves of TorchTitan's models."""
    monkeypatch.setattr(save_registry, "_registered", [])


# Gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_bitwise_equal(options, place, dtype):
    plain = backward(at.make_model().to(dtype))
    toy.assert_same_grads(plain, backward(without_ac(at.make_model().to(dtype))))
    model = at.make_model().to(dtype)
    offloader = apply_offload(model, *selective(place, **OPTIONS[options]), runtime=slow_link())
    for _ in range(3):
        model.zero_grad()
        backward(model)
        toy.assert_same_grads(model, plain)
        stats = offloader.step_end()
        assert stats.saved
        assert stats.pinned_in_use_bytes == 0
    assert (stats.num_offloads > 0) == (offloader.engine.config.mode != "none" or PLACES[place][1])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop(early_stop, place):
    def make():
        model = at.make_model()
        for name, block in list(model.layers.items()):
            model.layers[name] = checkpoint_wrapper(block._checkpoint_wrapped_module, early_stop=early_stop)
        return model

    model = make()
    apply_offload(model, *selective(place, save_modules=("w2",)), runtime=slow_link())
    ops = at.num_ops_in_backward(model, TOKENS)
    toy.assert_same_grads(model, backward(make()))
    # w1 always; w2 only where recompute goes on to the end, and then it was saved
    assert ops["aten::addmm"] == toy.NUM_BLOCKS


@pytest.mark.parametrize("place", PLACES)
def test_autocast(place):
    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.loss(TOKENS)
        loss.backward()
        return model

    model = at.make_model()
    offloader = apply_offload(model, *selective(place, save_modules=("wo", "w1")), runtime=slow_link())
    toy.assert_same_grads(run(model), run(at.make_model()))
    saved = offloader.step_end().saved
    assert saved['save_modules "wo"'] == (toy.NUM_BLOCKS, toy.NUM_BLOCKS * at.BATCH * at.SEQ * at.DIM * 2)


@pytest.mark.parametrize("place", PLACES)
def test_forward_under_a_profiler_and_backward_without(place):
    model = at.make_model()
    apply_offload(model, *selective(place, save_ops=("aten::",)), runtime=slow_link())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        loss = model.loss(TOKENS)
        with torch.profiler.record_function("step"):
            pass
    loss.backward()
    toy.assert_same_grads(model, backward(at.make_model()))


@pytest.mark.parametrize("place", PLACES)
def test_two_microbatches_alive(place):
    batches = toy.make_tokens(seed=1), toy.make_tokens(seed=2)
    model, plain = at.make_model(), at.make_model()
    apply_offload(model, *selective(place, save_modules=("wo",)), runtime=slow_link())
    for target in (model, plain):
        losses = [target.loss(batch) for batch in batches]
        for loss in losses:
            loss.backward()
    toy.assert_same_grads(model, plain)


@pytest.mark.parametrize("place", PLACES)
def test_block_called_twice_in_a_forward(place):
    model, plain = at.make_model(), at.make_model()
    apply_offload(model, *selective(place, save_modules=("wo",)), runtime=slow_link())
    for target in (model, plain):
        target.call = lambda block, h, rope: block(block(h, rope, mask=None), rope, mask=None)
        backward(target)
    toy.assert_same_grads(model, plain)


@pytest.mark.parametrize("place", PLACES)
def test_block_skipped_in_some_steps(place):
    model, plain = at.make_model(), at.make_model()
    offloader = apply_offload(model, *selective(place), runtime=slow_link())
    for step in range(4):
        for target in (model, plain):
            skipped = target.layers["2"] if step % 2 else None
            target.call = lambda block, h, rope, skipped=skipped: h if block is skipped else block(h, rope, mask=None)
            target.zero_grad()
            backward(target)
        toy.assert_same_grads(model, plain)
        assert offloader.step_end().saved['save_ops "attention"'][0] == toy.NUM_BLOCKS - step % 2


@pytest.mark.parametrize("place", PLACES)
def test_second_backward_over_a_retained_graph(place):
    plain = backward(at.make_model())
    model = at.make_model()
    offloader = apply_offload(model, *selective(place, save_modules=("wo",)), runtime=slow_link())
    loss = model.loss(TOKENS)
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        toy.assert_same_grads(model, plain)
    del loss
    assert toy.slots_in_use(offloader) == 0


@pytest.mark.parametrize("place", PLACES)
def test_split_backward_recomputes_a_region_several_times(place):
    """As zero-bubble schedules do: first the gradients of inputs, then those of weights, one call each."""
    plain = backward(at.make_model())
    model = at.make_model()
    offloader = apply_offload(model, *selective(place, save_modules=("wo",)), runtime=slow_link())
    loss = model.loss(TOKENS)
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(loss, parameter, retain_graph=True)[0] for parameter in parameters]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    toy.assert_same_grads(model, plain)
    del loss, grads
    assert toy.slots_in_use(offloader) == 0


@pytest.mark.parametrize("place", PLACES)
def test_a_retained_graph_holds_nothing_of_its_recomputes(place):
    made: list[weakref.ref] = []

    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            hidden = torch.tanh(x)
            if at.in_backward():
                made.append(weakref.ref(hidden.untyped_storage()))
            return x + torch.exp(torch.sigmoid(hidden))

    model = at.make_model(Block)
    apply_offload(model, *selective(place, save_ops=("aten::sigmoid",)), runtime=slow_link())
    loss = model.loss(TOKENS)
    loss.backward(retain_graph=True)
    assert [storage() for storage in made] == [None] * toy.NUM_BLOCKS


def test_torchs_own_selective_checkpointing_allows_one_recompute():
    """What the two tests above have over it."""
    policy = [at.ATTENTION_OP]
    block = checkpoint_wrapper(at.AttentionBlock(), context_fn=lambda: create_selective_checkpoint_contexts(policy))
    out = block(torch.randn(1, 4, at.DIM, requires_grad=True), torch.ones(at.DIM)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        out.backward()


def test_no_grad_and_eval_leave_no_trace():
    model = at.make_model()
    offloader = apply_offload(model, *selective("moved"), runtime=slow_link())
    with torch.no_grad():
        model.loss(TOKENS)
    assert offloader.step_end().saved == {}
    backward(model)
    model.zero_grad()
    model.eval()
    loss = model.loss(TOKENS)
    assert toy.slots_in_use(offloader) == 0
    loss.backward()
    toy.assert_same_grads(model, backward(at.make_model()))


@pytest.mark.parametrize("place", ["on the device", "moved"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpoint_around_checkpoint(early_stop, place):
    def run(model):
        model.call = lambda block, h, rope: torch.utils.checkpoint.checkpoint(
            block, h, rope, use_reentrant=False, early_stop=early_stop
        )
        return backward(model)

    model = at.make_model()
    offloader = apply_offload(model, *selective(place), runtime=slow_link())
    toy.assert_same_grads(run(model), run(at.make_model()))
    # the outer recompute saves again, unless it stops before, but moves nothing
    stats = offloader.step_end()
    assert stats.saved['save_ops "attention"'][0] == (1 if early_stop else 2) * toy.NUM_BLOCKS
    assert stats.num_offloads == (2 * (toy.NUM_BLOCKS - 1) if place == "moved" else 0)


@pytest.mark.parametrize("place", PLACES)
def test_everything_dies_with_the_graph_without_the_garbage_collector(place, monkeypatch):
    alive = weakref.WeakSet()
    init = RegionSaves.__init__
    monkeypatch.setattr(RegionSaves, "__init__", lambda self, block: (init(self, block), alive.add(self))[0])
    model = at.make_model()
    offloader = apply_offload(model, *selective(place, save_ops=("aten::",)), runtime=slow_link())
    gc.disable()
    try:
        backward(model)
        assert not alive
        loss = model.loss(TOKENS)
        assert len(alive) == toy.NUM_BLOCKS
        del loss
        assert not alive
        model.between = lambda i, h: 1 // 0 if i == 3 else h
        with contextlib.suppress(ZeroDivisionError):
            model.loss(TOKENS)
        assert not alive
        assert toy.slots_in_use(offloader) == 0
    finally:
        gc.enable()


# Work


def test_attention_is_not_recomputed():
    name = at.ATTENTION_OP.name()
    before = at.num_ops_in_backward(at.make_model(), TOKENS)
    model = at.make_model()
    apply_offload(model, ON_DEVICE, SelectiveConfig(), runtime=slow_link())
    after = at.num_ops_in_backward(model, TOKENS)
    assert before[name] == toy.NUM_BLOCKS
    assert name not in after
    assert after["aten::mm"] == before["aten::mm"]


@pytest.mark.parametrize(
    "options, op, num_per_block",
    [
        ({"save_modules": ("wo",)}, "aten::mm", 1),
        ({"save_modules": ("attention.wo", "wq")}, "aten::mm", 2),
        ({"save_modules": ("attention",)}, "aten::mm", 4),
        ({"save_modules": ("layers.*.w[kv]",)}, "aten::mm", 2),
        ({"save_modules": ("w1",)}, "aten::addmm", 1),
        ({"save_modules": ("w2",)}, "aten::addmm", 0),  # recompute stops before it
        ({"save_matmul_min_k": at.DIM}, "aten::mm", 4),
        ({"save_matmul_min_k": at.DIM + 1}, "aten::mm", 0),
    ],
)
def test_saved_matmuls_are_not_recomputed(options, op, num_per_block):
    before = at.num_ops_in_backward(at.make_model(), TOKENS)
    model = at.make_model()
    apply_offload(model, ON_DEVICE, SelectiveConfig(save_ops=(), **options), runtime=slow_link())
    after = at.num_ops_in_backward(model, TOKENS)
    assert before[op] - after.get(op, 0) == num_per_block * toy.NUM_BLOCKS
    assert after[at.ATTENTION_OP.name()] == toy.NUM_BLOCKS


def test_a_rule_may_be_of_a_whole_block():
    model = at.make_model()
    config = SelectiveConfig(save_ops=(), save_modules=("layers.3",))
    offloader = apply_offload(model, ON_DEVICE, config, runtime=slow_link())
    toy.assert_same_grads(backward(model), backward(at.make_model()))
    assert offloader.step_end().saved['save_modules "layers.3"'][0] == 4 + 2


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_registered_save_may_be_of_the_class_of_a_block(is_compiled):
    with at.removed_afterwards(register_mandatory_save("aten::tanh", at.AttentionBlock, reason="test")):
        model = compiled(at.make_model()) if is_compiled else at.make_model()
        apply_offload(model, ON_DEVICE, runtime=slow_link())
    assert "aten::tanh" not in at.num_ops_in_backward(model, TOKENS)
    toy.assert_same_grads(model, backward(at.make_model()))


def test_exact_name_is_one_block():
    before = at.num_ops_in_backward(at.make_model(), TOKENS)
    model = at.make_model()
    config = SelectiveConfig(save_ops=(), save_modules=("layers.3.attention.wo",))
    apply_offload(model, ON_DEVICE, config, runtime=slow_link())
    assert before["aten::mm"] - at.num_ops_in_backward(model, TOKENS)["aten::mm"] == 1


def test_registry_alone_removes_the_router_only(router_saves):
    before = at.num_ops_in_backward(at.make_model(at.MoEBlock), TOKENS)
    model = at.make_model(at.MoEBlock)
    apply_offload(model, ON_DEVICE, SelectiveConfig(save_ops=()), runtime=slow_link())
    after = at.num_ops_in_backward(model, TOKENS)
    gone = {name: num - after.get(name, 0) for name, num in before.items() if num > after.get(name, 0)}
    assert gone == {"aten::mm": toy.NUM_BLOCKS, "aten::_softmax": toy.NUM_BLOCKS, "aten::topk": toy.NUM_BLOCKS}
    toy.assert_same_grads(model, backward(at.make_model(at.MoEBlock)))


def test_a_linear_of_an_expanded_weight_counts_and_attention_taken_apart_does_not():
    class Block(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.w = nn.Linear(dim, dim, bias=False)

        def forward(self, x, rope, mask=None):
            weight = self.w.weight.t().expand(x.shape[0], -1, -1)
            y = torch.bmm(x, weight)
            return x + torch.bmm(torch.bmm(y, y.transpose(1, 2)).softmax(-1), y).tanh()

    model = at.make_model(Block)
    offloader = apply_offload(
        model, ON_DEVICE, SelectiveConfig(save_ops=(), save_matmul_min_k=at.SEQ), runtime=slow_link()
    )
    toy.assert_same_grads(backward(model), backward(at.make_model(Block)))
    num_bytes = at.BATCH * at.SEQ * at.DIM * 4
    assert offloader.step_end().saved == {f"save_matmul_min_k {at.SEQ}": (toy.NUM_BLOCKS, toy.NUM_BLOCKS * num_bytes)}


# Bytes


def test_bytes_of_attention():
    model = at.make_model()
    offloader = apply_offload(model, ON_DEVICE, SelectiveConfig(), runtime=slow_link())
    backward(model)
    out, log_sum_exp = at.BATCH * at.SEQ * at.DIM * 4, at.BATCH * at.HEADS * at.SEQ * 4
    expected = toy.NUM_BLOCKS, toy.NUM_BLOCKS * (out + log_sum_exp)
    assert offloader.step_end().saved == {'save_ops "attention"': expected}


@pytest.mark.parametrize("keep_last", [0, 1, 3])
def test_device_holds_nothing_beyond_keep_last_and_stash(keep_last, monkeypatch):
    """Storages of attention's outputs that are alive after forward."""
    outputs: list[weakref.ref] = []
    keep = selective_module.keep

    def spy(output, *args):
        outputs.append(weakref.ref(output.untyped_storage()))
        return keep(output, *args)

    monkeypatch.setattr(selective_module, "keep", spy)
    model = at.make_model()
    config = OffloadConfig(mode="none", min_offload_mib=0.0, keep_last=keep_last, max_inflight_offloads=1)
    offloader = apply_offload(model, config, SelectiveConfig(offload=True), runtime=slow_link())
    loss = model.loss(TOKENS)
    alive = [ref() is not None for ref in outputs]
    num_stashed = len(offloader.engine.stash)
    assert num_stashed <= 1
    assert len(alive) == 2 * toy.NUM_BLOCKS
    assert sum(alive) == 2 * keep_last + num_stashed
    assert all(alive[len(alive) - 2 * keep_last :])
    assert toy.slots_in_use(offloader) == 2 * (toy.NUM_BLOCKS - keep_last)
    loss.backward()
    assert toy.slots_in_use(offloader) == 0


def let_copies_end(offloader) -> None:
    for entry in offloader.engine.stash:
        offloader.engine.runtime.synchronize(entry.event)


@pytest.mark.parametrize("mode, num", [("none", 2), ("block_inputs", 3)])
def test_saved_outputs_come_back_with_the_region_ahead_of_use(mode, num):
    """All but those of the region that backward reaches first, which nothing could announce. They start first."""
    model = at.make_model()
    config = OffloadConfig(mode=mode, min_offload_mib=0.0, keep_last=0, max_inflight_offloads=1)
    offloader = apply_offload(model, config, SelectiveConfig(offload=True), runtime=HostRuntime())
    started = []
    start = offloader.engine._start_reload
    offloader.engine._start_reload = lambda payload: (started.append(payload.region.index), start(payload))[1]
    loss = model.loss(TOKENS)
    let_copies_end(offloader)
    loss.backward()
    assert started == [i for i in reversed(range(toy.NUM_BLOCKS)) for _ in range(num)]
    stats = offloader.step_end()
    assert stats.num_offloads == stats.num_reloads == num * toy.NUM_BLOCKS
    assert (stats.num_misses, stats.num_prefetch_hits) == (num, num * (toy.NUM_BLOCKS - 1))


def test_a_reload_is_late_only_where_nothing_announced_it():
    """The first backward starts in the middle; the second one comes past there."""
    model = at.make_model()
    config = OffloadConfig(mode="none", min_offload_mib=0.0, keep_last=0, max_inflight_offloads=1)
    offloader = apply_offload(model, config, SelectiveConfig(offload=True), runtime=HostRuntime())
    hidden = []
    model.between = lambda i, h: (hidden.append(h), h)[1]
    loss = model.loss(TOKENS)
    let_copies_end(offloader)
    for start, num_regions in ((hidden[3].sum(), 3), (loss, toy.NUM_BLOCKS)):
        start.backward(retain_graph=True)
        stats = offloader.step_end()
        assert (stats.num_misses, stats.num_prefetch_hits) == (2, 2 * (num_regions - 1))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_reloads_start_when_recompute_starts_where_no_input_is_moved(lookahead):
    order = []

    class Spying(HostRuntime):
        def copy(self, dst, src, stream):
            order.append("copy")
            super().copy(dst, src, stream)

    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            order.append("forward")
            return super().forward(x, rope, mask)

    model = at.make_model(Block, num_blocks=2)
    runtime = Spying()
    config = OffloadConfig(mode="none", min_offload_mib=0.0, keep_last=0, prefetch_lookahead=lookahead)
    offloader = apply_offload(model, config, SelectiveConfig(offload=True), runtime=runtime)
    query, runtime.query = runtime.query, lambda event: False  # forward sees no copy end
    loss = model.loss(TOKENS)
    let_copies_end(offloader)
    runtime.query = query
    order.clear()
    loss.backward()
    copies = ["copy"] * 2
    assert order == ([*copies, *copies, "forward", "forward"] if lookahead else [*copies, "forward"] * 2)


def test_what_is_alive_is_not_reloaded_when_its_region_is_reached():
    held = []

    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            hidden = torch.sigmoid(x)
            if at.in_backward():
                held.append(hidden)
            return super().forward(x + hidden, rope)

    model = at.make_model(Block)
    config = OffloadConfig(mode="none", min_offload_mib=0.0, keep_last=0, max_inflight_offloads=1)
    saves = SelectiveConfig(save_ops=("aten::sigmoid",), offload=True)
    offloader = apply_offload(model, config, saves, runtime=HostRuntime())
    loss = model.loss(TOKENS)
    let_copies_end(offloader)
    for num_reloads in (toy.NUM_BLOCKS, 0):
        loss.backward(retain_graph=True)
        stats = offloader.step_end()
        assert (stats.num_reloads, stats.num_resident) == (num_reloads, toy.NUM_BLOCKS - num_reloads)


def test_schedule_sync_reloads_when_asked():
    model = at.make_model()
    config = OffloadConfig(mode="none", min_offload_mib=0.0, schedule="sync", keep_last=0)
    offloader = apply_offload(model, config, SelectiveConfig(offload=True), runtime=HostRuntime())
    backward(model)
    stats = offloader.step_end()
    assert (stats.num_reloads, stats.num_misses, stats.num_prefetch_hits) == (2 * toy.NUM_BLOCKS, 0, 0)


def test_exhausted_budget_is_an_error_if_asked_for():
    model = at.make_model()
    config = OffloadConfig(mode="none", min_offload_mib=0.0, pinned_budget_gib=6000 / 1024**3, on_exhausted="error")
    apply_offload(model, config, SelectiveConfig(offload=True), runtime=slow_link())
    with pytest.raises(RuntimeError, match=r"no pinned host memory for .* layers\.1"):
        model.loss(TOKENS)


# Routing


def perturbed(change) -> type[nn.Module]:
    """A MoE block whose router does ``change`` to the logits in recompute."""

    class PerturbedRouter(at.Router):
        def perturb(self, logits):
            return change(logits) if at.in_backward() else logits

    moe = type("PerturbedMoE", (at.MoE,), {"router_type": PerturbedRouter})
    return type("PerturbedBlock", (at.MoEBlock,), {"moe_type": moe})


def noise(logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))


def other_order_of_ties(logits: torch.Tensor) -> torch.Tensor:
    return logits + 1e-6 * torch.arange(logits.shape[-1])


def tie_scores(model: toy.Model) -> toy.Model:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name:
                parameter.zero_()
    return model


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change, prepare", [(noise, lambda model: model), (other_order_of_ties, tie_scores)])
def test_routing_of_forward_is_kept(change, prepare, place, router_saves):
    expected = backward(prepare(at.make_model(at.MoEBlock)))
    model = prepare(at.make_model(perturbed(change)))
    apply_offload(model, *selective(place), runtime=slow_link())
    toy.assert_same_grads(backward(model), expected)


@pytest.mark.parametrize("change, prepare", [(noise, lambda model: model), (other_order_of_ties, tie_scores)])
def test_without_registration_the_same_gives_other_gradients(change, prepare):
    assert not [save for save in registered_saves() if save.module == "router"]
    expected = backward(prepare(at.make_model(at.MoEBlock)))
    model = prepare(at.make_model(perturbed(change)))
    apply_offload(model, *selective("on the device"), runtime=slow_link())
    backward(model)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert not all(torch.equal(p.grad, q.grad) for p, q in pairs)


def test_registered_saves_apply_without_selective_config(router_saves):
    expected = backward(at.make_model(at.MoEBlock))
    model = at.make_model(perturbed(noise))
    offloader = apply_offload(model, MOVE_ALL, runtime=slow_link())
    toy.assert_same_grads(backward(model), expected)
    assert set(offloader.step_end().saved) == {
        f"registered mandatory save {op} in router" for op in ("aten::mm", "aten::_softmax", "aten::topk")
    }


def test_blocks_without_a_rule_are_left_alone(router_saves):
    model = at.make_model()
    checkpoint_fns = [block.checkpoint_fn for block in model.layers.values()]
    offloader = apply_offload(model, ON_DEVICE, runtime=slow_link())
    assert offloader.saves.blocks == {}
    assert [block.checkpoint_fn for block in model.layers.values()] == checkpoint_fns


def test_check_routing_counts_the_tokens(router_saves):
    num_favoured = 5

    def favour_expert_0(logits):
        bonus = torch.zeros_like(logits)
        bonus[:num_favoured, 0] = 5
        return logits + bonus

    picked = []

    class Router(at.Router):
        def perturb(self, logits):
            return favour_expert_0(logits) if at.in_backward() else logits

        def forward(self, x):
            scores, indices = super().forward(x)
            if not at.in_backward():
                picked.append(indices)
            return scores, indices

    moe = type("MoE", (at.MoE,), {"router_type": Router})
    model = at.make_model(type("Block", (at.MoEBlock,), {"moe_type": moe}))
    offloader = apply_offload(model, ON_DEVICE, SelectiveConfig(check_routing=True), runtime=slow_link())
    toy.assert_same_grads(backward(model), backward(at.make_model(at.MoEBlock)))
    expected = {f"layers.{i}": int((indices[:num_favoured] != 0).all(-1).sum()) for i, indices in enumerate(picked)}
    assert sum(expected.values()) > 0
    assert offloader.step_end().num_rerouted == expected
    model.eval()
    assert offloader.step_end().num_rerouted == dict.fromkeys(expected, 0)


def test_check_routing_adds_up_what_a_step_does_and_lets_other_forwards_be(router_saves):
    class Router(at.Router):
        def perturb(self, logits):  # the same ops in both passes
            return logits + torch.full_like(logits[0], at.in_backward()).cumsum(0) * logits.roll(1, 0)

    moe = type("MoE", (at.MoE,), {"router_type": Router})
    model = at.make_model(type("Block", (at.MoEBlock,), {"moe_type": moe}))
    config = SelectiveConfig(save_ops=("aten::",), check_routing=True)
    offloader = apply_offload(model, ON_DEVICE, config, runtime=slow_link())
    backward(model)
    once = offloader.step_end()
    assert sum(once.num_rerouted.values()) > 0
    backward(model)
    backward(model)
    with torch.no_grad():
        model.loss(TOKENS)
    twice = offloader.step_end()
    assert twice.num_rerouted == {fqn: 2 * num for fqn, num in once.num_rerouted.items()}
    assert twice.saved == {rule: (2 * num, 2 * num_bytes) for rule, (num, num_bytes) in once.saved.items()}
    assert once.saved["registered mandatory save aten::topk in router"][0] == toy.NUM_BLOCKS
    model.eval()  # checkpoints recompute all the same
    toy.assert_same_grads(backward(model), backward(model))


def test_check_routing_within_a_module_that_is_checked_too(router_saves):
    with at.removed_afterwards(register_mandatory_save("aten::topk", "feed_forward", reason="ties")):
        model = at.make_model(perturbed(noise))
        apply_offload(model, ON_DEVICE, SelectiveConfig(check_routing=True), runtime=slow_link())
    toy.assert_same_grads(backward(model), backward(at.make_model(at.MoEBlock)))


def test_check_routing_is_of_mandatory_saves_of_topk():
    saves = register_preferred_save("aten::topk", "router"), register_mandatory_save("aten::mm", "wq", reason="test")
    with at.removed_afterwards(*saves):
        model = at.make_model(at.MoEBlock)
        offloader = apply_offload(model, ON_DEVICE, SelectiveConfig(check_routing=True), runtime=slow_link())
    backward(model)
    assert offloader.step_end().num_rerouted == {}


@pytest.mark.parametrize("place", PLACES)
def test_check_routing_changes_nothing(place, router_saves):
    """A router that draws random numbers draws the same ones after the trial run."""

    class NoisyRouter(at.Router):
        def perturb(self, logits):
            return logits + 0.1 * torch.rand_like(logits)

    class MoE(at.MoE):
        router_type = NoisyRouter

        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.3)

    block = type("Block", (at.MoEBlock,), {"moe_type": MoE})
    models = at.make_model(block), at.make_model(block)
    offloader = apply_offload(models[0], *selective(place, check_routing=True), runtime=slow_link())
    for model in models:
        torch.manual_seed(5)
        backward(model)
    toy.assert_same_grads(*models)
    assert set(offloader.step_end().num_rerouted) == {f"layers.{i}" for i in range(toy.NUM_BLOCKS)}


def test_recompute_that_goes_another_way_names_the_op():
    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            rows = 3 if at.in_backward() else 4
            return super().forward(x, rope) + self.feed_forward(x[:, :rows]).sum()

    model = at.make_model(Block)
    apply_offload(model, ON_DEVICE, SelectiveConfig(save_modules=("w1",)), runtime=slow_link())
    with pytest.raises(RuntimeError, match=r"aten::mm in layers\.5\.feed_forward\.w1 with shapes .* no counterpart"):
        backward(model)


@pytest.mark.parametrize(
    "of_forward, of_recompute",
    [
        (lambda block, x: torch.tanh(x), lambda block, x: torch.sigmoid(x)),
        (lambda block, x: block.attention.wq(x), lambda block, x: block.attention.wk(x)),
        (lambda block, x: torch.tanh(x[:, :4]).sum(), lambda block, x: torch.tanh(x[:, :3]).sum()),
        (lambda block, x: torch.tanh(x), lambda block, x: torch.tanh(torch.tanh(x))),
    ],
    ids=["op", "module", "shape", "number"],
)
def test_a_call_that_forward_did_not_make_is_an_error(of_forward, of_recompute):
    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            x = x + torch.sigmoid(x[:1])  # makes sure that an entry of each op is there
            return torch.exp((of_recompute if at.in_backward() else of_forward)(self, x) + x)

    model = at.make_model(Block)
    config = SelectiveConfig(save_ops=("aten::tanh", "aten::sigmoid"), save_modules=("wq", "wk"))
    apply_offload(model, ON_DEVICE, config, runtime=slow_link())
    with pytest.raises(RuntimeError, match=r"recompute of layers\.5 went another way than its forward: call"):
        backward(model)


# In-place edits, random numbers


class InPlaceBlock(at.AttentionBlock):
    """Normalizes what top-k returned in place, as some routers do."""

    def forward(self, x, rope, mask=None):
        hidden = self.feed_forward.w1(self.norm1(x) * rope).tanh()
        values, indices = hidden.topk(8, dim=-1)
        values /= values.sum(-1, keepdim=True) + 3
        return x + self.feed_forward.w2(torch.zeros_like(hidden).scatter(-1, indices, values))


@pytest.mark.parametrize("place", PLACES)
def test_in_place_edit_does_not_reach_a_mandatory_save(place):
    expected = backward(at.make_model(InPlaceBlock))
    with at.removed_afterwards(register_mandatory_save("aten::topk", reason="ties")):
        model = at.make_model(InPlaceBlock)
        apply_offload(model, *selective(place), runtime=slow_link())
    loss = model.loss(TOKENS)
    for _ in range(2):  # the first recompute edits in place too
        model.zero_grad()
        loss.backward(retain_graph=True)
        toy.assert_same_grads(model, expected)


class HiddenEditBlock(at.AttentionBlock):
    """Edits what a linear returns. On a batch of sequences that is a view which does not say so."""

    def forward(self, x, rope, mask=None):
        hidden = self.attention.wq(x)
        hidden.mul_(rope)
        return x + torch.tanh(hidden)


@pytest.mark.parametrize("runtime", [HostRuntime, slow_link])
@pytest.mark.parametrize("place", PLACES)
def test_in_place_edit_through_a_view_that_does_not_say_so_is_an_error(place, runtime):
    model = at.make_model(HiddenEditBlock)
    apply_offload(model, *selective(place, save_ops=("aten::mm",)), runtime=runtime())
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        backward(model)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", ["aten::mm", "aten::sigmoid"])  # the first returns a view, which does not say so
def test_in_place_edit_outside_the_block_is_an_error(op, place):
    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            return self.attention.wq(torch.tanh(x)) if op == "aten::mm" else torch.sigmoid(x)

    model = at.make_model(Block)
    model.between = lambda i, h: h.add_(1) if i else h
    # Without early stop, recompute goes on to the matmul.
    for name, block in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(block._checkpoint_wrapped_module, early_stop=False)
    apply_offload(model, *selective(place, save_ops=(op,)), runtime=slow_link())
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        backward(model)


@pytest.mark.parametrize("place", ["on the device", "on the device, inputs moved", "moved"])  # the last block's stays
def test_in_place_edit_in_a_recompute_is_an_error_in_the_next(place):
    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            hidden = torch.tanh(x).sigmoid()
            return x + torch.exp(hidden.mul_(2) if at.in_backward() else hidden * 2)

    model = at.make_model(Block)
    apply_offload(model, *selective(place, save_ops=("aten::sigmoid",)), runtime=slow_link())
    loss = model.loss(TOKENS)
    inputs = list(model.parameters())
    torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        torch.autograd.grad(loss, inputs, allow_unused=True)


def test_in_place_edit_of_what_took_the_place_of_a_freed_output_is_none_of_the_output(monkeypatch):
    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            return x + torch.tanh(x) + torch.ones_like(x).mul_(rope)

    monkeypatch.setattr(saved_output, "storage_id", lambda tensor: 0)  # all in one place
    model = at.make_model(Block)
    apply_offload(model, *selective("moved, sync", save_ops=("aten::tanh",)), runtime=HostRuntime())
    toy.assert_same_grads(backward(model), backward(at.make_model(Block)))


@pytest.mark.parametrize("runtime", [HostRuntime, slow_link])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_registered", [False, True])
def test_in_place_edit_of_any_other_save_is_an_error(is_registered, place, runtime):
    saves = [register_preferred_save("aten::topk")] if is_registered else []
    with at.removed_afterwards(*saves):
        model = at.make_model(InPlaceBlock)
        options = {} if is_registered else {"save_ops": ("aten::topk",)}
        apply_offload(model, *selective(place, **options), runtime=runtime())
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        backward(model)


class DropoutBlock(at.AttentionBlock):
    """Two ops that draw random numbers, the first of which is saved."""

    def forward(self, x, rope, mask=None):
        x = x + self.attention(self.norm1(x) * rope)
        x, _ = torch.ops.aten.native_dropout(x, 0.5, True)
        return x + self.feed_forward(self.norm2(nn.functional.dropout(x, 0.3)))


@pytest.mark.parametrize("place", PLACES)
def test_ops_after_a_saved_one_draw_the_same_random_numbers(place):
    models = at.make_model(DropoutBlock), at.make_model(DropoutBlock)
    apply_offload(models[0], *selective(place, save_ops=("aten::native_dropout",)), runtime=slow_link())
    after = []
    for model in models:
        torch.manual_seed(7)
        backward(model)
        after.append(torch.rand(1))
    toy.assert_same_grads(*models)
    assert after[0] == after[1]


def test_random_numbers_are_let_be_where_checkpoint_does_not_preserve_them():
    model = at.make_model(DropoutBlock)
    for name, block in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(block._checkpoint_wrapped_module, preserve_rng_state=False)
    apply_offload(model, ON_DEVICE, SelectiveConfig(save_ops=("aten::native_dropout",)), runtime=slow_link())
    loss = model.loss(TOKENS)
    torch.manual_seed(11)
    for _ in model.layers:  # the second dropout; the first is saved, and draws none
        nn.functional.dropout(torch.ones(at.BATCH, at.SEQ, at.DIM), 0.3)
    expected = torch.rand(1)
    torch.manual_seed(11)
    loss.backward()
    assert torch.rand(1) == expected


def test_random_numbers_are_those_of_the_host_and_of_the_device(monkeypatch):
    devices = []
    monkeypatch.setattr(saved_output, "_get_rng_state", lambda device: devices.append(device.type))
    model = at.make_model()
    offloader = apply_offload(
        model, ON_DEVICE, SelectiveConfig(save_ops=("aten::native_dropout",)), runtime=slow_link()
    )
    record = RegionSaves(offloader.saves.blocks["layers.0"])
    for output in (torch.ones(2, device="meta"), torch.ones(2)):
        record._make_entry(offloader.saves.policy.rules[0], torch.ops.aten.native_dropout.default, output)
    assert sorted(devices) == ["cpu", "cpu", "meta"]


# Ops that are not plain


def test_a_compiled_part_of_an_eager_block_stays_compiled():
    num_calls = []

    def backend(graph, inputs):
        return lambda *args: (num_calls.append(1), graph(*args))[1]

    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            return super().forward(x + scale(x.detach()), rope)

    scale = torch.compile(lambda x: x * 2 + 1, backend=backend)
    model = at.make_model(Block)
    apply_offload(model, *selective("on the device"), runtime=slow_link())
    backward(model)
    assert len(num_calls) == 2 * toy.NUM_BLOCKS


def test_flex_attention_is_an_op():
    from torch.nn.attention.flex_attention import flex_attention

    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            # FlexAttention has no backward on a CPU.
            q = x.detach().unflatten(-1, (at.HEADS, -1)).transpose(1, 2)
            return x + self.feed_forward(self.norm2(x * flex_attention(q, q, q).transpose(1, 2).flatten(2)))

    before = at.num_ops_in_backward(at.make_model(Block), TOKENS)
    model = at.make_model(Block)
    offloader = apply_offload(model, *selective("moved, inputs too"), runtime=slow_link())
    after = at.num_ops_in_backward(model, TOKENS)
    assert before["flex_attention"] == toy.NUM_BLOCKS
    assert "flex_attention" not in after
    assert offloader.step_end().saved['save_ops "attention"'][0] == toy.NUM_BLOCKS
    toy.assert_same_grads(model, backward(at.make_model(Block)))


@pytest.mark.parametrize("place", PLACES)
def test_sparse_outputs_are_saved_where_they_are(place):
    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            return super().forward(x, rope) + x.detach().flatten(0, 1).to_sparse().sum()

    model = at.make_model(Block)
    config = selective(place, save_ops=("aten::_to_sparse", "aten::tanh"))
    offloader = apply_offload(model, *config, runtime=slow_link())
    toy.assert_same_grads(backward(model), backward(at.make_model(Block)))
    assert offloader.step_end().saved['save_ops "aten::_to_sparse"'] == (toy.NUM_BLOCKS, 0)


def test_sparse_outputs_of_other_ops_are_let_be():
    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            x = super().forward(x, rope)
            return x + torch.sparse.mm(x.detach().flatten(0, 1).to_sparse(), torch.ones(at.DIM, 1)).sum()

    model = at.make_model(Block)
    apply_offload(model, *selective("on the device"), runtime=slow_link())
    toy.assert_same_grads(backward(model), backward(at.make_model(Block)))


def test_outputs_that_are_no_tensors():
    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            out = super().forward(x, rope)
            rows = (x.detach().abs().sum() * 0 + 3).long().item()  # a copy to the host that sizes something
            return out + self.feed_forward(x[:, :rows]).sum()

    with at.removed_afterwards(register_mandatory_save("aten::_local_scalar_dense", reason="waits for the device")):
        model = at.make_model(Block)
        apply_offload(model, *selective("moved, inputs too"), runtime=slow_link())
    ops = at.num_ops_in_backward(model, TOKENS)
    assert "aten::_local_scalar_dense" not in ops
    toy.assert_same_grads(model, backward(at.make_model(Block)))


# Layer types


@pytest.mark.parametrize(
    "options, num_saved",
    [
        ({}, 3),
        ({"save_sliding_window": True}, 6),
        ({"recompute_layer_types": ()}, 6),
        ({"recompute_layer_types": ("full_attention",)}, 3),
        ({"recompute_layer_types": ("full_attention", "sliding_attention")}, 0),
    ],
)
def test_layer_types(options, num_saved):
    model = at.make_model()
    for i, block in enumerate(model.layers.values()):
        block._checkpoint_wrapped_module.attention_type = ("sliding_attention", "full_attention")[i % 2]
    offloader = apply_offload(model, ON_DEVICE, SelectiveConfig(**options), runtime=slow_link())
    ops = at.num_ops_in_backward(model, TOKENS)
    assert ops.get(at.ATTENTION_OP.name(), 0) == toy.NUM_BLOCKS - num_saved
    assert offloader.step_end().saved.get('save_ops "attention"', (0, 0))[0] == num_saved
    toy.assert_same_grads(model, backward(at.make_model()))


# With torch's own selective checkpointing


def test_registered_saves_win_over_the_blocks_own(router_saves):
    """Which saves attention, and every second matmul by count, as TorchTitan's does."""

    def make_policy():
        calls = []

        def policy(context, op, *args, **kwargs):
            if op is torch.ops.aten.mm.default:
                calls.append(op)
            is_saved = op is at.ATTENTION_OP or (op is torch.ops.aten.mm.default and len(calls) % 2)
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return policy

    def own(model):
        for name, block in list(model.layers.items()):
            model.layers[name] = checkpoint_wrapper(
                block._checkpoint_wrapped_module,
                context_fn=lambda: create_selective_checkpoint_contexts(make_policy()),
            )
        return model

    model = own(at.make_model(perturbed(noise)))
    offloader = apply_offload(model, MOVE_ALL, runtime=slow_link())
    loss = model.loss(TOKENS)
    expected = backward(at.make_model(at.MoEBlock))
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        toy.assert_same_grads(model, expected)
    saved = offloader.step_end().saved
    assert saved["registered mandatory save aten::topk in router"][0] == toy.NUM_BLOCKS
    assert saved["the block's own selective checkpointing"][0] == toy.NUM_BLOCKS * (1 + 2)


@pytest.mark.parametrize(
    "decision, is_saved",
    [
        (True, True),
        (CheckpointPolicy.MUST_SAVE, True),
        (CheckpointPolicy.PREFER_SAVE, True),
        (False, False),
        (CheckpointPolicy.PREFER_RECOMPUTE, False),
        (CheckpointPolicy.MUST_RECOMPUTE, False),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_decisions_of_the_blocks_own(is_compiled, decision, is_saved):
    def policy(context, op, *args, **kwargs):
        return decision if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    model = at.make_model()
    for name, block in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(
            block._checkpoint_wrapped_module, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
    model = compiled(model) if is_compiled else model
    apply_offload(model, ON_DEVICE, SelectiveConfig(save_ops=("aten::tanh",)), runtime=slow_link())
    before = at.num_ops_in_backward(at.make_model(), TOKENS)
    after = at.num_ops_in_backward(model, TOKENS)
    assert before["aten::mm"] - after["aten::mm"] == (4 * toy.NUM_BLOCKS if is_saved else 0)
    assert "aten::tanh" not in after


def test_context_fn_that_cannot_be_joined():
    model = at.make_model()
    contexts = contextlib.nullcontext(), contextlib.nullcontext()
    for name, block in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(block._checkpoint_wrapped_module, context_fn=lambda: contexts)
    with pytest.raises(ValueError, match=r"layers\.0 is checkpointed with a context_fn of its own"):
        apply_offload(model, ON_DEVICE, SelectiveConfig(), runtime=slow_link())


# Installing and removing


def test_model_looks_the_same_and_is_as_before_after_remove(router_saves):
    model = at.make_model(at.MoEBlock)
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    checkpoint_fns = [block.checkpoint_fn for block in model.layers.values()]
    config = selective("moved, inputs too", save_modules=("wo",), check_routing=True)
    offloader = apply_offload(model, *config, runtime=slow_link())
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    loss = model.loss(TOKENS)
    offloader.remove()
    assert [block.checkpoint_fn for block in model.layers.values()] == checkpoint_fns
    assert not any("forward" in module.__dict__ for module in model.modules())
    loss.backward()  # its recompute still has to know inside which modules ops run
    del loss
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    toy.assert_same_grads(model, backward(at.make_model(at.MoEBlock)))


def test_deep_copy_runs_its_own_weights(router_saves):
    model = at.make_model(at.MoEBlock)
    apply_offload(model, *selective("moved, inputs too", save_modules=("wo",)), runtime=slow_link())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.01)
    expected = at.make_model(at.MoEBlock)
    expected.load_state_dict(twin.state_dict())
    toy.assert_same_grads(backward(twin), backward(expected))
    toy.assert_same_grads(backward(model), backward(at.make_model(at.MoEBlock)))


def test_classes_are_found_inside_the_wrappers_of_compile():
    model = at.make_model()
    for block in model.layers.values():
        block._checkpoint_wrapped_module.feed_forward = torch.compile(
            block._checkpoint_wrapped_module.feed_forward, backend="eager"
        )
    with at.removed_afterwards(register_preferred_save("aten::tanh", at.FeedForward)):
        offloader = apply_offload(model, ON_DEVICE, runtime=slow_link())
    assert {name for block in offloader.saves.blocks.values() for name in block.scopes} == {"feed_forward"}


def test_threads_do_not_share_what_they_are_inside_of():
    """Two forwards, the second of which takes place while the first is inside a module."""

    class Block(at.AttentionBlock):
        def forward(self, x, rope, mask=None):
            return super().forward(x, rope) + self.feed_forward.w1(x).sum()

    models = at.make_model(Block, num_blocks=1), at.make_model(Block, num_blocks=1)
    config = SelectiveConfig(save_ops=(), save_modules=("attention",))
    offloader = apply_offload(models[0], ON_DEVICE, config, runtime=slow_link())
    offloader.attach(models[1])
    wqs = [model.layers["0"]._checkpoint_wrapped_module.attention.wq for model in models]

    def run_the_other(module, args):
        if not at.in_backward():
            thread = threading.Thread(target=backward, args=(models[1],))
            thread.start()
            thread.join()

    wqs[0].register_forward_pre_hook(run_the_other)
    inside = []
    for wq in wqs:
        wq.register_forward_hook(lambda *_: inside.append([run.scopes[:] for run in offloader.saves.passes()]))
    backward(models[0])
    assert inside == [[["attention"]]] * 4
    toy.assert_same_grads(models[1], models[0])


def test_module_that_never_began_leaves_the_scopes_as_they_were():
    def fail(*args):
        raise ZeroDivisionError

    class Attention(at.Attention):
        def __init__(self, dim):
            super().__init__(dim)
            self.failing = nn.Linear(dim, dim)
            self.failing.register_forward_pre_hook(fail)

        def forward(self, x):
            with contextlib.suppress(ZeroDivisionError):
                self.failing(x)
            return super().forward(x)

    class Block(at.AttentionBlock):
        def __init__(self, dim=at.DIM):
            super().__init__(dim)
            self.attention = Attention(dim)

    model = at.make_model(Block)
    config = SelectiveConfig(save_ops=(), save_modules=("attention", "failing"))
    offloader = apply_offload(model, ON_DEVICE, config, runtime=slow_link())
    backward(model)
    assert offloader.step_end().saved['save_modules "attention"'][0] == 4 * toy.NUM_BLOCKS


def test_exception_that_a_block_catches_does_not_confuse_the_scopes():
    class Failing(nn.Linear):
        def forward(self, x):
            super().forward(x)
            raise ZeroDivisionError

    class Block(at.AttentionBlock):
        def __init__(self, dim=at.DIM):
            super().__init__(dim)
            self.failing = Failing(dim, dim)

        def forward(self, x, rope, mask=None):
            with contextlib.suppress(ZeroDivisionError):
                self.failing(x)
            return super().forward(x, rope)

    model = at.make_model(Block)
    offloader = apply_offload(
        model, ON_DEVICE, SelectiveConfig(save_ops=(), save_modules=("failing",)), runtime=slow_link()
    )
    backward(model)
    assert offloader.step_end().saved == {
        'save_modules "failing"': (toy.NUM_BLOCKS, toy.NUM_BLOCKS * at.BATCH * at.SEQ * at.DIM * 4)
    }


# Rules that did nothing


def train(model: toy.Model, num_regions: int) -> None:
    for _ in range(-(-num_regions // toy.NUM_BLOCKS)):
        backward(model)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"save_ops": ("aten::erf",)}, 'save_ops "aten::erf" matched no op in 64 regions'),
        ({"save_ops": (), "save_modules": ("norm1",)}, 'save_modules "norm1" matched no matmul in 64 regions'),
        ({"save_ops": (), "save_matmul_min_k": 65}, "save_matmul_min_k 65 matched no matmul in 64 regions"),
        ({"save_ops": (), "save_modules": ("w2",)}, 'recompute never asked for what save_modules "w2" saved of '
         "aten::addmm in feed_forward.w2 (0.00 MiB)"),
    ],
)  # fmt: skip
def test_one_warning_for_a_rule_that_does_nothing(options, text, caplog):
    model = at.make_model()
    apply_offload(model, ON_DEVICE, SelectiveConfig(**options), runtime=slow_link())
    with caplog.at_level(logging.WARNING):
        train(model, 63 - toy.NUM_BLOCKS)
        assert not caplog.records
        train(model, 200)
    assert [text in record.message for record in caplog.records] == [True]


def test_no_warning_for_rules_that_work(caplog):
    model = at.make_model()
    config = SelectiveConfig(save_modules=("wo", "w1"), save_matmul_min_k=16)
    with at.removed_afterwards(register_preferred_save("aten::tanh")):
        apply_offload(model, ON_DEVICE, config, runtime=slow_link())
    with caplog.at_level(logging.WARNING):
        train(model, 200)
    # the threshold reaches the last projection as well, which recompute does not ask for
    assert ["save_matmul_min_k 16" in record.message for record in caplog.records] == [True]


def test_no_warning_for_what_nobody_asked_for_by_name(caplog):
    """A built-in save that the model has no op for; what is saved for correctness, or by the block's own policy, and is
    never asked for, because recompute stops before."""

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.add.Tensor else CheckpointPolicy.PREFER_RECOMPUTE

    model = at.make_model()
    for name, block in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(
            block._checkpoint_wrapped_module, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
    saves = (
        register_builtin_save("aten::topk", at.Attention, reason="ties"),
        register_mandatory_save("aten::addmm", "w2", reason="test"),
    )
    with at.removed_afterwards(*saves):
        offloader = apply_offload(model, ON_DEVICE, runtime=slow_link())
    with caplog.at_level(logging.WARNING):
        train(model, 200)
        saved = offloader.step_end().saved
    assert saved["the block's own selective checkpointing"][0] > 0
    assert saved["registered mandatory save aten::addmm in w2"][0] > 0
    assert not caplog.records


def test_an_output_that_was_asked_for_once_is_not_warned_of(caplog):
    rule = SaveRule("rule", lambda op: True)
    log = RuleLog([rule])
    with caplog.at_level(logging.WARNING):
        for i in range(NUM_REGIONS):
            log.recompute_ended([SavedPlace(rule, "aten::mm", "wq", 0, 64, was_asked=i == 0)])
    assert not caplog.records


def test_warning_for_a_registered_save_that_does_nothing(caplog):
    with at.removed_afterwards(register_mandatory_save("aten::topk", reason="ties")):
        model = at.make_model()
        apply_offload(model, ON_DEVICE, runtime=slow_link())
    with caplog.at_level(logging.WARNING):
        train(model, 100)
    assert ["registered mandatory save aten::topk matched no op" in record.message for record in caplog.records] == [
        True
    ]


# Errors


@pytest.mark.parametrize(
    "options, text",
    [
        ({"save_ops": ("attentoin",)}, r"save_ops = 'attentoin' .* closest: attention"),
        ({"save_ops": ("aten::mmm",)}, r"save_ops = 'aten::mmm' .* closest: aten::"),
        ({"save_modules": ("wx",)}, r"save_modules = 'wx' matches no module; closest: .*wq"),
        ({"save_modules": ("layers",)}, r"save_modules = 'layers' matches only layers, outside the blocks"),
        ({"save_modules": ("head",)}, r"save_modules = 'head' matches only head, outside the blocks"),
        ({"save_modules": ("layers.9.attention.*",)}, r"save_modules = 'layers\.9\.attention\.\*' matches no module"),
        ({"recompute_layer_types": ("sliding",)}, r"recompute_layer_types = 'sliding' .* closest: sliding_attention"),
    ],
)
def test_names_that_do_not_exist(options, text):
    model = at.make_model()
    with pytest.raises(ValueError, match=rf"selective_checkpoint\.{text}"):
        apply_offload(model, ON_DEVICE, SelectiveConfig(**options), runtime=slow_link())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_debug_checkpoints_are_refused():
    model = at.make_model()
    for name, block in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(block._checkpoint_wrapped_module, debug=True)
    with pytest.raises(ValueError, match=r"layers\.0 is checkpointed with debug=True"):
        apply_offload(model, ON_DEVICE, SelectiveConfig(), runtime=slow_link())


def test_no_checkpoint_no_saves():
    with pytest.raises(ValueError, match="no module matched by blocks"):
        apply_offload(without_ac(at.make_model()), ON_DEVICE, SelectiveConfig(), runtime=slow_link())


def test_registered_saves_ask_for_no_checkpoint(router_saves, caplog):
    model = without_ac(at.make_model(at.MoEBlock))
    offloader = apply_offload(model, ON_DEVICE, runtime=slow_link())
    backward(model)
    assert offloader.step_end().saved == {}
    assert not caplog.records


def test_nothing_to_do_is_no_error_whatever_the_model():
    reentrant = at.make_model()
    for name, block in list(reentrant.layers.items()):
        reentrant.layers[name] = checkpoint_wrapper(
            block._checkpoint_wrapped_module, checkpoint_impl=CheckpointImpl.REENTRANT
        )
    offloaded = at.make_model()
    apply_offload(offloaded, MOVE_ALL, runtime=slow_link())
    for model in (reentrant, nn.Linear(2, 2), offloaded):
        apply_offload(model, ON_DEVICE, runtime=slow_link())
    with at.removed_afterwards(register_preferred_save("aten::mm", "router")):
        for model in (reentrant, nn.Linear(2, 2)):
            apply_offload(model, ON_DEVICE, runtime=slow_link())


def test_reentrant_checkpoints_are_refused_where_something_is_saved():
    model = at.make_model()
    for name, block in list(model.layers.items()):
        model.layers[name] = checkpoint_wrapper(
            block._checkpoint_wrapped_module, checkpoint_impl=CheckpointImpl.REENTRANT
        )
    with (
        at.removed_afterwards(register_preferred_save("aten::mm", "wo")),
        pytest.raises(ValueError, match=r"layers\.0 is checkpointed with use_reentrant=True"),
    ):
        apply_offload(model, ON_DEVICE, runtime=slow_link())


def test_keep_last_is_of_no_concern_where_nothing_moves():
    config = OffloadConfig(mode="none", keep_last=toy.NUM_BLOCKS)
    model = at.make_model()
    apply_offload(model, config, SelectiveConfig(), runtime=slow_link())
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(ValueError, match="keep_last = 6 leaves nothing to move"):
        apply_offload(at.make_model(), config, SelectiveConfig(offload=True), runtime=slow_link())


# Compiled blocks


def compiled(model: toy.Model) -> toy.Model:
    torch._dynamo.reset()
    for name, block in list(model.layers.items()):
        model.layers[name] = torch.compile(block, backend="aot_eager", fullgraph=True)
    model.call = lambda block, h, rope: block(h, rope)
    return model


@pytest.mark.parametrize(
    "options, op, num_gone",
    [
        ({"save_modules": ("wo",)}, "aten::mm", toy.NUM_BLOCKS),
        ({"save_modules": ("layers.3.attention.wo",)}, "aten::mm", 1),
        ({"save_modules": ("layers.3.attention.wo", "layers.4.feed_forward.w1")}, "aten::mm", 1),
        ({"save_ops": ("aten::mm",)}, "aten::mm", 4 * toy.NUM_BLOCKS),
        ({"save_matmul_min_k": 32}, "aten::mm", 4 * toy.NUM_BLOCKS),
    ],
)
@pytest.mark.parametrize("offload", [ON_DEVICE, MOVE_ALL])
def test_compiled_blocks(options, op, num_gone, offload):
    before = at.num_ops_in_backward(compiled(at.make_model()), TOKENS)
    model = compiled(at.make_model())
    apply_offload(model, offload, SelectiveConfig(**{"save_ops": ()} | options), runtime=slow_link())
    after = at.num_ops_in_backward(model, TOKENS)
    assert before[op] - after.get(op, 0) == num_gone
    toy.assert_same_grads(model, backward(compiled(at.make_model())))


def test_compiled_blocks_of_different_types_do_not_share_a_policy(monkeypatch):
    """The compiler would reuse what it made of the first block for all that look like it."""
    monkeypatch.setattr(save_policy, "ATTENTION_OPS", {"aten::tanh"})  # the partitioner saves attention by itself
    before = at.num_ops_in_backward(compiled(at.make_model()), TOKENS)
    model = compiled(at.make_model())
    for i, block in enumerate(model.layers.values()):
        block._orig_mod._checkpoint_wrapped_module.attention_type = ("sliding_attention", "full_attention")[i % 2]

    def layer_type_of(block):
        assert type(block) is at.AttentionBlock
        return block.attention_type

    offloader = apply_offload(model, ON_DEVICE, SelectiveConfig(), runtime=slow_link(), layer_type_of=layer_type_of)
    after = at.num_ops_in_backward(model, TOKENS)
    assert (before["aten::tanh"], after["aten::tanh"]) == (toy.NUM_BLOCKS, toy.NUM_BLOCKS // 2)
    assert offloader.step_end().saved['save_ops "attention"'][0] > 0


@pytest.mark.parametrize("key", ["offload", "check_routing"])
def test_what_compiled_blocks_cannot_do(key):
    with pytest.raises(ValueError, match=rf"selective_checkpoint\.{key} = true does not work in a compiled block"):
        apply_offload(compiled(at.make_model()), ON_DEVICE, SelectiveConfig(**{key: True}), runtime=slow_link())
