"""FaultInjector: makes the n-th passing of a point fail as it would in life. What the tests of faults are driven by.

Owns the points, and what is raised at each. The package knows nothing of it: the runtime's points are those of
`FaultyRuntime`, a subclass; the blocks' are module hooks and an autograd Function that changes no number; and any line
of the engine is reached by Python's own tracing (`LineInterrupt`).
"""

import contextlib
import linecache
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from attention_toy import in_backward
from torch import nn

import titan_offload.engine
from titan_offload import HostRuntime


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (made by the fault injector)")


def device_error() -> BaseException:
    return RuntimeError("CUDA error: an illegal memory access was encountered (made by the fault injector)")


def bug_in_a_block() -> BaseException:
    return KeyError("a bug in a block (made by the fault injector)")


def lost_peer() -> BaseException:
    return torch.distributed.DistBackendError("Connection reset by peer (made by the fault injector)")


BLOCK_POINTS = {
    "forward start": bug_in_a_block,
    "forward inside": out_of_memory,
    "forward end": bug_in_a_block,
    "recompute start": bug_in_a_block,
    "recompute inside": out_of_memory,
    "backward start": bug_in_a_block,
    "backward inside": out_of_memory,
}
"""Passed once per block and pass. "inside" is where autograd allocates; a recompute stops before the block's end."""

RUNTIME_POINTS = {
    "empty": out_of_memory,
    "gather": out_of_memory,
    "copy": device_error,
    "after copy": device_error,
    "record_event": device_error,
    "wait_event": device_error,
    "query": device_error,
}
"""What the engine asks of the device. "after copy": the copy has begun, and the engine does not get to know."""

POINTS = BLOCK_POINTS | RUNTIME_POINTS

COLLECTIVE_POINTS = {f"collective in {where}": lost_peer for where in ("forward", "recompute", "backward")}
"""For blocks that have one."""


class FaultInjector:
    """Raises once, at the point and the passing that `fail_at` names.

    Attributes:
        raised: the error that was raised; None: that passing has not come.
        is_lost: the device is lost: everything that is asked of it fails, for good.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self.is_lost = False
        self._num_passed: Counter[str] = Counter()
        self._armed: tuple[str, int, BaseException | signal.Signals] | None = None
        self._loses_device = False

    def fail_at(
        self, point: str, n: int, error: BaseException | signal.Signals | None = None, loses_device: bool = False
    ) -> None:
        """The ``n``-th passing of ``point`` from now on, counted from 1, raises ``error`` (default: what fails there in
        life), and perhaps the device is lost with it. A signal goes to this process."""
        self.disarm()
        error = error or (POINTS | COLLECTIVE_POINTS)[point]()
        self._armed, self._loses_device = (point, n, error), loses_device

    def disarm(self) -> None:
        self._num_passed.clear()
        self.raised = self._armed = None

    def reach(self, point: str) -> None:
        if self.is_lost and point in RUNTIME_POINTS:
            raise RuntimeError("CUDA error: the device is lost (made by the fault injector)")
        self._num_passed[point] += 1
        if self._armed is not None and self._armed[:2] == (point, self._num_passed[point]):
            error, self._armed, self.is_lost = self._armed[2], None, self._loses_device
            self.fail(error)

    def fail(self, error: BaseException | signal.Signals) -> None:
        if isinstance(error, signal.Signals):
            os.kill(os.getpid(), error)
        else:
            self.raised = error
            raise error

    def install(self, model: nn.Module) -> None:
        """Puts the points of `BLOCK_POINTS` into ``model.layers``."""
        for block in model.layers.values():
            block = getattr(block, "_checkpoint_wrapped_module", block)
            block.register_forward_pre_hook(lambda *_: self.reach_pass("{} start"))
            block.register_forward_hook(lambda *_: self.reach_pass("{} end"))
            block.register_forward_hook(lambda module, args, out: _BackwardStarts.apply(out, self))
            first = next(module for name, module in block.named_children() if "norm" in name)
            first.register_forward_hook(lambda module, args, out: _Inside.apply(out, self))

    def reach_pass(self, text: str) -> None:
        """Reaches the point whose name has ``forward`` or ``recompute`` for the ``{}`` in ``text``."""
        self.reach(text.format("recompute" if in_backward() else "forward"))

    @contextlib.contextmanager
    def in_gather(self) -> Iterator[None]:
        """Adds the point "gather": the clone of a tensor whose storage is mostly somebody else's."""
        gather = titan_offload.engine.gather
        titan_offload.engine.gather = lambda tensor: (self.reach("gather"), gather(tensor))[1]
        try:
            yield
        finally:
            titan_offload.engine.gather = gather


class _Inside(torch.autograd.Function):
    """Changes nothing; passes points where a block's ops allocate."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, injector: FaultInjector) -> torch.Tensor:
        ctx.injector = injector
        injector.reach_pass("{} inside")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.injector.reach("backward inside")
        return grad, None


class _BackwardStarts(torch.autograd.Function):
    """Changes nothing; the last op of a block, whose backward is the block's first."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, injector: FaultInjector) -> torch.Tensor:
        ctx.injector = injector
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.injector.reach("backward start")
        return grad, None


class FaultyRuntime(HostRuntime):
    """A host runtime with the points of `RUNTIME_POINTS`."""

    def __init__(self, injector: FaultInjector, **kwargs: object) -> None:
        self.injector = injector
        super().__init__(**kwargs)

    def empty(self, num_bytes, device):
        self.injector.reach("empty")
        return super().empty(num_bytes, device)

    def copy(self, dst, src, stream):
        self.injector.reach("copy")
        super().copy(dst, src, stream)
        self.injector.reach("after copy")

    def record_event(self, stream):
        if stream is not self._scrubber:  # that one is of the runtime itself
            self.injector.reach("record_event")
        return super().record_event(stream)

    def wait_event(self, stream, event):
        if stream is not self._scrubber:
            self.injector.reach("wait_event")
        super().wait_event(stream, event)

    def query(self, event):
        self.injector.reach("query")
        return super().query(event)

    # A lost device copies nothing, so nothing can come in a wrong order.

    def check(self):
        if not self.injector.is_lost:
            super().check()

    def scrub(self, buffer, event):
        return event if self.injector.is_lost else super().scrub(buffer, event)


class LineInterrupt:
    """While on, counts the lines that this thread executes in some modules of the package; at one of them the user
    presses Ctrl-C.

    Args:
        modules: names of their files.
        n: the line, counted from 1 as they are executed.
        functions: names of those that count. Default: all.

    Attributes:
        num: lines so far.
        raised: the KeyboardInterrupt; None: that line has not come.
        place: where it was raised.
    """

    def __init__(self, modules: tuple[str, ...], n: int, functions: tuple[str, ...] = ()) -> None:
        self.num = 0
        self.raised: KeyboardInterrupt | None = None
        self.place = ""
        self._n, self._functions = n, functions
        package = Path(titan_offload.engine.__file__).parent
        self._files = {str(package / name) for name in modules}

    def __enter__(self) -> "LineInterrupt":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame, event, arg) -> Callable | None:
        is_counted = not self._functions or frame.f_code.co_name in self._functions
        return self._line if is_counted and frame.f_code.co_filename in self._files else None

    def _line(self, frame, event, arg) -> Callable | None:
        # A `with` is traced once more when it is left, where Python handles no signal: the lock would stay locked.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(
            "with"
        ):
            self.num += 1
            if self.num == self._n:
                self.place = f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_qualname}"
                self.raised = KeyboardInterrupt("made by the fault injector")
                raise self.raised
        return self._line
