"""Tensors that a region can recompute and that somebody references when it ends."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import gelu
from torch.testing._internal.two_tensor import TwoTensor

import ebb
from ebb_tests.exactness import leaves, same_bits
from ebb_tests.other_threads import in_thread

pytestmark = pytest.mark.engines("device")


class Holder:
    """Something outside of the region, such as a module."""


@pytest.fixture
def x():
    return leaves((4, 3))[0]


@pytest.fixture
def holder():
    return Holder()


def bytes_of(tensor):
    return tensor.untyped_storage().nbytes()


def with_attribute(x, holder):
    holder.hidden = (x * 2).sin()
    return holder.hidden.cos().exp()


def test_an_attribute_becomes_a_placeholder_and_comes_back(x, holder):
    expected = torch.autograd.grad(with_attribute(x, holder).sum(), x)[0]
    hidden = holder.hidden.detach()
    y = ebb.region(escapes="placeholder", name="block")(with_attribute)(x, holder)
    held = holder.hidden
    assert bytes_of(held) == 0
    with pytest.raises(RuntimeError, match=r"aten::sin.default \(96 bytes\).*region 'block'"):
        held.sum()
    assert same_bits(torch.autograd.grad(y.sum(), x)[0], expected)
    assert same_bits(held, hidden)


def test_keep_is_the_default_and_is_counted(x, holder):
    y = ebb.region(name="block")(with_attribute)(x, holder)
    assert bytes_of(holder.hidden) == 96
    assert ebb.stats()["regions"]["block"]["bytes_escaped"] == 96
    y.sum().backward()


def test_nothing_escapes(x):
    with ebb.region(name="block", escapes="placeholder"):
        y = (x * 2).sin().cos()
    assert ebb.stats()["regions"]["block"]["bytes_escaped"] == 0
    assert bytes_of(y) == 96


@pytest.mark.parametrize("named", [False, True])
def test_a_block_of_code(named, x):
    """What no op has read is a result; others must be named."""
    h = x.sin()
    expected = torch.autograd.grad((h + h.cos()).sum(), x)[0]
    with ebb.region(escapes="placeholder") as region:
        h = x.sin()
        y = h.cos()
        if named:
            region.returns([h], {"y": y})
    assert bytes_of(y) == 96
    if named:
        assert same_bits(torch.autograd.grad((h + y).sum(), x)[0], expected)
    else:
        with pytest.raises(RuntimeError, match=r"name it with region\.returns"):
            torch.add(h, y)


class KeepsOnCtx(torch.autograd.Function):
    """Reads a field of ctx that autograd knows nothing of."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.x.exp()


@pytest.mark.parametrize("last", [False, True])
def test_a_field_of_ctx(last, x):
    def block(x):
        y = KeepsOnCtx.apply((x * 2).sin())
        return y if last else y.sin()

    expected = torch.autograd.grad(block(x).sum(), x)[0]
    y = ebb.region(escapes="placeholder")(block)(x)
    assert same_bits(torch.autograd.grad(y.sum(), x)[0], expected)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        self.hidden = gelu(self.up(x))
        return x + self.down(self.hidden)


def test_modules_of_a_model():
    model = nn.Sequential(Block(), Block(), Block())
    x = torch.randn(4, 8)
    expected = torch.autograd.grad(model(x).sum(), model.parameters())
    hidden = [block.hidden.detach() for block in model]
    with ebb.apply(model, modules="[012]", escapes="placeholder"):
        y = model(x)
        assert [bytes_of(block.hidden) for block in model] == [0, 0, 0]
        found = torch.autograd.grad(y.sum(), model.parameters())
    assert all(map(same_bits, found, expected))
    assert all(same_bits(block.hidden, h) for block, h in zip(model, hidden, strict=True))


def test_checkpoint(x, holder):
    expected = torch.autograd.grad(with_attribute(x, holder).sum(), x)[0]
    y = ebb.checkpoint(with_attribute, x, holder, escapes="placeholder")
    assert bytes_of(holder.hidden) == 0
    assert same_bits(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.parametrize("retain", [False, True])
def test_written_after_it_came_back(retain, x, holder):
    """It is saved, so the version tells, as in eager."""

    def run(region):
        with region:
            y = with_attribute(x, holder).sum()
        y.register_hook(lambda _: None)
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        with torch.no_grad():
            holder.hidden.mul_(2)
        return y, first

    y, _ = run(ebb.region(escapes="placeholder"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x)


def test_twice_with_the_graph_retained(no_objects_left, x, holder):
    y = ebb.region(escapes="placeholder")(with_attribute)(x, holder).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert same_bits(torch.autograd.grad(y, x)[0], first)
    assert bytes_of(holder.hidden) == 96


def test_views_and_kept_values_stay_right(x, holder):
    def block(x, holder):
        h = (x * 2).sin()
        holder.view = h[1:]
        holder.kept = h.cos()  # SAVE
        return (holder.kept * h).tanh()

    expected = torch.autograd.grad(block(x, holder).sum(), x)[0]
    view = holder.view.detach()
    policy = ebb.Policy({"aten::cos": ebb.SAVE})
    y = ebb.region(policy, escapes="placeholder")(block)(x, holder)
    assert bytes_of(holder.kept) == 96
    assert bytes_of(holder.view) == 0
    assert same_bits(torch.autograd.grad(y.sum(), x)[0], expected)
    assert same_bits(holder.view, view)


def test_without_gradients_nothing_is_emptied(x, holder):
    with torch.no_grad():
        ebb.region(escapes="placeholder")(with_attribute)(x, holder)
        with ebb.region(escapes="placeholder"):
            with_attribute(x, holder)
    assert bytes_of(holder.hidden) == 96


@pytest.mark.on_cpu("numpy shows no other memory")
def test_what_numpy_shows_is_not_emptied(x, holder):
    def block():
        y = with_attribute(x, holder)
        holder.array = holder.hidden.detach().numpy()
        return y

    y = ebb.region(escapes="placeholder")(block)()
    assert (holder.array == (x * 2).sin().detach().numpy()).all()
    y.sum().backward()


def test_an_exception_empties_nothing(x, holder):
    def fails():
        with_attribute(x, holder)
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        ebb.region(escapes="placeholder")(fails)()
    assert bytes_of(holder.hidden) == 96


def test_a_graph_that_dies_leaves_nothing(no_objects_left, x, holder):
    ebb.region(escapes="placeholder")(with_attribute)(x, holder)
    with pytest.raises(RuntimeError, match="was read before backward restored it"):
        holder.hidden.sum()
    holder.hidden = None


def test_inner_regions_decide_nothing(x, holder):
    with ebb.region():
        y = ebb.region(escapes="placeholder")(with_attribute)(x, holder)
        assert bytes_of(holder.hidden) == 96
    y.sum().backward()


def wrapped(s):
    return TwoTensor(s, s.cos())


def sparse(s):
    return torch.sparse_coo_tensor(torch.arange(4)[None], s, (4, 3))


def nested(s):
    return torch.nested.nested_tensor_from_jagged(s, torch.tensor([0, 1, 4]))


@pytest.mark.parametrize(
    "result",
    [
        wrapped,
        pytest.param(sparse, marks=pytest.mark.on_cpu("the test device has no sparse tensors")),
        nested,
    ],
)
def test_what_results_consist_of_stays(result, x):
    def block(x):
        s = (x * 2).sin()
        t = s.cos()
        return result(s), t

    found = ebb.region(escapes="placeholder")(block)(x)[0]
    inner = {"wrapped": "a", "sparse": "_values", "nested": "values"}[result.__name__]
    part = getattr(found, inner)
    assert same_bits(part if result is wrapped else part(), (x * 2).sin())


def test_a_returned_parameter_collects_no_hooks(holder):
    w = nn.Parameter(torch.randn(4))
    for _ in range(3):
        y, _ = ebb.region(escapes="placeholder")(lambda: (with_attribute(w, holder), w))()
        y.sum().backward()
    assert not w._backward_hooks


@pytest.mark.parametrize("escapes", ["keep", "placeholder"])
def test_a_region_object_forgets_its_results(escapes, x):
    region = ebb.region(escapes=escapes)
    with contextlib.suppress(ZeroDivisionError), region:
        y = x.sin()
        region.returns(y)
        watch = StorageWeakRef(y.untyped_storage())
        del y
        raise ZeroDivisionError
    assert watch.expired()
    with region:
        z = x.sin().cos()
    z.sum().backward()


def test_what_cannot_be_computed_again_stops_no_backward_that_does_without(holder):
    x, buffer = torch.randn(4, requires_grad=True), torch.randn(4)

    def block():
        holder.stat = (buffer * 2).sin()
        holder.stat.cos()
        return (x * 2).sin()

    y = ebb.region(escapes="placeholder")(block)()
    buffer.add_(1)
    assert same_bits(torch.autograd.grad(y.sum(), x)[0], 2 * (x * 2).cos())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        holder.stat.sum()


class Fails(Exception):
    pass


def test_an_exception_of_pythons_loses_none(holder):
    """Who asks first gets it; who asks next finds all of them."""
    fails = False

    def sine(x):
        if fails:
            raise Fails
        return x.sin()

    library = torch.library.Library("test_escapes", "DEF")
    library.define("sine(Tensor x) -> Tensor")
    library.impl("sine", sine, "CPU")
    x, factor = torch.randn(4), torch.randn(4, requires_grad=True)

    def block():
        holder.first = x * 2
        holder.second = torch.ops.test_escapes.sine(holder.first)
        holder.third = holder.second * 3
        return factor * (holder.third * 1)

    policy = ebb.Policy({"test_escapes::sine": ebb.RECOMPUTE})
    y = ebb.region(policy, escapes="placeholder")(block)()
    assert bytes_of(holder.first) == bytes_of(holder.second) == bytes_of(holder.third) == 0
    fails = True
    with pytest.raises(Fails):
        torch.autograd.grad(y.sum(), factor, retain_graph=True)
    fails = False

    found = torch.autograd.grad(y.sum(), factor)[0]
    assert same_bits(found, (x * 2).sin() * 3 * 1)
    assert same_bits(holder.first, x * 2)
    assert same_bits(holder.second, (x * 2).sin())
    assert same_bits(holder.third, (x * 2).sin() * 3)


@pytest.mark.filterwarnings("ignore:ebb. regions have no effect here")
def test_where_hooks_are_disabled_nothing_is_emptied(x):
    with torch.autograd.graph.disable_saved_tensors_hooks("no"), ebb.region(escapes="placeholder"):
        y = (x * 2).sin().cos() * 2
    y.sum().backward()


def test_gradients_of_a_backward_inside_stay_whatever_other_threads_enter(x, holder):
    """Whether there was a backward is asked of this region, not of the process."""

    def step():
        y = torch.ones(3, requires_grad=True)
        with ebb.region():
            loss = y.sin().cos().sum()
        loss.backward()

    with ebb.region(escapes="placeholder"):
        y = x.sin().exp()
        holder.grad = torch.autograd.grad(y.sum(), x)[0]
        doubled = holder.grad * 2
        in_thread(lambda: (step(), step()))
    assert same_bits(holder.grad * 2, doubled)


@pytest.mark.parametrize(
    ("function", "gradient"),
    [
        (lambda w: w * 2 * 3, lambda w: torch.full_like(w, 6.0)),  # its backward unpacks nothing
        (lambda w: (w * 2).sin(), lambda w: 2 * (w * 2).cos()),
    ],
)
def test_gradients_of_a_backward_inside_stay(function, gradient):
    w = nn.Parameter(torch.randn(4))

    @ebb.region(escapes="placeholder")
    def step():
        loss = function(w).sum()
        loss.backward()
        return loss

    step()
    assert same_bits(w.grad, gradient(w))
