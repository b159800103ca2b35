"""Rule 7: a replayed draw is the same draw, and the outer state goes on as in eager."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests import fake_cuda
from ebb_tests.exactness import assert_exact, assert_like_eager, exact, leaves, like_eager, policies
from ebb_tests.gpus import DRAWS_NUMBERS
from ebb_tests.other_threads import run_in_threads

pytestmark = pytest.mark.engines("exactness", "device", "checked")


@exact((6, 6))
def test_dropout_before_and_after_other_random_ops(x):
    h = F.dropout(x * 2, 0.5)
    noise = torch.randn_like(h)
    h = F.dropout(h * noise, 0.3) + torch.rand(h.shape, dtype=h.dtype)
    return F.alpha_dropout(h, 0.2, training=True).exp() * F.dropout1d(h, 0.5).sin()


@exact((6, 6))
def test_every_kind_of_random_op(x):
    p = torch.sigmoid(x)
    with torch.no_grad():
        draws = [
            torch.bernoulli(p),
            torch.normal(x, p),
            torch.poisson(p * 5),
            torch.multinomial(p, 6, replacement=True).to(x.dtype),
            torch.randperm(6).to(x.dtype),
            torch.randint(0, 9, (6,)).to(x.dtype),
            torch.randint_like(x, 5),
            torch.empty_like(x).uniform_(),
            torch._standard_gamma(p + 1),
            torch.binomial(torch.full_like(p, 9), p),
        ]
    return [(x * d).sin().sum() for d in draws]


@pytest.mark.on_cpu("its numbers are drawn from a generator of the CPU")
@like_eager()
def test_explicit_generators(region):
    generator = torch.Generator().manual_seed(5)
    x = leaves((50,))[0]
    with region:
        mask = torch.empty(50, dtype=x.dtype).bernoulli_(0.5, generator=generator)
        noise = torch.randn(50, generator=generator, dtype=x.dtype)
        loss = ((x * mask).exp() * (x + noise).sin()).sum()
    loss.backward()
    return x.grad, torch.rand(3, generator=generator)


def test_generator_moved_on_between_forward_and_backward():
    def moved(*_):
        torch.rand(100)

    assert_exact(lambda x: F.dropout(x * 2, 0.5).exp(), leaves((50,)), after=moved)


def test_unmarked_custom_op_that_draws():
    @torch.library.custom_op("ebb_test::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)

    noisy.register_autograd(lambda ctx, gradient: gradient)

    def program(x):
        return noisy(x * 2).exp() * noisy(x).sin()

    redrawn = ebb.Policy({"ebb_test::noisy": ebb.RECOMPUTE})
    assert_exact(program, leaves((5,)), {**policies(), "redrawn": redrawn})


@exact((3,))
def test_normal_numbers_that_are_drawn_two_at_a_time(x):
    """The generator keeps the second one."""

    def normal():
        return torch.empty_like(x.detach()).normal_()

    return (x * normal()).exp() * normal()


def test_threads_that_draw_at_once_keep_their_masks():
    failures = []

    def train(seed):
        x = torch.ones(200, 50, requires_grad=True)
        for _ in range(30):
            x.grad = None
            with ebb.region():
                h = F.dropout(x * 1.0, 0.5)
                loss = (h * h).sum()
                mask = h.detach().clone()
            loss.backward()
            if not torch.equal(x.grad, 2 * mask * 2 * (mask > 0)):
                failures.append(seed)

    run_in_threads(*(partial(train, seed) for seed in range(4)))

    assert not failures


@pytest.mark.on_cpu("fused cells have kernels for the CPU and CUDA only")
def test_recurrent_network_with_dropout():
    lstm = nn.LSTM(4, 6, num_layers=2, dropout=0.5).double()

    def program(x):
        out, (h, c) = lstm(x)
        return out.exp(), h.sin(), c

    assert_exact(program, leaves((5, 2, 4)))


@pytest.mark.on_cpu("the test device's kernels raise when they run")
def test_an_operator_that_raises_after_it_has_drawn():
    """The generator is as far on as in eager."""

    def state(region):
        x = torch.randn(2, 3, 4)
        with region, pytest.raises(RuntimeError, match="more than one element"):
            nn.functional.rrelu(x.mul(1)[:1].expand(2, 3, 4), training=True, inplace=True)
        return torch.get_rng_state()

    assert_like_eager(state)
    torch.manual_seed(1)
    drawn = state(contextlib.nullcontext())
    torch.manual_seed(1)
    torch.randn(2, 3, 4)
    assert not torch.equal(drawn, torch.get_rng_state())  # it did draw


# What CUDA's generator does, by one that stands in for it: `_testing.replay_draw` draws, moves the
# generator on, and replays the draw.


@pytest.mark.parametrize("device", ["cuda:0", "privateuseone:0"])
def test_a_replay_leaves_a_devices_generator_as_it_was(device):
    """CUDA's gets a state on loan. Setting it makes cuDNN's recurrent layers begin their masks
    anew, unlike in eager."""
    draw = _testing.replay_draw(device)

    assert draw["replayed"] == draw["forward"]
    assert draw["after"] == draw["before"]
    assert device != "cuda:0" or draw["begun_anew"] == 0


@pytest.mark.parametrize("device", ["cuda:0", "privateuseone:0"])
def test_a_kernels_error_is_raised_though_the_generator_cannot_be_put_back(device):
    """After an assertion of the device all that is asked of it raises; the process lives."""
    with pytest.raises(RuntimeError, match="the kernel failed"):
        _testing.replay_draw(device, kernel_raises=True, setting_fails=True)


def test_a_generator_that_cannot_be_put_back_raises():
    with pytest.raises(RuntimeError, match="the device is lost"):
        _testing.replay_draw("privateuseone:0", setting_fails=True)


CAPTURES = """
def attempt(before, between, **what):
    cuda.fake_cuda_capture(before, 0)
    then = lambda: cuda.fake_cuda_capture(between, 0)
    try:
        draw = testing.replay_draw("cuda:0", between=then, **what)
        print("as drawn", draw["replayed"] == draw["forward"] and draw["after"] == draw["before"])
        print("set", draw["begun_anew"])
    except RuntimeError as refused:
        print(str(refused).splitlines()[0])

attempt(0, 0)
attempt(7, 7)
attempt(0, 0, takes_generator=True)
attempt(7, 7, takes_generator=True)
attempt(0, 7)
attempt(7, 0)
attempt(7, 8)
"""


@pytest.mark.sweep
@pytest.mark.once
@pytest.mark.skipif(not late.TELLS_OF_CAPTURES, reason="torch tells of no captures but CUDA's")
def test_in_a_capture_the_generator_is_set_and_other_captures_are_refused(tmp_path):
    printed = fake_cuda.run(fake_cuda.build(tmp_path), CAPTURES)

    outside, inside = ["as drawn True", "set 0"], ["as drawn True", "set 2"]
    assert printed == [*outside, *inside, *outside, *inside, *["drawn in another capture"] * 3]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.needs_cuda
@needs_cuda
@DRAWS_NUMBERS
@like_eager(ebb.policies.recompute_all)
def test_replays_on_a_gpu_leave_the_masks_of_recurrent_layers_as_in_eager(region):
    lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.5).cuda()
    x = torch.randn(5, 4, 8, device="cuda", requires_grad=True)
    found = []
    for _ in range(3):
        with region:
            y = F.dropout(lstm(x)[0].exp(), 0.5).sin()
        torch.autograd.grad(y.sum(), x)
        found.append(y.detach())
    return found


DRAWS_ON_A_GPU = {
    "native_dropout": lambda h: F.dropout(h, 0.5),
    "bernoulli": lambda h: h * torch.empty_like(h).bernoulli_(0.5),  # takes a Generator
    "rrelu": lambda h: F.rrelu(h, training=True),
}


@pytest.mark.needs_cuda
@needs_cuda
@DRAWS_NUMBERS
@pytest.mark.parametrize("draws", DRAWS_ON_A_GPU)
def test_a_captured_step_draws_what_its_forward_drew(draws):
    x = torch.randn(1000, device="cuda", requires_grad=True)

    def captured(region):
        def step():
            with region():
                y = DRAWS_ON_A_GPU[draws](x.exp()).sin().exp()
            return torch.autograd.grad(y.sum(), x)[0]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gradient = step()
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            graph.replay()
            found.append(gradient.clone())
        return found

    expected = captured(contextlib.nullcontext)
    found = captured(ebb.region)

    assert not torch.equal(expected[0], expected[1])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
