"""Operators that are not torch's own, and draw without saying so: rule 7."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.exactness import assert_exact, leaves

DRAWS = [torch.rand]  # what the kernel of `draws` does; each appends what it may


@torch.library.custom_op("ebb_test::draws", mutates_args=())
def draws(x: torch.Tensor, dropout_p: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    noise = DRAWS[-1](x.shape, dtype=x.dtype)
    return x * 2, noise


draws.register_autograd(lambda ctx, gradient, _: (gradient * 2, None))
REDRAWN = ebb.Policy({"ebb_test::draws": ebb.RECOMPUTE})


@pytest.fixture
def draw_otherwise():
    yield DRAWS.append
    del DRAWS[1:]


def with_noise(x):
    doubled, noise = draws(x * 1)
    return (doubled * noise).exp().sum()


def test_an_operator_from_elsewhere_that_draws_though_its_dropout_is_none():
    assert_exact(with_noise, leaves((5,)), {"redrawn": REDRAWN})


def test_other_draws_are_refused_though_the_first_result_is_the_same(draw_otherwise):
    x = leaves((5,))[0]
    with ebb.region(REDRAWN, name="block"):
        loss = with_noise(x)
    draw_otherwise(lambda *shape, **options: torch.rand(*shape, **options) + torch.rand(1))

    with pytest.raises(RuntimeError, match="'block': its replay draws other random numbers"):
        loss.backward()


def test_an_error_of_a_replay_leaves_the_generator_as_it_is(draw_otherwise):
    x = leaves((5,))[0]
    with ebb.region(REDRAWN):
        loss = with_noise(x)
    draw_otherwise(lambda *_, **__: torch.rand(3) / (1 // 0))
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        loss.backward()

    assert torch.equal(torch.get_rng_state(), before)


@torch.library.custom_op("ebb_test::noise", mutates_args=())
def noise(count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64)


@pytest.mark.parametrize("decision", [ebb.SAVE, ebb.RECOMPUTE])
def test_an_operator_from_elsewhere_without_tensors(decision):
    def program(x):
        return ((x * noise(5)).exp() * noise(5)).sum()

    policy = ebb.Policy({"ebb_test::noise": decision})
    assert_exact(program, leaves((5,)), {"noise": policy})
