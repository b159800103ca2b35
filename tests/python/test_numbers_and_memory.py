"""What recording itself keeps: Python numbers, long regions, objects that outlive their region."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from exactness import assert_exact
from torch.profiler import ProfilerActivity, profile

import ebb


def alive() -> tuple[int, int]:
    """Recipes and handles that exist, those of garbage that earlier tests left not counted."""
    gc.collect()
    return ebb.stats()["live_recipes"], ebb.stats()["live_handles"]


NUMBERS = [3, -7, 2**40, True, False, 0.1, float("inf"), -0.0, 1e-300, 1.5 - 2.5j]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64])
def test_an_op_with_a_number_is_recomputed_with_that_number(
    number: complex, dtype: torch.dtype
) -> None:
    # Integers do not need grad: the number then decides the dtype of the product.
    grad = dtype.is_floating_point or dtype.is_complex
    x = (torch.arange(6.0).reshape(2, 3) + 1).to(dtype).requires_grad_(grad)
    w = torch.full((2, 3), 0.5, requires_grad=True)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * number + number) * w
        return y.abs().sin().sum()

    assert_exact(step, [x, w])


def test_numbers_hold_no_memory_until_backward() -> None:
    """`x + 1e-6` reaches the recorder as an op on two tensors; the second must not be kept."""
    x = torch.randn(4, 8, requires_grad=True)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler, ebb.region():
        y = x
        for _ in range(50):
            y = (y + 1e-6).tanh()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    assert held == y.numel() * y.element_size()
    y.sum().backward()


def test_a_region_of_many_ops_between_short_ones() -> None:
    """The table of values and the arena grow for it and serve short regions again."""
    x = torch.randn(3, requires_grad=True)
    before = alive()
    for ops in (2, 5000, 3, 700, 1):

        def step(x: torch.Tensor, ops: int = ops) -> torch.Tensor:
            y = x
            for i in range(ops):
                y = y.sin() if i % 3 else y * 1.01
            return y.sum()

        assert_exact(step, [x])
    assert alive() == before


def test_handles_that_outlive_their_thread() -> None:
    """Recipes, values and handles are freed on another thread than the one that made them."""
    x = torch.randn(4, 4, requires_grad=True)
    losses: list[torch.Tensor] = []
    before = alive()

    def forward() -> None:
        with ebb.region():
            y = x
            for _ in range(40):
                y = (y @ y).tanh()
        losses.append(y.sum())

    for _ in range(20):
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    assert alive()[0] > before[0]
    with torch.autograd.set_multithreading_enabled(False):
        for loss in losses[::2]:
            loss.backward()
    losses.clear()
    del loss
    assert alive() == before


def test_one_survivor_keeps_no_recipes() -> None:
    """A handle that lives on keeps its own value, not what was recorded around it."""
    x = torch.randn(8, requires_grad=True)
    recipes, handles = alive()
    with ebb.region():
        kept = x.exp()
        y = x
        for _ in range(100):
            y = y.sin()
    del y
    assert alive() == (recipes + 1, handles + 1)  # what makes `kept` again
    kept.sum().backward()
    del kept
    assert alive() == (recipes, handles)
