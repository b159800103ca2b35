"""The core's door: plug-ins use it, and nothing of the core needs a plug-in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ebb

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "src/plugins"
CALLED_ONLY = {"placeholder"}  # observe nothing: Python calls them


def includes(path):
    return re.findall(r'^\s*#\s*include "(.+?)"', path.read_text(), re.M)


def sources(folder):
    return [path for path in folder.rglob("*") if path.suffix in (".h", ".cpp")]


def test_only_bindings_include_plugins():
    """Python sees what plug-ins have found; all else is told by the door."""
    others = [p for p in sources(ROOT / "src") if PLUGINS not in p.parents]
    using = {p.parent.name for p in others if any(i.startswith("plugins/") for i in includes(p))}

    assert len(others) > 100
    assert using == {"bindings"}


def test_the_core_includes_only_itself_and_the_door():
    used = {i.split("/")[0] for path in sources(ROOT / "src/core") for i in includes(path)}
    own = {path.name for path in (ROOT / "src/core").iterdir()}

    assert used - own == {"ebb", "hooks", "torch_seams"}


@pytest.mark.parametrize("plugin", sorted(p.name for p in PLUGINS.iterdir()))
def test_no_plugin_includes_another(plugin):
    used = {i for path in sources(PLUGINS / plugin) for i in includes(path)}

    assert {i.split("/")[1] for i in used if i.startswith("plugins/")} <= {plugin}
    assert plugin in CALLED_ONLY or any(i.startswith("hooks/") for i in used)


def test_the_door_includes_nothing_of_the_core():
    used = {i for path in sources(ROOT / "src/hooks") for i in includes(path)}

    assert {i.split("/")[0] for i in used} == {"ebb", "hooks"}


def test_the_example_of_the_design_page_is_the_code_that_is_built():
    page = (ROOT / "docs/design/plugins.md").read_text()
    (shown,) = re.findall(r"```cpp\n(.*?)```", page, re.S)

    assert shown in (ROOT / "tests/native/recomputed_bytes.cpp").read_text()
    assert shown.count("\n") <= 40


def test_the_example_counts_recomputed_bytes_of_each_module():
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


def test_plugins_work_together():
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


def test_an_operator_that_raises_is_in_no_profile():
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
