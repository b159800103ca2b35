"""Decisions of policies on operators."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch

import ebb
from ebb._policy.compiled import PRESETS
from ebb_tests.exactness import leaves, replayed, same_bits


def saves(policy: ebb.Policy, op: str = "mm") -> bool:
    """Whether the product in a small program is kept under `policy`."""
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4)
    ebb.reset_stats()
    with ebb.region(policy):
        h = x @ w if op == "mm" else torch.bmm(x[None], w[None])[0]
        loss = (h * h).sum()
        del h
    saved = ebb.stats()["total"]["bytes_saved"]
    loss.backward()
    return saved == 2 * 4 * 4


@pytest.mark.parametrize(
    "key",
    [
        "aten::mm",
        "aten::mm.default",
        "aten.mm",
        "aten.mm.default",
        "aten::m?",
        "*::mm",
        "*::mm.*",
        torch.ops.aten.mm,
        torch.ops.aten.mm.default,
    ],
    ids=str,
)
def test_operator_can_be_named_in_each_way(key):
    assert saves(ebb.Policy({key: ebb.SAVE}))
    assert not saves(ebb.Policy({key: ebb.RECOMPUTE}, default=ebb.RECOMPUTE))
    assert not saves(ebb.Policy({key: ebb.SAVE}), op="bmm")


def test_first_rule_that_matches_decides_else_the_default():
    assert saves(ebb.Policy({"aten::mm": ebb.SAVE, "aten::*": ebb.RECOMPUTE}))
    assert not saves(ebb.Policy({"aten::*": ebb.RECOMPUTE, "aten::mm": ebb.SAVE}))
    assert saves(ebb.Policy(default=ebb.SAVE))
    assert saves(ebb.Policy({"aten::bmm": ebb.RECOMPUTE}, default=ebb.SAVE))
    assert not saves(ebb.Policy({"aten::mm.out": ebb.SAVE}))  # an overload names only itself


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("aten::bmmm", "aten::bmm"),
        ("aten::adddmm", "aten::addmm"),
        ("aten::mm.defualt", "aten::mm.default"),
        ("atn::mm", "aten::mm"),
    ],
)
def test_unknown_operator_gives_the_nearest_names(key, nearest):
    with pytest.raises(ValueError, match=re.escape(nearest)) as error:
        ebb.Policy({key: ebb.SAVE})

    assert key in str(error.value)


@pytest.mark.parametrize("key", ["mmm", "aten::nothing*", ""])
def test_unknown_operator_without_near_names_raises(key):
    with pytest.raises(ValueError, match="matches no registered operator"):
        ebb.Policy({key: ebb.SAVE})


@pytest.mark.parametrize("decision", [0, "save", True, None, torch.float32])
def test_decision_of_another_type_raises(decision):
    with pytest.raises(TypeError, match=r"must be ebb.SAVE, ebb.RECOMPUTE"):
        ebb.Policy({"aten::mm": decision})
    with pytest.raises(TypeError, match=r"default must be ebb.SAVE"):
        ebb.Policy(default=decision)


@pytest.mark.parametrize("key", [3, None, torch.mm, ("aten::mm",)])
def test_operator_of_another_type_raises(key):
    with pytest.raises(TypeError, match="an operator is a string"):
        ebb.Policy({key: ebb.SAVE})


def test_torchtitan_recomputes_every_second_product():
    x = leaves((4, 4))[0]
    with ebb.region(ebb.policies.torchtitan):
        losses = [(h * h).sum() for h in (x @ x for _ in range(5))]

    assert ebb.stats()["total"]["bytes_saved"] == 3 * 4 * 4 * 8
    sum(losses).backward()


def test_save_matmuls_keeps_products_convolutions_and_attention():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    image = torch.randn(1, 2, 5, 5, requires_grad=True)
    kernel = torch.randn(3, 2, 3, 3, requires_grad=True)
    x = torch.randn(4, 4, requires_grad=True)
    programs = [
        lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
        lambda: torch.nn.functional.conv2d(image, kernel),
        lambda: x @ x,
        lambda: torch.addmm(x, x, x),
        lambda: torch.bmm(x[None], x[None]),
        lambda: torch.baddbmm(x[None], x[None], x[None]),
        lambda: torch.nn.functional.linear(x, x, x[0]),
    ]
    for program in programs:
        with ebb.region(ebb.policies.save_matmuls):
            loss = program().square().sum()
        ebb.reset_stats()
        loss.backward()
        assert replayed() == 0


def test_save_all_replays_nothing_and_recompute_all_keeps_nothing():
    x = leaves((4, 4))[0]
    for policy, key in (
        (ebb.policies.save_all, "bytes_dropped"),
        (ebb.policies.recompute_all, "bytes_saved"),
    ):
        ebb.reset_stats()
        with ebb.region(policy):
            loss = (x @ x).exp().sin().sum()
        assert ebb.stats()["total"][key] == 0
        loss.backward()


SAVING = ebb.Policy({"aten::mm": ebb.SAVE})
EACH_TIME = ebb.Policy(default=ebb.RECOMPUTE_EACH_TIME)


@pytest.mark.parametrize(
    "policy",
    [
        SAVING,
        EACH_TIME,  # for torch it means RECOMPUTE
        ebb.policies.recompute_all,
        ebb.policies.save_all,
        ebb.policies.save_matmuls,
    ],
)
def test_checkpoint_of_torch_under_a_policy_has_gradients_of_eager(policy):
    w = torch.randn(8, 8, requires_grad=True)

    def block(x):
        return ((x @ w).sin() @ w).exp().sum()

    x = torch.randn(4, 8)
    expected = torch.autograd.grad(block(x), w)[0]
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=policy.to_sac())

    assert same_bits(torch.autograd.grad(y, w)[0], expected)


@pytest.fixture
def no_garbage_collection():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("preset", [ebb.policies.save_matmuls, ebb.policies.torchtitan])
def test_policy_is_freed_with_its_last_reference(no_garbage_collection, preset):
    policy = ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE), *preset.rules])
    with ebb.region(policy):
        y = torch.ones(2, 2, requires_grad=True).exp()
    y.sum().backward()
    policy.to_sac()
    freed = weakref.ref(policy)

    del policy, y

    assert freed() is None


def test_policies_compare_hash_and_pickle_by_value():
    policy = ebb.Policy({"aten::mm": ebb.SAVE}, default=ebb.SAVE)

    assert policy == ebb.Policy({"aten.mm": ebb.SAVE}, default=ebb.SAVE)
    assert policy != ebb.Policy({"aten::mm": ebb.SAVE})
    assert hash(policy) == hash(copy.deepcopy(policy))
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert "aten::mm" in repr(policy)
    assert policy.rules == (ebb.Rule("aten::mm", ebb.SAVE),)
    assert policy.default is ebb.SAVE


def test_pickles_name_only_public_modules():
    rule = ebb.Rule("aten::mm", ebb.SAVE, module="*.mlp")
    policy = ebb.Policy([rule], default=ebb.SAVE)

    for value in (
        ebb.SAVE,
        rule,
        policy,
        ebb.experimental.PlaceholderError("read"),
        ebb.experimental.PageOverflowError("full"),
    ):
        text = pickle.dumps(value)
        assert b"ebb._" not in text
        assert type(pickle.loads(text)) is type(value)
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_each_public_policy_is_a_preset():
    named = {name: getattr(ebb.policies, name) for name in ebb.policies.__all__}

    policies = {name for name, value in named.items() if isinstance(value, ebb.Policy)}
    assert policies == set(PRESETS)
    assert all(ebb.Policy.parse(name) == named[name] for name in PRESETS)
