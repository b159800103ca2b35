"""Programs that were written to break exactness: rare arguments, late registration, odd aliases."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ebb
from ebb_tests.engines import current
from ebb_tests.exactness import assert_like_eager, like_eager
from ebb_tests.memory_use import fill_unseen

pytestmark = pytest.mark.engines("device")

_NUMBERS = itertools.count()

# Changes `h`, which exp() of the second argument gave, in place.
Change = Callable[[torch.Tensor, torch.Tensor], object]


def _assert_same(change: Change) -> None:
    """The gradient of a factor of what `change` made of a tensor that a region computed."""

    def gradient(region):
        x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
        with region:
            h = x.exp()
            change(h, x)
            y = (h * w).sum()
            del h
        return torch.autograd.grad(y, w)

    assert_like_eager(gradient, ebb.policies.recompute_all)


@pytest.mark.parametrize("name", ["addmm", "addmv", "addbmm", "baddbmm"])
@like_eager(ebb.policies.recompute_all)
def test_a_product_whose_beta_is_the_bool_true_reads_what_it_adds_to(region, name):
    shapes = {
        "addmm": [(3, 3), (3, 3), (3, 3)],
        "addmv": [(3,), (3, 3), (3,)],
        "addbmm": [(3, 3), (2, 3, 3), (2, 3, 3)],
        "baddbmm": [(2, 3, 3), (2, 3, 3), (2, 3, 3)],
    }[name]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with region:
        y = getattr(torch, name)(*tensors, beta=True).sin().sum()
    return torch.autograd.grad(y, tensors)


@pytest.mark.parametrize("name", ["addmm_", "baddbmm_"])
def test_a_product_in_place_whose_beta_is_the_bool_true_reads_what_it_adds_to(name):
    def change(h, x):
        target = h if name == "addmm_" else h.view(1, 4, 4)
        factor = x if name == "addmm_" else x.view(1, 4, 4)
        getattr(target, name)(factor, factor, beta=True)

    _assert_same(change)


@like_eager(ebb.policies.recompute_all)
def test_an_out_of_std_is_a_write_where_tensors_have_no_versions(region):
    x, w = torch.randn(4, 4), torch.randn(4, requires_grad=True)
    with region:
        with torch.inference_mode():
            h = x.exp().sum(0)
            torch.std(x, 0, correction=1, out=h)
        y = (h.clone() * w).sum()
        del h
    return torch.autograd.grad(y, w)


def test_an_out_of_std_is_a_write_inside_a_dispatch_mode():
    class WritesElsewhere(TorchDispatchMode):
        def __init__(self, target):
            super().__init__()
            self.target = target

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.cos.default:
                torch.std(args[0], 0, correction=1, out=self.target[0])
            return func(*args, **(kwargs or {}))

    def change(h, x):
        with WritesElsewhere(h):
            x.cos()

    _assert_same(change)


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_announced_write_after_a_foreach_operator_is_noticed(mode, tensors):
    def change(h, _x):
        with mode():
            torch._foreach_mul_([h] * tensors, 2.0)
        fill_unseen(h, 3)
        torch.autograd.graph.increment_version(h)

    _assert_same(change)


def _write_raw(t: torch.Tensor) -> None:
    fill_unseen(t, 5)


# Dispatch keys of kernels. None: that of the device on which the test runs.
KEYS = pytest.mark.parametrize(
    "key", [None, "CompositeExplicitAutograd"], ids=["of the device", "of all"]
)


def _library() -> torch.library.Library:
    return torch.library.Library(f"ebb_adversary{next(_NUMBERS)}", "DEF")


@pytest.mark.parametrize("defined", ["before", "inside"])
@KEYS
def test_an_operator_that_gets_its_kernel_inside_the_region_writes_what_it_says(defined, key):
    def change(h, _x):
        library = _library() if defined == "inside" else libraries.pop()
        if defined == "inside":
            library.define("write_(Tensor(a!) x) -> ()")
        library.impl("write_", _write_raw, key or current().dispatch_key)
        torch.ones(1).neg()  # operators are looked for at each op that is seen
        getattr(torch.ops, library.ns).write_(h)

    libraries = [_library(), _library()]
    for library in libraries:
        library.define("write_(Tensor(a!) x) -> ()")
    _assert_same(change)


@KEYS
def test_an_operator_that_gets_its_kernel_after_a_region_has_seen_it_writes_what_it_says(key):
    library = _library()
    library.define("write_(Tensor(a!) x) -> ()")
    with ebb.region():
        pass
    library.impl("write_", _write_raw, key or current().dispatch_key)
    _assert_same(lambda h, _x: getattr(torch.ops, library.ns).write_(h))
