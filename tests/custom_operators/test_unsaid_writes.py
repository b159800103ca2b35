"""Operators from elsewhere that write to what their schemas call read, below torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import ebb
from ebb_tests.exactness import POLICIES, assert_like_eager
from ebb_tests.programs.unseen_writes import PROGRAMS, outcome

LIBRARY = torch.library.Library("ebb_unsaid", "DEF")


def define(name, schema, function, key="CPU"):
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, function, key)
    return getattr(torch.ops.ebb_unsaid, name).default


def triple(tensor):
    """As a kernel of C++ writes: no operator, and no version moves."""
    array = tensor.numpy()
    array *= 3


def tripled(x):
    triple(x)
    return torch.ones(1, dtype=x.dtype)


def both(x, scratch):
    triple(scratch)
    return x * 2


def all_of(tensors):
    for tensor in tensors:
        triple(tensor)


def one_said(x, said):
    triple(x)
    triple(said)


@torch.library.custom_op("ebb_unsaid::custom", mutates_args=())
def custom(x: torch.Tensor) -> torch.Tensor:
    triple(x)
    return x.clone()


RETURNS = define("returns", "(Tensor x) -> Tensor", tripled)
NOTHING = define("nothing", "(Tensor x) -> ()", triple)
EXPLICIT = define("explicit", "(Tensor x) -> Tensor", tripled, "CompositeExplicitAutograd")
SCRATCH = define("scratch", "(Tensor x, Tensor scratch) -> Tensor", both)
LISTS = define("lists", "(Tensor[] tensors) -> ()", all_of)
ONE_SAID = define("one_said", "(Tensor x, Tensor(a!) said) -> ()", one_said)
WARNED = define("warned", "(Tensor x) -> ()", triple)
HONEST = define("honest", "(Tensor x) -> Tensor", lambda x: x * 2)

WRITES = {
    "returns": RETURNS,
    "nothing": NOTHING,
    "explicit": EXPLICIT,
    "scratch": lambda h: SCRATCH(h.clone(), h),
    "lists": lambda h: LISTS([torch.ones_like(h), h]),
    "one said": lambda h: ONE_SAID(h, torch.ones_like(h)),
    "custom_op": custom,
    "a view": lambda h: NOTHING(h[1:3]),
}
NAMED = ebb.Policy({"ebb_unsaid::*": ebb.RECOMPUTE}, default=ebb.RECOMPUTE)


def what_it_returns(x, write):
    h = x * 2
    made = write(h.detach())
    made = h if made is None else made.detach()
    return (made * x).sin() + h.exp()


@pytest.mark.parametrize("policy", [*POLICIES, "named"])
@pytest.mark.parametrize("program", [*PROGRAMS, what_it_returns])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_unsaid_is_what_backward_sees(name, program, policy):
    run = partial(outcome, program=program, write=WRITES[name])
    assert_like_eager(run, (POLICIES | {"named": NAMED})[policy])


def test_a_leaf_that_recipes_have_read_is_refused():
    x = torch.ones(4, requires_grad=True)
    leaf = torch.full((4,), 2.0)
    with ebb.region():
        loss = (x * leaf.exp()).sum()
        NOTHING(leaf)

    with pytest.raises(RuntimeError, match="without a change of its version counter"):
        loss.backward()


def test_the_operator_is_named_once(capfd, recwarn):
    x = torch.ones(4, requires_grad=True)
    with ebb.region():
        WARNED((x * 2).detach())
        WARNED((x * 2).detach())

    said_by_python = [str(one.message) for one in recwarn]  # since torch 2.15
    told = "".join([capfd.readouterr().err, *said_by_python])

    assert told.count("operator ebb_unsaid::warned.default writes to its argument 'x'") == 1


def test_nothing_is_said_of_an_honest_one(capfd):
    x = torch.ones(4, requires_grad=True)
    with ebb.region(NAMED):
        loss = (HONEST((x * 2).detach()) * x).sum()
    loss.backward()

    assert capfd.readouterr().err == ""
    assert torch.equal(x.grad, torch.full((4,), 4.0))
    assert ebb.stats()["total"]["ops_replayed"] > 0
