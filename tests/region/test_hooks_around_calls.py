"""Saved-tensor hooks around a checkpointed call get its arguments, as under torch's checkpoint."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ebb
from ebb._launch import takeover
from ebb_tests.exactness import same_bits as same


def same_bits(expected, found):
    return all(same(a, b) for a, b in zip(expected, found, strict=True))


@pytest.fixture
def taken():
    takeover.install(ebb.policies.recompute_all, "1", ())
    yield
    takeover.remove()


def later(function, *arguments):
    return checkpoint(function, *arguments, use_reentrant=False)


def reentrant(function, *arguments):
    return checkpoint(function, *arguments, use_reentrant=True)


def plain(function, *arguments):
    return function(*arguments)


CALLS = {"non-reentrant": later, "reentrant": reentrant, "ebb": ebb.checkpoint}


class Moves:
    """Hooks that keep a copy of each tensor, and what they were called with."""

    def __init__(self):
        self.log = []

    def pack(self, tensor):
        self.log.append(("pack", tuple(tensor.shape)))
        return tensor.clone()

    def unpack(self, tensor):
        self.log.append(("unpack", tuple(tensor.shape)))
        return tensor

    def __call__(self):
        return saved_tensors_hooks(self.pack, self.unpack)


def block(x, mask, w):
    return ((x * mask) @ w).sin()


def steps(call, hooks, length=3):
    """Gradients of a chain of calls, and the storages of the inputs that outlive the forward."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    mask = torch.rand(8, 1)
    storages = []
    with hooks():
        h = x * 2
        for _ in range(length):
            storages.append(StorageWeakRef(h.untyped_storage()))
            h = call(block, h, mask, w)
    loss = h.sum()
    del h
    gc.collect()
    alive = sum(not storage.expired() for storage in storages)
    loss.backward()
    return [x.grad, w.grad], alive


@pytest.mark.parametrize("call", [later, reentrant], ids=["non-reentrant", "reentrant"])
def test_hooks_are_called_as_under_torchs_checkpoint(call):
    under_torch, under_ebb = Moves(), Moves()
    expected, alive = steps(call, under_torch)
    takeover.install(ebb.policies.recompute_all, "1", ())
    ebb.reset_stats()

    try:
        found, now_alive = steps(call, under_ebb)
    finally:
        takeover.remove()

    assert ebb.stats()["total"]["entered"] == 3
    assert same_bits(expected, found)
    assert under_ebb.log == under_torch.log
    assert now_alive == alive == 0


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("hooks", [save_on_cpu, Moves()], ids=["save_on_cpu", "own"])
def test_gradients_equal_those_without_checkpoints(call, hooks):
    assert same_bits(steps(plain, hooks)[0], steps(call, hooks)[0])


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("policy", ["recompute_all", "save_all", "save_matmuls"])
def test_gradients_with_each_policy(policy):
    def call(function, *arguments):
        return ebb.checkpoint(function, *arguments, policy=getattr(ebb.policies, policy))

    assert same_bits(steps(plain, save_on_cpu)[0], steps(call, save_on_cpu)[0])


def test_hooks_that_keep_the_tensor_itself():
    hooks = lambda: saved_tensors_hooks(lambda x: x, lambda x: x)  # noqa: E731

    assert same_bits(steps(plain, hooks)[0], steps(ebb.checkpoint, hooks)[0])


@pytest.mark.parametrize("keeps", [True, False], ids=["the tensor itself", "a copy"])
def test_an_argument_that_the_call_writes(keeps):
    hooks = saved_tensors_hooks(lambda x: x if keeps else x.clone(), lambda x: x)

    def function(h):
        y = h.detach().exp()  # a recipe reads the old contents
        h.mul_(3)
        return (h.sin() * y * (y + 1)).cos()

    def gradient(call):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        with hooks:
            loss = call(function, x * 2).sum()
        return torch.autograd.grad(loss, x)

    assert same_bits(gradient(plain), gradient(ebb.checkpoint))


def test_an_argument_with_other_strides():
    def gradient(call, hooks):
        torch.manual_seed(0)
        x, w = torch.randn(33, 17, requires_grad=True), torch.randn(33, 9, requires_grad=True)
        with hooks():
            loss = call(lambda h: (h @ w).sin().exp(), (x * 2).t().exp()).sum()
        return torch.autograd.grad(loss, [x, w])

    dense = lambda: saved_tensors_hooks(  # noqa: E731
        lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
    )
    expected = gradient(plain, lambda: saved_tensors_hooks(torch.clone, lambda x: x))

    assert same_bits(expected, gradient(ebb.checkpoint, dense))


def test_a_second_backward():
    hooks = Moves()
    x = torch.randn(4, requires_grad=True)
    with hooks():
        loss = ebb.checkpoint(lambda h: h.sin().exp(), x * 2).sum()

    first = torch.autograd.grad(loss, x, retain_graph=True)
    second = torch.autograd.grad(loss, x)

    assert same_bits(first, second)
    assert hooks.log.count(("unpack", (4,))) == hooks.log.count(("pack", (4,)))


def test_a_graph_that_is_dropped_lets_the_hooks_data_go():
    hooks = Moves()
    packed = []
    x = torch.randn(4, requires_grad=True)

    def pack(tensor):
        packed.append(StorageWeakRef((copy := hooks.pack(tensor)).untyped_storage()))
        return copy

    with saved_tensors_hooks(pack, hooks.unpack):
        y = ebb.checkpoint(lambda h: h.sin().exp(), x.sin())
    del y
    gc.collect()

    assert len(packed) == 2
    assert all(storage.expired() for storage in packed)


def test_hooks_that_give_back_another_type():
    x = torch.randn(4, requires_grad=True)
    with saved_tensors_hooks(torch.Tensor.double, lambda packed: packed):
        loss = ebb.checkpoint(lambda h: h.sin().exp(), x * 2).sum()

    with pytest.raises(
        RuntimeError, match=r"packed an input of shape \[4\] and gave back a .*Doub"
    ):
        loss.backward()


def test_calls_inside_of_other_regions_leave_the_hooks_alone():
    hooks = Moves()
    x = torch.randn(4, requires_grad=True)
    with hooks(), ebb.region():
        loss = ebb.checkpoint(lambda h: h.sin().exp(), x * 2).sum()

    assert hooks.log == []
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("from_input", [True, False], ids=["of the input", "of a parameter"])
def test_inputs_and_escapes_come_back(from_input):
    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    escaped = []

    def function(h):
        escaped.append(((h if from_input else w) * 2).sin())
        return (escaped[-1].cos() * h).exp()

    expected = torch.autograd.grad(function(x * 2).sum(), x)
    hooks = Moves()
    with hooks():
        loss = ebb.checkpoint(function, x * 2, escapes="placeholder").sum()
    assert escaped[-1].untyped_storage().nbytes() == 0

    assert same_bits(expected, torch.autograd.grad(loss, x))
    assert same(*escaped)
    assert hooks.log == [("pack", (4,)), ("unpack", (4,))]
