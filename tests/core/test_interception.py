"""Which ops reach ebb: composite ones, libraries that come late, Python ops, compiled functions."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests import fork_server
from ebb_tests.exactness import assert_exact, assert_like_eager, exact, leaves, like_eager, replayed
from ebb_tests.time_limits import HANGS


def assert_prints(source: str, expected: str) -> None:
    """Runs the script in another process. Its output must contain the text."""
    done = fork_server.run(["-c", source], timeout=HANGS)
    assert expected in done.stdout, done.stderr


def test_composite_explicit_ops_are_recorded():
    x = torch.randn(3, 4, requires_grad=True)
    w = torch.randn(2, 1, 3, requires_grad=True)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::convolution", "CompositeExplicitAutograd"
    )

    with ebb.region():
        loss = torch.nn.functional.conv1d(x[:, None], w).exp().sum()
    loss.backward()

    assert replayed() == 2  # convolution, exp


@pytest.mark.parametrize("policy", [ebb.policies.recompute_all, ebb.policies.save_all])
def test_operators_that_decompose_but_have_a_kernel_too_run_that_kernel(policy):
    grad, x = torch.linspace(1, 2, 64).double(), torch.linspace(-4, 4, 64).double()

    def run(region):
        with region:
            leaf = x.clone().requires_grad_()
            mish = torch.autograd.grad(torch.nn.functional.mish(leaf).sum(), leaf)[0]
            silu = torch.ops.aten.silu_backward(grad, x)
            return mish, silu, torch.ops.aten.mish_backward(grad, x)

    assert_like_eager(run, policy)


def test_kernels_are_not_recorded_inside_kernels():
    x = torch.randn(3, 4, requires_grad=True)
    with ebb.region():
        torch.nn.functional.layer_norm(x, (4,))
        x @ x.t()

    assert ebb.stats()["total"]["ops_recorded"] == 2


def test_library_registered_after_the_first_region():
    with ebb.region():
        pass
    library = torch.library.Library("ebb_late", "DEF")
    library.define("triple(Tensor x) -> Tensor")
    library.impl("triple", lambda x: x * 3, "CompositeExplicitAutograd")
    op = torch.ops.ebb_late.triple
    torch.library.register_autograd("ebb_late::triple", lambda ctx, grad: op(grad), lib=library)

    ebb.reset_stats()
    assert_exact(lambda x: op(x).exp() * op(x * 2), leaves((3,)))
    x = leaves((3,))[0]
    ebb.reset_stats()
    with ebb.region(ebb.Policy({"ebb_late::triple": ebb.RECOMPUTE})):
        op(x)

    assert ebb.stats()["total"]["ops_recorded"] == 1


def test_result_of_a_python_kernel_is_recomputed():
    @torch.library.custom_op("ebb_test::quadruple", mutates_args=())
    def quadruple(x: torch.Tensor) -> torch.Tensor:
        return x * 4

    x = torch.randn(3, requires_grad=True)
    with ebb.region(ebb.Policy({"ebb_test::*": ebb.RECOMPUTE})):
        loss = (quadruple(x.detach()) * x).sum()
    loss.backward()

    assert replayed() == 1
    assert ebb.stats()["total"]["bytes_saved"] == 0


def test_operators_from_elsewhere_are_kept_unless_a_rule_matches_them():
    calls = []

    @torch.library.custom_op("ebb_test::stateful", mutates_args=())
    def stateful(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * len(calls)

    x = torch.randn(3, requires_grad=True)
    with ebb.region():
        loss = (stateful(x.detach()) * x).sum() + (stateful(x.detach()) * x).sum()
    loss.backward()

    assert len(calls) == 2
    assert torch.equal(x.grad, x.detach() + x.detach() * 2)


@torch.library.custom_op("ebb_test::moody", mutates_args=())
def moody(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if torch.is_grad_enabled() else 3)


moody.register_autograd(lambda ctx, grad: grad * 2)


@like_eager(ebb.Policy({"ebb_test::*": ebb.RECOMPUTE}))
def test_custom_op_that_reads_grad_mode_and_requires_grad(region):
    x = leaves((3,))[0]
    with region:
        loss = (moody(x) * x).sum()
    return torch.autograd.grad(loss, x)


def test_keyword_only_written_argument_that_is_no_out():
    library = torch.library.Library("ebb_kw", "DEF")
    library.define("accumulate(Tensor x, *, Tensor(a!) acc) -> ()")

    def accumulate(x, *, acc):
        acc.add_(x)

    library.impl("accumulate", accumulate, "CPU")

    def program(region):
        x = leaves((4,))[0]
        with region:
            acc = x.detach() * 2
            torch.ops.ebb_kw.accumulate(x.detach(), acc=acc)
            loss = (x * acc).sin().sum()
            del acc
        return torch.autograd.grad(loss, x)

    recomputed = ebb.Policy({"ebb_kw::*": ebb.RECOMPUTE})
    assert_like_eager(program, ebb.policies.recompute_all, recomputed)


def test_operator_unregistered_before_backward_is_refused_by_name():
    library = torch.library.Library("ebb_gone", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    x = torch.randn(3, requires_grad=True)
    with ebb.region(ebb.Policy({"ebb_gone::*": ebb.RECOMPUTE}), name="block"):
        loss = torch.ops.ebb_gone.double(x.detach()).exp().mul(x).sum()
    library._destroy()

    with pytest.raises(
        RuntimeError, match=r"ebb_gone::double.default in region 'block'.*unregistered"
    ):
        loss.backward()


@torch.library.custom_op("ebb_test::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, by: float) -> None:
    x.numpy()[...] *= by


@exact((4,))
def test_custom_op_that_writes(x):
    h = (x * 2).detach()
    scale_(h, 3.0)
    scale_(h[1:], 2.0)
    return (x * h).exp()


def test_custom_op_that_returns_memory_it_keeps():
    cache = torch.zeros(4, dtype=torch.float64)

    @torch.library.custom_op("ebb_test::cached", mutates_args=())
    def cached(x: torch.Tensor) -> torch.Tensor:
        cache.copy_(x)
        return cache

    x = leaves((4,))[0]
    with ebb.region(name="block"):
        once = (x + cached(x.detach() * 2)).exp().sum()
    assert torch.equal(
        torch.autograd.grad(once, x, retain_graph=True)[0], (x + x.detach() * 2).exp()
    )

    with ebb.region(name="block"):
        twice = (x + cached(x.detach() * 2)).exp() * (x + cached(x.detach() * 3)).exp()
    with pytest.raises(RuntimeError, match=r"recompute aten::add.Tensor in region 'block'"):
        twice.sum().backward()


@pytest.mark.slow
def test_compiled_function_inside_a_region():
    source = """
import torch, ebb
torch.manual_seed(0)
f = torch.compile(lambda x: (x * 2).exp().sin(), backend="aot_eager")
def g(h):
    h.mul_(3)
    return None
g = torch.compile(g, backend="aot_eager")
x = torch.randn(4, requires_grad=True)
def program():
    h = f(x + 1) * 2
    k = (x + 2).detach()
    g(k)
    return (h.exp() * k * x).sum()
expected = torch.autograd.grad(program(), x)[0]
for policy in (ebb.policies.recompute_all, ebb.policies.save_all):
    with ebb.region(policy):
        loss = program()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
print("exact")
"""
    assert_prints(source, "exact")


@pytest.mark.slow
def test_region_and_checkpoint_under_compile():
    source = """
import torch, ebb
torch.manual_seed(0)
w = torch.randn(4, 4, requires_grad=True)
def program(x):
    with ebb.region(ebb.policies.save_matmuls):
        h = (x @ w).exp()
    return ebb.checkpoint(lambda h: (h @ w).sin().exp(), h, policy=ebb.policies.save_matmuls)
x = torch.randn(3, 4)
expected = torch.autograd.grad(program(x).sum(), w)[0]
compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
ebb.reset_stats()
actual = torch.autograd.grad(compiled(x).sum(), w)[0]
assert torch.allclose(actual, expected)
assert ebb.stats()["total"]["entered"] == 0
print("no-op")
"""
    assert_prints(source, "no-op")


@pytest.mark.slow
def test_compiled_autograd_unpacks_handles():
    source = """
import torch, ebb
x = torch.randn(4, 4, requires_grad=True)
def loss():
    return torch.tanh(x @ x).exp().sin().sum()
expected = torch.autograd.grad(loss(), x)[0]
with ebb.region():
    ours = loss()
with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
    ours.backward()
assert torch.equal(x.grad, expected)
print("exact")
"""
    assert_prints(source, "exact")


def test_another_owner_of_the_key_is_a_clear_error():
    source = """
import torch
library = torch.library.Library("_", "IMPL", "CustomRNGKeyId")
library.fallback(torch.library.fallthrough_kernel, "CustomRNGKeyId")
import ebb
try:
    ebb.region().__enter__()
except RuntimeError as error:
    print(error)
"""
    assert_prints(source, "another library in this process owns it")


def test_kernels_are_registered_when_ebb_is_imported():
    """At the first region, other threads may be running operators whose kernels change."""
    source = """
import torch, ebb
def kernels():
    keys = "CustomRNGKeyId", "ADInplaceOrView", "SparseCPU"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [has(name, key) for name in torch._C._dispatch_get_all_op_names() for key in keys]
x = torch.ones(2)
before = kernels()
with ebb.region():
    x.sin()
print(before == kernels())
"""
    assert_prints(source, "True")


def test_forked_child_trains():
    source = """
import os, torch, ebb
x = torch.randn(4, requires_grad=True)
def step():
    with ebb.region():
        loss = (x * 2).exp().sin().sum()
    loss.backward()
step()
child = os.fork()
if child == 0:
    step()
    os._exit(7)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    assert_prints(source, "7")
