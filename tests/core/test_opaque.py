"""Writes that torch does not see, marked with ebb.opaque."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import ebb
from ebb_tests.exactness import assert_exact, each_policy, exact, leaves, like_eager
from ebb_tests.memory_use import poke

pytestmark = pytest.mark.engines("exactness", "device")


def opaque_poke(tensor, values=(5.0, -1.0)):
    with ebb.opaque(tensor):
        poke(tensor, values)


@exact((4,))
def test_a_computed_tensor_that_is_then_saved(x):
    h = x * 2
    opaque_poke(h)
    return h.sin() * x


@exact((4,))
def test_a_computed_tensor_of_which_others_were_made_before(x):
    h = x * 2
    before = h + 1
    before = before * before  # backward needs `before`, whose recipe reads the old h
    opaque_poke(h)
    after = h + 1
    return before + after * after


@exact((4,))
def test_a_tensor_that_autograd_has_already_packed(x):
    h = x * 2
    y = h.sin()  # eager's saved h is the same memory, so its backward sees the write
    opaque_poke(h)
    return y


@exact((4,))
def test_through_a_view_and_twice(x):
    h = x * 2
    opaque_poke(h[2:])
    y = h.sin()
    opaque_poke(h, (7.0,))
    return y + h.exp().sin()


@exact((4,))
def test_torch_goes_on_writing_to_it_in_place(x):
    h = x * 2
    opaque_poke(h)
    h.mul_(3)
    y = h.sin()
    h = h + 1
    h.relu_()
    return y * h


@exact((4,))
def test_an_op_that_reads_it_while_it_is_written(x):
    h = x * 2
    with ebb.opaque(h):
        between = h.detach() * 3
        poke(h)
    return (between * x).sin() * h


@exact((4,))
def test_torch_writes_and_reads_it_while_it_is_written(x):
    h = x * 2
    with ebb.opaque(h):
        h.detach().add_(1)
        between = h.detach() * 3
        poke(h)
    return (between * x).sin() * h


def test_an_input_of_the_region_that_only_recipes_read():
    def program(x, buffer):
        before = x + buffer
        before = before * before
        opaque_poke(buffer)
        after = x + buffer
        return before + after * after

    x, buffer = leaves((4,), (4,))
    assert_exact(program, (x, buffer.requires_grad_(False)))


def test_an_input_of_the_region_that_autograd_has_packed():
    def program(x, buffer):
        y = x * buffer  # eager's saved buffer is the same memory, so its backward sees the write
        opaque_poke(buffer)
        return y * (x + buffer)

    x, buffer = leaves((4,), (4,))
    assert_exact(program, (x, buffer.requires_grad_(False)))


@pytest.mark.replays
def test_an_input_that_an_earlier_region_needs_is_refused_there():
    x, buffer = leaves((4,))[0], torch.ones(4, dtype=torch.float64)
    with ebb.region(name="early"):
        h = x + buffer
        loss = (h * h).sum()
        del h
    with ebb.region():
        opaque_poke(buffer)
    with pytest.raises(RuntimeError, match=r"aten::add.Tensor in region 'early'"):
        loss.backward()


@like_eager(ebb.policies.recompute_all)
def test_a_buffer_that_each_forward_writes_before_one_backward(region):
    x, buffer = leaves((4,))[0], torch.zeros(4, dtype=torch.float64)
    total = 0
    for step in range(3):
        with region:
            opaque_poke(buffer, (float(step), 1.0 + step))
            h = x + buffer
            total = total + (h * h).exp().sum()
    return torch.autograd.grad(total, x)[0]


@each_policy
def test_after_the_region_what_needs_the_old_contents_raises(policy):
    x = leaves((4,))[0]
    with ebb.region(policy):
        h = x * 2
        loss = h.sin().sum()
    opaque_poke(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.replays
def test_after_the_region_a_leaf_that_a_recipe_needs_is_refused():
    x, w = leaves((4,), (4,))
    with ebb.region(name="block"):
        loss = (x * w.detach().sin()).exp().sum()
    opaque_poke(w.detach())
    with pytest.raises(RuntimeError, match=r"aten::sin.default in region 'block'"):
        loss.backward()


def test_outside_of_regions_plain_eager_is_left_alone():
    other = leaves((4,))[0]
    with ebb.region():
        waiting = (other * 2).sin()  # an unrelated graph is alive
    x = leaves((4,))[0]
    y = x.exp()
    opaque_poke(y)
    y.sum().backward()
    assert x.grad[0] == 5
    waiting.sum().backward()


@exact((4,))
def test_the_block_may_raise(x):
    h = x * 2
    try:
        with ebb.opaque(h):
            poke(h)
            raise KeyError
    except KeyError:
        pass
    return h.sin()


@pytest.mark.on_cpu("the test device has no sparse tensors")
def test_sparse_tensors_pass():
    with ebb.region(), ebb.opaque(torch.eye(2).to_sparse()):
        pass


def test_a_call_without_with_warns():
    x = torch.ones(3)
    with pytest.warns(RuntimeWarning, match="ebb.opaque.* was called without `with`") as caught:
        ebb.opaque(x)
    assert caught[0].filename == __file__


def test_an_object_that_is_entered_later_or_by_a_stack_does_not_warn(recwarn):
    x = torch.ones(3)
    write = ebb.opaque(x)
    with contextlib.ExitStack() as stack:
        stack.enter_context(write)
    del write
    with pytest.raises(TypeError, match="opaque takes tensors"):
        ebb.opaque([x])
    gc.collect()
    assert not recwarn
