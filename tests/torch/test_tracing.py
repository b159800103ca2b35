"""Whoever makes a graph of a region gets that of plain eager, right for other inputs too."""

from __future__ import annotations

import warnings

import pytest
import torch
from functorch.compile import nop
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import aot_export_module, aot_function, aot_module
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ebb
from ebb._launch import takeover
from ebb._region import tracing
from ebb_tests.exactness import same_bits
from ebb_tests.programs.paged import Seen

pytestmark = pytest.mark.filterwarnings("ignore")


def body(x, w):
    """Saves inputs, products, results, and what needs no grad."""
    h = (x @ w).sin()
    mask = (x.detach() * 2).sigmoid()
    return (h.exp() * x * mask).tanh().square().sum()


class Body(nn.Module):
    def forward(self, x, w):
        return body(x, w)


class Outer(nn.Module):
    def __init__(self, function=None):
        super().__init__()
        self.inner, self.function = Body(), function

    def forward(self, x, w):
        return self.inner(x, w) if self.function is None else self.function(x, w)


def with_block(policy):
    def function(x, w):
        with ebb.region(policy):
            return body(x, w)

    return function


def nested(policy):
    def function(x, w):
        with ebb.region(policy, escapes="placeholder") as region:
            loss = ebb.region(policy)(body)(x, w)
            region.returns(loss)
        return loss

    return function


def discarding(policy):
    def function(x, w):
        y = ebb.checkpoint(lambda a: (a @ w).sin(), x, policy=policy, discard_output=True)
        z = (y.exp() * x * (x.detach() * 2).sigmoid()).tanh().square().sum()
        ebb.experimental.discard(y, restore_at=z)
        return z

    return function


def applied(policy):
    model = Outer()
    ebb.apply(model, policy, "inner")
    return model


def taken_over(_policy):
    return lambda x, w: checkpoint(body, x, w, use_reentrant=False)


WAYS = {
    "with-block": with_block,
    "decorator": lambda policy: ebb.region(policy)(body),
    "nested": nested,
    "checkpoint": lambda policy: lambda x, w: ebb.checkpoint(body, x, w, policy=policy),
    "discard": discarding,
    "apply": applied,
    "EBB": taken_over,
    "EBB_MODULES": lambda policy: Outer(),
}


@pytest.fixture(params=[*WAYS, "with-block, save_all"])
def way(request):
    return request.param


@pytest.fixture
def region(way):
    """A function or module with the same gradients as `body`, whose middle is a region."""
    way, _, name = way.partition(", ")
    name = name or "recompute_all"
    policy = getattr(ebb.policies, name)
    torch._dynamo.reset()
    if way.startswith("EBB"):
        takeover.install(policy, name, ("inner",) if way == "EBB_MODULES" else ())
    yield WAYS[way](policy)
    takeover.remove()
    torch._dynamo.reset()


def inputs(seed):
    torch.manual_seed(seed)
    return tuple(torch.randn(4, 4, requires_grad=True) for _ in range(2))


def gradients(function, given=None):
    x, w = given or inputs(1)
    return torch.autograd.grad(function(x, w), (x, w))


def gradients_inside(function):
    """Of these a tracer sees the backward too."""

    def graph(x, w):
        return gradients(function, (x.detach().requires_grad_(), w.detach().requires_grad_()))

    return graph


def as_module(function):
    return function if isinstance(function, nn.Module) else Outer(function)


def exported(function, **options):
    return torch.export.export(as_module(function), inputs(0), **options).module()


def unfused(script):
    """Without formulas of TorchScript's own, whose bits are others."""

    def run(x, w):
        with torch.jit.optimized_execution(False):
            return script(x, w)

    return run


FORWARDS = {
    "make_fx": lambda f: make_fx(f)(*inputs(0)),
    "make_fx, fake": lambda f: make_fx(f, tracing_mode="fake")(*inputs(0)),
    "make_fx, symbolic": lambda f: make_fx(f, tracing_mode="symbolic")(*inputs(0)),
    "make_fx, pre_dispatch": lambda f: make_fx(f, pre_dispatch=True)(*inputs(0)),
    "jit.trace": lambda f: unfused(torch.jit.trace(f, inputs(0), check_trace=False)),
    "export": lambda f: exported(f, strict=False),
    "export, strict": lambda f: exported(f, strict=True),
    "aot_function": lambda f: aot_function(f, nop, nop),
    "aot_module": lambda f: aot_module(as_module(f), nop, nop),
    "symbolic_trace": lambda f: torch.fx.symbolic_trace(f),
    "functionalize": lambda f: torch.func.functionalize(f),
    "compile, eager": lambda f: torch.compile(f, backend="eager"),
    "compile, aot_eager": lambda f: torch.compile(f, backend="aot_eager"),
}


# Refused, by torch: global hooks, and checkpointing, in what it exports by Dynamo.
REFUSED = {("EBB", "export, strict"), ("EBB_MODULES", "export, strict")}
# By ebb.experimental.discard: a tensor that is none, and one that the region does not compute.
REFUSED |= {("discard", "symbolic_trace"), ("discard", "functionalize")}


@pytest.mark.parametrize("tracer", FORWARDS)
def test_a_traced_forward_has_the_gradients_of_eager_for_other_inputs(tracer, way, region):
    if (way, tracer) in REFUSED:
        with pytest.raises(
            Exception,
            match=r"must be a tensor|cannot be discarded|ModuleToTrace|_checkpoint_context_fn",
        ):
            gradients(FORWARDS[tracer](region))
        return
    traced = FORWARDS[tracer](region)
    gradients(traced, inputs(0))  # for those that trace now

    found = gradients(traced)

    assert all(map(same_bits, found, gradients(body)))


GRADIENTS = {
    "make_fx": lambda f: make_fx(gradients_inside(f))(*inputs(0)),
    "make_fx, fake": lambda f: make_fx(gradients_inside(f), tracing_mode="fake")(*inputs(0)),
    "make_fx, symbolic": lambda f: make_fx(gradients_inside(f), tracing_mode="symbolic")(
        *inputs(0)
    ),
    "make_fx of func.grad": lambda f: make_fx(torch.func.grad(f, argnums=(0, 1)))(*inputs(0)),
    "compile, aot_eager": lambda f: torch.compile(gradients_inside(f), backend="aot_eager"),
}


@pytest.mark.parametrize("tracer", GRADIENTS)
def test_a_traced_gradient_is_that_of_eager_for_other_inputs(tracer, region):
    traced = GRADIENTS[tracer](region)

    found = traced(*inputs(1))

    assert all(map(same_bits, found, gradients(body)))


def test_a_joint_graph_of_AOT_has_the_gradients_of_eager(region):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(inputs(0)[1].detach())

        def forward(self, x):
            return (region(x, self.w),)

    graph, _ = aot_export_module(Model(), [inputs(0)[0]], trace_joint=True, output_loss_index=0)
    x, w = inputs(1)

    found = graph(w, x)

    assert same_bits(found[1], gradients(body)[1])


@pytest.mark.parametrize("policy", ["recompute_all", "save_all"])
def test_jit_trace_of_a_gradient(policy):
    """torch refuses it where autograd saves a computed tensor that needs grad."""

    def plain(x, w):
        return (x * (w.detach() * 2).sin()).sum()

    def gradient(x, w):
        return torch.autograd.grad(ebb.region(getattr(ebb.policies, policy))(plain)(x, w), x)[0]

    traced = torch.jit.trace(gradient, inputs(0), check_trace=False)
    x, w = inputs(1)

    assert same_bits(traced(x, w), torch.autograd.grad(plain(x, w), x)[0])


@pytest.mark.parametrize("policy", ["recompute_all", "save_all"])
def test_jit_trace_of_a_gradient_that_is_started_inside_a_region_is_refused(policy):
    """It hides while autograd packs, so that a region knows nothing of it."""

    def gradient(x, w):
        return torch.autograd.grad((x * (w.detach() * 2).sin()).sum(), x)[0]

    inside = ebb.region(getattr(ebb.policies, policy))
    with inside, pytest.raises(RuntimeError, match="outside of regions"):
        torch.jit.trace(gradient, inputs(0), check_trace=False)


def test_jit_trace_of_a_forward_that_is_started_inside_a_region():
    with ebb.region():
        traced = torch.jit.trace(body, inputs(0), check_trace=False)

    assert all(map(same_bits, gradients(unfused(traced)), gradients(body)))


torch.fx.wrap("wrapped_region")


@ebb.region()
def wrapped_region(x, w):
    return body(x, w)


def test_a_region_that_fx_keeps_as_one_call_is_a_region_when_the_graph_runs():
    traced = torch.fx.symbolic_trace(lambda x, w: wrapped_region(x, w))

    found = gradients(traced)

    assert all(map(same_bits, found, gradients(body)))
    assert ebb.stats()["total"]["ops_replayed"] > 0


@pytest.mark.parametrize(
    "mode",
    [lambda: FlopCounterMode(display=False), Seen, lambda: torch.device("cpu")],
    ids=["counts flops", "sees operators", "a default device"],
)
def test_a_mode_of_the_users_is_no_tracer(mode, region):
    expected, given = gradients(body), inputs(1)

    with mode():
        region(*given).backward()

    assert all(same_bits(t.grad, g) for t, g in zip(given, expected, strict=True))
    assert ebb.stats()["total"]["entered"] > 0


def test_in_a_fake_mode_a_region_does_nothing(region):
    with FakeTensorMode() as mode:
        found = gradients(region, tuple(mode.from_tensor(t) for t in inputs(0)))

    assert [t.shape for t in found] == [(4, 4), (4, 4)]
    assert ebb.stats()["total"]["entered"] == 0


def test_a_region_is_a_region_again_after_the_trace(region):
    make_fx(gradients_inside(region))(*inputs(0))
    ebb.reset_stats()

    found = gradients(region)

    assert all(map(same_bits, found, gradients(body)))
    assert ebb.stats()["total"]["entered"] > 0


@pytest.mark.parametrize("policy", ["recompute_all", "save_all"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_tracer_that_is_started_inside_a_region(policy, mode):
    with ebb.region(getattr(ebb.policies, policy)):
        traced = make_fx(gradients_inside(body), tracing_mode=mode)(*inputs(0))

    assert all(map(same_bits, traced(*inputs(1)), gradients(body)))


def test_the_python_dispatcher_in_a_region():
    x, w = inputs(1)

    with enable_python_dispatcher(), ebb.region():
        loss = body(x, w)

    assert all(map(same_bits, torch.autograd.grad(loss, (x, w)), gradients(body)))


def test_a_trace_that_fails_leaves_no_region():
    def fails(x):
        with ebb.region():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_fx(fails)(torch.ones(1))

    assert ebb.stats()["open_regions"] == 0


def test_a_traced_region_keeps_the_rules_of_a_region():
    region = ebb.region()

    def enters_twice(x):
        with region, region:
            return x

    with pytest.raises(RuntimeError, match="is already open"):
        make_fx(enters_twice)(torch.ones(1))
    with pytest.raises(RuntimeError, match="had not been entered"):
        region.__exit__(None, None, None)


def test_a_tracer_is_told_of_once():
    tracing.region_is_traced.cache_clear()
    with pytest.warns(UserWarning, match="no effect under torch.export, make_fx"):
        make_fx(with_block(None))(*inputs(0))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ebb:")
        make_fx(with_block(None))(*inputs(0))
