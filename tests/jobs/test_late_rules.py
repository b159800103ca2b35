"""Rules of EBB about operators of libraries that are imported after ebb."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch.library import Library
from torch.utils.checkpoint import checkpoint

import ebb
from ebb._launch import takeover
from ebb._launch.start import policy_from
from ebb._support.job import _TOLD
from ebb_tests.exactness import replayed, same_bits
from ebb_tests.programs_apart import run_program

FILE = '[[rules]]\nop = "ebb_late::{}"\ndecision = "save"\n'


@pytest.fixture
def library():
    library = None

    def define():
        nonlocal library
        library = Library("ebb_late", "FRAGMENT")
        library.define("dequant(Tensor x) -> Tensor")
        library.impl("dequant", lambda x: x.double().float() * 2, "CPU")
        return torch.ops.ebb_late.dequant

    yield define
    library._destroy()


@pytest.fixture
def take(take_over, monkeypatch):
    monkeypatch.delenv(_TOLD, raising=False)
    return lambda text: take_over(policy=policy_from(text), text=text)


@pytest.fixture(params=["line", "file"])
def text(request, tmp_path):
    def of(name):
        if request.param == "line":
            return f"recompute_all,ebb_late::{name}:save"
        path = tmp_path / "policy.toml"
        path.write_text(FILE.format(name))
        return str(path)

    return of


def step(operator):
    x = torch.randn(8, requires_grad=True)
    expected = torch.autograd.grad((operator(x.detach()) * x).sin().sum(), x)[0]
    ebb.reset_stats()
    y = checkpoint(lambda x: (operator(x.detach()) * x).sin(), x, use_reentrant=False)
    y.sum().backward()
    assert same_bits(x.grad, expected)
    torch.optim.SGD([x], lr=0.1).step()


def test_library_that_is_imported_later(text, library, take, capsys):
    take(text("dequant"))
    operator = library()
    step(operator)
    assert replayed() == 1  # the product; what the rule saves is not run again
    assert "matches" not in capsys.readouterr().err


def test_misspelt_operator_is_told_of_when_an_optimizer_steps(
    text, library, take, capsys, monkeypatch
):
    take(text("dequat"))
    operator = library()
    for count in (1, 0):
        step(operator)
        told = capsys.readouterr().err
        assert told.count("the rule 'ebb_late::dequat' matches no registered op") == count
        assert told.count("did you mean ebb_late::dequant?") == count
    takeover.remove()
    monkeypatch.setenv("EBB_STRICT", "1")
    take(text("dequat"))
    with pytest.raises(ValueError, match="did you mean ebb_late"):
        step(operator)


def test_unknown_operator_of_torch_raises_at_once():
    with pytest.raises(ValueError, match="the rule 'aten::mn' matches no registered operator"):
        policy_from("mn:save")
    with pytest.raises(ValueError, match="import it before making the policy"):
        ebb.Policy.parse("ebb_never::op:save")


PROGRAM = """
import sys, torch
from torch.utils.checkpoint import checkpoint
if sys.argv[1] == "checkpoints":
    x = torch.ones(3, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
"""


@pytest.mark.sweep
@pytest.mark.parametrize(("argument", "count"), [("checkpoints", 1), ("starts", 0)])
def test_rule_without_an_operator_is_told_of_when_the_process_ends(argument, count):
    path = os.pathsep.join(sys.path)
    variables = {"EBB": "ebb_never::op:recompute", "PYTHONPATH": path}
    done = run_program("-c", "import ebb\n" + PROGRAM, argument, **variables)
    line = "ebb: EBB=ebb_never::op:recompute: the rule 'ebb_never::op' matches no registered"
    assert done.stderr.count(line) == count, done.stderr


def test_preset_may_be_followed_by_rules():
    rules = ebb.Policy.parse("gelu:offload,torchtitan,mm:recompute")
    own = (ebb.Rule("aten::gelu", ebb.OFFLOAD), ebb.Rule("aten::mm", ebb.RECOMPUTE))
    assert rules.rules == own + ebb.policies.torchtitan.rules
    assert ebb.Policy.parse("save_all,mm:recompute").default is ebb.SAVE
    assert ebb.Policy.parse("offload_inputs,mm:save").inputs is ebb.OFFLOAD
    for text in ("save_all,save_matmuls", "save_all,default:save"):
        with pytest.raises(ValueError, match=r"is neither a preset|'preset' cannot be combined"):
            ebb.Policy.parse(text)
