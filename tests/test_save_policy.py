"""Which ops are saved: the names, the order of decisions, the registry."""

import attention_toy as at
import pytest
import torch
import torch.nn.attention.varlen  # registers its op
from torch import nn

from titan_offload import SelectiveConfig, register_mandatory_save, register_preferred_save, save_registry
from titan_offload.save_policy import (
    ATTENTION_OPS,
    MATMULS,
    Call,
    SavePolicy,
    check_save_ops,
    has_bounded_window,
    matches_module,
)
from titan_offload.save_registry import (
    closest,
    known_op_names,
    packet_name,
    register_builtin_save,
    registered_saves,
)

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Other tests import what registers saves of TorchTitan's models."""
    monkeypatch.setattr(save_registry, "_registered", [])


def call(op, *args, scope=(), layer_type=None, **kwargs):
    return Call(op, args, kwargs, [frozenset(scope)] if scope else [], layer_type)


def rule_name(policy: SavePolicy, made: Call) -> str | None:
    rule = policy.rule_for(made)
    return rule and rule.name


MM = call(aten.mm.default, torch.ones(3, 8), torch.ones(8, 5))
Q = torch.ones(1, 2, 8, 4)
SDPA = call(at.ATTENTION_OP, Q, Q, Q)


# Attention


def test_every_attention_forward_of_this_torch_is_in_the_group():
    """What the dispatcher has, minus what training does not reach as one op that returns its output."""
    left_out = {
        "aten::scaled_dot_product_attention",  # taken apart into one of the others before a mode sees it
        "aten::_native_multi_head_attention",  # inference only
        "aten::_triton_multi_head_attention",
        "aten::_triton_scaled_dot_attention",
        "aten::_flash_attention_forward_no_dropout_inplace",  # writes into an argument
        "torch_attn::_varlen_attn_out",
    }
    dispatched = {
        name.partition(".")[0]
        for name in known_op_names()
        if name.startswith(("aten::", "torch_attn::", "higher_order::flex_attention"))
        and ("attention" in name or "attn" in name)
        and "backward" not in name
    }
    assert dispatched - left_out == ATTENTION_OPS & dispatched
    assert "torch_attn::_varlen_attn" in dispatched
    assert "higher_order::flex_attention" in dispatched
    assert not any("backward" in name for name in ATTENTION_OPS)


def window(size):
    n = torch.tensor([0, 8])
    q = torch.ones(8, 2, 4)
    return call(torch.ops.torch_attn._varlen_attn.default, q, q, q, n, n, 8, 8, False, None, size)


def flash_window(left, right):
    q = torch.ones(1, 8, 2, 4)
    op = aten._flash_attention_forward.default
    return call(op, q, q, q, None, None, 8, 8, 0.0, True, False, window_size_left=left, window_size_right=right)


@pytest.mark.parametrize(
    "made, is_saved",
    [
        (SDPA, True),
        (window(None), True),
        (window([-1, 0]), True),  # TorchTitan's causal attention
        (window([-1, -1]), True),
        (window([128, 0]), False),
        (window([0, 0]), False),
        (flash_window(None, None), True),
        (flash_window(-1, 0), True),
        (flash_window(64, 0), False),
        (call(at.ATTENTION_OP, Q, Q, Q, layer_type="sliding_attention"), False),
        (call(at.ATTENTION_OP, Q, Q, Q, layer_type="chunked_attention"), False),
        (call(at.ATTENTION_OP, Q, Q, Q, layer_type="full_attention"), True),
        (call(torch.ops.higher_order.flex_attention, Q, Q, Q, layer_type="sliding_attention"), False),
        (call(torch.ops.higher_order.flex_attention, Q, Q, Q), True),
        (call(torch.ops.higher_order.flex_attention, Q, Q, Q, window_size=64), False),
        (call(torch.ops.higher_order.flex_attention, Q, Q, Q, window_size=-1), True),
        (call(torch.ops.higher_order.flex_attention, Q, Q, Q, attention_chunk=64), False),
        (call(torch.ops.higher_order.flex_attention, Q, Q, Q, attention_chunk=0), True),  # no chunks
        (window([]), True),
    ],
)
def test_sliding_windows_are_recomputed_unless_asked_for(made, is_saved):
    assert rule_name(SavePolicy(SelectiveConfig(), []), made) == ('save_ops "attention"' if is_saved else None)
    assert SavePolicy(SelectiveConfig(save_sliding_window=True), []).rule_for(made) is not None
    # Not even if the op is named
    named = SavePolicy(SelectiveConfig(save_ops=("attn", "attention_f", "flex")), [])
    assert (named.rule_for(made) is not None) == is_saved


def test_a_bounded_window_that_is_the_ops_default_counts():
    with torch.library._scoped_library("test_offload", "DEF") as library:
        library.define("attn(Tensor q, int window_size_left=64) -> Tensor")
        policy = SavePolicy(SelectiveConfig(save_ops=("test_offload",)), [])
        ATTENTION_OPS.add("test_offload::attn")
        try:
            op = torch.ops.test_offload.attn.default
            assert policy.rule_for(call(op, Q)) is None
            assert policy.rule_for(call(op, Q, -1)) is not None
        finally:
            ATTENTION_OPS.remove("test_offload::attn")


def test_backwards_are_never_saved():
    policy = SavePolicy(SelectiveConfig(save_ops=("attention", "flash_attention")), [])
    assert policy.candidates(at.ATTENTION_OP)
    assert not policy.candidates(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)


# Matmuls


def grouped():
    return call(aten._grouped_mm.default, torch.ones(6, 16), torch.ones(2, 16, 8), torch.tensor([2, 6]))


@pytest.mark.parametrize(
    "made, k",
    [
        (MM, 8),
        (call(aten.addmm.default, torch.ones(5), torch.ones(3, 8), torch.ones(8, 5)), 8),
        (call(aten.bmm.default, torch.ones(2, 3, 8), torch.ones(8, 5).expand(2, 8, 5)), 8),
        (grouped(), 16),
        (call(aten._scaled_mm.default, torch.ones(3, 8), torch.ones(8, 5), torch.ones(()), torch.ones(())), 8),
    ],
)
def test_contraction_dim(made, k):
    assert packet_name(made.op) in MATMULS
    for min_k, is_saved in ((1, True), (k, True), (k + 1, False)):
        policy = SavePolicy(SelectiveConfig(save_ops=(), save_matmul_min_k=min_k), [])
        assert (policy.rule_for(made) is not None) == is_saved
    assert SavePolicy(SelectiveConfig(save_ops=()), []).rule_for(made) is None


def test_a_batched_matmul_that_is_no_linear_is_not_one_of_a_module():
    made = call(aten.bmm.default, torch.ones(2, 3, 8), torch.ones(2, 8, 5))
    policy = SavePolicy(SelectiveConfig(save_ops=(), save_matmul_min_k=1, save_modules=("w",)), [])
    made.rules_in_scope = [frozenset(policy.rules)]
    assert policy.rule_for(made) is None


@pytest.mark.parametrize(
    "pattern, matches",
    [
        ("layers.1.attention.wo", True),
        ("wo", True),
        ("attention.wo", True),
        ("o", False),
        ("layers.1.attention", False),
        ("layers.*.wo", True),
        ("*.attention.w?", True),
        ("layers.[0-1].*", True),
        ("layers.[2-9].*", False),
        ("layers.?.attention.wo", True),
        ("layers.[0-1].attention.wo", True),
        ("w*", False),
    ],
)
def test_module_patterns(pattern, matches):
    assert matches_module("layers.1.attention.wo", pattern) == matches


# Order


def test_the_first_rule_that_matches_decides():
    saves = [register_preferred_save("aten::mm"), register_mandatory_save("aten::mm", "router", reason="flips")]
    with at.removed_afterwards(*saves):
        registered = registered_saves()
    config = SelectiveConfig(save_ops=("aten::mm", "mm"), save_modules=("wo",), save_matmul_min_k=2)
    policy = SavePolicy(config, registered)
    assert [rule.name for rule in policy.rules] == [
        "registered mandatory save aten::mm in router",
        "registered preferred save aten::mm",
        'save_ops "aten::mm"',
        'save_ops "mm"',
        'save_modules "wo"',
        "save_matmul_min_k 2",
    ]
    in_router = call(MM.op, *MM.args, scope=policy.rules[:1])
    assert policy.rule_for(in_router) is policy.rules[0]
    assert policy.rule_for(in_router).is_mandatory
    assert policy.rule_for(MM) is policy.rules[1]
    without = SavePolicy(config, [])
    assert rule_name(without, MM) == 'save_ops "aten::mm"'
    without = SavePolicy(SelectiveConfig(save_ops=(), save_modules=("wo",), save_matmul_min_k=2), [])
    assert rule_name(without, call(MM.op, *MM.args, scope=without.rules[:1])) == 'save_modules "wo"'
    assert rule_name(without, MM) == "save_matmul_min_k 2"


def test_rules_of_outer_modules_hold_too_and_the_order_of_rules_decides():
    policy = SavePolicy(SelectiveConfig(save_ops=(), save_modules=("attention", "wq")), [])
    made = call(MM.op, *MM.args)
    made.rules_in_scope = [frozenset(policy.rules[:1]), frozenset(policy.rules[1:])]
    assert rule_name(policy, made) == 'save_modules "attention"'


def test_registered_saves_come_before_the_sliding_window():
    with at.removed_afterwards(register_preferred_save(at.ATTENTION_OP)):
        policy = SavePolicy(SelectiveConfig(), registered_saves())
    made = call(at.ATTENTION_OP, Q, Q, Q, layer_type="sliding_attention")
    assert policy.rule_for(made) is policy.rules[0]


# What has nothing to save


@pytest.mark.parametrize(
    "made",
    [
        call(aten.view.default, torch.ones(4), [2, 2]),
        call(aten.t.default, torch.ones(2, 2)),
        call(aten.split.Tensor, torch.ones(4), 2),
        call(aten.add_.Tensor, torch.ones(4), 1),
        call(aten.mm.out, torch.ones(2, 2), torch.ones(2, 2), out=torch.ones(2, 2)),
        call(aten.detach.default, torch.ones(4)),
        call(torch.ops._c10d_functional.wait_tensor.default, torch.ones(4)),
    ],
)
def test_views_and_in_place_ops_are_recomputed(made):
    assert SavePolicy(SelectiveConfig(save_ops=("::",)), []).rule_for(made) is None


@pytest.mark.parametrize(
    "op",
    [
        aten.detach.default,  # what checkpointing adds in recompute
        torch.ops._c10d_functional.wait_tensor.default,
        aten.sym_size.default,
        aten.is_contiguous.default,
        torch.ops.prim.device.default,
    ],
)
def test_ops_that_one_of_the_two_passes_may_lack_are_not_even_counted(op):
    assert not SavePolicy(SelectiveConfig(save_ops=("::",)), []).candidates(op)


def test_an_argument_that_is_left_out_has_its_default():
    with torch.library._scoped_library("save_policy_test", "DEF") as library:
        library.define("fwd(Tensor q, int window_size_left=4) -> Tensor")
        op = torch.ops.save_policy_test.fwd.default
        assert [has_bounded_window(call(op, Q, *window)) for window in ((), (4,), (-1,))] == [True, True, False]


def test_an_output_argument_that_is_not_given_leaves_the_output_fresh():
    with torch.library._scoped_library("save_policy_test", "DEF") as library:
        library.define("fwd(Tensor q, Tensor(out!)? out=None) -> Tensor")
        policy = SavePolicy(SelectiveConfig(save_ops=("save_policy_test::fwd",)), [])
        op = torch.ops.save_policy_test.fwd.default
        assert policy.rule_for(call(op, Q)) is policy.rule_for(call(op, Q, None)) is policy.rules[0]
        assert policy.rule_for(call(op, Q, Q)) is policy.rule_for(call(op, Q, out=Q)) is None


ON_DEVICE = torch.ones(4, dtype=torch.int64, device="meta")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "made, is_saved",
    [
        (call(aten._to_copy.default, ON_DEVICE, device=CPU), True),
        (call(aten._to_copy.default, ON_DEVICE.float(), device=CPU), False),
        (call(aten._to_copy.default, ON_DEVICE, dtype=torch.int32), False),
        (call(aten._to_copy.default, ON_DEVICE, device=torch.device("meta")), False),
        (call(aten._to_copy.default, torch.ones(4, dtype=torch.int64), device=CPU), False),
        (call(aten._local_scalar_dense.default, ON_DEVICE), True),
        (call(aten._local_scalar_dense.default, ON_DEVICE.float()), False),
    ],
)
def test_sizes_are_whole_numbers_on_their_way_to_the_host(made, is_saved):
    name = packet_name(made.op)
    with at.removed_afterwards(register_builtin_save(name, nn.Linear, reason="sizes", only_sizes=True)):
        registered = [save for save in registered_saves() if save.module is nn.Linear]
    policy = SavePolicy(None, registered)
    made.rules_in_scope = [frozenset(policy.rules)]
    assert (policy.rule_for(made) is not None) == is_saved


def test_profiler_ops_are_ignored():
    policy = SavePolicy(SelectiveConfig(save_ops=("::",)), [])
    assert not policy.candidates(torch.ops.profiler._record_function_enter_new.default)
    assert policy.candidates(aten.tanh.default)


# Registry


def test_registered_twice():
    first = register_mandatory_save("aten::topk", "router", reason="ties")
    with at.removed_afterwards(first):
        assert register_mandatory_save(aten.topk, "router", reason="ties") is first
        for register in (register_mandatory_save, register_preferred_save):
            with pytest.raises(
                ValueError, match=r"aten::topk in router is registered already.* 'ties'; got .* 'other'"
            ):
                register("aten::topk", "router", reason="other")
        with pytest.raises(ValueError, match=r"as mandatory, .* got preferred"):
            register_preferred_save("aten::topk", "router", reason="ties")
        elsewhere = register_mandatory_save("aten::topk", nn.Linear, reason="other")
        assert str(elsewhere) == "aten::topk in Linear"
        elsewhere.remove()
    assert not [save for save in registered_saves() if save.op == "aten::topk" and not save.is_builtin]


@pytest.mark.parametrize(
    "op, made, matches",
    [
        ("aten::topk", aten.topk.default, True),
        ("aten::topk", aten.topk.values, True),
        (aten.topk, aten.topk.values, True),
        ("aten::topk.values", aten.topk.values, True),
        ("aten::topk.values", aten.topk.default, False),
        (aten.sum.dim_IntList, aten.sum.default, False),
        (torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention, True),
    ],
)
def test_registered_op_names(op, made, matches):
    with at.removed_afterwards(register_mandatory_save(op, reason="test")):
        policy = SavePolicy(None, registered_saves())
    assert any(rule.may_match(made) for rule in policy.rules if not rule.is_silent) == matches


def test_unknown_names():
    with pytest.raises(ValueError, match=r"no op is called 'aten::topkk': .* aten::topk"):
        register_mandatory_save("aten::topkk", reason="ties")
    with pytest.raises(ValueError, match=r"save_ops = 'flash_attn9' .* closest: "):
        check_save_ops(["attention", "flash_attn9"])
    with pytest.raises(ValueError, match=r"save_ops = 'backward'"):
        check_save_ops(["backward"])
    check_save_ops(["attention", "aten::mm", "flash_attn_3", "flex_attention"])
    assert closest("topkk", known_op_names())[0].startswith("aten::topk")
