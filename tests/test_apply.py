"""apply_offload: which blocks it finds, what it refuses, and that it leaves the model as it was."""

import contextlib
import copy
import functools
import warnings
import weakref

import pytest
import torch
import toy
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titan_offload import HostRuntime, OffloadConfig, OffloadStats, apply_offload
from titan_offload.blocks import find_blocks

FAST = {"link_gb_per_s": None, "jitter_ms": 0.0}


def snapshot(model: nn.Module) -> object:
    """All that a module tree is made of, by identity: names, attributes, hooks, parameters, state dict keys."""
    attributes = {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
        for name, module in model.named_modules()
    }
    return attributes, list(model.state_dict()), [name for name, _ in model.named_parameters()]


def train_step(model: nn.Module, seed: int = 0) -> None:
    model.zero_grad()
    model.loss(toy.make_tokens(seed)).backward()


def reference(seed: int = 0, **kwargs) -> nn.Module:
    model = toy.make_model(**kwargs)
    train_step(model, seed)
    return model


# find_blocks


class Tree(nn.Module):
    """Modules by name: ``Tree({"layers.10.w1": None})``."""

    def __init__(self, *names: str, wrap: tuple[str, ...] = ()) -> None:
        super().__init__()
        for name in names:
            parent = self
            for segment in name.split("."):
                if segment not in parent._modules:
                    parent.add_module(segment, nn.Module())
                parent = parent.get_submodule(segment)
        for name in wrap:
            parent, segment = name.rsplit(".", 1)
            block = checkpoint_wrapper(self.get_submodule(name))
            self.get_submodule(parent).add_module(segment, block)


LAYERS = tuple(f"layers.{i}.w1" for i in range(12))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers.1", ["layers.1"]),
        ("layers.*", [f"layers.{i}" for i in range(12)]),
        ("layers.1*", ["layers.1", "layers.10", "layers.11"]),
        ("layers.[23]", ["layers.2", "layers.3"]),
        ("layers.*.w1", list(LAYERS)),
        ("*.5", ["layers.5"]),
        ("layers", ["layers"]),
    ],
)
def test_wildcards_do_not_cross_segments(pattern, found):
    """`layers.1` is not `layers.10`, `layers.*` is not `layers.1.w1`, and 10 comes after 9. Guards: `_matches`."""
    model = Tree("emb", *LAYERS, "head")
    blocks = find_blocks(model, pattern)
    assert list(blocks) == found
    assert all(blocks[fqn] is model.get_submodule(fqn) for fqn in found)


def test_containers_may_be_nested():
    model = Tree("encoder.layers.0.w1", "encoder.layers.1.w1", "decoder.layers.0.w1", "layers.0")
    assert list(find_blocks(model, "encoder.layers.*")) == ["encoder.layers.0", "encoder.layers.1"]
    assert list(find_blocks(model, "*.layers.*")) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"]
    assert list(find_blocks(model, "layers.*")) == ["layers.0"]


def test_names_are_those_without_wrappers_and_the_outermost_module_is_taken():
    """Guards: `_WRAPPER_SEGMENTS` and `fqn not in found`."""
    model = Tree(*LAYERS[:3], wrap=("layers.0", "layers.2"))
    model.layers.add_module("2", torch.compile(model.layers.get_submodule("2"), backend="eager"))
    blocks = find_blocks(model, "layers.*")
    assert list(blocks) == ["layers.0", "layers.1", "layers.2"]
    assert all(block is model.layers.get_submodule(name) for name, block in zip("012", blocks.values(), strict=True))
    assert list(find_blocks(model, "layers.*.w1")) == ["layers.0.w1", "layers.1.w1", "layers.2.w1"]


@pytest.mark.parametrize(
    ("names", "valid"),
    [
        (("emb", "layers.0", "layers.1"), r"such as layers\.\*$"),
        (("encoder.layers.0", "decoder.blocks.0"), r"such as decoder\.blocks\.\*, encoder\.layers\.\*$"),
        (("emb", "trunk.first", "head"), "such as emb, trunk, trunk.first, head$"),
    ],
)
def test_pattern_that_matches_nothing_names_what_would(names, valid):
    with pytest.raises(ValueError, match=rf"blocks = 'transformer\.h\.\*' matches no module of Tree.*{valid}"):
        find_blocks(Tree(*names), "transformer.h.*")


# What is refused; nothing is half applied


def plain_blocks(model):
    for name, block in model.layers.items():
        model.layers[name] = block._checkpoint_wrapped_module


def reentrant_last_block(model):
    name = str(toy.NUM_BLOCKS - 1)
    block = model.layers[name]._checkpoint_wrapped_module
    model.layers[name] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT)


def offload_on_a_middle_block(model):
    model.other = apply_offload(model, OffloadConfig(keep_last=0), blocks="layers.3", runtime=HostRuntime(**FAST))


REFUSED = {
    "no such block": (lambda model: None, {"blocks": "blocks.*"}, r"blocks = 'blocks\.\*' matches no module of Model"),
    "a container": (lambda model: None, {"blocks": "layers"}, r"blocks = 'layers' is wrapped by .*checkpoint_wrapper"),
    "no checkpoint": (plain_blocks, {}, r"checkpoint_wrapper, .*activation_checkpoint\.mode = \"full\""),
    "reentrant": (reentrant_last_block, {}, r"layers\.5 is checkpointed with use_reentrant=True.*NO_REENTRANT"),
    "keep_last": (lambda model: None, {"keep_last": 6}, r"keep_last = 6 leaves nothing to move.* 6 .*at most 5"),
    "keep_last + 1": (lambda model: None, {"keep_last": 7}, r"keep_last = 7 leaves nothing to move.* 6 .*at most 5"),
    "twice": (offload_on_a_middle_block, {}, r"layers\.3 has activation offload already; call remove\(\)"),
}


def try_apply(model, blocks="layers.*", **config):
    return apply_offload(model, OffloadConfig(**config), blocks=blocks, runtime=HostRuntime(**FAST))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_the_model_as_it_was(name):
    """Guards: that all checks come before the first `install`."""
    prepare, settings, message = REFUSED[name]
    model = toy.make_model()
    prepare(model)
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        try_apply(model, **settings)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", REFUSED)
def test_refused_attach_leaves_both_parts_as_they_were(name):
    prepare, settings, message = REFUSED[name]
    first, second = toy.make_model(num_blocks=8), toy.make_model()
    prepare(second)
    offloader = toy.offload(first, keep_last=settings.get("keep_last", 1))
    before = snapshot(first), snapshot(second)
    with pytest.raises(ValueError, match=message):
        offloader.attach(second, blocks=settings.get("blocks", "layers.*"))
    assert (snapshot(first), snapshot(second)) == before
    assert offloader.part_fqns == [[f"layers.{i}" for i in range(8)]]
    train_step(first)
    assert offloader.step_end().num_offloads == 8 - settings.get("keep_last", 1)
    toy.assert_same_grads(first, reference(num_blocks=8))


def test_applying_twice_is_refused_and_again_after_remove_is_fine():
    model = toy.make_model()
    before = snapshot(model)
    for _ in range(3):
        offloader = toy.offload(model)
        under_offload = snapshot(model)
        with pytest.raises(ValueError, match=r"layers\.0 has activation offload already"):
            toy.offload(model)
        assert snapshot(model) == under_offload
        train_step(model)
        toy.assert_same_grads(model, reference())
        assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - 1
        offloader.remove()
        assert snapshot(model) == before


def test_only_the_checkpointed_blocks_are_taken():
    """TorchTitan's selective AC by layer frequency checkpoints every n-th block."""
    model, expected = toy.make_model(), toy.make_model()
    for m in (model, expected):
        for name in ("1", "3", "5"):
            m.layers[name] = m.layers[name]._checkpoint_wrapped_module
        train_step(m)
    before = snapshot(model)
    offloader = toy.offload(model)
    assert offloader.part_fqns == [["layers.0", "layers.2", "layers.4"]]
    changed = [name for name in model.layers if "forward" in model.layers[name].__dict__]
    assert changed == ["0", "2", "4"]
    train_step(model)
    toy.assert_same_grads(model, expected)
    assert offloader.step_end().num_offloads == 2
    offloader.remove()
    assert snapshot(model) == before


def test_order_of_more_than_ten_blocks_is_the_models_order():
    """ "10" sorts before "2". Guards: that `keep_last` counts in the order of the model."""
    model = toy.make_model(num_blocks=12)
    offloader = toy.offload(model, runtime=HostRuntime(**FAST), keep_last=2)
    packed = []
    offload = offloader.engine._offload
    offloader.engine._offload = lambda region, *args: (packed.append(region.fqn), offload(region, *args))[1]
    train_step(model)
    assert offloader.part_fqns == [[f"layers.{i}" for i in range(12)]]
    assert packed == [f"layers.{i}" for i in range(10)]


def test_mode_none_does_nothing():
    model = toy.make_model()
    before = snapshot(model)
    offloader = apply_offload(model, OffloadConfig(mode="none"), runtime=HostRuntime(**FAST))
    offloader.attach(toy.make_model())
    assert snapshot(model) == before
    train_step(model)
    toy.assert_same_grads(model, reference())
    assert offloader.step_end() == offloader.stats() == OffloadStats()
    assert offloader.part_fqns == []
    offloader.remove()
    assert offloader.engine.runtime.num_pinned_allocations == 0


def test_budget_bytes_overrides_the_config():
    model = toy.make_model()
    config = OffloadConfig(min_offload_mib=0.0, pinned_budget_gib=1.0)
    offloader = apply_offload(model, config, runtime=HostRuntime(**FAST), budget_bytes=2 * toy.INPUT_BYTES)
    train_step(model)
    assert offloader.step_end().num_offloads == 2
    assert offloader.engine.pool.bytes_pinned == 2 * toy.INPUT_BYTES


# The model is the same with, without and after


def test_remove_leaves_nothing_behind():
    """Guards: `Installed.undo`, `retire`; and that nothing of ours outlives the offloader."""
    model = toy.make_model()
    before = snapshot(model)
    offloader = toy.offload(model)
    assert snapshot(model) != before
    train_step(model)
    offloader.remove()
    assert snapshot(model) == before
    assert offloader.engine.pool.bytes_pinned == 0
    offloader.remove()  # twice is once
    assert snapshot(model) == before
    train_step(model)
    toy.assert_same_grads(model, reference())
    engine = weakref.ref(offloader.engine)
    del offloader
    assert engine() is None


def test_remove_takes_all_parts_away():
    models = [toy.make_model(seed) for seed in range(2)]
    before = [snapshot(model) for model in models]
    offloader = toy.offload(models[0])
    offloader.attach(models[1])
    offloader.remove()
    assert [snapshot(model) for model in models] == before
    assert offloader.part_fqns == []


@pytest.mark.parametrize("when", ["forward", "half of backward"])
def test_graphs_alive_across_remove_stay_valid(when):
    model = toy.make_model()
    offloader = toy.offload(model)
    if when == "forward":
        loss = model.loss(toy.make_tokens())
        offloader.remove()
    else:
        model.between = lambda i, h: (h.register_hook(lambda grad: offloader.remove()) if i == 3 else None, h)[1]
        loss = model.loss(toy.make_tokens())
    loss.backward()
    del loss
    toy.assert_same_grads(model, reference())
    assert toy.slots_in_use(offloader) == 0
    assert offloader.part_fqns == []


def test_pinned_memory_goes_back_once_the_last_graph_is_gone_after_remove():
    """Slots in use at `remove` keep their slabs; when they are free nobody will ever use those slabs again."""
    model = toy.make_model()
    offloader = toy.offload(model)
    loss = model.loss(toy.make_tokens())
    offloader.remove()
    assert offloader.engine.pool.bytes_pinned == (toy.NUM_BLOCKS - 1) * toy.INPUT_BYTES
    loss.backward()
    del loss
    assert offloader.engine.pool.bytes_pinned == 0


def test_names_and_state_dict_are_the_same_with_and_without():
    model, expected = toy.make_model(), toy.make_model()
    offloader = toy.offload(model)
    for under_offload in (True, False):
        assert [name for name, _ in model.named_modules()] == [name for name, _ in expected.named_modules()]
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in expected.named_buffers()]
        assert list(model.state_dict()) == list(expected.state_dict())
        model.load_state_dict(expected.state_dict())
        assert repr(model) == repr(expected)
        if under_offload:
            offloader.remove()


@contextlib.contextmanager
def counted_checkpoint_frames(monkeypatch):
    """Counts checkpoint frames made in the body: one per checkpointed call of forward."""
    frames = []
    make_frame = torch.utils.checkpoint._CheckpointFrame

    def count(*args, **kwargs):
        frames.append(1)
        return make_frame(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.checkpoint, "_CheckpointFrame", count)
        yield frames


def test_number_of_checkpoint_frames_and_recomputes_is_the_same(monkeypatch):
    """F37: offload must not turn the recompute off, nor add one."""

    def frames_and_forwards(prepare):
        model = toy.make_model()
        forwards = []
        for block in model.layers.values():
            block._checkpoint_wrapped_module.register_forward_pre_hook(lambda *_: forwards.append(1))
        prepare(model)
        with counted_checkpoint_frames(monkeypatch) as frames:
            loss = model.loss(toy.make_tokens())
            num_frames = len(frames)
            loss.backward()
        return num_frames, len(frames), len(forwards)

    expected = (toy.NUM_BLOCKS, toy.NUM_BLOCKS, 2 * toy.NUM_BLOCKS)
    assert frames_and_forwards(lambda model: None) == expected
    assert frames_and_forwards(toy.offload) == expected
    assert frames_and_forwards(lambda model: toy.offload(model).remove()) == expected


# Copies of the model


@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_trains_its_own_weights_and_is_not_under_offload(times):
    """Pipeline parallelism deep-copies the model. Guards: `HookedForward.__deepcopy__`."""
    model = toy.make_model()
    offloader = toy.offload(model)
    copied = model
    for _ in range(times):
        copied = copy.deepcopy(copied)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(0.5)
    expected = toy.make_model()
    with torch.no_grad():
        for p in expected.parameters():
            p.mul_(0.5)
    for m in (copied, expected):
        train_step(m)
    toy.assert_same_grads(copied, expected)
    assert toy.grads(model) == [None] * len(toy.grads(model))
    assert offloader.step_end().num_offloads == 0
    train_step(model)
    toy.assert_same_grads(model, reference())
    assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - 1
    toy.assert_same_grads(copied, expected)
    block = weakref.ref(copied.layers["0"])
    del copied, m, p
    assert block() is None  # the garbage collector is off


def test_a_copy_may_be_put_under_offload_and_outlives_the_original():
    model = toy.make_model()
    toy.offload(model)
    copied = copy.deepcopy(model)
    before = snapshot(copied)
    original = weakref.ref(model)
    del model
    assert original() is None
    offloader = toy.offload(copied)
    train_step(copied)
    toy.assert_same_grads(copied, reference())
    assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - 1
    offloader.remove()
    assert snapshot(copied) == before
    train_step(copied)
    toy.assert_same_grads(copied, reference())


def test_a_model_that_is_saved_whole_is_loaded_without_offload(tmp_path):
    """``torch.save`` of the modules, not of their state dict. Guards: `HookedForward.__reduce__`."""
    model, expected = toy.make_model(), reference()
    offloader = toy.offload(model)
    del model.between, model.call  # functions without a name
    torch.save(model, tmp_path / "model.pt")
    assert b"titan_offload" not in (tmp_path / "model.pt").read_bytes()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.save(model.layers["1"], tmp_path / "block.pt")
    loaded.layers["1"] = torch.load(tmp_path / "block.pt", weights_only=False)
    for m, num_moved in ((loaded, 0), (model, toy.NUM_BLOCKS - 1)):
        m.between, m.call = expected.between, expected.call
        train_step(m)
        toy.assert_same_grads(m, expected)
        assert offloader.step_end().num_offloads == num_moved


# Selective checkpoints


def save_matmuls(ctx, op, *args, **kwargs):
    is_matmul = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


def make_selective_model() -> nn.Module:
    model = toy.make_model()
    context_fn = functools.partial(create_selective_checkpoint_contexts, save_matmuls)
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block._checkpoint_wrapped_module, context_fn=context_fn)
    return model


@pytest.mark.parametrize("keep_last", [0, 1])
def test_selective_checkpoint_moves_exactly_the_block_inputs(keep_last):
    """TorchTitan's mode "selective" by op. From torch 2.14 a FutureWarning says that saved outputs will reach
    saved-tensor hooks. Guards: `respect_saved_tensors_hooks=False` in `install`."""
    model, expected = make_selective_model(), make_selective_model()
    before = snapshot(model)
    offloader = toy.offload(model, keep_last=keep_last)
    num = toy.NUM_BLOCKS - keep_last
    for seed in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            train_step(model, seed)
        train_step(expected, seed)
        toy.assert_same_grads(model, expected)
        stats = offloader.step_end()
        assert (stats.num_offloads, stats.offloaded_bytes) == (num, num * toy.INPUT_BYTES)
        assert stats.kept == ({"keep_last": (keep_last, keep_last * toy.INPUT_BYTES)} if keep_last else {})
    offloader.remove()
    assert snapshot(model) == before


# Compiled blocks, as TorchTitan compiles them: the checkpoint wrapper, in place of itself


def compile_blocks(model: nn.Module) -> nn.Module:
    for name, block in model.layers.items():
        model.layers.register_module(name, torch.compile(block, backend="aot_eager", fullgraph=True))
    return model


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("make", [toy.make_model, make_selective_model], ids=["full", "selective"])
def test_compiled_blocks(make, fresh_dynamo):
    """Same bits as compiled without offload, the same graphs, no break and no recompile of ours."""
    expected = compile_blocks(make())
    grads = []
    for seed in range(3):
        train_step(expected, seed)
        grads.append(toy.grads(expected))
    compiled = {name: dict(counter) for name, counter in counters.items()}
    torch._dynamo.reset()
    counters.clear()

    model = compile_blocks(make())
    before = snapshot(model)
    offloader = toy.offload(model, keep_last=1)
    assert offloader.part_fqns == [[f"layers.{i}" for i in range(toy.NUM_BLOCKS)]]
    for seed in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            train_step(model, seed)
        assert all(map(torch.equal, toy.grads(model), grads[seed]))
        stats = offloader.step_end()
        num = toy.NUM_BLOCKS - 1
        assert (stats.num_offloads, stats.offloaded_bytes) == (num, num * toy.INPUT_BYTES)
        assert stats.kept == {"keep_last": (1, toy.INPUT_BYTES)}
        assert toy.slots_in_use(offloader) == 0
    assert {name: dict(counter) for name, counter in counters.items()} == compiled
    assert not counters["graph_break"]
    offloader.remove()
    assert snapshot(model) == before
    train_step(model, 2)
    assert all(map(torch.equal, toy.grads(model), grads[2]))
    assert counters["stats"]["unique_graphs"] == compiled["stats"]["unique_graphs"]


def test_a_copy_of_a_compiled_model_trains_its_own_weights(fresh_dynamo):
    model = compile_blocks(toy.make_model())
    offloader = toy.offload(model)
    copied = copy.deepcopy(model)
    train_step(copied)
    toy.assert_same_grads(copied, reference())
    assert toy.grads(model) == [None] * len(toy.grads(model))
    assert offloader.step_end().num_offloads == 0
    train_step(model)
    toy.assert_same_grads(model, reference())
    assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - 1


def test_a_key_without_effect_is_warned_of_once(caplog):
    toy.offload(toy.make_model(), schedule="sync", prefetch_lookahead=3)
    assert [record.message for record in caplog.records] == [
        "activation_offload: prefetch_lookahead set, without effect (mode 'block_inputs', schedule 'sync', "
        "pinned_budget_gib 0)"
    ]
