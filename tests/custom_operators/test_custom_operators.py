"""Operators from outside torch: which of them a replay repeats, and what ebb logs of the others."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

import ebb
from ebb._support import effects, pinned
from ebb_tests.exactness import same_bits

ALL = ebb.policies.recompute_all
LIBRARY = torch.library.Library("ebb_guarded", "DEF")
NUMBERS = itertools.count()


def define(schema, function):
    """A new operator, of which ebb has said nothing yet."""
    name = f"op{next(NUMBERS)}"
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.ebb_guarded, name).default


def named(op, **settings):
    return ebb.Policy([ebb.Rule(op.name(), ebb.RECOMPUTE, **settings)], default=ebb.RECOMPUTE)


def counting():
    """Two operators with hidden state: one returns a tensor, and one writes to its argument."""
    calls = itertools.count()

    def write(x):
        x.add_(next(calls))

    returns = define("(Tensor x) -> Tensor", lambda x: x + next(calls))
    return returns, define("(Tensor(a!) x) -> ()", write)


def gradient(x, op, region):
    with region:
        h = x.detach() * 2
        made = op(h)
        loss = ((h if made is None else made) * x).sin().sum()
        del h, made
    return torch.autograd.grad(loss, x)[0]


@pytest.fixture
def log():
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("ebb").addHandler(handler)
    yield records
    logging.getLogger("ebb").removeHandler(handler)


@pytest.mark.parametrize(("which", "where"), [(0, "result 0"), (1, "argument 0")])
def test_hidden_state_is_refused_though_a_rule_names_the_operator(which, where):
    op = counting()[which]
    x = torch.randn(8, requires_grad=True)

    with pytest.raises(RuntimeError, match=rf"other bits than in the forward, in {where}\. The op"):
        gradient(x, op, ebb.region(named(op)))

    assert ebb.stats()["open_regions"] == 0


@pytest.mark.parametrize("which", [0, 1])
def test_without_a_rule_hidden_state_is_kept(which):
    x = torch.randn(8, requires_grad=True)

    found = gradient(x, counting()[which], ebb.region(ALL))

    assert same_bits(found, gradient(x, counting()[which], torch.enable_grad()))


def test_a_rule_or_a_checkpointed_call_replays():
    runs = []
    op = define("(Tensor x) -> Tensor", lambda x: runs.append(x) or x * 3)
    x = torch.randn(8, requires_grad=True)
    expected = gradient(x, op, torch.enable_grad())

    runs.clear()
    assert same_bits(gradient(x, op, ebb.region(ALL)), expected)
    assert len(runs) == 1
    assert same_bits(gradient(x, op, ebb.region(named(op))), expected)
    assert len(runs) == 3
    loss = ebb.checkpoint(lambda x: (op(x.detach() * 2) * x).sin(), x).sum()
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    assert len(runs) == 5


def kept(x, op):
    made = op(x.detach() * 2)
    return (made * x).sin()  # autograd saves the result


def test_results_that_stay_are_logged_once_when_the_region_has_ended(log):
    op = define("(Tensor x) -> Tensor", lambda x: x * 3)
    x = torch.randn(1024, requires_grad=True)
    with ebb.region(ALL, name="outer"):
        with ebb.region(ALL, name="inner"):
            loss = kept(x, op)
        loss = loss + kept(x, op)
        assert log == []
    with ebb.region(ALL):
        kept(x, op)

    (message,) = log
    assert f"region 'outer' saves 0.0 MiB of results of {op.name()}" in message


def test_a_region_that_is_split_logs_once_at_its_end(log):
    op = define("(Tensor x) -> Tensor", lambda x: x * 3)
    x = torch.randn(64, requires_grad=True)
    weight = torch.randn(64)
    with ebb.region(ALL, name="split"):
        loss = kept(x, op) * weight.exp()
        contents, storage = weight.tolist(), weight.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)  # as FSDP frees a parameter
        storage.resize_(nbytes)
        weight.numpy()[:] = contents
        loss = loss + kept(x, op)
        assert log == []
    loss.sum().backward()

    assert len(log) == 1


def test_an_error_in_the_log_does_not_break_the_region(monkeypatch):
    def tell(*_):
        raise ValueError("no log")

    monkeypatch.setattr(pinned, "tell", tell)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    op = define("(Tensor x) -> Tensor", lambda x: x * 3)
    x = torch.randn(8, requires_grad=True)

    found = gradient(x, op, ebb.region(ALL))

    assert same_bits(found, gradient(x, op, torch.enable_grad()))


def test_an_error_while_ebb_asks_for_effects_reaches_the_program(monkeypatch):
    """The operator has not run, and the region records on."""

    def has_effect(_):
        raise ValueError("no registry")

    runs = []
    op = define("(Tensor x) -> Tensor", lambda x: runs.append(x) or x * 3)
    x = torch.randn(8, requires_grad=True)
    with ebb.region(named(op)):
        h = x.detach() * 2
        with monkeypatch.context() as patched:
            patched.setattr(effects, "has_effect", has_effect)
            with pytest.raises(ValueError, match="no registry"):
                op(h)
        assert runs == []
        loss = (op(h) * x).sin().sum()
        del h
    found = torch.autograd.grad(loss, x)[0]

    assert same_bits(found, gradient(x, op, torch.enable_grad()))
