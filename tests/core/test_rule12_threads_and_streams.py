"""Rule 12: a replay runs where and when unpack is called."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import ebb
from ebb_tests.exactness import leaves
from ebb_tests.other_threads import another_thread_draws, run_in_threads
from ebb_tests.time_limits import HANGS

pytestmark = pytest.mark.engines("exactness", "device", "checked")


def program(x):
    return (torch.nn.functional.dropout(x * 2, 0.5).exp() @ x.t()).sin().sum()


def test_two_threads_run_backward_on_one_graph():
    x = leaves((40, 40))[0]
    with ebb.region():
        torch.manual_seed(0)
        h = program(x)
        losses = [h * 2, h * 3]
    torch.manual_seed(0)
    h = program(x)
    expected = [torch.autograd.grad(h * k, x, retain_graph=True)[0] for k in (2, 3)]

    found = [None, None]

    def backward(i):
        found[i] = torch.autograd.grad(losses[i], x, retain_graph=True)[0]

    run_in_threads(partial(backward, 0), partial(backward, 1))

    assert all(map(torch.equal, found, expected))


@pytest.mark.on_cpu("numpy shows no other memory")
def test_replay_of_a_python_op_does_not_deadlock_other_threads():
    @torch.library.custom_op("ebb_test::slow_double", mutates_args=())
    def slow_double(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    slow_double.register_autograd(lambda ctx, grad: grad * 2)

    class Peek(torch.autograd.Function):
        """Unpacks with the GIL held."""

        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return h * h

        @staticmethod
        def backward(ctx, grad):
            (h,) = ctx.saved_tensors
            return grad * 2 * h

    x = leaves((8,))[0]
    with ebb.region():
        h = slow_double(x)
        losses = [Peek.apply(slow_double(h)).sum() for _ in range(4)]
    expected = 2 * 4 * 4 * x.detach()

    results = []

    def backward(loss):
        results.append(torch.autograd.grad(loss, x, retain_graph=True)[0])

    run_in_threads(*(partial(backward, loss) for loss in losses))

    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


def test_the_number_of_threads_in_backward_changes_no_bit():
    x = torch.randn(1_000_000, requires_grad=True)

    def gradient(policy, threads_in_backward):
        torch.set_num_threads(2)
        with ebb.region(policy):
            loss = ((x * 2).sum() / 1e4).exp() * x.sum()
        torch.set_num_threads(threads_in_backward)
        return torch.autograd.grad(loss, x)[0]

    expected = gradient(ebb.policies.save_all, 2)
    actual = gradient(ebb.policies.recompute_all, 1)  # each test begins with this number again

    assert torch.get_num_threads() == 1
    assert torch.equal(actual, expected)


@pytest.mark.needs_cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_replay_on_the_stream_current_at_unpack():
    x = torch.randn(1000, 1000, device="cuda", requires_grad=True)
    expected = torch.autograd.grad((x * 2).exp().sin().sum(), x)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), ebb.region():
        loss = (x * 2).exp().sin().sum()
    actual = torch.autograd.grad(loss, x)[0]
    torch.cuda.synchronize()

    assert torch.equal(actual, expected)


def test_a_forward_that_draws_while_another_thread_replays_draws():
    x = torch.randn(50_000, requires_grad=True)
    with ebb.region():
        for _ in range(50):
            h = torch.native_dropout(x * 1.5, 0.5, True)[0].sin()
            total = torch.native_dropout(h, 0.5, True)[0].exp().sum()
            backward = threading.Thread(target=lambda total=total: torch.autograd.grad(total, x))
            backward.start()
            for _ in range(5):
                torch.native_dropout(x.detach(), 0.3, True)
            backward.join(HANGS)
            assert not backward.is_alive(), "deadlock"


def is_refused(draw):
    """Whether the backward of one step is refused, because another thread drew meanwhile.

    Eager's masks then differ from run to run; a replay's must be those of its own forward.
    """
    x = torch.ones(512, requires_grad=True)
    with ebb.region(name="block"):
        if draw == "bernoulli":
            factor = torch.bernoulli(torch.full_like(x.detach(), 0.5))
        else:
            factor = torch.randn_like(x)
        out = (x * factor).exp()
        seen = factor.clone()
        total = out.sum()
        del factor, out
    try:
        assert torch.equal(torch.autograd.grad(total, x)[0], seen * seen.exp())
    except RuntimeError as error:
        assert "aten::randn_like.default in region 'block': its replay draws" in str(error)  # noqa: PT017
        return True
    return False


@pytest.mark.parametrize(("draw", "pause"), [("bernoulli", 0), ("randn_like", 50e-6)])
def test_a_thread_outside_of_regions_that_draws_meanwhile(draw, pause):
    """How many randn_like are refused depends on who gets the processor when."""
    waits = threading.Event()
    with another_thread_draws(lambda: not waits.wait(pause)):
        refused = sum(is_refused(draw) for _ in range(1000))
    assert refused == 0 or draw == "randn_like"


def test_a_draw_of_another_thread_refuses_one_step_at_most():
    may_draw = threading.Semaphore(0)
    with another_thread_draws(may_draw.acquire) as draws:
        refused = 0
        try:
            for step in range(500):
                if step % 5 == 0:
                    may_draw.release()
                refused += is_refused("randn_like")
        finally:
            may_draw.release()
    assert refused <= len(draws) <= 101
