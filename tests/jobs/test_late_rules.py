"""Rules of EBB about operators of libraries that are imported after ebb."""

from __future__ import annotations

import contextlib
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
from ebb_tests import fork_server
from ebb_tests.exactness import replayed, same_bits

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


@contextlib.contextmanager
def taken_over(text):
    takeover.install(policy_from(text), text, ())
    try:
        yield
    finally:
        takeover.remove()


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


def test_a_library_that_comes_later(text, library, capsys, monkeypatch):
    monkeypatch.delenv(_TOLD, raising=False)
    with taken_over(text("dequant")):
        operator = library()
        step(operator)
        assert replayed() == 1  # the product; what the rule saves is not run again
        assert "matches" not in capsys.readouterr().err


def test_a_misspelt_operator_is_told_of_when_an_optimizer_steps(text, library, capsys, monkeypatch):
    monkeypatch.delenv(_TOLD, raising=False)
    with taken_over(text("dequat")):
        operator = library()
        for count in (1, 0):
            step(operator)
            told = capsys.readouterr().err
            assert told.count("the rule 'ebb_late::dequat' matches no registered op") == count
            assert told.count("did you mean ebb_late::dequant?") == count
    monkeypatch.setenv("EBB_STRICT", "1")
    with taken_over(text("dequat")), pytest.raises(ValueError, match="did you mean ebb_late"):
        step(operator)


def test_torchs_own_operators_are_known_at_once():
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
def test_what_is_told_when_the_process_ends():
    for argument, count in (("checkpoints", 1), ("starts", 0)):
        done = fork_server.run(
            ["-c", "import ebb\n" + PROGRAM, argument],
            env=os.environ
            | {"EBB": "ebb_never::op:recompute", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        line = "ebb: EBB=ebb_never::op:recompute: the rule 'ebb_never::op' matches no registered"
        assert done.stderr.count(line) == count, done.stderr


def test_a_preset_may_be_followed_by_rules():
    rules = ebb.Policy.parse("gelu:offload,torchtitan,mm:recompute")
    own = (ebb.Rule("aten::gelu", ebb.OFFLOAD), ebb.Rule("aten::mm", ebb.RECOMPUTE))
    assert rules.rules == own + ebb.policies.torchtitan.rules
    assert ebb.Policy.parse("save_all,mm:recompute").default is ebb.SAVE
    assert ebb.Policy.parse("offload_inputs,mm:save").inputs is ebb.OFFLOAD
    for text in ("save_all,save_matmuls", "save_all,default:save"):
        with pytest.raises(ValueError, match=r"is neither a preset|'preset' cannot be combined"):
            ebb.Policy.parse(text)
