"""What is known of TorchTitan 0.2.2's own models: which outputs of their MoE layers must never be recomputed, and the
attention type of their blocks.

A recompute that sends a token to another expert than forward did gives wrong gradients without a word. So the router's
decisions are saved, and what follows from them on the host: the sizes of an expert-parallel exchange, and DeepEP's
dispatch and combine, whose handles exist once. The exchange of the tokens themselves is recomputed: with the same sizes
it gives the same tokens, and it is as large as ``top_k`` block inputs.
"""

from torch import nn
from torchtitan.models.moe.moe import MoE, TokenChoiceTopKRouter

from titan_offload.apply import layer_type_attribute
from titan_offload.save_registry import register_builtin_save

_ROUTER = "recomputed scores or near ties would send tokens to other experts"
_ON_HOST = "sizes an exchange among ranks; recompute would wait for the device again"
_HANDLE = "its result refers to a handle that exists once"

ROUTER_OPS = (
    *("aten::mm", "aten::addmm"),  # the gate, without and with bias
    *("aten::sigmoid", "aten::_softmax"),  # the score function
    "aten::topk",
)
SIZE_OPS = ("aten::_to_copy", "aten::_local_scalar_dense", "_c10d_functional::all_to_all_single")
DEEPEP_OPS = ("deepep::dispatch", "deepep::combine")


def register_builtin_saves() -> None:
    """Registers what TorchTitan's MoE layers must save. Called again, it does nothing."""
    for op in ROUTER_OPS:
        register_builtin_save(op, TokenChoiceTopKRouter, reason=_ROUTER)
    for op in SIZE_OPS:
        register_builtin_save(op, MoE, reason=_ON_HOST, only_sizes=True)
    for op in DEEPEP_OPS:
        register_builtin_save(op, MoE, reason=_HANDLE)


def layer_type(block: nn.Module) -> str | None:
    """The attention type of a block of TorchTitan's models, or as a block of another model says; None: not known."""
    if hasattr(block, "use_sliding_attention"):  # gpt_oss
        return "sliding_attention" if block.use_sliding_attention else "full_attention"
    attention = getattr(block, "attention", None)
    if hasattr(attention, "use_rope"):  # llama4: with FlexAttention, blocks with rotary embeddings look at one chunk
        return "chunked_attention" if attention.attn_type == "flex" and attention.use_rope else "full_attention"
    return layer_type_attribute(block)
