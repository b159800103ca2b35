"""Rule 9: raise exactly where eager raises; an unseen write makes a new leaf."""

from __future__ import annotations

import pytest
import torch
from exactness import POLICIES, assert_exact, assert_same_error, leaves

import ebb


def test_saved_output_written_inside_the_region():
    def program(x):
        h = (x * 2).exp()  # saves its result
        h.add_(1)
        return h.sum()

    message = assert_same_error(program, leaves((3,)))
    assert "modified by an inplace operation" in message
    assert "region 'test'" in message
    assert "aten::exp.default" in message


def test_saved_output_written_through_a_view_inside_the_region():
    def program(x):
        h = (x * 2).exp()
        h[0].zero_()
        return h.sum()

    assert_same_error(program, leaves((3, 2)))


def test_saved_output_written_after_the_region():
    def write(x, out):
        with torch.no_grad():
            out.add_(1)

    assert_same_error(lambda x: (x * 2).exp(), leaves((3,)), after=write)


def test_unsaved_output_written_after_the_region_is_no_error():
    def write(x, out):
        with torch.no_grad():
            out.add_(1)

    def program(x):
        return x.sin() + 1

    assert_exact(program, leaves((3,)), after=write)


def test_output_that_a_recipe_reads_written_after_the_region():
    def write(x, h, out):
        with torch.no_grad():
            h.mul_(7)

    def program(x):
        h = x + 1  # saved by nothing
        return h, (h * 2).exp()

    assert_exact(program, leaves((3,)), after=write)


def test_parameter_written_between_forward_and_backward():
    def write(w, x, out):
        with torch.no_grad():
            w.mul_(2)

    assert_same_error(lambda w, x: (w * x).exp(), leaves((3,), (3,)), after=write)


def test_leaf_that_only_a_recipe_needs_is_refused_by_name():
    w = torch.randn(3)
    x = torch.randn(3, requires_grad=True)
    with ebb.region(name="block"):
        out = (x + w).exp().sin()
    w.add_(1)

    with pytest.raises(RuntimeError, match=r"recompute aten::add.Tensor in region 'block'"):
        out.sum().backward()


def test_unseen_write_that_moves_the_version_makes_a_leaf():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            h.numpy()[...] *= 2  # behind the dispatcher
            ctx.mark_dirty(h)
            return h

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def program(x):
        h = x * 3
        Doubled.apply(h)
        return h.exp() * h.sin()

    assert_exact(program, leaves((4,)))


def test_write_of_a_kernel_below_us_that_moves_the_version():
    def program(x):
        h = (x * 3).detach()
        h.add_(1)
        h.numpy()[...] *= 2
        torch._C._autograd._unsafe_set_version_counter((h,), (h._version + 1,))
        return (h * x).exp() * h

    assert_exact(program, leaves((4,)))


def test_dead_leaf_is_refused_by_name():
    w = torch.randn(3)
    x = torch.randn(3, requires_grad=True)
    with ebb.region(name="block"):
        out = (x + w).exp().sin()
    w.untyped_storage().resize_(0)

    with pytest.raises(
        RuntimeError, match=r"recompute aten::add.Tensor in region 'block'.*resized"
    ):
        out.sum().backward()


def test_dead_saved_parameter_is_refused():
    w = torch.randn(3, requires_grad=True)
    x = torch.randn(3, requires_grad=True)
    with ebb.region(name="block"):
        out = x * w
    w.untyped_storage().resize_(0)

    with pytest.raises(RuntimeError, match="has no data any more"):
        out.sum().backward()


def test_two_backwards_without_retain_graph_raise_as_in_eager():
    x = torch.randn(3, requires_grad=True)
    with ebb.region():
        loss = (x * 2).exp().sum()
    loss.backward()

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


ALIASES = {
    "matmul of more than two dimensions": lambda x, w: x.reshape(1, 3, 4) @ w,
    "reshape that copies": lambda x, w: (x * 2).t().reshape(-1),
    "unsafe_chunk": lambda x, w: (x * 2).unsafe_chunk(3)[1],
    "data": lambda x, w: (x * 2).data * 1 + (x * 2).data,
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_alias_with_a_counter_of_its_own_written_after_the_region(alias, policy):
    """Nothing has saved it, so eager goes on; a recipe that reads it needs the old state."""

    def run(region):
        x, w = leaves((3, 4), (4, 4))
        with region:
            h = ALIASES[alias](x, w)
            loss = (x.sum() * (h * 0.5).exp()).sum()
        with torch.no_grad():
            h.add_(1)
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(run(ebb.region(POLICIES[policy])), run(torch.enable_grad()))


def test_write_through_data_after_the_region_is_seen_by_backward_as_in_eager():
    def run(region):
        x = leaves((4,))[0]
        with region:
            h = x * 2
            alias = h.data
            loss = (h.sin() * (alias + 1)).sum()
        alias.add_(1)
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(run(ebb.region(ebb.policies.save_all)), run(torch.enable_grad()))
    assert torch.equal(run(ebb.region()), run(torch.enable_grad()))
