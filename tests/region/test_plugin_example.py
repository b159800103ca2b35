"""Plug-ins beside each other, and the example of docs/design/plugins.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ebb

ROOT = Path(__file__).parents[2]


def test_page_shows_the_code_that_is_built():
    page = (ROOT / "docs/design/plugins.md").read_text()
    (shown,) = re.findall(r"```cpp\n(.*?)```", page, re.S)

    assert shown in (ROOT / "tests/native/recomputed_bytes.cpp").read_text()
    assert shown.count("\n") <= 40


def test_example_counts_recomputed_bytes_of_each_module():
    testing = pytest.importorskip("ebb._testing")

    def block():
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())

    model = torch.nn.Sequential(block(), block())
    before = testing.recomputed_bytes()
    policy = ebb.Policy([ebb.Rule("*", ebb.RECOMPUTE, module="*")])  # asks for modules' names
    with ebb.apply(model, policy, modules=["0", "1"]):
        testing.count_recomputed_bytes(True)
        try:
            loss = model(torch.randn(4, 8, requires_grad=True)).sum()
        finally:
            testing.count_recomputed_bytes(False)
        loss.backward()
    counted = {
        module: nbytes - before.get(module, 0)
        for module, nbytes in testing.recomputed_bytes().items()
    }

    # the result of each linear layer, which the backward of GELU needs
    assert counted == {"0.0": 4 * 8 * 4, "1.0": 4 * 8 * 4}


def test_gradients_are_exact_with_three_observers():
    """Verify mode, a report and the example look at one graph; gradients are eager's."""
    testing = pytest.importorskip("ebb._testing")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def gradients():
        model.zero_grad()
        model(x).sin_().square().sum().backward()
        return [p.grad for p in model.parameters()]

    expected = gradients()
    before = sum(testing.recomputed_bytes().values())
    regions = ebb.apply(model, ebb.policies.recompute_all, modules="")
    with regions, ebb.verify(), ebb.record_reports():
        testing.count_recomputed_bytes(True)
        try:
            found = gradients()
        finally:
            testing.count_recomputed_bytes(False)
        report = ebb.report()

    assert all(map(torch.equal, found, expected))
    assert sum(testing.recomputed_bytes().values()) > before
    assert {row.fate for row in report.rows} >= {"recomputed", "outside"}
    assert sum(row.replays for row in report.rows) > 0


def test_profile_leaves_out_an_operator_that_raises():
    """The observer was told that it will run, and not that its results are recorded."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)

    def step():
        with ebb.region(ebb.policies.recompute_all):
            hidden = x.exp()
            with pytest.raises(IndexError):
                hidden.index_select(0, torch.tensor([4]))  # raises in its kernel
            loss = hidden.sin().sum()
        loss.backward()

    names = [operator.func_name for operator in ebb.profile(step).operators]

    assert names[0] == "aten::exp.default"
    assert "aten::index_select.default" not in names
    assert names[-2:] == ["aten::sin.default", "aten::sum.default"]
