"""Part "right": gradients with offload are those without, bit for bit, whatever comes late or is read too early.

How it works. Models with the same weights are trained in all ways side by side, on the same tokens, with another
sequence length in each step. After each backward the gradients of all are compared with those of activation
checkpointing alone (AC), as bits; then all take the same optimizer step. ``ac_again`` tells a device that does not
compute the same twice from an offload that is wrong. There are four rounds of it:

    plain            as a run does it
    strict           copies come late, and what is freed, or not written yet, is filled with NaN
    competing        another runtime's copies keep the link busy
    default kernels  those that a run uses: not the same bits each time, so gradients may differ by `MAX_NOISE`

Between steps the allocator is poisoned: what it hands out next is full of NaN. In the first three rounds deterministic
algorithms are on: without them attention is another kernel, whose backward adds up in another order each time.

A round has its share of the time. Where that ends before its steps do, its rows say after how many.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from gpu_parts.device import Device
from gpu_parts.part import Task, TimeBox
from gpu_parts.ways import Running, make_tokens, model_args, running, ways_of
from titan_offload import Runtime
from titan_offload.config import MIB

REFERENCE, AGAIN = "ac", "ac_again"
COMPARED = (
    *("sync", "overlap", "attention_on_device", "attention_on_host"),
    *("all_with_ac", "all_without_ac", "no_ac"),
)
NOISY = "default kernels"
ROUNDS = ("plain", "strict", "competing", NOISY)
LEARNING_RATE = 0.1

MAX_NOISE = 0.05
"""Norm of a gradient's difference over its own, with the same weights: bf16 has 8 bits, and sums in another order
differ in the last of them here and there. A gradient that is wrong differs by about its own norm."""


def run(device: Device, task: Task) -> None:
    """Emits ``gradients``, a row per round and way."""
    with device.mesh() as mesh:
        for index, name in enumerate(ROUNDS):
            for row in try_round(device, mesh, name, TimeBox(task.box.left() / (len(ROUNDS) - index))):
                task.emit("gradients", row)


def try_round(device: Device, mesh: DeviceMesh, name: str, box: TimeBox) -> list[dict[str, Any]]:
    """One round. If it fails, the row says why, and the next round may still be right."""
    try:
        return compare(device, mesh, name, box)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    device.empty_cache()
    return [asdict(Result(name, "all ways")) | {"problem": problem}]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """The same gradients each time, where cuBLAS was told so before it started (`gpu_check.environment_of`). torch does
    not fill new memory: that would hide what a runtime forgets to write."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


# Gradients


@dataclass
class Result:
    """What came of one way in one round.

    Attributes:
        round, way: which.
        num_steps: steps that were compared.
        num_gradients: gradients that were compared with the reference's.
        num_different: of them, as bits, or by more than `MAX_NOISE`; first_different: where that was seen first.
        max_noise: largest norm of a difference over the reference's, in the round of default kernels.
        num_offloads, num_misses: of all steps, see `OffloadStats`.
        loss: of the last step.
    """

    round: str
    way: str
    num_steps: int = 0
    num_gradients: int = 0
    num_different: int = 0
    first_different: str = ""
    max_noise: float | None = None
    num_offloads: int = 0
    num_misses: int = 0
    loss: float = 0.0


@dataclass
class Competitor:
    """Copies of both directions that keep a link busy.

    Args:
        runtime: that is used for nothing else.
        device: whose link.
    """

    runtime: Runtime
    device: Device
    _buffers: list[torch.Tensor] = field(default_factory=list)
    _last: list[Any] = field(default_factory=list)

    def start(self) -> None:
        """Queues copies of both directions, and does not wait for them."""
        runtime, place = self.runtime, self.device.torch_device
        num_bytes, num_copies = self.device.pick((64 * MIB, 16), (MIB // 16, 8))
        if not self._buffers:
            pinned = runtime.allocate_pinned(2 * num_bytes)
            self._buffers = [pinned, *(runtime.empty(num_bytes, place) for _ in range(2))]
        pinned, out, back = self._buffers
        ready = runtime.record_event(runtime.compute_stream(place))
        ways = (
            (runtime.d2h_stream(place), pinned[:num_bytes], out),
            (runtime.h2d_stream(place), back, pinned[num_bytes:]),
        )
        for stream, dst, src in ways:
            runtime.wait_event(stream, ready)
            for _ in range(num_copies):
                runtime.copy(dst, src, stream)
                self._last.append(runtime.record_event(stream))

    def close(self) -> None:
        """Gives the memory back."""
        for event in self._last:
            self.runtime.synchronize(event)
        if self._buffers:
            self.runtime.free_pinned(self._buffers[0])
        self._buffers, self._last = [], []


def compare(device: Device, mesh: DeviceMesh, name: str, box: TimeBox) -> list[dict[str, Any]]:
    """One round, of fewer steps where the time ends before. Returns its rows.

    Raises:
        AssertionError: the comparison would say nothing: a gradient is not finite, or all are 0.
    """
    ways = ways_of(device)
    max_len = device.pick(4096, 96)
    num_steps = device.pick(20, 5) if name != NOISY else device.pick(5, 2)
    lengths = sequence_lengths(num_steps, device.pick(512, 24), max_len)
    args = model_args(device, "1.7B", device.pick(6, 4), max_len)
    results = {way: Result(name, way) for way in (AGAIN, *COMPARED)}
    learning_rate = LEARNING_RATE if name != NOISY else 0.0  # else differences would grow from step to step
    with contextlib.ExitStack() as stack:
        if name != NOISY:
            stack.enter_context(deterministic())
        runs: dict[str, Running] = {}
        before: dict[str, Callable[[], None]] = {}
        for way in (REFERENCE, AGAIN, *COMPARED):
            runtime, competitor = runtimes_of(device, name)
            settings = ways[REFERENCE if way == AGAIN else way]
            runs[way] = stack.enter_context(running(device, mesh, args, settings, runtime))
            stack.callback(competitor.close)
            before[way] = competitor.start if name == "competing" else lambda: None
        for step, length in enumerate(lengths):
            if not box.left():
                break
            tokens = make_tokens(device, args, length, seed=step)
            expected: dict[str, torch.Tensor] = {}
            for way, each in runs.items():
                before[way]()
                loss = each.backward(tokens)
                gradients = dict(each.gradients())
                if way == REFERENCE:
                    check_sense(gradients)
                    expected = {key: gradient.clone() for key, gradient in gradients.items()}
                else:
                    note(results[way], step, gradients, expected)
                    results[way].loss = loss.item()
                del gradients
                each.step_end(learning_rate)
                if way != REFERENCE:
                    results[way].num_offloads += each.stats.num_offloads
                    results[way].num_misses += each.stats.num_misses
            device.poison()
    return [asdict(result) for result in results.values()]


def runtimes_of(device: Device, name: str) -> tuple[Runtime, Competitor]:
    """For a way in this round, its runtime, and a competitor on the same link."""
    own, other = device.runtimes(2)
    return device.strict_runtime() if name == "strict" else own, Competitor(other, device)


def sequence_lengths(num_steps: int, shortest: int, longest: int) -> list[int]:
    """Of the steps, the same each time; odd ones too."""
    choice = random.Random(0)
    return [choice.randint(shortest, longest) for _ in range(num_steps)]


def check_sense(gradients: dict[str, torch.Tensor]) -> None:
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), f"{name} has a gradient that is not finite, without any offload"
    assert any(gradient.any() for gradient in gradients.values()), "all gradients are 0"


def note(result: Result, step: int, gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compares a step's gradients."""
    assert gradients.keys() == expected.keys()
    if result.round == NOISY:
        noises = {name: noise(gradient, expected[name]) for name, gradient in gradients.items()}
        result.max_noise = max(result.max_noise or 0.0, *noises.values())
        different = [name for name, found in noises.items() if not found <= MAX_NOISE]
    else:
        different = [name for name, gradient in gradients.items() if not same_bits(gradient, expected[name])]
    result.num_steps += 1
    result.num_gradients += len(gradients)
    result.num_different += len(different)
    if different and not result.first_different:
        result.first_different = f"step {step}: {different[0]}"


def noise(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference of two tensors over that of the second one; NaN if that cannot be said."""
    return (torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float())).item()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, NaN and the sign of 0 included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
