"""OFFLOAD: which tensors are sent, and how often."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import ebb
from ebb_tests import fork_server
from ebb_tests.programs.offloaded import OFFLOAD_ALL, SINES, finish_copies, gradients
from ebb_tests.stand_ins import fake_accelerator


@pytest.mark.parametrize(("elements", "sent"), [(127, 0), (128, 1), (129, 1)])
def test_min_bytes(elements, sent):
    x = torch.randn(elements, dtype=torch.float64, requires_grad=True)
    with fake_accelerator(min_bytes=1024) as fake:
        with ebb.region(SINES):
            y = x.sin().cos()
        y.sum().backward()
        fake.advance(1000)
        assert fake.counts()["copies_out"] == sent


def test_parameters_and_their_views_are_not_offloaded(accelerator):
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4)
    with ebb.region(ebb.policies.offload_inputs):
        y = (x @ w.t()).sin() * w[:, :1]
    y.sum().backward()
    accelerator.advance(1000)

    assert accelerator.counts()["copies_out"] == 0


def test_computed_inputs_are_offloaded(accelerator):
    x = torch.randn(4, 4, requires_grad=True)
    h = x * 2
    with ebb.region(ebb.policies.offload_inputs):
        y = h.sin().cos().exp()
    del h
    finish_copies(accelerator)
    storages = ebb.stats()["offload"]
    y.sum().backward()

    assert storages["stashes"] == 1
    assert accelerator.counts()["copies_out"] == 1
    assert accelerator.counts()["copies_in"] == 1
    assert torch.equal(x.grad, gradients((x * 2).sin().cos().exp().sum(), x)[0])


@pytest.mark.parametrize("mark", ["_do_not_offload", "_TE_do_not_offload"])
def test_marked_tensors_are_not_offloaded(accelerator, mark, x):
    with ebb.region(OFFLOAD_ALL):
        h = x.sin()
        setattr(h, mark, True)
        y = h.cos()
    y.sum().backward()
    accelerator.advance(1000)

    assert accelerator.counts()["copies_out"] == 0


def test_storage_saved_several_times_is_copied_once(accelerator):
    x = torch.randn(6, 4, requires_grad=True)
    with ebb.region(SINES):
        h = x.sin()
        a, b = h[:3], h[3:]
        y = h.cos().sum() + h.exp().sum() + a.cos().sum() + b.tanh().sum() + h.t().sin().sum()
    del h, a, b
    finish_copies(accelerator)
    y.backward()
    accelerator.advance(1000)

    assert accelerator.counts()["copies_out"] == 1
    assert accelerator.counts()["copies_in"] == 1


def test_new_tensor_at_a_freed_address_is_sent(accelerator):
    x = torch.randn(1024, requires_grad=True)
    expected = gradients(sum((x * k).sin().cos().sum() for k in range(1, 9)), x)[0]
    with ebb.region(OFFLOAD_ALL):
        loss = 0
        for k in range(1, 9):
            loss = loss + (x * k).sin().cos().sum()
            accelerator.advance(1000)  # what was sent is freed: the next one may get its address
    assert torch.equal(gradients(loss, x)[0], expected)


@pytest.mark.sweep
def test_cpu_tensors_are_saved_with_a_warning():
    program = (
        "import torch, ebb\n"
        "x = torch.randn(1 << 20, requires_grad=True)\n"
        "for _ in range(2):\n"
        "    with ebb.region(ebb.Policy(default=ebb.OFFLOAD)):\n"
        "        y = x.sin().cos().sum()\n"
        "    y.backward()\n"
        "print(torch.equal(x.grad, 2 * torch.autograd.grad(x.sin().cos().sum(), x)[0]))\n"
    )
    done = fork_server.run(["-c", program])

    assert done.stdout == "True\n"
    assert done.stderr.count("tensors on cpu are saved instead of offloaded") == 1


@pytest.mark.filterwarnings("ignore:ebb. tensors on meta are saved instead of offloaded")
def test_meta_and_fake_tensors_are_not_offloaded(accelerator):
    """On the meta device, and fake ones."""
    with ebb.region(OFFLOAD_ALL):
        x = torch.ones(4, 4, device="meta", requires_grad=True)
        y = (x @ x).sin().cos()
    y.sum().backward()
    with FakeTensorMode(), ebb.region(OFFLOAD_ALL):
        x = torch.ones(4, 4, requires_grad=True)
        y = (x @ x).sin().cos()
        y.sum().backward()
    accelerator.advance(1000)

    assert x.grad.shape == (4, 4)
    assert accelerator.counts()["copies_out"] == 0


def test_saved_leaf_is_the_same_object(accelerator):
    seen = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors)
            return None, seen[0].t() @ gradient

    x = torch.randn(4, 4)
    w = torch.randn(4, 4, requires_grad=True)
    with ebb.region(OFFLOAD_ALL):
        y = Keeps.apply(x, w)
    y.sum().backward()
    accelerator.advance(1000)

    assert seen[0] is x
    assert seen[1].data_ptr() == w.data_ptr()
    assert accelerator.counts()["copies_out"] == 0


def test_transfers_are_counted_by_region_and_op():
    x = torch.randn(8, requires_grad=True)
    h = x * 2
    with fake_accelerator(in_flight_bytes=0, prefetch_bytes=0) as fake:
        with ebb.region(ebb.Policy({"aten::sin": ebb.OFFLOAD}, inputs=ebb.OFFLOAD), "a"):
            y = h.sin().cos()
        with ebb.region(SINES, "b"):
            z = y.exp().sin().cos()
        del h
        finish_copies(fake)
        z.sum().backward()
        transfers = ebb.stats()["transfers"]
        fake.advance(1000)
    assert set(transfers) == {"a", "b"}
    assert set(transfers["a"]) == {"aten::sin.default", "input"}
    for counts in (*transfers["a"].values(), *transfers["b"].values()):
        assert counts == {
            "bytes_offloaded": 32,
            "bytes_reloaded": 32,
            "bytes_waited_host": 0,
            "bytes_waited_device": 2 * 32,
            "bytes_fell_back": 0,
            "bytes_spilled": 0,
        }
