"""Warnings of rules without effect: composite operators, and modules that do not exist."""

from __future__ import annotations

import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import ebb
from ebb._policy import idle_rules


@pytest.fixture(autouse=True)
def no_warning_yet():
    idle_rules._told.clear()
    idle_rules.warn_of_no_root.cache_clear()


def pickle_and_load(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("op", sorted(idle_rules._DECOMPOSED))
def test_warning_names_the_operators_of_a_composite_one(op):
    with pytest.warns(UserWarning, match=f"the rule 'aten::{op}' has no effect") as caught:
        policy = ebb.Policy({f"aten::{op}": ebb.SAVE})

    named = re.search(r"Use these operators instead: (.*)\.", str(caught[0].message))[1]
    with warnings.catch_warnings(action="error"):
        ebb.Policy(dict.fromkeys(named.split(", "), ebb.SAVE))  # they exist, and are not composite
        ebb.Policy(policy.rules)  # warns once


def test_policy_from_text_warns():
    with pytest.warns(UserWarning, match="'aten::dropout' has no effect"):
        ebb.Policy.parse("mm:save,dropout:save")


@pytest.mark.parametrize("op", ["aten::mm", "aten::*norm*", "aten::relu", "*"])
def test_other_rules_do_not_warn(op):
    with warnings.catch_warnings(action="error"):
        ebb.Policy({op: ebb.SAVE})


@pytest.mark.parametrize("make", [list, pickle_and_load])
def test_rules_of_a_preset_do_not_warn(make):
    """Presets list operators that only some devices and models run."""
    rule = ebb.Rule("aten::gelu", ebb.SAVE)
    with warnings.catch_warnings(action="error"):
        ebb.Policy([rule, *make(ebb.policies.save_matmuls.rules)])
    with pytest.warns(UserWarning, match="'aten::linear' has no effect"):
        ebb.Policy([ebb.Rule("aten::linear", ebb.SAVE)])


def test_operators_that_warnings_name_are_those_that_run():
    called = {
        "linear": lambda x: nn.functional.linear(x, x),
        "matmul": lambda x: x @ x,
        "layer_norm": lambda x: nn.functional.layer_norm(x, (4,)),
        "scaled_dot_product_attention": lambda x: nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None]
        ),
        "conv1d": lambda x: nn.functional.conv1d(x, x[:, :, None]),
        "softmax": lambda x: x.softmax(-1),
    }
    for op, call in called.items():
        x = torch.randn(4, 4, requires_grad=True)
        with ebb.record_reports(), ebb.region():
            y = call(x)
            y = y * y
        y.sum().backward()
        seen = {row.op.partition(".")[0] for row in ebb.report().rows}
        assert f"aten::{op}" not in seen
        names = idle_rules._DECOMPOSED[op].replace("*", "").split(", ")
        assert any(one.startswith(name) for one in seen for name in names), (op, seen)


def test_glob_that_matches_no_module_warns():
    policy = ebb.Policy([ebb.Rule("*", ebb.SAVE, module="*.mlp")])
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    with pytest.warns(
        UserWarning, match=r"modules that match '\*\.mlp', but the model has none.*: 0, 1\."
    ):
        ebb.apply(model, policy, modules="").remove()
    with warnings.catch_warnings(action="error"):
        ebb.apply(model, policy, modules="").remove()  # warns once


def test_rules_for_modules_without_a_root_warn(monkeypatch):
    monkeypatch.setattr("ebb._C.any_module_has_number", lambda: False)
    policy = ebb.Policy([ebb.Rule("*", ebb.SAVE, module="0")])

    with pytest.warns(UserWarning, match="rules with module= have no effect in this region"):
        ebb.region(policy)
    with warnings.catch_warnings(action="error"):
        ebb.region(policy)  # warns once
        with ebb.region(policy, root=nn.Sequential(nn.ReLU())):
            pass


def test_suggested_names_are_near_and_not_composite():
    with pytest.raises(ValueError, match="matches no registered operator") as error:
        ebb.Policy({"aten::xqzzykkw": ebb.SAVE})
    assert "did you mean" not in str(error.value)

    with pytest.raises(ValueError, match="did you mean ") as error:
        ebb.Policy({"aten::native_layer_norn": ebb.SAVE})
    assert "aten::native_layer_norm" in str(error.value)

    with pytest.raises(ValueError, match="matches no registered operator") as error:
        ebb.Policy({"aten::layer_norn": ebb.SAVE})
    assert "aten::layer_norm" not in str(error.value)

    with pytest.raises(ValueError, match=r"'2' is neither a preset \(valid names: 'recompute_all'"):
        ebb.Policy.parse("2")
