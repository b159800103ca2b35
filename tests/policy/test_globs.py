"""Globs match alike in C++ and in Python: see Note [One dialect of globs]."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ebb
from ebb._testing import glob_matches

TABLE = [
    ("", "", True),
    ("", "a", False),
    ("aten::mm", "aten::mm", True),
    ("aten::mm", "aten::mm.default", False),
    ("aten::*", "aten::mm", True),
    ("*mm", "aten::addmm", True),
    ("*m?", "aten::mm", True),
    ("**", "", True),
    ("?", "", False),
    ("layers.[0-3].mlp", "layers.2.mlp", True),
    ("layers.[0-3].mlp", "layers.4.mlp", False),
    ("layers.[!0-3].mlp", "layers.4.mlp", True),
    ("layers.[!0-3].mlp", "layers.3.mlp", False),
    ("layers.[02468]", "layers.4", True),
    ("layers.[02468]", "layers.5", False),
    ("[]a]", "]", True),
    ("[!]a]", "]", False),
    ("[!]a]", "b", True),
    ("[a-]", "-", True),
    ("[-a]", "-", True),
    ("[a-c-e]", "-", True),
    ("[a-c-e]", "d", False),
    ("[z-a]", "m", False),
    ("[!z-a]", "m", True),
    ("[!]", "[!]", True),
    ("[]", "[]", True),
    ("[a", "[a", True),
    ("a[", "a[", True),
    ("[[]", "[", True),
    ("[^a]", "^", True),
    ("[^a]", "b", False),
    ("\\*", "\\x", True),
    ("[\\]", "\\", True),
    ("*[0-9]*[a-c]", "x7yb", True),
    ("*[0-9]*[a-c]", "x7yd", False),
    ("?", "é", True),
    ("[à-ö]", "é", True),
    ("[à-ö]", "z", False),
]


@pytest.mark.parametrize(("pattern", "text", "matches"), TABLE)
def test_globs_match_alike_in_both_languages(pattern, text, matches):
    assert fnmatchcase(text, pattern) is matches
    assert glob_matches(pattern, text) is matches


LETTERS = st.text("ab-]![*?^é\\", max_size=8)


@given(LETTERS, LETTERS)
def test_any_glob_matches_alike_in_both_languages(pattern, text):
    assert glob_matches(pattern, text) is fnmatchcase(text, pattern)


def test_rule_for_a_range_of_modules():
    policy = ebb.Policy([ebb.Rule("aten::sin", ebb.SAVE, module="layers.[0-1]")])
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
    for layer in layers:
        layer.forward = lambda x: x.sin()
    model = torch.nn.Module()
    model.layers = layers
    model.forward = lambda x: layers[2](layers[1](layers[0](x)))
    x = torch.ones(2, 2, requires_grad=True)

    ebb.apply(model, policy, lambda module, _: module is model)
    model(x).cos().sum().backward()

    assert ebb.stats()["total"]["bytes_packed"] == 2 * x.nbytes


def test_rule_for_a_set_of_operators():
    policy = ebb.Policy({"aten::[sc][io][ns]": ebb.SAVE})
    x = torch.ones(2, requires_grad=True)
    with ebb.region(policy):
        y = x.sin().cos().sin().sum()
    y.backward()
    assert ebb.stats()["total"]["bytes_packed"] == 2 * x.nbytes
