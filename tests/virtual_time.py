"""A device whose clock only the test moves: a real engine on it takes exactly the time that arithmetic says."""

import math

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from titan_offload import OffloadConfig, Runtime, apply_offload
from titan_offload.link import LinkRates, PortRates

NUMEL = 4
INPUT_BYTES = NUMEL * 4


class VirtualStream:
    """Work in order; ``now`` is when the last that was given ends."""

    def __init__(self) -> None:
        self.now = 0
        self.copy_time = 0


class VirtualRuntime(Runtime):
    """A device whose streams only count time. Copies are done at once; an event is the time when it is done."""

    device_type = "cpu"

    def __init__(self, d2h: int, h2d: int, host_runs_ahead: bool) -> None:
        self.compute, self.d2h, self.h2d = VirtualStream(), VirtualStream(), VirtualStream()
        self.d2h.copy_time, self.h2d.copy_time = d2h, h2d
        self.host_runs_ahead = host_runs_ahead

    def compute_stream(self, device):
        return self.compute

    def d2h_stream(self, device):
        return self.d2h

    def h2d_stream(self, device):
        return self.h2d

    def record_event(self, stream):
        return stream.now

    def wait_event(self, stream, event):
        stream.now = max(stream.now, event)

    def timed_wait(self, stream, event):
        wait = max(0, event - stream.now)
        self.wait_event(stream, event)
        return lambda: wait

    def query(self, event):
        return not self.host_runs_ahead and event <= self.compute.now

    def record_timed_event(self, stream):
        return stream.now

    def elapsed_ms(self, start, end):
        return end - start

    def synchronize(self, event):
        assert event <= self.compute.now, "the engine never blocks the host for a copy"

    def copy(self, dst, src, stream):
        dst.copy_(src)
        stream.now += stream.copy_time

    def empty(self, num_bytes, device):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def lend(self, buffer, stream):
        raise AssertionError("there is one compute stream")

    def allocate_pinned(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free_pinned(self, buffer):
        pass


class Compute(torch.autograd.Function):
    """``x * 2`` that takes ``forward`` of the compute stream's time, and twice that in backward."""

    @staticmethod
    def forward(ctx, x, stream, forward):
        stream.now += forward
        ctx.save_for_backward(x)
        ctx.stream, ctx.forward = stream, forward
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # recomputes
        ctx.stream.now += 2 * ctx.forward
        return grad * 2, None, None


class VirtualBlock(nn.Module):
    def __init__(self, stream, forward):
        super().__init__()
        self.stream, self.forward_time = stream, forward

    def forward(self, x):
        return Compute.apply(x, self.stream, self.forward_time)


class VirtualModel:
    """A real engine on a stack of blocks, on virtual time in milliseconds.

    Args:
        forward: of each block.
        config: of offload. With ``limit = "link"`` the link's rates are those of ``runtime``.
    """

    def __init__(self, forward, runtime, **config):
        self.runtime = runtime
        self.blocks = nn.Sequential(*[checkpoint_wrapper(VirtualBlock(runtime.compute, ms)) for ms in forward])
        offload = OffloadConfig(min_offload_mib=0.0, **config)
        self.offloader = apply_offload(self.blocks, offload, blocks="*", runtime=runtime, budget_bytes=2**40)
        d2h, h2d = (
            INPUT_BYTES / stream.copy_time / 1e6 if stream.copy_time else math.inf
            for stream in (runtime.d2h, runtime.h2d)
        )
        rates = PortRates(d2h, h2d, d2h, h2d)
        self.offloader.set_link(LinkRates(alone=rates, shared=rates))

    def step(self):
        """How long a step took, and its statistics."""
        runtime = self.runtime
        start = runtime.compute.now
        self.blocks(torch.ones(NUMEL, requires_grad=True)).sum().backward()
        stats = self.offloader.step_end()
        duration = runtime.compute.now - start
        runtime.compute.now = max(stream.now for stream in (runtime.compute, runtime.d2h, runtime.h2d))  # the optimizer
        return duration, stats


def run_engine(num_blocks, forward, runtime, **config):
    """The second step."""
    model = VirtualModel([forward] * num_blocks, runtime, **config)
    return [model.step() for _ in range(2)][-1]
