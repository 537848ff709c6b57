"""How large TorchTitan 0.2.2's models are, from their model args.

Owns the layout of their blocks: which matmuls there are, how many parameters a token meets in them, and what attention
looks at. Relies on model args by their attribute names, TorchTitan's own objects or what `titan_source` reads of them.
The source of each layout is the model's ``TransformerBlock``; a test builds every layer of every flavor on the meta
device and counts its parameters.

A token meets ``top_k`` of a router's experts, the shared ones and the router's gate. Biases and norms are parameters,
but no matmuls. Price: nothing is built; a few hundred additions.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from titan_offload.config import SelectiveConfig
from titan_offload.planner.block_layout import Block, Linear
from titan_offload.planner.saved_activations import saved_activations
from titan_offload.planner.shapes import LayerShape, ModelShape

FLOAT32, INT64 = 4, 8

SLICED_BY_COLUMN = ("wq", "wk", "wv", "w1", "w3", "wq_b", "wkv_b")
"""Linears whose output features tensor parallel divides among ranks, in TorchTitan's plans."""


def model_shape(
    name: str,
    family: str,
    args: Any,
    selective: SelectiveConfig | None = None,
    *,
    itemsize: int = 2,
    tensor_parallel: int = 1,
    batch: int = 1,
    on_cpu: bool = False,
) -> ModelShape:
    """The layers of a model, and its size.

    Args:
        name: for people, such as ``"qwen3 8B"``.
        family: the model of TorchTitan whose blocks it has: one of `FAMILIES`.
        args: its model args.
        selective: what is saved besides attention's outputs. None: what a router needs in any case.
        itemsize: bytes per element of what is saved.
        tensor_parallel: degree.
        batch: sequences of one forward pass.
        on_cpu: whether it runs on a CPU, where norms save more.

    Raises:
        ValueError: it has no TransformerBlocks in ``layers``.
    """
    if family not in FAMILIES:
        raise ValueError(
            f'model.name = "{family}" has no TransformerBlocks in layers, so there is no block input to move: plan one '
            f"of {', '.join(FAMILIES)}"
        )
    blocks = [FAMILIES[family](args, index) for index in range(args.n_layers)]
    layers = [
        LayerShape(
            params=sum(linear.used_params for linear in block.linears),
            attention_width=block.attention_width,
            num_heads=block.num_heads,
            window=block.window,
            value_width=block.value_width,
            other_saves=tuple(_other_saves(block, f"layers.{index}", selective, itemsize, tensor_parallel)),
            activations=saved_activations(block, args.dim, itemsize, tensor_parallel, batch, on_cpu),
        )
        for index, block in enumerate(blocks)
    ]
    embeddings = 1 if getattr(args, "enable_weight_tying", False) else 2
    num_params = embeddings * args.vocab_size * args.dim + args.dim  # the last norm
    for block in blocks:
        num_params += sum(linear.num_params for linear in block.linears) + block.num_norm_params
    return ModelShape(name, args.dim, tuple(layers), vocab_size=args.vocab_size, num_params=num_params)


# Blocks


def _llama3(args: Any, index: int) -> Block:
    head_dim = args.dim // args.n_heads
    linears = [*_projections(args, head_dim), *_swiglu("feed_forward", args.dim, _llama_hidden_dim(args))]
    return Block(linears, args.n_heads * head_dim, args.n_heads, num_norm_params=2 * args.dim)


def _llama4(args: Any, index: int) -> Block:
    """Every ``interleave_moe_layer_step``-th layer is a mixture of experts, which are narrower by the number that a
    token meets (``auto_scale_hidden_dim``). With FlexAttention, layers with rotary embeddings look at chunks of the
    sequence, of which a token has half before it on average."""
    head_dim, moe_args = args.dim // args.n_heads, args.moe_args
    has_experts = (index + 1) % args.interleave_moe_layer_step == 0
    if has_experts:
        num_used = moe_args.top_k + moe_args.num_shared_experts if args.auto_scale_hidden_dim else 1
        hidden_dim = int(_scaled_hidden_dim(args) / num_used)
        feed_forward = _experts(moe_args, args.dim, hidden_dim + -hidden_dim % args.multiple_of)
    else:
        feed_forward = _swiglu("feed_forward", args.dim, _llama_hidden_dim(args))
    has_rope = args.every_n_layers_nope is None or index % args.every_n_layers_nope != 0
    return Block(
        [*_projections(args, head_dim), *feed_forward],
        args.n_heads * head_dim,
        args.n_heads,
        window=args.fixed_attn_block_size // 2 if args.attn_type == "flex" and has_rope else None,
        num_norm_params=2 * args.dim,
        router=(moe_args.num_experts, moe_args.top_k) if has_experts else None,
        scales_inputs=has_experts and moe_args.score_before_experts,
    )


def _qwen3(args: Any, index: int) -> Block:
    if args.moe_enabled:
        feed_forward = _experts(args.moe_args, args.dim, args.moe_inter_dim)
    else:
        feed_forward = _swiglu("feed_forward", args.dim, args.hidden_dim)
    return Block(
        [*_projections(args, args.head_dim), *feed_forward],
        args.n_heads * args.head_dim,
        args.n_heads,
        num_norm_params=2 * args.dim + (2 * args.head_dim if args.qk_norm else 0),
        router=(args.moe_args.num_experts, args.moe_args.top_k) if args.moe_enabled else None,
        has_qk_norm=args.qk_norm,
        copies_rope=True,
        scales_inputs=args.moe_enabled and args.moe_args.score_before_experts,
    )


def _deepseek_v3(args: Any, index: int) -> Block:
    """Multi-head latent attention: queries (with a ``q_lora_rank``), and keys with values, go through a narrow layer
    each, and values are narrower than keys. The first ``n_dense_layers`` layers have no experts."""
    qk_head_dim = args.qk_nope_head_dim + args.qk_rope_head_dim
    if args.q_lora_rank == 0:
        linears = [Linear("attention.wq", args.dim, args.n_heads * qk_head_dim)]
    else:
        linears = [
            Linear("attention.wq_a", args.dim, args.q_lora_rank),
            Linear("attention.wq_b", args.q_lora_rank, args.n_heads * qk_head_dim),
        ]
    linears += [
        Linear("attention.wkv_a", args.dim, args.kv_lora_rank + args.qk_rope_head_dim),
        Linear("attention.wkv_b", args.kv_lora_rank, args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)),
        Linear("attention.wo", args.n_heads * args.v_head_dim, args.dim),
    ]
    has_experts = index >= args.n_dense_layers
    if has_experts:
        linears += _experts(args.moe_args, args.dim, args.moe_inter_dim)
    else:
        linears += _swiglu("feed_forward", args.dim, args.inter_dim)
    return Block(
        linears,
        args.n_heads * qk_head_dim,
        args.n_heads,
        value_width=args.n_heads * args.v_head_dim,
        num_norm_params=2 * args.dim + args.q_lora_rank + args.kv_lora_rank,
        router=(args.moe_args.num_experts, args.moe_args.top_k) if has_experts else None,
        scales_inputs=has_experts and args.moe_args.score_before_experts,
    )


def _gpt_oss(args: Any, index: int) -> Block:
    """Every other layer, from the first on, looks at a sliding window. Linears have a bias, each head has a sink."""
    moe_args, hidden_dim = args.moe_args, args.moe_inter_dim
    per_expert = {"num": moe_args.num_experts, "num_used": moe_args.top_k, "has_bias": True, "is_module": False}
    return Block(
        [
            *_projections(args, args.head_dim, has_bias=True),
            _gate(moe_args, args.dim),
            Linear("moe.experts.mlp1", args.dim, 2 * hidden_dim, **per_expert),
            Linear("moe.experts.mlp2", hidden_dim, args.dim, **per_expert),
            *_shared_experts(moe_args, args.dim, hidden_dim),
        ],
        args.n_heads * args.head_dim,
        args.n_heads,
        window=args.sliding_window_size if index % 2 == 0 else None,
        num_norm_params=2 * args.dim + args.n_heads,
        router=(moe_args.num_experts, moe_args.top_k),
        copies_rope=True,
        scales_inputs=moe_args.score_before_experts,
    )


FAMILIES: dict[str, Callable[[Any, int], Block]] = {
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "llama3": _llama3,
    "llama4": _llama4,
    "qwen3": _qwen3,
}
"""By TorchTitan's name of the model, what makes a layer's layout from model args and index."""


def _projections(args: Any, head_dim: int, has_bias: bool = False) -> list[Linear]:
    """Of grouped-query attention: queries and output, and keys and values of fewer heads."""
    width = args.n_heads * head_dim
    kv_width = (args.n_heads if args.n_kv_heads is None else args.n_kv_heads) * head_dim
    return [
        Linear("attention.wq", args.dim, width, has_bias=has_bias),
        Linear("attention.wk", args.dim, kv_width, has_bias=has_bias),
        Linear("attention.wv", args.dim, kv_width, has_bias=has_bias),
        Linear("attention.wo", width, args.dim, has_bias=has_bias),
    ]


def _swiglu(name: str, dim: int, hidden_dim: int, **counts: Any) -> list[Linear]:
    return [
        Linear(f"{name}.w1", dim, hidden_dim, **counts),
        Linear(f"{name}.w2", hidden_dim, dim, **counts),
        Linear(f"{name}.w3", dim, hidden_dim, **counts),
    ]


def _experts(moe_args: Any, dim: int, hidden_dim: int) -> list[Linear]:
    per_expert = {"num": moe_args.num_experts, "num_used": moe_args.top_k, "is_module": False}
    return [
        _gate(moe_args, dim),
        *_swiglu("moe.experts", dim, hidden_dim, **per_expert),
        *_shared_experts(moe_args, dim, hidden_dim),
    ]


def _gate(moe_args: Any, dim: int) -> Linear:
    return Linear("moe.router.gate", dim, moe_args.num_experts, has_bias=moe_args.gate_bias)


def _shared_experts(moe_args: Any, dim: int, hidden_dim: int) -> list[Linear]:
    """TorchTitan makes one feed-forward of all shared experts."""
    num_shared = moe_args.num_shared_experts
    return _swiglu("moe.shared_experts", dim, hidden_dim * num_shared) if num_shared else []


def _scaled_hidden_dim(args: Any) -> int:
    """Hidden dim of a SwiGLU with as many parameters as a plain feed-forward of ``4 x dim`` has, times a factor."""
    hidden_dim = int(2 * 4 * args.dim / 3)
    return hidden_dim if args.ffn_dim_multiplier is None else int(args.ffn_dim_multiplier * hidden_dim)


def _llama_hidden_dim(args: Any) -> int:
    return -(-_scaled_hidden_dim(args) // args.multiple_of) * args.multiple_of


# Saved outputs


def _other_saves(
    block: Block, fqn: str, selective: SelectiveConfig | None, itemsize: int, tensor_parallel: int
) -> Iterator[int]:
    """Bytes per token of each output besides attention's that a forward of ``block`` saves: those of `titan.need`."""
    for linear in block.linears:
        is_gate = linear.name == "moe.router.gate"
        if linear.is_module and (is_gate or _is_saved(linear, fqn, selective)):
            is_sliced = linear.name.rpartition(".")[2] in SLICED_BY_COLUMN
            yield linear.out_features // (tensor_parallel if is_sliced else 1) * itemsize
    if block.router is not None:
        num_experts, top_k = block.router
        yield from (num_experts * FLOAT32, top_k * FLOAT32, top_k * INT64)  # scores; values and indices of the top k


def _is_saved(linear: Linear, fqn: str, selective: SelectiveConfig | None) -> bool:
    """Whether ``[selective_checkpoint]`` saves this matmul's output: rules 4 to 6 of `save_policy`, in its terms."""
    if selective is None:
        return False
    if any(entry in "aten::mm" for entry in selective.save_ops):
        return True
    parts = linear.name.split(".")
    scopes = [fqn, *(f"{fqn}.{'.'.join(parts[:depth])}" for depth in range(1, len(parts) + 1))]
    if any(_matches(scope, pattern) for scope in scopes for pattern in selective.save_modules):
        return True
    return 0 < selective.save_matmul_min_k <= linear.in_features


def _matches(fqn: str, pattern: str) -> bool:
    """See `save_policy.matches_module`."""
    if any(wildcard in pattern for wildcard in "*?["):
        return fnmatchcase(fqn, pattern)
    return fqn == pattern or fqn.endswith(f".{pattern}")
