"""as_savable_op: same numbers as function.apply, and how often the forward kernel runs."""

import contextlib
import gc
import weakref

import attention_toy
import pytest
import torch
import toy
from attention_toy import BATCH, HEADS, SEQ
from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_offload import OffloadConfig, SelectiveConfig, apply_offload, as_savable_op
from titan_offload.save_policy import ATTENTION_OPS

SCHEMA = "(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, int?[] window_size)"
NUM_BLOCKS = toy.NUM_BLOCKS


class ToyAttention(torch.autograd.Function):
    """Has the form of FlashAttention 4: arguments that no op schema can express, a log-sum-exp that is saved."""

    num_forwards = 0
    seen = ()  # what the last forward got, and what backward found on ctx

    @staticmethod
    def forward(
        ctx, q, k, v, softmax_scale=None, causal=False, window_size=(None, None), bias=None, dropout=0.0, mod=None
    ):
        ToyAttention.num_forwards += 1
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        scores = q @ k.transpose(-2, -1) * scale
        scores = scores if bias is None else scores + bias
        scores = scores if mod is None else mod(scores)
        allowed = allowed_pairs(q.shape[-2], causal, *window_size)
        lse = torch.logsumexp(scores.masked_fill(~allowed, float("-inf")).float(), -1)
        keep = torch.rand_like(scores) >= dropout if dropout else None
        out = probabilities(scores, allowed, lse, keep) @ v
        ctx.save_for_backward(q, k, v, out, lse, bias, keep)
        ctx.scale, ctx.allowed, ctx.settings = scale, allowed, (softmax_scale, causal, window_size, mod)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, bias, keep = ctx.saved_tensors
        ToyAttention.seen = (ctx.settings, ctx.needs_input_grad, dlse)
        scores = q @ k.transpose(-2, -1) * ctx.scale
        scores = scores if bias is None else scores + bias
        probs = probabilities(scores, ctx.allowed, lse, None)
        kept = probs if keep is None else probs * keep
        dprobs = dout @ v.transpose(-2, -1)
        dprobs = dprobs if keep is None else dprobs * keep
        dscores = probs * (dprobs - (dout * out).sum(-1, keepdim=True))
        dbias = None if bias is None else dscores.sum(0, keepdim=True)
        dq, dk = dscores @ k * ctx.scale, dscores.transpose(-2, -1) @ q * ctx.scale
        return dq, dk, kept.transpose(-2, -1) @ dout, None, None, None, dbias, *((None,) * 9)


def allowed_pairs(seq: int, causal: bool, left: int | None, right: int | None) -> torch.Tensor:
    behind = torch.arange(seq)[:, None] - torch.arange(seq)[None, :]
    allowed = torch.ones(seq, seq, dtype=torch.bool)
    allowed &= behind >= 0 if causal else allowed
    allowed &= behind <= left if left is not None else allowed
    return allowed & (behind >= -right if right is not None else allowed)


def probabilities(scores, allowed, lse, keep):
    probs = torch.exp(scores.masked_fill(~allowed, float("-inf")) - lse[..., None]).to(scores.dtype)
    return probs if keep is None else probs * keep


class HiddenLse(ToyAttention):
    """Returns the output alone: nothing but its forward has the log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v, softmax_scale=None, causal=False, window_size=(None, None)):
        return ToyAttention.forward(ctx, q, k, v, softmax_scale, causal, window_size)[0]

    @staticmethod
    def backward(ctx, dout):
        return ToyAttention.backward(ctx, dout, None)


attention = as_savable_op(ToyAttention, name="toy_attention", schema=SCHEMA)
hidden_attention = as_savable_op(HiddenLse, name="toy_hidden", schema=SCHEMA)


def make_block(attend, *args, dropout: float = 0.0) -> type[nn.Module]:
    """A block that calls ``attend(q, k, v, *args)``, and has a dropout of its own after it."""

    class Attention(attention_toy.Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            out, lse = attend(q, k, v, *args)
            assert not lse.requires_grad
            x = self.wo(out.transpose(1, 2).flatten(2) + lse.mean())
            return nn.functional.dropout(x, dropout) if dropout else x

    class Block(attention_toy.AttentionBlock):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.attention = Attention(dim)

    return Block


def make_model(attend, *args, **kwargs) -> toy.Model:
    return attention_toy.make_model(make_block(attend, *args, **kwargs))


def train_step(model: nn.Module, seed: int = 0) -> tuple[int, int]:
    """How often the kernel ran in forward and in backward."""
    before = ToyAttention.num_forwards
    torch.manual_seed(seed)
    loss = model.loss(toy.make_tokens(seed))
    between = ToyAttention.num_forwards
    loss.backward()
    return between - before, ToyAttention.num_forwards - between


def reference(*args, **kwargs) -> toy.Model:
    model = make_model(ToyAttention.apply, *args, **kwargs)
    assert train_step(model) == (NUM_BLOCKS, NUM_BLOCKS)
    return model


def make_qkv(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, HEADS, SEQ, 8, generator=generator).requires_grad_() for _ in range(3)]


def outputs_and_grads(function, tensors, *args) -> list[torch.Tensor | None]:
    """Of one call: outputs, and gradients of ``tensors`` if the sum of squares of the outputs is the loss."""
    tensors = [tensor if tensor is None else tensor.detach().clone().requires_grad_() for tensor in tensors]
    outputs = function(*tensors, *args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((out**2).sum() for out in outputs if out is not None and out.requires_grad).backward()
    return [*outputs, *(None if tensor is None else tensor.grad for tensor in tensors)]


def assert_same(got: list, expected: list) -> None:
    for x, y in zip(got, expected, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (torch.equal(x, y) and x.requires_grad == y.requires_grad and x.stride() == y.stride())


@contextlib.contextmanager
def applied(model: nn.Module, *, offload: bool = False, **selective):
    config = OffloadConfig(mode="block_inputs", min_offload_mib=0.0) if offload else OffloadConfig(mode="none")
    saves = SelectiveConfig(offload=offload, **selective)
    offloader = apply_offload(model, config, saves, runtime=toy.slow_link())
    try:
        yield offloader
    finally:
        offloader.remove()


# Same numbers as function.apply


CALLS = [
    (),
    (0.3, True),
    (None, False, (4, 0)),
    (None, True, (None, 2)),
    (0.5, True, (None, None), None, 0.0, torch.tanh),
]


@pytest.mark.parametrize("args", CALLS)
def test_outputs_and_gradients_are_those_of_apply(args):
    expected = outputs_and_grads(ToyAttention.apply, make_qkv(), *args)
    assert_same(outputs_and_grads(attention, make_qkv(), *args), expected)

    def checkpointed(*args):
        return checkpoint(attention, *args, use_reentrant=False)

    assert_same(outputs_and_grads(checkpointed, make_qkv(), *args), expected)


def test_arguments_arrive_as_they_are():
    outputs_and_grads(ToyAttention.apply, make_qkv(), 1, True, (4, 0), None, 0.0, torch.tanh)
    expected, needs_input_grad, _ = ToyAttention.seen
    outputs_and_grads(attention, make_qkv(), 1, True, (4, 0), None, 0.0, torch.tanh)
    assert expected == (1, True, (4, 0), torch.tanh)
    assert ToyAttention.seen[:2] == (expected, needs_input_grad)
    assert [type(x) for x in ToyAttention.seen[0]] == [type(x) for x in expected]


def test_an_optional_tensor_that_the_schema_does_not_name_gets_its_gradient():
    def call(function):
        return lambda q, k, v, bias: function(q, k, v, None, True, (None, None), bias)

    bias = torch.randn(1, HEADS, SEQ, SEQ, generator=torch.Generator().manual_seed(1))
    for value in (bias, None):
        expected = outputs_and_grads(call(ToyAttention.apply), [*make_qkv(), value])
        assert_same(outputs_and_grads(call(attention), [*make_qkv(), value]), expected)


def test_without_gradients_and_in_eval():
    q, k, v = make_qkv()
    with torch.no_grad():
        expected, got = ToyAttention.apply(q, k, v), attention(q, k, v)
    assert_same([*got], [*expected])
    assert not got[0].requires_grad
    assert_same([*attention(q.detach(), k.detach(), v.detach())], [*expected])
    model, other = make_model(attention).eval(), make_model(ToyAttention.apply).eval()
    with applied(model), torch.no_grad():
        assert torch.equal(model(toy.make_tokens()), other(toy.make_tokens()))


def test_what_a_graph_holds_dies_with_it():
    q, k, v = make_qkv()
    assert not gc.isenabled()
    out, lse = attention(q, k, v)
    alive = [weakref.ref(out), weakref.ref(lse), weakref.ref(out.grad_fn)]
    out.sum().backward()
    del out, lse
    assert [ref() for ref in alive] == [None] * 3


class Split(torch.autograd.Function):
    """Outputs of all kinds: a view, None, whole numbers, an intermediate. Saves one tensor twice."""

    seen = ()

    @staticmethod
    def forward(ctx, x: torch.Tensor, y: torch.Tensor | None = None, materialize: bool = True):
        ctx.set_materialize_grads(materialize)
        inner = x.sin()
        both = torch.stack((inner, x.cos()))
        index = both.argmax(0)
        ctx.save_for_backward(inner, None, x, inner, y)
        ctx.mark_non_differentiable(index)
        return both[0], None, index, both[1], inner if y is None else inner * y

    @staticmethod
    def backward(ctx, g0, g1, g2, g3, g4):
        inner, nothing, x, again, y = ctx.saved_tensors
        assert nothing is None and torch.equal(inner, again)
        Split.seen = tuple(grad if grad is None else grad.clone() for grad in (g0, g1, g2, g3, g4))
        dx = sum((g * f for g, f in ((g0, x.cos()), (g3, -inner), (g4, x.cos())) if g is not None), torch.zeros_like(x))
        return dx, None if y is None else torch.zeros_like(y) if g4 is None else g4 * inner, None


split = as_savable_op(Split, name="toy_split", is_attention=False)


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("used", [0, 3, 4])
@pytest.mark.parametrize("has_y", [True, False])
def test_tuples_with_none_views_and_gradients_that_are_not_there(materialize, used, has_y):
    results = []
    for function in (Split.apply, split):
        x, y = (torch.linspace(start, 3, 5).requires_grad_() for start in (0, 1))
        outputs = function(x, y if has_y else None, materialize)
        assert isinstance(outputs, tuple) and [out is None for out in outputs] == [False, True, False, False, False]
        assert [out is not None and out.requires_grad for out in outputs] == [True, False, False, True, True]
        outputs[used].sum().backward()
        results.append([*outputs, x.grad, y.grad, *Split.seen])
    assert_same(results[1], results[0])


class WithSetupContext(torch.autograd.Function):
    """Forward without ctx. Its annotations are what the op's schema follows from."""

    num_forwards = 0

    @staticmethod
    def forward(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        WithSetupContext.num_forwards += 1
        return (x * scale).exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return grad * output * ctx.scale, None


def test_a_function_with_setup_context_that_returns_one_tensor():
    exp = as_savable_op(WithSetupContext, name="toy_exp", is_attention=False)
    assert str(torch.ops.titan_offload.toy_exp.default._schema).startswith(
        "titan_offload::toy_exp(Tensor x, float scale)"
    )
    x = torch.linspace(0, 1, 5)
    for args in ((), (0.5,)):
        expected = outputs_and_grads(lambda x, *args: WithSetupContext.apply(x, *(args or (2.0,))), [x], *args)
        assert_same(outputs_and_grads(exp, [x], *args), expected)


# In a checkpointed model


def hidden(function):
    """For `make_block`."""
    return lambda *args: (out := function(*args), out.detach())


@pytest.mark.parametrize("is_hidden", [False, True])
def test_forward_runs_twice_without_selective_saves_and_once_with(is_hidden):
    expected = reference(None, True)
    model = make_model(attention, None, True)
    if is_hidden:
        expected, model = (make_model(hidden(function), None, True) for function in (HiddenLse.apply, hidden_attention))
        train_step(expected)
    assert train_step(model) == (NUM_BLOCKS, NUM_BLOCKS)
    toy.assert_same_grads(model, expected)
    with applied(model) as offloader:
        model.zero_grad()
        assert train_step(model) == (NUM_BLOCKS, 0)
        toy.assert_same_grads(model, expected)
        saved = offloader.step_end().saved
    assert saved == {'save_ops "attention"': (NUM_BLOCKS, NUM_BLOCKS * attention_toy.ATTENTION_BYTES)}


@pytest.mark.parametrize("is_hidden", [False, True])
def test_what_is_saved_may_wait_in_host_memory(is_hidden):
    functions = (HiddenLse.apply, hidden_attention) if is_hidden else (ToyAttention.apply, attention)
    expected, model = (make_model(hidden(function) if is_hidden else function, None, True) for function in functions)
    train_step(expected)
    with applied(model, offload=True) as offloader:
        for _ in range(3):
            model.zero_grad()
            assert train_step(model) == (NUM_BLOCKS, 0)
            toy.assert_same_grads(model, expected)
            stats = offloader.step_end()
            assert stats.offloaded_bytes == (NUM_BLOCKS - 1) * (toy.INPUT_BYTES + attention_toy.ATTENTION_BYTES)
        assert toy.slots_in_use(offloader) == 0


@pytest.mark.parametrize("offload", [False, True])
def test_a_retained_graph_and_two_microbatches(offload):
    expected = make_model(ToyAttention.apply)
    model = make_model(attention)

    def run(model: toy.Model) -> None:
        first, second = (model.loss(toy.make_tokens(seed)) for seed in (0, 1))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()

    run(expected)
    with applied(model, offload=offload):
        before = ToyAttention.num_forwards
        run(model)
        assert ToyAttention.num_forwards - before == 2 * NUM_BLOCKS
    toy.assert_same_grads(model, expected)


@pytest.mark.parametrize(
    ("window", "selective", "in_backward"),
    [
        ((4, 0), {}, NUM_BLOCKS),
        ((4, 0), {"save_sliding_window": True}, 0),
        ((None, 0), {}, 0),
    ],
)
def test_attention_in_a_sliding_window_is_recomputed_unless_asked_for(window, selective, in_backward):
    expected, model = reference(None, False, window), make_model(attention, None, False, window)
    with applied(model, **selective):
        assert train_step(model) == (NUM_BLOCKS, in_backward)
    toy.assert_same_grads(model, expected)


def test_a_default_window_is_seen():
    class Windowed(ToyAttention):
        @staticmethod
        def forward(ctx, q, k, v, window_size=(4, 0)):
            return ToyAttention.forward(ctx, q, k, v, None, False, window_size)

    schema = "(Tensor q, Tensor k, Tensor v, int[2] window_size=[4, 0])"
    model = make_model(as_savable_op(Windowed, name="toy_windowed", schema=schema))
    with applied(model):
        assert train_step(model) == (NUM_BLOCKS, NUM_BLOCKS)


def test_random_numbers_after_a_skipped_forward_are_those_of_forward():
    args = (None, True, (None, None), None, 0.25)
    expected, model = reference(*args, dropout=0.5), make_model(attention, *args, dropout=0.5)
    with applied(model):
        assert train_step(model) == (NUM_BLOCKS, 0)
    toy.assert_same_grads(model, expected)


def test_autocast_reaches_the_kernel():
    expected, model = make_model(ToyAttention.apply), make_model(attention)
    with torch.autocast("cpu", torch.bfloat16):
        train_step(expected)
        with applied(model):
            assert train_step(model) == (NUM_BLOCKS, 0)
        toy.assert_same_grads(model, expected)
        q, k, v = make_qkv()
        with attention_toy.CountOps():
            got, expected = attention(q, k, v), ToyAttention.apply(q, k, v)
    assert got[0].dtype == torch.bfloat16
    assert_same([*got], [*expected])


def test_outputs_of_other_kinds_are_saved_by_name():
    class Block(attention_toy.AttentionBlock):
        function = staticmethod(Split.apply)

        def forward(self, x, rope, mask=None):
            first, _, index, third, last = self.function(super().forward(x, rope), rope, False)
            return first * third + last + index

    class SavedBlock(Block):
        function = staticmethod(split)

    expected, model = attention_toy.make_model(Block), attention_toy.make_model(SavedBlock)
    train_step(expected)
    with applied(model, save_ops=("attention", "titan_offload::toy_split")) as offloader:
        loss = model.loss(toy.make_tokens())
        with attention_toy.CountOps() as count:
            loss.backward()
        assert "titan_offload::toy_split" not in count.num
        toy.assert_same_grads(model, expected)
        assert offloader.step_end().saved['save_ops "titan_offload::toy_split"'][0] == NUM_BLOCKS


def test_an_edit_of_a_saved_output_is_an_error():
    def edited(*args):
        out, lse = attention(*args)
        return out.mul_(2), lse

    model = make_model(edited)
    with applied(model):
        loss = model.loss(toy.make_tokens())
        with pytest.raises(RuntimeError, match="modified by an in"):
            loss.backward()


class ViewOfSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        assert x.requires_grad and not torch.is_grad_enabled()
        out = x.exp()
        ctx.save_for_backward(out)
        return out.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.view_as(ctx.saved_tensors[0]) * ctx.saved_tensors[0]


def test_an_edit_of_a_view_of_a_saved_tensor_is_an_error_as_in_apply():
    view = as_savable_op(ViewOfSaved, name="toy_view", is_attention=False)
    for function in (ViewOfSaved.apply, view):
        with attention_toy.CountOps():
            y = function(torch.ones(2, 2, requires_grad=True))
            with pytest.raises(RuntimeError, match=r"Output 0 of ViewOfSaved(Backward)? is a view and is"):
                y.mul_(2)


def test_a_compiled_caller_runs_it_uncompiled():
    @torch.compile(backend="aot_eager")
    def double(q, k, v):
        out, lse = attention(q * 2, k, v)
        return out * 2, lse

    def expected(q, k, v):
        out, lse = ToyAttention.apply(q * 2, k, v)
        return out * 2, lse

    assert_same(outputs_and_grads(double, make_qkv()), outputs_and_grads(expected, make_qkv()))


# Errors


def function_of(forward) -> type[torch.autograd.Function]:
    return type("Bad", (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": lambda ctx, g: g})


def test_a_name_is_registered_once():
    assert as_savable_op(ToyAttention, name="toy_attention", schema=SCHEMA) is attention
    for function, schema in ((Split, SCHEMA), (ToyAttention, None)):
        with pytest.raises(ValueError, match=r"'toy_attention' is registered already.*Choose another name"):
            as_savable_op(function, name="toy_attention", schema=schema)
    with pytest.raises(ValueError, match="'not a name' must be an identifier"):
        as_savable_op(ToyAttention, name="not a name", schema=SCHEMA)
    with pytest.raises(TypeError, match=r"takes a subclass of torch\.autograd\.Function"):
        as_savable_op(ToyAttention.apply, name="toy_bad", schema=SCHEMA)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (None, r"do not follow from the annotations of ToyAttention.forward.*schema=\"\(Tensor q, "),
        ("Tensor q, Tensor k", r"is not the arguments of an op, such as \"\(Tensor q, "),
        (f"{SCHEMA} -> Tensor", "is not the arguments of an op"),
        ("(Tensor q, Tensor key)", "key must be a positional argument of ToyAttention.forward.*valid: q, k, v"),
        ("(Tensor(a!) q)", "q must be a positional argument of ToyAttention.forward that is not modified"),
        ("(Tensor q, *, bool causal)", "causal must be a positional argument"),
    ],
)
def test_a_schema_that_does_not_fit(schema, text):
    with pytest.raises(ValueError, match=f"(?s){text}"):
        as_savable_op(ToyAttention, name="toy_bad", schema=schema)
    assert "titan_offload::toy_bad" not in ATTENTION_OPS


@pytest.mark.parametrize(
    ("forward", "error", "text"),
    [
        (lambda ctx, x: x, ValueError, "output 0 of Bad is an input or a view of one: return a clone"),
        (lambda ctx, x: (x + 1, x[0]), ValueError, "output 1 of Bad is an input or a view of one"),
        (lambda ctx, x: (x + 1, 3), TypeError, "output 1 of Bad is 3: an op returns tensors or None"),
        (lambda ctx, x: [x + 1], TypeError, "output 0 of Bad is .*: an op returns tensors or None"),
        (lambda ctx, x: ctx.mark_dirty(x) or x.add_(1), ValueError, "Bad modifies an input"),
    ],
)
def test_outputs_that_no_op_can_return(forward, error, text, request):
    name = "toy_" + "".join(filter(str.isalnum, request.node.callspec.id))
    bad = as_savable_op(function_of(forward), name=name, schema="(Tensor x)", is_attention=False)
    with pytest.raises(error, match=text):
        bad(torch.ones(2, requires_grad=True) * 1)


def test_the_op_alone_is_not_to_be_called():
    with pytest.raises(RuntimeError, match="call what as_savable_op returned for ToyAttention, not its op"):
        torch.ops.titan_offload.toy_attention(*make_qkv(), None, False, [None, None])
