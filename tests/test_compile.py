"""Blocks compiled one by one, as TorchTitan compiles them: same bits and the same graphs as without offload.

A graph is told by what the compiler itself writes down of each compilation: of which frame, the how manieth of it, and
why once more. Hooks that change what the compiler guards on, or a frame of ours that it compiles, make a difference.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import attention_toy as at
import pytest
import torch
import toy
from test_apply import snapshot
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch._inductor.utils import fresh_cache
from torch.autograd.graph import saved_tensors_hooks

from titan_offload import OffloadConfig, Offloader, SelectiveConfig, apply_offload
from titan_offload.saved_tensor import storage_id

SEQS = (16, 24, 32)
"""The second one is compiled again, with dynamic shapes; the third one is not."""

AOT_EAGER = "aot_eager"
pytestmark = pytest.mark.timeout(300)  # inductor runs a C++ compiler

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU, inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def fresh_compiler():
    def forget() -> None:
        torch._dynamo.reset()
        counters.clear()
        clear_compilation_metrics()

    forget()
    with fresh_cache():
        yield forget
    forget()


def compile_each(model: toy.Model, backend: str) -> toy.Model:
    for name, block in model.layers.items():
        model.layers.register_module(name, torch.compile(block, backend=backend, fullgraph=True))
    return model


def compile_in_place(model: toy.Model, backend: str) -> toy.Model:
    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    return model


def compilations() -> list[tuple]:
    """All compilations so far but those of a backward alone, which inductor finds in its cache the second time."""
    fields = ("compile_id", "co_name", "co_filename", "recompile_reason", "fail_reason", "restart_reasons")
    entries = [tuple(str(getattr(entry, name)) for name in fields) for entry in get_compilation_metrics()]
    return [entry for entry in entries if entry[1] != "None"]


# Steps: each returns what must not change


def train(model: toy.Model, seq: int) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model.loss(toy.make_tokens(seq=seq))
    loss.backward()
    return [loss.detach(), *toy.grads(model)]


def train_microbatches(model: toy.Model, seq: int, order: Callable = reversed) -> list[torch.Tensor]:
    """Three graphs are alive at once; the second one is of another length."""
    model.zero_grad()
    losses = [model.loss(toy.make_tokens(seed, seq=seq + 8 * (seed == 1))) for seed in range(3)]
    for loss in order(losses):
        loss.backward()
    return [*(loss.detach() for loss in losses), *toy.grads(model)]


def train_microbatches_oldest_first(model: toy.Model, seq: int) -> list[torch.Tensor]:
    return train_microbatches(model, seq, order=list)


def validate(model: toy.Model, seq: int) -> list[torch.Tensor]:
    model.eval()
    with torch.no_grad():
        loss = model.loss(toy.make_tokens(seq=seq))
    model.train()
    return [loss]


def train_in_eval_mode(model: toy.Model, seq: int) -> list[torch.Tensor]:
    model.eval()
    result = train(model, seq)
    model.train()
    return result


def forward_is_dropped(model: toy.Model, seq: int) -> list[torch.Tensor]:
    return [model.loss(toy.make_tokens(seq=seq)).detach()]


# name -> steps, and how many times as many blocks move as in one forward
PROGRAMS = {
    "lengths": [(train, seq, 1) for seq in (*SEQS, *SEQS)],
    "microbatches": [
        (train_microbatches, 16, 3),
        (train_microbatches_oldest_first, 24, 3),
        (train_microbatches_oldest_first, 24, 3),
        (train_microbatches, 16, 3),
    ],
    "modes": [
        (train, 16, 1),
        (validate, 16, 0),
        (train, 24, 1),
        (train_in_eval_mode, 24, 0),
        (forward_is_dropped, 16, 1),
        (validate, 24, 0),
        (train, 16, 1),
    ],
    "all": [(train, 16, 1), (train_microbatches, 16, 3), (validate, 24, 0), (train, 32, 1)],
}


def run(model: toy.Model, program: str, offloader: Offloader | None = None) -> Iterator[tuple]:
    for step, seq, num_forwards in PROGRAMS[program]:
        result = step(model, seq)
        yield result, offloader and offloader.step_end(), num_forwards, seq


CASES = [
    *((compile_each, AOT_EAGER, program) for program in PROGRAMS),
    (compile_in_place, AOT_EAGER, "all"),
    pytest.param(compile_each, "inductor", "all", marks=NEEDS_COMPILER),
]


@pytest.mark.parametrize(("compile_blocks", "backend", "program"), CASES)
def test_same_bits_and_graphs(compile_blocks, backend, program, fresh_compiler):
    """Guards: `entry_of`."""
    expected = [result for result, *_ in run(compile_blocks(toy.make_model(), backend), program)]
    graphs = compilations()
    stats = dict(counters["stats"])
    fresh_compiler()

    model = compile_blocks(toy.make_model(), backend)
    before = snapshot(model)
    offloader = toy.offload(model, keep_last=1)
    num = toy.NUM_BLOCKS - 1
    for result, (got, moved, num_forwards, seq) in zip(expected, run(model, program, offloader), strict=True):
        assert all(map(torch.equal, got, result))
        assert moved.num_offloads == num_forwards * num
        lengths = num_forwards * seq + (8 if num_forwards == 3 else 0)
        assert moved.offloaded_bytes == num * lengths * toy.INPUT_BYTES // toy.SEQ
        assert toy.slots_in_use(offloader) == 0
    assert compilations() == graphs
    assert dict(counters["stats"]) == stats
    assert not counters["graph_break"]
    assert len(graphs) >= 2  # it was compiled, and again where lengths or modes differ

    with torch._dynamo.config.patch(error_on_recompile=True):
        for result, (got, *_) in zip(expected, run(model, program, offloader), strict=True):
            assert all(map(torch.equal, got, result))
    offloader.remove()
    assert snapshot(model) == before


def compile_attention_blocks(model: toy.Model) -> toy.Model:
    model.call = lambda block, h, rope: block(h, rope)
    return compile_each(model, AOT_EAGER)


@pytest.mark.parametrize(
    "saves",
    [{"save_ops": ("attention",)}, {"save_ops": (), "save_modules": ("wo",)}, {"save_matmul_min_k": 64}],
    ids=["ops", "modules", "min_k"],
)
def test_selective_saves_take_as_many_graphs(saves, fresh_compiler):
    """Blocks that are alike share one, and so its limit of recompilations. Guards: `BlockSaves.compiled_context_fn`."""
    expected = compile_attention_blocks(at.make_model())
    results = [train(expected, seq) for seq in SEQS]
    graphs = compilations()
    assert len(graphs) == 2
    fresh_compiler()
    model = compile_attention_blocks(at.make_model())
    config = OffloadConfig(min_offload_mib=0.0)
    offloader = apply_offload(model, config, SelectiveConfig(**saves), runtime=toy.slow_link())
    for seq, result in zip(SEQS, results, strict=True):
        assert all(map(torch.equal, train(model, seq), result))
        assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - 1
    assert compilations() == graphs
    assert not counters["graph_break"]


def test_selective_saves_of_a_block_compiled_in_place(fresh_compiler):
    """Guards: `is_compiled`."""
    model = compile_in_place(at.make_model(), AOT_EAGER)
    model.call = lambda block, h, rope: block(h, rope)
    with pytest.raises(ValueError, match=r"selective_checkpoint\.offload = true does not work in a compiled block"):
        apply_offload(model, OffloadConfig(), SelectiveConfig(offload=True), runtime=toy.slow_link())
    before = at.num_ops_in_backward(model, toy.make_tokens())
    expected = toy.grads(model)
    model.zero_grad()
    offloader = apply_offload(
        model,
        OffloadConfig(min_offload_mib=0.0),
        SelectiveConfig(save_ops=("aten::mm",)),
        runtime=toy.slow_link(),
    )
    after = at.num_ops_in_backward(model, toy.make_tokens())
    assert before["aten::mm"] - after["aten::mm"] == 4 * toy.NUM_BLOCKS
    assert all(map(torch.equal, toy.grads(model), expected))
    assert offloader.step_end().num_offloads == toy.NUM_BLOCKS - 1


def test_a_model_compiled_as_a_whole_is_refused():
    whole = toy.make_model()
    whole.compile()
    for model in (whole, torch.compile(toy.make_model())):
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"Model is compiled as a whole.*compile the blocks one by one"):
            toy.offload(model)
        assert snapshot(model) == before


# Mode "all"


def what_is_saved(model: toy.Model, seq: int, keep_last: int) -> tuple[list[torch.Tensor], int, int]:
    """What a training step of a model without offload gives; and the bytes and number of storages that autograd saves
    of it before the last ``keep_last`` blocks, parameters and buffers left out."""
    state = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}
    begun = -1

    def begin(i: int, h: torch.Tensor) -> torch.Tensor:
        nonlocal begun
        begun = i
        return h

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if begun < toy.NUM_BLOCKS - keep_last and storage_id(tensor) not in state:
            saved[storage_id(tensor)] = tensor.untyped_storage()
        return tensor.detach()

    model.between = begin
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = train(model, seq)
    return result, sum(storage.nbytes() for storage in saved.values()), len(saved)


@dataclass(frozen=True)
class Kind:
    """How blocks are compiled: with or without checkpointing, and with which ``memory_budget``; and how many tensors of
    a block are saved."""

    backend: str
    is_checkpointed: bool = False
    memory_budget: float = 1.0
    num_saved: int = 5

    def make(self) -> toy.Model:
        model = toy.make_model() if self.is_checkpointed else toy.make_model(wrap=lambda block: block)
        return compile_each(model, self.backend)


KINDS = [
    pytest.param(Kind(AOT_EAGER), id="no AC"),
    pytest.param(Kind(AOT_EAGER, is_checkpointed=True, num_saved=1), id="AC"),
    pytest.param(Kind(AOT_EAGER, memory_budget=0.5, num_saved=1), id="memory_budget"),
    pytest.param(Kind("inductor"), id="no AC, inductor", marks=[NEEDS_COMPILER, pytest.mark.slow]),
    pytest.param(
        Kind("inductor", memory_budget=0.5, num_saved=3),
        id="memory_budget, inductor",
        marks=[NEEDS_COMPILER, pytest.mark.slow],
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_compiled_blocks_save_moves(kind, fresh_compiler):
    """Without AC the compiler decides what that is. TorchTitan's mode "memory_budget" says how much of it."""
    keep_last, seqs = 1, (16, 24, 24)
    with torch._functorch.config.patch(activation_memory_budget=kind.memory_budget):
        reference = kind.make()
        expected = [what_is_saved(reference, seq, keep_last) for seq in seqs]
        graphs = compilations()
        fresh_compiler()

        model = kind.make()
        offloader = toy.offload(model, mode="all", keep_last=keep_last)
        for seq, (result, num_bytes, num) in zip(seqs, expected, strict=True):
            assert num == 1 + kind.num_saved * (toy.NUM_BLOCKS - keep_last)  # 1: the tokens, of the embedding
            assert all(map(torch.equal, train(model, seq), result))
            stats = offloader.step_end()
            assert (stats.offloaded_bytes, stats.num_offloads) == (num_bytes, num)
            assert stats.kept.keys() == {"keep_last", "after the last block"}
            assert (stats.num_misses, toy.slots_in_use(offloader)) == (0, 0)
        assert compilations() == graphs
        assert len(graphs) == 2
        assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("kind", "num_recomputed"),
    [(Kind(AOT_EAGER), 0), (Kind(AOT_EAGER, is_checkpointed=True), toy.NUM_BLOCKS)],
    ids=["no AC", "AC"],
)
def test_compiled_blocks_without_checkpointing_recompute_nothing(kind, num_recomputed):
    model = kind.make()
    toy.offload(model, mode="all")
    assert at.num_ops_in_backward(model, toy.make_tokens()).get("aten::tanh", 0) == num_recomputed
