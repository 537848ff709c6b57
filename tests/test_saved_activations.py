"""What the planner says that autograd saves of a block, against blocks of TorchTitan, tensor by tensor."""

import dataclasses

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.protocols.train_spec import get_train_spec

from titan_offload.planner.costs import activation_sizes
from titan_offload.planner.model_shape import model_shape
from titan_offload.planner.shapes import Job

BATCH, SEQ_LEN = 3, 64
TINY_BYTES = 64  # a generator's state

# One head has 16 or 128 features; keys as many as queries or fewer; one norm or one per head.
DENSE = {
    "llama3": {},
    "llama3, fewer keys": {"n_kv_heads": 4},
    "qwen3": {},
    "qwen3, no norm of heads": {"qk_norm": False},
}

pytestmark = pytest.mark.timeout(120)


def args_of(name, **changes):
    family = name.partition(",")[0]
    return family, dataclasses.replace(get_train_spec(family).model_args["debugmodel"], max_seq_len=SEQ_LEN, **changes)


def saved_sizes(family, args, dtype, device, index=0):
    """Bytes of each storage that a block saves, parameters and buffers left out, as mode "all" would move it: whole, or
    of a view that is less than half of it the view."""
    with torch.device(device):
        model = get_train_spec(family).model_cls(args)
        x = torch.empty(BATCH, SEQ_LEN, args.dim, dtype=dtype, requires_grad=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    table = model.rope_cache if hasattr(model, "rope_cache") else model.freqs_cis
    table = table if table.is_complex() else table.to(dtype)  # as FSDP2 casts what goes into a block
    state = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in state:
            is_gathered = 2 * tensor.nbytes < storage.nbytes()
            seen[tensor if is_gathered else storage._cdata] = (
                storage,
                tensor.nbytes if is_gathered else storage.nbytes(),
            )
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model.layers[str(index)](x, table, None)
    return sorted(num_bytes for _, num_bytes in seen.values() if num_bytes >= TINY_BYTES)


def planned_sizes(family, args, dtype, on_cpu, index=0):
    shape = model_shape("x", family, args, itemsize=dtype.itemsize, batch=BATCH, on_cpu=on_cpu)
    return sorted(
        activation_sizes(
            shape.layers[index], shape, Job(SEQ_LEN, batch=BATCH, itemsize=dtype.itemsize, is_checkpointed=False)
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_dense_blocks_on_a_cpu(name, dtype):
    family, args = args_of(name, **DENSE[name])
    assert planned_sizes(family, args, dtype, on_cpu=True) == saved_sizes(family, args, dtype, "cpu")


class FusedNorm(torch.autograd.Function):
    """What ``_fused_rms_norm`` saves: input, weight, and the number per row that it returns too (torch's
    ``derivatives.yaml``). Elsewhere than on an accelerator torch takes the op apart."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def of(module, x):
        return FusedNorm.apply(x, module.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_dense_blocks_on_an_accelerator(name, dtype, monkeypatch):
    """On the meta device, with attention in the kernel that an accelerator takes, and a norm that saves the same."""

    def flash(self, q, k, v, *, scale=None, enable_gqa=False, is_causal=True):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    monkeypatch.setattr(ScaledDotProductAttentionWrapper, "forward", flash)
    monkeypatch.setattr(torch.nn.RMSNorm, "forward", FusedNorm.of)
    family, args = args_of(name, **DENSE[name])
    assert planned_sizes(family, args, dtype, on_cpu=False) == saved_sizes(family, args, dtype, "meta")


def test_sizes_of_a_known_model_by_hand():
    """Llama 3 8B: 4096 wide, of 32 heads 8 for keys, 14336 in the feed-forward; in 16 bits."""
    shape = model_shape("x", "llama3", get_train_spec("llama3").model_args["8B"])
    norm, attention = [2 * 4096, 4, 2 * 4096], [2 * 4096, 2 * 1024, 2 * 1024, 4 * 32, 2 * 4096]
    by_hand = [*norm, *attention, *norm, *[2 * 14336] * 4]
    assert shape.layers[0].activations == tuple(by_hand)
    halved = model_shape("x", "llama3", get_train_spec("llama3").model_args["8B"], tensor_parallel=2)
    norm = [4096, 2, 2 * 4096]  # by tokens; linears are given all of them
    assert halved.layers[0].activations == (*norm, *[n / 2 for n in attention], *norm, *[14336] * 4)


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4", "qwen3", "gpt_oss"])
def test_every_layer_of_every_model_has_an_estimate(name):
    """Within reason: more than its input and what a linear made of it, less than a hundred inputs."""
    for flavor, args in get_train_spec(name).model_args.items():
        for layer in model_shape(flavor, name, args).layers:
            assert 4 * 2 * args.dim < sum(layer.activations) < 100 * 2 * args.dim * max(1, layer.params**0.5 / args.dim)
