"""A TransformerBlock as the planner sees it: its matmuls and what attention looks at, plain numbers.

Owns these two records. Who makes them, from a model's args: `model_shape`.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Linear:
    """A weight, or one per expert.

    Attributes:
        name: within the block.
        in_features, out_features: of one.
        num: how many there are.
        num_used: how many of them a token meets.
        has_bias: whether each has one.
        is_module: whether it is an ``nn.Linear``; experts are not.
    """

    name: str
    in_features: int
    out_features: int
    num: int = 1
    num_used: int = 1
    has_bias: bool = False
    is_module: bool = True

    @property
    def used_params(self) -> int:
        return self.num_used * self.in_features * self.out_features

    @property
    def num_params(self) -> int:
        return self.num * (self.in_features + self.has_bias) * self.out_features


@dataclass(frozen=True)
class Block:
    """A TransformerBlock.

    Attributes:
        linears: all of them.
        attention_width: ``n_heads x head_dim`` of queries and keys.
        num_heads: query heads.
        value_width: ``n_heads x head_dim`` of values, if that is another one.
        window: tokens that attention looks back on average, if not all.
        num_norm_params: parameters that are in no linear.
        router: its experts and how many of them a token is sent to, if there is one.
        has_qk_norm: whether queries and keys are normalized per head.
        copies_rope: whether each forward casts its rotary tables to the dtype of queries.
        scales_inputs: whether experts get what the router sends them times its score, instead of giving it.
    """

    linears: list[Linear]
    attention_width: int
    num_heads: int
    value_width: int | None = None
    window: int | None = None
    num_norm_params: int = 0
    router: tuple[int, int] | None = field(default=None)
    has_qk_norm: bool = False
    copies_rope: bool = False
    scales_inputs: bool = False

    def linear(self, name: str) -> Linear | None:
        """By its name within the block; None: there is none."""
        return next((linear for linear in self.linears if linear.name == name), None)
