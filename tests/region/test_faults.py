"""An exception at any point of a region, or of a replay, leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.exactness import POLICIES, assert_like_eager, same_bits
from ebb_tests.stand_ins import failing_policy


def model():
    torch.manual_seed(4)
    return nn.ModuleDict(
        {"first": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "gate": nn.Linear(4, 4, bias=False)}
    )


def forward(net, x):
    """In-place writes, a write through a view, buffers, randomness, a list op, several results."""
    h = net["norm"](net["first"](x)).relu_()
    h = nn.functional.dropout(h, 0.4) * net["gate"](x).sigmoid()
    h[:2].mul_(2)
    values, order = h.sort(-1)
    a, b = torch.cat((values.exp(), h), 1).split(4, 1)
    out = torch.zeros(4, 4).add_(a) * b.sin()
    return (out + order).cumsum(0).square().mean()


def gradients(net, x, region):
    torch.manual_seed(5)
    with region:
        loss = forward(net, x)
    return torch.autograd.grad(loss, list(net.parameters()))


@pytest.mark.sweep
@pytest.mark.usefixtures("no_objects_left")
def test_a_fault_at_every_op_of_a_region():
    x = torch.randn(4, 4)
    expected = gradients(model(), x, torch.enable_grad())
    gc.collect()
    kinds = ("open_regions", "live_recipes", "live_handles")
    before = [ebb.stats()[kind] for kind in kinds]
    at, failed = 0, True
    while failed:
        at += 1
        net = model()
        failed = fails(lambda net=net, at=at: gradients(net, x, ebb.region(failing_policy(at))))
        gc.collect()
        assert [ebb.stats()[kind] for kind in kinds] == before, at
        # The next step is right, in the same thread and with the same parameters.
        net.load_state_dict(model().state_dict())
        for a, e in zip(gradients(net, x, ebb.region()), expected, strict=True):
            assert same_bits(a, e), at
    assert at > 20


def fails(function):
    try:
        function()
    except RuntimeError as error:
        return "fault injected" in str(error)
    return False


class Fault(Exception):
    pass


STEPS = [
    lambda h: h.mul_(1.5),
    lambda h: h[1:].add_(h[:1].detach()) is None,
    lambda h: h.exp(),
    lambda h: h.sin() + 1,
    lambda h: torch.nn.functional.dropout(h, 0.3),
    lambda h: h.relu_(),
    lambda h: h.sort(0).values,
    lambda h: h * torch.rand(3),
]


def skipping(steps):
    def run(x, inner):
        h = x * 2
        for index, step in enumerate(STEPS):
            if index in steps and inner is None:
                continue
            try:
                with inner(index) if inner else torch.enable_grad():
                    result = step(h)
            except RuntimeError:
                continue
            h = result if isinstance(result, torch.Tensor) else h
        return h

    return run


@pytest.mark.usefixtures("no_objects_left")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("failing", range(len(STEPS)))
def test_a_fault_that_the_program_catches_and_goes_on(policy, failing):
    x = torch.randn(4, 3, requires_grad=True)
    program = skipping({failing})

    def inner(index):
        return ebb.region(failing_policy(1) if index == failing else POLICIES[policy])

    torch.manual_seed(1)
    with ebb.region(POLICIES[policy]):
        out = program(x, inner)
    actual = torch.autograd.grad(out.sum(), x)[0]
    torch.manual_seed(1)
    expected = torch.autograd.grad(program(x, None).sum(), x)[0]

    assert same_bits(actual, expected)


@pytest.fixture
def fragile():
    """An operator that can be told to raise at its n-th call from now."""
    fuse = [0]

    def burn():
        fuse[0] -= 1
        if fuse[0] == 0:
            raise Fault("burnt")

    def fragile(x):
        burn()
        return x * 3

    def fragile_(x):
        x.mul_(3)
        burn()
        return x

    with torch.library._scoped_library("ebb_fault_test", "FRAGMENT") as library:
        library.define("fragile(Tensor x) -> Tensor")
        library.define("fragile_(Tensor(a!) x) -> Tensor(a!)")
        library.impl("fragile", fragile, "CPU")
        library.impl("fragile_", fragile_, "CPU")
        yield torch.ops.ebb_fault_test, fuse, ebb.Policy({"ebb_fault_test::*": ebb.RECOMPUTE})


@pytest.mark.usefixtures("no_objects_left")
def test_a_fault_at_every_op_of_a_replay(fragile):
    ops, fuse, policy = fragile
    x = torch.randn(3, requires_grad=True)

    def run(region):
        with region:
            h = x.detach()
            total = 0
            for _ in range(4):
                h = ops.fragile(h).sin()
                h = ops.fragile_(h * 2)
                total = total + (x * h).exp().sum()
        return total

    expected = torch.autograd.grad(run(torch.enable_grad()), x)[0]
    for at in range(1, 9):
        fuse[0] = 0
        total = run(ebb.region(policy, "block"))
        fuse[0] = at
        with pytest.raises(Fault, match="burnt"):
            torch.autograd.grad(total, x, retain_graph=True)
        fuse[0] = 0
        # What the kernel that failed had begun to write is gone; then the error says so.
        try:
            again = torch.autograd.grad(total, x)[0]
        except RuntimeError as error:
            again = str(error)
        del total
        if isinstance(again, str):
            assert "Run the forward again" in again
        else:
            assert same_bits(again, expected)
        assert same_bits(torch.autograd.grad(run(ebb.region(policy)), x)[0], expected)


@pytest.mark.usefixtures("no_objects_left")
def test_a_kernel_that_fails_half_way_in_the_forward(fragile):
    ops, fuse, policy = fragile
    x = torch.randn(3, requires_grad=True)

    def run(region):
        with region:
            h = (x * 2).detach()
            fuse[0] = 1
            with contextlib.suppress(Fault):
                ops.fragile_(h)  # has written already
            return torch.autograd.grad((x * h.sin()).exp().sum(), x)[0]

    assert_like_eager(run, policy)


@pytest.mark.usefixtures("no_objects_left")
def test_an_exception_in_a_hook_during_backward():
    x = torch.randn(3, requires_grad=True)
    with ebb.region():
        h = (x * 2).sin()
        loss = h.exp().sum()

    def fail(grad):
        raise Fault

    hook = h.register_hook(fail)
    with pytest.raises(Fault):
        torch.autograd.grad(loss, x, retain_graph=True)
    hook.remove()

    expected = torch.autograd.grad((x * 2).sin().exp().sum(), x)[0]
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)
