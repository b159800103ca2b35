"""Where memory starts, who else has it, when it is freed, and what shows it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb_tests.exactness import like_eager

pytestmark = pytest.mark.engines("exactness", "device")


def lines(count=4096):
    return torch.linspace(0, 1, count).requires_grad_()


@pytest.mark.on_cpu("numpy shows no other memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [8, 24, 32])
@like_eager()
def test_copy_of_memory_that_is_not_aligned_as_torch_aligns(region, dtype, offset):
    raw = torch.zeros(33 * 33 * dtype.itemsize + 128, dtype=torch.uint8)
    mapped = torch.frombuffer(raw.numpy(), dtype=dtype, count=33 * 33, offset=offset)
    matrix = mapped.view(33, 33).normal_()
    x = torch.ones(1, dtype=dtype, requires_grad=True)
    with region:
        product = x * (matrix @ torch.randn(33, dtype=dtype)).sin()
        loss = (product * (matrix @ matrix.t()).sum()).sum()
        matrix.mul_(0.5)  # its bytes are copied for the recipe
    return torch.autograd.grad(loss, x)


@like_eager()
def test_storage_that_is_freed_and_grown_again_has_no_data(region):
    x = lines()
    with region:
        h = x.detach() * 2
        loss = (x + h).exp().sum()
    storage = h.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    shape = h.shape
    storage.resize_(0)
    others = [torch.full(shape, 9.0, dtype=h.dtype)]
    while others[-1].data_ptr() != address and len(others) < 1000:
        others.append(torch.full(shape, 9.0, dtype=h.dtype))
    storage.resize_(size)  # gets other memory
    return torch.autograd.grad(loss, x, grad_outputs=others[0][:1].sum())


@like_eager()
def test_computed_inference_tensor_written_after_the_region(region):
    x = lines()
    with region:
        with torch.inference_mode():
            cache = x.detach() * 2
        loss = (x + cache).exp().sum()
    with torch.inference_mode():
        cache.mul_(3)
    return torch.autograd.grad(loss, x)


@like_eager()
def test_backward_under_inference_mode(region):
    x = lines(8)
    with region:
        loss = (x * 2).sin().exp().sum()
    with torch.inference_mode():
        found = [g.clone() for g in torch.autograd.grad(loss, x)]
    return [torch.tensor(g.tolist()) for g in found]


class MovesTheVersion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.mark_dirty(t)
        return t

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.on_cpu("numpy shows no other memory")
@pytest.mark.parametrize("how", ["nested", "version", "region entered inside", "left in it"])
@like_eager()
def test_opaque_marks_hold_until_the_last_one_ends(region, how):
    x = lines()
    made = x.detach() * 2
    mark = ebb.opaque(made)
    if how in ("region entered inside", "left in it"):
        mark.__enter__()
    with region:
        t = made if "it" in how or "entered" in how else x.detach() * 2
        with ebb.opaque(t) if t is not made else contextlib.nullcontext():
            if how == "nested":
                with ebb.opaque(t):
                    pass
            if how == "version":
                MovesTheVersion.apply(t)
            loss = (x + t).exp().sum()
            t.numpy()[37] = 3  # few elements: no fingerprint tells
        if how == "left in it":
            mark.__exit__(None, None, None)
    if how == "region entered inside":
        mark.__exit__(None, None, None)
    return torch.autograd.grad(loss, x)


@torch.jit.script
def roll_and_change(t: torch.Tensor, shifts: list[int]):
    rolled = torch.roll(t, shifts, [0])
    shifts[0] = 3
    return rolled


@like_eager()
def test_list_that_a_script_changes_later(region):
    x = lines(64)
    with region:
        with torch.inference_mode():
            rolled = roll_and_change(x.detach() * 2, [1])
        loss = (x + rolled).exp().sum()
        del rolled
    return torch.autograd.grad(loss, x)


@like_eager()
def test_nnpack_switched_off_in_the_forward(region):
    x, w = torch.randn(16, 4, 12, 12), torch.randn(8, 4, 3, 3)
    x, w = x.requires_grad_(), w.requires_grad_()
    with torch.backends.mkldnn.flags(enabled=False):
        with torch.backends.nnpack.flags(enabled=False), region:
            loss = F.conv2d(x, w, padding=1).sin().exp().sum()
        return torch.autograd.grad(loss, (x, w))


def test_verify_mode_does_not_compare_what_ctc_loss_leaves_uninitialised():
    x = torch.randn(20, 4, 6, requires_grad=True)
    targets = torch.randint(1, 6, (4, 8))
    inputs, lengths = torch.tensor([20, 12, 5, 9]), torch.tensor([8, 3, 2, 4])
    with ebb.verify(), ebb.region():
        loss = F.ctc_loss((x * 1.5).log_softmax(-1), targets, inputs, lengths)
    loss.backward()
