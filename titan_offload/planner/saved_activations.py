"""What autograd saves of a block that is not checkpointed: with mode "all" it all goes to the host.

Owns, for TorchTitan 0.2.2's blocks, which op saves which tensor, each counted once though several ops may save it.
Relies on `block_layout`, numbers alone. Parameters and buffers are left out, and so are their views: they do not move.

Sources: torch's ``derivatives.yaml``, and what runs saved. Exact where attention is one fused kernel and no router
decides how many tokens an expert gets (`plan_input` has all conditions); tests hold it to real blocks. Price: some
twenty additions per layer.
"""

from collections.abc import Iterator

from titan_offload.planner.block_layout import Block, Linear

FLOAT32, INT64 = 4, 8

EXPERT_TENSORS = {"moe.experts.w1": 4, "moe.experts.mlp1": 3.5}
"""Of an expert's first matmul, how many tensors as wide as its output are saved from there to its last one. Of SwiGLU
each counted at w1's width: SiLU's input and output, w3's output, their product. gpt_oss has both halves in one matmul,
and clamps them: its output, and of half its width SiLU's input, its sigmoid, the product, the linear half and the
product of both."""


def saved_activations(
    block: Block, dim: int, itemsize: int, tensor_parallel: int = 1, batch: int = 1, on_cpu: bool = False
) -> tuple[float, ...]:
    """Bytes of each tensor that autograd saves of a block, per token of one forward pass of a rank.

    Tokens are those inside a block. Tensor parallel cuts norms, and what they take, by tokens, linears by their
    features; what goes into a linear that is cut by columns it gathers.

    Args:
        block, dim: of the model.
        itemsize: bytes per element of the hidden state.
        tensor_parallel: degree.
        batch: sequences of the forward pass. The rotary tables are saved once for all.
        on_cpu: whether it runs on a CPU, see `_norm`.
    """
    tokens = 1 / tensor_parallel
    sizes = [
        *_norm(tokens, dim, itemsize, on_cpu),
        dim * itemsize,  # to the projections
        *_attention(block, itemsize, tensor_parallel, batch, on_cpu),
        *_norm(tokens, dim, itemsize, on_cpu),
        dim * itemsize,  # to the feed-forward, or to router and shared expert
        *_feed_forward(block, dim, itemsize, tensor_parallel),
    ]
    return tuple(sizes)


def _norm(tokens: float, width: float, itemsize: int, on_cpu: bool, num_rows: float = 1) -> Iterator[float]:
    """RMSNorm: on an accelerator one kernel, which saves its input and a float32 number per row. On a CPU it is many
    ops, in float32: they save the input in float32 and the normalized one (torch's ``rms_norm_composite``)."""
    yield tokens * width * (FLOAT32 if on_cpu else itemsize)
    yield tokens * num_rows * FLOAT32
    if on_cpu:
        yield tokens * width * FLOAT32


def _attention(block: Block, itemsize: int, degree: int, batch: int, on_cpu: bool) -> Iterator[float]:
    """Queries, keys and values as attention gets them, its output, and its float32 log-sum-exp per head. Tensor
    parallel divides the heads. The output is what ``wo`` saves too."""
    heads, queries = block.num_heads / degree, block.attention_width / degree
    head_dim = block.attention_width / block.num_heads
    keys, values = queries, (block.value_width or block.attention_width) / degree
    out = values
    if wk := block.linear("attention.wk"):
        keys = values = wk.out_features / degree
    elif up := block.linear("attention.wkv_b"):
        yield from _latents(block, itemsize, degree, on_cpu)
        # Values are a view of what the linear made of keys and values: that moves whole unless they are less than half.
        whole = up.out_features / degree
        values = whole if 2 * values >= whole else values
    if block.has_qk_norm:
        yield from _norm(1, queries, itemsize, on_cpu, num_rows=heads)
        yield from _norm(1, keys, itemsize, on_cpu, num_rows=keys / head_dim)
    if block.copies_rope and itemsize < FLOAT32:
        yield 2 * head_dim * itemsize / batch  # cosine and sine, one tensor
    yield from (width * itemsize for width in (queries, keys, values))
    yield heads * FLOAT32
    yield out * itemsize


def _latents(block: Block, itemsize: int, degree: int, on_cpu: bool) -> Iterator[float]:
    """Of DeepSeek's latent attention: the narrow layers, whose norms are not cut by tensor parallel."""
    down, up = block.linear("attention.wkv_a"), block.linear("attention.wkv_b")
    yield from _norm(1, up.in_features, itemsize, on_cpu)
    yield up.in_features * itemsize
    if not on_cpu or itemsize == FLOAT32:
        yield (down.out_features - up.in_features) * itemsize  # the norm's input is a view of it all
    if queries := block.linear("attention.wq_b"):
        yield from _norm(1, queries.in_features, itemsize, on_cpu)
        yield queries.in_features * itemsize


def _feed_forward(block: Block, dim: int, itemsize: int, degree: int) -> Iterator[float]:
    for name in ("feed_forward", "moe.shared_experts"):
        if linear := block.linear(f"{name}.w1"):
            yield from _swiglu(linear, itemsize, degree)
    if block.router is not None:
        yield from _experts(block, dim, itemsize)


def _swiglu(linear: Linear, itemsize: int, degree: int) -> Iterator[float]:
    """``w2(silu(w1(x)) * w3(x))``: SiLU's input, both factors, their product."""
    yield from (linear.out_features * itemsize / degree for _ in range(4))


def _experts(block: Block, dim: int, itemsize: int) -> Iterator[float]:
    """Tokens as the router sent them, what experts make of them, and scores: before the experts, or after them."""
    num_experts, top_k = block.router
    yield num_experts * FLOAT32
    yield from (top_k * INT64 for _ in range(3))  # which experts, and twice the order that tokens are sorted in
    yield top_k * FLOAT32
    yield top_k * dim * FLOAT32  # what is multiplied by scores
    yield top_k * dim * itemsize
    for name, num in EXPERT_TENSORS.items():
        if linear := block.linear(name):
            yield top_k * num * linear.out_features * itemsize
