"""Lets torch's context parallel take the attention op of the CPU, which it has no rule for.

TorchTitan applies torch's ``_ContextParallel`` to attention modules. It makes DTensors of query, key and value, sharded
along the sequence, and DTensor's dispatcher hands the attention op to torch's ring. That is a template over the op, and
here it is given the CPU's. The exchange of keys and values (all-gather or all-to-all), load balance and the merge of
partial results are torch's own code.
"""

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention

SEQ_DIM = 2
BACKWARD_ARGS = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")


def let_context_parallel_run_on_cpu() -> None:
    """For all later calls of torch's ``_enable_context_parallel_dispatcher`` in this process."""
    _attention.custom_ops[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default] = _forward
    _attention.custom_ops[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _backward


def _forward(op: OpOverload, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
    group, local_args, wrap = _unwrap(args)
    is_causal = local_args[4] if len(local_args) > 4 else False
    ring = _attention._templated_ring_attention
    return wrap(ring(group, SEQ_DIM, op, *local_args[:3], is_causal=is_causal, **kwargs))


def _backward(op: OpOverload, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
    group, local_args, wrap = _unwrap(args)
    named = dict(zip(BACKWARD_ARGS, local_args, strict=True))
    ring = _attention._templated_ring_attention_backward
    return wrap(ring(group, SEQ_DIM, op, grad_out_name="grad_out", **named, **kwargs))


def _unwrap(args: tuple):
    """The group, the arguments with local tensors, and what makes results DTensors again: all are sharded alike."""
    of = next(arg for arg in args if isinstance(arg, DTensor))
    mesh, placements = of.device_mesh, of.placements
    local_args = [arg._local_tensor if isinstance(arg, DTensor) else arg for arg in args]

    def wrap(results):
        return tuple(DTensor.from_local(result, mesh, placements, run_check=False) for result in results)

    return mesh.get_group(), local_args, wrap
