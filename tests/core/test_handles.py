"""What autograd does with handles: hooks, identity, graphs used twice, double backward."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import ebb
from ebb import _testing
from ebb_tests.exactness import each_policy, exact, leaves, like_eager, like_eager_each, policies
from ebb_tests.other_threads import in_thread

pytestmark = pytest.mark.engines("exactness", "device", "checked")


def net(x):
    return (torch.tanh(x * 2) @ x.t()).exp().sin()


@each_policy
def test_retain_graph_gives_the_same_twice(policy, x):
    expected = torch.autograd.grad(net(x).sum(), x)[0]
    with ebb.region(policy):
        loss = net(x).sum()

    for retain in (True, True, False):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=retain)[0], expected)


@pytest.fixture
def x():
    return leaves((4, 4))[0]


def sine_of_recomputed(x):
    """The sine of a tensor that nothing else holds; and the function that saved it."""
    with ebb.region():
        y = (x * 2).sin()
    return y, y.grad_fn


@pytest.mark.not_in_verify_mode("it frees recomputed tensors later")
def test_a_recomputed_tensor_is_gone_after_its_function_ran(x):
    y, sine = sine_of_recomputed(x)
    sine.register_hook(lambda *_: sine._saved_self)

    with pytest.raises(
        RuntimeError, match=r"aten::mul.Tensor.*region 'region'.*is unpacked again.*retain_graph"
    ):
        y.sum().backward()


def test_a_hook_sees_a_recomputed_tensor_again_if_the_graph_is_retained(x):
    y, sine = sine_of_recomputed(x)
    seen = []
    sine.register_hook(lambda *_: seen.append(sine._saved_self))

    y.sum().backward(retain_graph=True)

    assert torch.equal(seen[0], x * 2)
    assert torch.equal(x.grad, 2 * (x * 2).cos())


def test_a_recomputed_tensor_that_somebody_holds_is_seen_again(x):
    y, sine = sine_of_recomputed(x)
    seen = []
    sine.register_prehook(lambda *_: seen.append(sine._saved_self))
    sine.register_hook(lambda *_: seen.append(sine._saved_self))

    y.sum().backward()

    before, after = seen
    assert before.data_ptr() == after.data_ptr()
    assert torch.equal(after, x * 2)


class Cosine(torch.autograd.Function):
    """Its backward looks twice at what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx, gradient):
        factor = -ctx.saved_tensors[0].sin()
        return gradient * factor + 0 * ctx.saved_tensors[0]


@exact((4,))
def test_a_custom_function_may_look_twice_at_what_it_saved(x):
    return Cosine.apply(x * 2)


@like_eager_each
def test_double_and_triple_backward(region):
    x = leaves((4, 4))[0]
    with region:
        loss = net(x).sum()
    results = []
    for _ in range(3):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        results.append(grad.detach())
        loss = grad.square().sum()
    return results


@like_eager()
def test_gradient_penalty_inside_the_region(region):
    x = leaves((4, 4))[0]
    with region:
        out = net(x).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + (grad.norm() - 1).square()
    loss.backward()
    return x.grad


def test_backward_inside_the_region(x):
    expected = torch.autograd.grad(net(x).sum(), x)[0]

    with ebb.region():
        net(x).sum().backward()
        assert torch.equal(x.grad, expected)
        net(x).sum().backward()

    assert torch.equal(x.grad, expected + expected)


def test_hooks_pushed_outside_see_what_is_packed_outside(x):
    packed = []

    # Not the tensor: it would hold its node, which holds the hooks, where no collector looks.
    with saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        h = x.exp()
        outside_before = len(packed)
        with ebb.region():
            h = h.exp().exp()
        outside_after = len(packed)
        h.exp()

    assert outside_before == 1
    assert outside_after == 1
    assert len(packed) == 2


def test_unpack_gives_the_tensor_itself_for_inputs_that_need_no_grad():
    seen = []

    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask):
            ctx.save_for_backward(x, mask)
            return x * mask

        @staticmethod
        def backward(ctx, grad):
            seen.extend(ctx.saved_tensors)
            return grad * ctx.saved_tensors[1], None

    x, mask = torch.randn(3, requires_grad=True), torch.ones(3)
    with ebb.region():
        Peek.apply(x, mask).sum().backward()

    assert seen[1] is mask
    assert seen[0].data_ptr() == x.data_ptr()
    assert seen[0].requires_grad


def test_saved_leaf_that_needs_grad_accumulates_in_the_leaf():
    w = torch.randn(3, requires_grad=True)
    with ebb.region():
        out = (w * w).sum()
    (grad,) = torch.autograd.grad(out, w, create_graph=True)
    grad.sum().backward()

    assert torch.equal(w.grad, torch.full((3,), 2.0))


@pytest.mark.on_cpu("torch plans in Python what operators of the test device return")
def test_handles_make_no_python_objects(x):
    """No Python on the path: neither pack nor unpack calls a Python function."""
    calls = []

    def note(frame, event, arg):
        # A test with run_step, earlier in this process, has made ebb watch the engine.
        if event == "call" and not frame.f_code.co_filename.endswith("paging/_attempt.py"):
            calls.append(frame.f_code.co_name)

    with ebb.region():
        sys.setprofile(note)
        h = x.exp().exp().exp()
        sys.setprofile(None)
    loss = h.sum()
    one = torch.ones_like(loss)
    sys.setprofile(note)
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    sys.setprofile(None)

    assert calls == []


@pytest.mark.usefixtures("no_objects_left")
def test_forwards_whose_backward_never_runs_free_everything(x):
    for policy in policies().values():
        with ebb.region(policy):
            net(x).sum()
        with ebb.region(policy):
            kept = net(x).sum()
        del kept


@pytest.mark.usefixtures("no_objects_left")
def test_a_very_long_chain_is_freed_without_recursion():
    def chain(x):
        with ebb.region():
            h = x
            for _ in range(60_000):
                h = h + 1
            return h.exp().sum()

    def body():
        x = torch.ones(2, requires_grad=True)
        chain(x).backward()
        chain(x)

    threading.stack_size(2 << 20)  # far less than a recursion this deep would take
    try:
        in_thread(body)
    finally:
        threading.stack_size(0)
    gc.collect()


def test_grad_fn_attributes_can_be_read(x):
    with ebb.region():
        h = (x * 2).exp()

    assert torch.equal(h.grad_fn._saved_result, (x * 2).exp())


def test_anomaly_mode_names_the_forward_op():
    x = torch.zeros(3, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        with ebb.region():
            loss = torch.sqrt(x * 1).sum() * 0
        with pytest.raises(RuntimeError, match=r"MulBackward0|SqrtBackward0"):
            loss.backward()


@pytest.mark.on_cpu("the test device has no sparse tensors")
@exact((2,), (3, 2))
def test_sparse_and_other_unrecordable_tensors_are_kept_whole(x, dense):
    sparse = torch.sparse_coo_tensor([[0, 1], [2, 0]], x * 2, (2, 3))
    return torch.sparse.mm(sparse, dense.exp() * 2).exp()


@pytest.mark.parametrize("policy", [ebb.policies.save_all, ebb.policies.recompute_all])
def test_a_handle_loses_its_count_before_it_releases_what_it_holds(policy):
    """Else the value takes the program's reference to a storage for a handle's."""
    (x,) = leaves((4,))
    _testing.watch_handles(True)
    try:
        with ebb.region(policy):
            y = x.exp()  # one handle
    finally:
        _testing.watch_handles(False)
    _testing.counts_of_dead_handles()
    del y

    assert _testing.counts_of_dead_handles() == [0]
