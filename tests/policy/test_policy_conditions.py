"""Rules with conditions on name, call, size or dtype; ready-made policies."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ebb
from ebb_tests import fork_server
from ebb_tests.bytes_saved import Block, saved
from ebb_tests.exactness import same_bits
from ebb_tests.stand_ins import fake_accelerator
from ebb_tests.time_limits import HANGS


def sines(x, length=4):
    """Each but the first saves the result of the one before."""
    for _ in range(length):
        x = x.sin()
    return x


@pytest.fixture
def x():
    return torch.randn(16, requires_grad=True)  # 64 bytes


# Calls


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"nth": 1}, 1),
        ({"nth": 3}, 1),
        ({"nth": 5}, 0),
        ({"every": 2}, 2),
        ({"every": 3}, 1),
        ({}, 4),
    ],
)
def test_calls_are_counted_per_region(x, rule, kept):
    rules = [ebb.Rule("aten::sin", ebb.SAVE, **rule)]
    for _ in range(2):
        assert saved(rules, lambda x: sines(x).cos(), x) == 64 * kept


def test_later_rule_counts_only_calls_that_reach_it(x):
    rules = [ebb.Rule("aten::sin", ebb.SAVE, nth=1), ebb.Rule("aten::sin", ebb.SAVE, nth=1)]
    assert saved(rules, lambda x: sines(x).cos(), x) == 2 * 64


# Sizes and dtypes


def both_sizes(x):
    return x.sin().sin() + torch.cat([x, x]).sin().sin()[:16]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"min_bytes": 65}, 128),
        ({"min_bytes": 64}, 192),
        ({"max_bytes": 64}, 64),
        ({"max_bytes": 63}, 0),
        ({"min_bytes": "0.0625KiB", "max_bytes": "100 B"}, 64),
    ],
)
def test_conditions_on_size(x, rule, kept):
    assert saved([ebb.Rule("aten::sin", ebb.SAVE, **rule)], both_sizes, x) == kept


def test_later_rules_decide_on_other_sizes(x):
    rules = [
        ebb.Rule("aten::sin", ebb.RECOMPUTE, min_bytes=65),
        ebb.Rule("aten::sin", ebb.SAVE, nth=1),
    ]
    assert saved(rules, both_sizes, x) == 64


@pytest.mark.parametrize("dtype", [torch.float64, "float64", "torch.float64"])
def test_conditions_on_dtype(x, dtype):
    rules = [ebb.Rule("*", ebb.SAVE, dtype=dtype)]
    assert saved(rules, lambda x: x.sin().sin().double().sin().sin(), x) == 2 * 128


def test_each_result_of_an_op_has_its_own_size_and_dtype(x):
    def program(x):
        values, indices = x.sin().sort()
        return (values.sin() * indices).sin()

    everything = saved([ebb.Rule("aten::sort", ebb.SAVE)], program, x)
    values = saved([ebb.Rule("aten::sort", ebb.SAVE, dtype="float32")], program, x)
    indices = saved([ebb.Rule("aten::sort", ebb.SAVE, dtype=torch.int64)], program, x)
    assert (everything, values, indices) == (192, 64, 128)


def test_conditions_apply_to_results_of_writes(x):
    def program(x):
        h = x.sin()
        return h.mul_(2).sin()

    assert saved([ebb.Rule("aten::mul_", ebb.SAVE, min_bytes=1)], program, x) == 64
    assert saved([ebb.Rule("aten::mul_", ebb.SAVE, min_bytes=65)], program, x) == 0


def test_custom_operator_without_a_matching_rule_is_not_repeated():
    calls = []
    with torch.library._scoped_library("ebbconditions", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")

        def counted(x):
            calls.append(1)
            return x * 2

        library.impl("counted", counted, "CompositeExplicitAutograd")
        rule = ebb.Rule("ebbconditions::counted", ebb.RECOMPUTE, min_bytes=65)
        for elements, replays in ((16, 0), (32, 1)):
            calls.clear()
            x = torch.randn(elements, requires_grad=True)
            with ebb.region(ebb.Policy([rule])):
                h = torch.ops.ebbconditions.counted(x.detach())
                y = (x * h).sum()
            del h
            y.backward()
            assert len(calls) == 1 + replays


# Names


def named(x, name="a"):
    h = ebb.checkpoint_name(x.sin(), name)
    return h.sin().sin()


def test_named_values_are_saved(x):
    assert saved(ebb.policies.save_only_these_names("a"), named, x) == 64
    assert saved(ebb.policies.save_only_these_names("b", "c"), named, x) == 0
    assert ebb.checkpoint_name(x, "a") is x


@pytest.mark.parametrize("decision", [ebb.SAVE, ebb.OFFLOAD, ebb.RECOMPUTE])
@pytest.mark.parametrize("before", [ebb.SAVE, ebb.OFFLOAD, ebb.RECOMPUTE])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("alive", [False, True])
def test_named_after_another_decision_has_gradients_of_eager(decision, before, written, alive):
    """The sigmoid saves its own result; a replay reads that of the sine."""

    def program(x):
        h = x.sin()
        y = h.sigmoid()
        ebb.checkpoint_name(h, "h")
        ebb.checkpoint_name(y, "y")
        z = (h * y).cos() + y.sin()
        if written:
            with torch.no_grad():
                h.mul_(2)
        kept.append((h, y) if alive else None)
        return z * h.sum() if written else z

    rules = [ebb.Rule("*", decision, name=name) for name in "hy"]
    policy = ebb.Policy(rules, default=before)
    kept = []
    x = torch.randn(16, requires_grad=True)

    def outcome(y):
        try:
            return torch.autograd.grad(y.sum(), x)[0]
        except RuntimeError as error:
            return type(error)

    expected = outcome(program(x))
    with fake_accelerator() as fake:
        with ebb.region(policy):
            y = program(x)
        fake.advance(100)
        found = outcome(y)
        if isinstance(expected, torch.Tensor):
            assert same_bits(found, expected)
        else:
            assert found is expected
        kept.clear()
        del y


def test_named_values_are_offloaded(x):
    policy = ebb.Policy([ebb.Rule("*", ebb.OFFLOAD, name="a")])
    with fake_accelerator():
        with ebb.region(policy):
            y = named(x)
        assert ebb.stats()["total"]["bytes_offloaded"] == 64
        torch.autograd.grad(y.sum(), x)


def test_earlier_rule_decides_on_named_values(x):
    def policy(*rules):
        return ebb.Policy(rules)

    name = ebb.Rule("*", ebb.SAVE, name="a")
    sin = ebb.Rule("aten::sin", ebb.RECOMPUTE)
    assert saved(policy(name, sin), named, x) == 64
    assert saved(policy(sin, name), named, x) == 0
    other = ebb.Rule("aten::cos", ebb.SAVE, name="a")
    assert saved(policy(other), named, x) == 0


def test_names_of_inputs_views_and_constants_save_nothing(x):
    policy = ebb.policies.save_only_these_names("a")

    def program(x):
        ebb.checkpoint_name(x, "a")
        h = ebb.checkpoint_name(x[:8], "a")
        ebb.checkpoint_name(torch.ones(3), "a")
        ebb.checkpoint_name(torch.zeros(3).to_sparse(), "a")
        return h.sin().sin()

    assert saved(policy, program, x) == 0


def test_named_zeros_may_be_filled_later(x):
    """See Note [Uninitialised memory is not a recipe]."""

    def program(x):
        mask = torch.zeros_like(x)
        ebb.checkpoint_name(mask, "a")
        mask.numpy()[::2] = 1
        return (x.sin() * mask).sin()

    policy = ebb.Policy([ebb.Rule("*", ebb.RECOMPUTE, name="a")], default=ebb.RECOMPUTE)
    saved(policy, program, x.detach().requires_grad_())


def test_policies_with_names_of_jax():
    weights = torch.randn(4, 4, requires_grad=True)

    def program(w):
        h = (w @ w).sin()
        return (h[None] @ h[None]).sin()[0]

    presets = ebb.policies
    assert saved(presets.dots_saveable, program, weights) == 128
    assert saved(presets.dots_with_no_batch_dims_saveable, program, weights) == 64


def test_megatron_recomputes_the_modules():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.core_attention = nn.Softmax(-1)
            self.mlp = Block()

        def forward(self, x):
            return self.mlp(self.core_attention(self.norm(x)))

    net = Layer()
    x = torch.randn(2, 4, requires_grad=True)
    everything = saved(ebb.policies.save_all, net, x)
    kept = {
        modules: saved(ebb.policies.megatron(*modules), net, x, root=net)
        for modules in [(), ("core_attn",), ("mlp",), ("layernorm",), ("layernorm", "mlp")]
    }
    assert kept[()] == kept["core_attn",] == everything - 32
    assert kept["mlp",] == everything - 96
    assert kept["layernorm",] < everything
    assert kept["layernorm", "mlp"] == kept["mlp",] + kept["layernorm",] - everything
    with pytest.raises(ValueError, match="unknown module 'attn'; valid names: core_attn"):
        ebb.policies.megatron("attn")


# Explanations


def test_explain_lists_the_rules():
    policy = ebb.Policy(
        [
            ebb.Rule("aten::mm", ebb.SAVE, module="*.mlp.*", every=2, per_module=True),
            ebb.Rule("aten::addmm", ebb.SAVE),
            ebb.Rule("*", ebb.OFFLOAD, min_bytes="1KiB", max_bytes=4096, dtype="bfloat16"),
            ebb.Rule("aten::m*", ebb.SAVE, nth=3),
            ebb.Rule("aten::mm", ebb.OFFLOAD, name="out"),
        ]
    )
    assert policy.explain(torch.ops.aten.mm.default).splitlines() == [
        "aten::mm.default",
        "  SAVE by rule 0, 'aten::mm', in modules that match '*.mlp.*', "
        "for calls 2, 4, .. of a module",
        "  OFFLOAD by rule 2, '*', of at least 1024 bytes, of at most 4096 bytes, "
        "of dtype BFloat16",
        "  SAVE by rule 3, 'aten::m*', for call 3 of a region",
        "  OFFLOAD by rule 4, 'aten::mm', with name 'out'",
        "  RECOMPUTE by default",
    ]
    assert len(policy.explain("aten::mm").splitlines()) > 8  # two overloads
    with pytest.raises(ValueError, match="'aten::mn' matches no registered operator"):
        policy.explain("aten::mn")


# Errors


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ({"nth": 0}, ValueError, "nth must be from 1"),
        ({"nth": "2"}, TypeError, "nth must be an int"),
        ({"nth": True}, TypeError, "nth must be an int"),
        ({"nth": 2, "every": 2}, ValueError, "both every and nth"),
        ({"per_module": True}, ValueError, "per_module without every or nth"),
        ({"per_module": 1, "nth": 1}, TypeError, "per_module must be a bool"),
        ({"module": ""}, ValueError, "module must not be empty"),
        ({"module": 3}, TypeError, "module must be a str"),
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"name": "a", "nth": 2}, ValueError, "combines name with every, nth or force"),
        ({"min_bytes": "1 mile"}, ValueError, "min_bytes must be a number of bytes"),
        ({"min_bytes": -1}, ValueError, "min_bytes must be from 0"),
        ({"min_bytes": 2, "max_bytes": 1}, ValueError, "nothing matches"),
        ({"dtype": "floaty"}, ValueError, "unknown dtype 'floaty'"),
        ({"dtype": 3}, TypeError, "dtype must be a torch.dtype"),
        ({"force": True, "min_bytes": 1}, ValueError, "combines force with a condition on the"),
    ],
)
def test_invalid_condition_raises(rule, error, message):
    with pytest.raises(error, match=message):
        ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, **rule)])


def test_conditions_without_equivalent_in_torch_warn():
    policy = ebb.Policy(
        [ebb.Rule("aten::sin", ebb.SAVE, module="*"), ebb.Rule("aten::mm", ebb.SAVE, nth=2)]
    )
    ebb._policy.policy._warn_conditions.cache_clear()

    def block(x):
        return ((x @ x).sin() @ x).sin()

    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = torch.utils.checkpoint.checkpoint(
            block, x, use_reentrant=False, context_fn=policy.to_sac()
        )
        assert same_bits(torch.autograd.grad(y.sum(), x)[0], expected)
    assert any("sees no module names" in str(warning.message) for warning in caught)


@pytest.mark.sweep
def test_naming_during_a_replay_does_not_deadlock():
    """The replay of an operator in Python needs the GIL."""
    program = """
import threading, time, torch, ebb

@torch.library.custom_op("ebbnames::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.001)
    return x * 2

twice.register_autograd(lambda ctx, g: g * 2)
rules = [ebb.Rule("*", ebb.SAVE, name="a"), ebb.Rule("ebbnames::twice", ebb.RECOMPUTE)]
w = torch.randn(8, 8, requires_grad=True)
with ebb.region(ebb.Policy(rules)):
    h = twice(w)
    s = h.sin()
    loss = (s * h).sum()
    k = torch.ones(3).exp()
    del h, s
    def differentiate():
        for _ in range(50):
            torch.autograd.grad(loss, w, retain_graph=True)
    thread = threading.Thread(target=differentiate)
    thread.start()
    while thread.is_alive():
        ebb.checkpoint_name(k, "a")
        with ebb.opaque(k):
            pass
    thread.join()
"""
    fork_server.run(["-c", program], check=True, timeout=HANGS)
