"""Programs that test_random_programs.py found, shrunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ebb
from ebb_tests.engines import current
from ebb_tests.exactness import exact, leaves, like_eager_each
from ebb_tests.programs.custom_functions import GivesWhatItSaved

pytestmark = pytest.mark.engines("device")


@pytest.mark.parametrize("function", [F.mish, F.silu])
@exact((4, 8), dtype=torch.float32)
def test_operator_with_a_kernel_and_a_decomposition(x, function):
    """In a region its kernel runs, as in eager: the decomposition rounds otherwise."""
    out = function(x)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return grad * x


@like_eager_each
def test_gradient_that_is_a_saved_tensor_is_not_taken_by_the_engine(region):
    """AccumulateGrad may keep a gradient that nobody else holds, and then adds to it in place."""
    x = leaves((4,))[0]
    with region:
        loss = GivesWhatItSaved.apply(x).sum()
    sums = []
    for _ in range(3):
        loss.backward(retain_graph=True)
        sums.append(x.grad.clone())
    return sums


@exact((4,), dtype=torch.float32)
def test_silent_write_after_a_resize_that_changes_nothing(x):
    """rand with a generator and `out=` resizes first; the saved tensor follows it all the same."""
    h = x.softmax(0)  # saves its result
    with torch.no_grad():
        torch.rand(4, generator=torch.Generator(current().device).manual_seed(3), out=h.data)
    return h * 1


@pytest.mark.parametrize(
    "alias", [lambda h: h.data, lambda h: torch.unsafe_chunk(h, 1)[0]], ids=["data", "unsafe_chunk"]
)
@exact((4,))
def test_saved_through_an_alias_with_a_version_counter_of_its_own_then_written(x, alias):
    """Eager's saved tensor shares the storage and does not notice; so must ebb's."""
    h = x.detach() * 2
    out = x * alias(h)
    h.mul_(10)
    return out


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@exact((4,))
def test_out_that_the_kernel_shrinks_keeps_the_rest_of_the_storage(x):
    h = (x * 2).detach()
    tail = h[2:]
    torch.add(x.detach()[:1], 1, out=h)
    return x[2:] * tail.sin()


@pytest.mark.on_cpu("leaves have fingerprints there only")
@pytest.mark.parametrize("then", ["the region ends", "another write"])
def test_leaf_written_behind_torch_before_it_is_copied_is_refused(then):
    x, buffer = leaves((4,))[0], torch.ones(4, dtype=torch.float64)
    with ebb.region(name="block"):
        buffer.add_(1)
        loss = (x * (buffer * 2).sin()).sum()
        buffer.numpy()[...] *= 3
        if then == "another write":
            buffer.add_(1)

    with pytest.raises(RuntimeError, match=r"region 'block'.*has changed since"):
        loss.backward()
