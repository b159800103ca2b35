"""Operators that draw, on a device that has kernels of its own for them, or the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import needs_captures

EVERYTHING = ebb.policies.recompute_all
OPERATORS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "no dropout": lambda x: torch.native_dropout(x, 0.3, False)[0],
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint_like": lambda x: x * torch.randint_like(x, 5),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "normal_": lambda x: x * torch.empty_like(x).normal_(),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "multinomial": lambda x: x[:, torch.multinomial(x.detach().abs()[0], 5)],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu, not in training": lambda x: F.rrelu(x, training=False),
}
DEVICES = [(whose, True) for whose in late.DRAWS] + [("from cpu", False)]


def run(operator, region, device):
    """The loss, the gradient, and what both generators give next."""
    torch.manual_seed(1)
    x = torch.randn(4, 16).to(device).requires_grad_()
    with region:
        loss = operator(x).sin().exp().sum()
    gradient = torch.autograd.grad(loss, x)[0]
    return [loss.detach().cpu(), gradient.cpu(), torch.rand(3), torch.ops.late.random_state()]


def assert_exact(operator, device, policy=EVERYTHING):
    torch.ops.late.hidden_seed(7)
    expected = run(operator, torch.enable_grad(), device)
    torch.ops.late.hidden_seed(7)
    found = run(operator, ebb.region(policy), device)
    for ours, eager in zip(found, expected, strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize(
    "device_draws", DEVICES, ids=lambda d: d[0] + (", no generator" * (not d[1]))
)
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_gradients_and_generators_are_as_in_eager(operator, device_draws, device):
    whose, has_generator = device_draws
    with late.drawing(whose, generator=has_generator):
        assert_exact(operator, device)


@pytest.mark.parametrize("whose", ["from device", "from cpu"])
def test_numbers_from_a_known_generator_are_recomputed(whose, device):
    ebb.reset_stats()
    with late.drawing(whose):
        run(OPERATORS["rand_like"], ebb.region(EVERYTHING), device)

    assert ebb.stats()["total"]["ops_replayed"] > 0
    assert ebb.stats()["total"]["bytes_saved"] == 0


@pytest.mark.parametrize("whose", ["from both", "from hidden"])
def test_numbers_from_an_unknown_generator_are_saved(whose, device):
    ebb.reset_stats()
    with late.drawing(whose), ebb.record_reports():
        run(OPERATORS["rand_like"], ebb.region(EVERYTHING), device)

        assert "from a generator that ebb cannot identify" in str(ebb.report())


@pytest.mark.parametrize("whose", ["from device", "from cpu"])
def test_explicit_generator(whose, device):
    def operator(x):
        of = device if whose == "from device" else "cpu"
        generator = torch.Generator(device=of).manual_seed(3)
        return x * torch.empty_like(x).bernoulli_(0.5, generator=generator)

    with late.drawing(whose):
        assert_exact(operator, device)


@torch.library.custom_op("ebb_test::scaled_noise", mutates_args=())
def scaled_noise(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x) * scale.item()


@torch.library.custom_op("ebb_test::noise_on", mutates_args=())
def noise_on(count: int, device: torch.device) -> torch.Tensor:
    return torch.rand(count, device=device)


FROM_ELSEWHERE = ebb.Policy({"ebb_test::*": ebb.RECOMPUTE})


@torch.library.custom_op(
    "ebb_test::noise_there", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise_there(count: int) -> torch.Tensor:
    return torch.rand(count, device="late")


def noise_on_device(name):
    return lambda x: x * noise_on(16, torch.device(name)).to(x.device)


CUSTOM = {
    "first_tensor_on_the_cpu": lambda x: x * scaled_noise(torch.tensor(3.0), x.detach()),
    "device_argument": noise_on_device("late:0"),
    "device_argument_without_an_index": noise_on_device("late"),
    "cpu_argument": noise_on_device("cpu"),
    "tag_only": lambda x: x * noise_there(16),
}


@pytest.mark.parametrize("operator", CUSTOM.values(), ids=CUSTOM)
def test_custom_operators_draw_as_in_eager(operator, device):
    assert_exact(operator, device, FROM_ELSEWHERE)


@torch.library.custom_op("ebb_test::times_a_number", mutates_args=())
def times_a_number(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(()).item()


@needs_captures
def test_captured_replay_uses_the_cpu_numbers_of_the_forward(device):
    stream = torch.Stream(device=device)
    x = torch.randn(4, 16).to(device).requires_grad_()

    def step(region):
        with region:
            loss = (x * times_a_number(x.detach())).sin().exp().sum()
        return torch.autograd.grad(loss, x)[0]

    def captured(region):
        with stream:
            step(region)
        torch.manual_seed(1)
        with late.Graph().capture(stream) as graph:
            gradient = step(region)
        graph.replay_and_wait()
        return gradient.cpu()

    expected = captured(torch.enable_grad())
    assert torch.equal(captured(ebb.region(FROM_ELSEWHERE)), expected)
