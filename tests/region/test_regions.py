"""Entering and leaving regions, and everything that can go wrong."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

import ebb
from ebb import _C
from ebb_tests.exactness import exact
from ebb_tests.other_threads import in_thread
from ebb_tests.time_limits import HANGS

pytestmark = pytest.mark.engines("device")


def works() -> bool:
    """A region works now: something is recomputed, and the gradient is right."""
    x = torch.randn(4, requires_grad=True)
    ebb.reset_stats()
    with ebb.region():
        loss = (x * 2).exp().sin().sum()
    loss.backward()
    ours, x.grad = x.grad, None
    (x * 2).exp().sin().sum().backward()
    total = ebb.stats()["total"]
    return torch.equal(ours, x.grad) and total["ops_replayed"] > 0 and not _C.in_region()


def test_outside_a_region_nothing_is_seen():
    assert works()
    ebb.reset_stats()

    torch.randn(3).exp()

    assert ebb.stats()["total"]["ops_seen"] == 0
    assert not torch._C._dispatch_tls_is_dispatch_key_included("CustomRNGKeyId")


def test_an_exception_closes_the_region():
    with pytest.raises(ZeroDivisionError), ebb.region(), ebb.region():
        raise ZeroDivisionError(torch.ones(3) * 2)

    assert works()


def test_an_op_that_raises_leaves_no_trace():
    x = torch.randn(3, 4, requires_grad=True)
    with ebb.region():
        h = x * 2
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            h @ h
        with pytest.raises(RuntimeError):
            h.detach().add_(torch.ones(7))
        loss = h.exp().sum()
    loss.backward()

    assert torch.equal(x.grad, 2 * (x * 2).exp())
    assert works()


def test_entered_twice_by_hand():
    region = ebb.region()
    region.__enter__()
    with pytest.raises(RuntimeError, match="is already open"):
        region.__enter__()
    region.__exit__(None, None, None)

    assert works()


def test_used_again_after_leaving_and_left_twice():
    region = ebb.region()
    for _ in range(2):
        with region:
            torch.ones(3) * 2
    with pytest.raises(RuntimeError, match="had not been entered"):
        region.__exit__(None, None, None)

    assert works()


def test_left_in_the_wrong_order():
    outer, inner = ebb.region(name="outer"), ebb.region(name="inner")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match=r"reverse order.*'inner' was still open"):
        outer.__exit__(None, None, None)
    assert not _C.in_region()
    with pytest.raises(
        RuntimeError, match=r"was left on another thread .*, or after a region around it"
    ):
        inner.__exit__(None, None, None)

    assert works()


def test_left_in_another_thread():
    region = ebb.region()
    region.__enter__()

    def leave():
        with pytest.raises(RuntimeError) as raised:
            region.__exit__(None, None, None)
        return str(raised.value)

    assert "was left on another thread than the one that entered it" in in_thread(leave)
    assert works()


def test_threads_do_not_see_each_others_regions():
    with ebb.region():
        assert not in_thread(_C.in_region)
        assert _C.in_region()


def test_a_thread_that_ends_inside_a_region_cleans_up():
    def run():
        ebb.region().__enter__()
        torch.ones(3) * 2

    in_thread(run)
    deadline = time.monotonic() + HANGS  # join returns before the thread's own clean-up has run
    while ebb.stats()["open_regions"] and time.monotonic() < deadline:
        time.sleep(0.01)

    assert ebb.stats()["open_regions"] == 0
    assert works()


def test_decorator_names_the_region_after_the_function():
    @ebb.region(ebb.policies.save_matmuls)
    def block(x):
        """Doubles."""
        return x * 2

    x = torch.ones(3, requires_grad=True)
    assert torch.equal(block(x), x * 2)

    assert block.__doc__ == "Doubles."
    assert any(name.endswith("block") for name in ebb.stats()["regions"])


def test_decorated_function_may_recurse():
    @ebb.region()
    def power(x, n):
        return x if n == 0 else power(x * 2, n - 1)

    x = torch.ones(3, requires_grad=True)
    power(x, 5).sum().backward()

    assert torch.equal(x.grad, torch.full((3,), 32.0))


def test_empty_name_is_the_default_name():
    with ebb.region(name=""):
        torch.ones(2).exp()
    assert list(ebb.stats()["regions"]) == ["region"]


def test_no_grad_and_inference_mode_inside():
    x = torch.randn(3, requires_grad=True)
    with ebb.region():
        with torch.inference_mode():
            torch.ones(3).mul_(2).exp()
        with torch.no_grad():
            scale = x.exp().mul_(2)
        loss = (x * scale).exp().sum()
    loss.backward()
    ours, x.grad = x.grad, None
    (x * (2 * x.detach().exp())).exp().sum().backward()

    assert torch.equal(ours, x.grad)


def test_functorch_transforms_over_a_region():
    def f(x):
        with ebb.region():
            return (x * 2).exp().sin().sum()

    def plain(x):
        return (x * 2).exp().sin().sum()

    x = torch.randn(3, 4)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert torch.equal(torch.func.grad(f)(x), torch.func.grad(plain)(x))
        assert torch.equal(torch.vmap(torch.func.grad(f))(x), torch.vmap(torch.func.grad(plain))(x))
        assert all(map(torch.equal, *(torch.func.jvp(g, (x,), (x,)) for g in (f, plain))))

    assert works()


@exact((3,))
def test_functorch_transforms_inside_a_region(x):
    inner = torch.func.grad(lambda y: (y * y).exp().sum())(x * 2)
    return (inner * x).sin()


def test_warns_once_where_hooks_are_disabled():
    ebb.region._warn_hooks_disabled.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.func.grad(ebb.region()(lambda x: x.exp().sum()))(torch.ones(3))

    assert len([w for w in caught if "ebb" in str(w.message)]) == 1


def test_meta_tensors_pass_through():
    with ebb.region():
        h = torch.randn(3, 4, device="meta", requires_grad=True)
        assert (h @ h.t()).exp().shape == (3, 3)

    assert works()


def test_data_parallel_worker_threads_are_not_in_the_region():
    x = torch.randn(4, requires_grad=True)
    with ebb.region():
        loss = (in_thread(lambda: (x * 2).exp()) * x).sum()
    loss.backward()
    ours, x.grad = x.grad, None
    ((x * 2).exp() * x).sum().backward()

    assert torch.equal(ours, x.grad)
