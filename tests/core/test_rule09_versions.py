"""Rule 9: raise exactly where eager raises; an unseen write makes a new leaf."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import ebb
from ebb_tests.exactness import (
    assert_exact,
    assert_same_error,
    each_policy,
    exact,
    leaves,
    like_eager,
    like_eager_each,
    policies,
)
from ebb_tests.stand_ins import operator_facts

pytestmark = pytest.mark.engines("exactness", "device", "checked")


def test_saved_output_written_inside_the_region():
    def program(x):
        h = (x * 2).exp()  # saves its result
        h.add_(1)
        return h.sum()

    message = assert_same_error(program, leaves((3,)))
    assert "modified by an inplace operation" in message
    assert "region 'test'" in message
    assert "aten::exp.default" in message


def test_saved_output_written_through_a_view_inside_the_region():
    def program(x):
        h = (x * 2).exp()
        h[0].zero_()
        return h.sum()

    assert_same_error(program, leaves((3, 2)))


@torch.no_grad()
def write_to_second(_first, second, *_):
    second.mul_(7)


def test_saved_output_written_after_the_region():
    assert_same_error(lambda x: (x * 2).exp(), leaves((3,)), after=write_to_second)


def test_unsaved_output_written_after_the_region_is_no_error():
    assert_exact(lambda x: x.sin() + 1, leaves((3,)), after=write_to_second)


def test_output_that_a_recipe_reads_written_after_the_region():
    def program(x):
        h = x + 1  # saved by nothing
        return h, (h * 2).exp()

    assert_exact(program, leaves((3,)), after=write_to_second)


def test_parameter_written_between_forward_and_backward():
    program = lambda x, w: (w * x).exp()  # noqa: E731
    assert_same_error(program, leaves((3,), (3,)), after=write_to_second)


@pytest.mark.replays
@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda w: w.add_(1), ""), (lambda w: w.untyped_storage().resize_(0), ".*resized")],
    ids=["written", "dead"],
)
def test_leaf_that_only_a_recipe_needs_is_refused_by_name(change, reason):
    w = torch.randn(3)
    x = torch.randn(3, requires_grad=True)
    with ebb.region(name="block"):
        out = (x + w).exp().sin()
    change(w)

    message = rf"recompute aten::add.Tensor in region 'block'{reason}"
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        h.numpy()[...] *= 2  # behind the dispatcher
        ctx.mark_dirty(h)
        return h

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.on_cpu("numpy shows no other memory")
@exact((4,))
def test_unseen_write_that_moves_the_version_makes_a_leaf(x):
    h = x * 3
    Doubled.apply(h)
    return h.exp() * h.sin()


@pytest.mark.on_cpu("numpy shows no other memory")
@exact((4,))
def test_write_of_a_kernel_below_us_that_moves_the_version(x):
    h = (x * 3).detach()
    h.add_(1)
    h.numpy()[...] *= 2
    torch._C._autograd._unsafe_set_version_counter((h,), (h._version + 1,))
    return (h * x).exp() * h


def test_dead_saved_parameter_is_refused():
    w = torch.randn(3, requires_grad=True)
    x = torch.randn(3, requires_grad=True)
    with ebb.region(name="block"):
        out = x * w
    w.untyped_storage().resize_(0)

    with pytest.raises(RuntimeError, match="has no data any more"):
        out.sum().backward()


def test_two_backwards_without_retain_graph_raise_as_in_eager():
    for region in (torch.enable_grad(), *(ebb.region(p) for p in policies().values())):
        x = torch.randn(3, requires_grad=True)
        with region:
            loss = (x * 2).exp().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


ALIASES = {
    "matmul of more than two dimensions": lambda x, w: x.reshape(1, 3, 4) @ w,
    "linear of more than two dimensions": lambda x, w: F.linear(x.reshape(1, 3, 4), w),
    "reshape that copies": lambda x, w: (x * 2).t().reshape(-1),
    "unsafe_chunk": lambda x, w: (x * 2).unsafe_chunk(3)[1],
    "data": lambda x, w: (x * 2).data * 1 + (x * 2).data,
}


@pytest.mark.parametrize("alias", ALIASES)
@like_eager_each
def test_alias_with_a_counter_of_its_own_written_after_the_region(region, alias):
    """Nothing has saved it, so eager goes on; a recipe that reads it needs the old state."""
    x, w = leaves((3, 4), (4, 4))
    with region:
        h = ALIASES[alias](x, w)
        loss = (x.sum() * (h * 0.5).exp()).sum()
    with torch.no_grad():
        h.add_(1)
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.not_in_verify_mode(
    "there it keeps storages alive, and finds the write", on_device=True
)
@like_eager(ebb.policies.save_all, ebb.policies.recompute_all)
def test_write_through_data_after_the_region_is_seen_by_backward_as_in_eager(region):
    x = leaves((4,))[0]
    with region:
        h = x * 2
        alias = h.data
        loss = (h.sin() * (alias + 1)).sum()
    alias.add_(1)
    return torch.autograd.grad(loss, x)[0]


def write_unseen(h):
    """A write as a kernel below torch would do it, and a version that tells of it."""
    h.detach().numpy()[:] = 5
    torch.autograd.graph.increment_version(h)


# Writes that ebb sees, and after which torch moves no version.
SEEN_AND_UNCOUNTED = {
    "resize_ to the same size": lambda h: h.resize_(h.shape),
    "resize_as_": lambda h: h.resize_as_(torch.empty(h.shape)),
    "an operator without a kernel that counts": lambda h: torch._cummax_helper(
        torch.ones(4), h, torch.empty(4, dtype=torch.long), 0
    ),
    "an operator that a __torch_dispatch__ calls": lambda h: Wrapper(h).add_(1),
    "an in-place view that a __torch_dispatch__ calls": lambda h: Wrapper(h).squeeze_(),
    "a gradient scaler's": lambda h: torch._amp_foreach_non_finite_check_and_unscale_(
        [h], torch.zeros(1), torch.ones(1)
    ),
}


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        op(args[0].inner, *args[1:])
        return args[0]


@pytest.mark.on_cpu("numpy shows no other memory")
@pytest.mark.parametrize("seen", SEEN_AND_UNCOUNTED)
@like_eager(ebb.policies.recompute_all)
def test_a_seen_write_that_moves_no_version_hides_no_unseen_one(region, seen):
    x = torch.arange(1.0, 5.0, requires_grad=True)
    with region:
        h = (x * 2).detach()
        SEEN_AND_UNCOUNTED[seen](h)
        write_unseen(h)
        loss = (x * h.sin()).sum()
    del h
    return torch.autograd.grad(loss, x)[0]


INPLACE = [
    pytest.param(op, op.get_inplace(), id=op.full_name)
    for op in op_db
    if op.get_inplace() is not None and torch.float32 in op.supported_dtypes("cpu")
]


class Operators(TorchDispatchMode):
    """The operators that run."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


@pytest.mark.once
@pytest.mark.parametrize(("op", "variant"), INPLACE)
def test_versions_move_as_the_table_of_operators_says(op, variant):
    sample = next(iter(op.sample_inputs("cpu", torch.float32)))
    x = sample.input[0] if isinstance(sample.input, list) else sample.input
    before = x._version
    try:
        with Operators() as seen:
            variant(sample.input, *sample.args, **sample.kwargs)
    except RuntimeError as error:
        pytest.skip(f"the first sample cannot be written in place: {error}")
    if len(seen.ops) != 1:
        pytest.skip("several operators")

    facts = operator_facts(seen.ops[0])
    if "self" not in facts["counted"]:
        pytest.skip("on this device another operator does it")

    if seen.ops[0] is not torch.ops.aten.resize_.default:  # moves it only if the shape changes
        assert x._version - before == facts["counted"]["self"]


def strided(values):
    return torch.nested.as_nested_tensor([values[:2], values[2:]], layout=torch.strided)


def sparse(values):
    return torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values[:, 0], (2, 3)).coalesce()


@pytest.mark.on_cpu("torch ends the process where a device has no nested tensors", run=False)
@pytest.mark.parametrize("make", [strided, sparse])
@each_policy
def test_a_written_saved_tensor_of_another_layout(make, policy):
    def message(region):
        w = torch.randn(3, 4, requires_grad=True)
        with region:
            h = make(w * 2)
            z = h * h
            h.mul_(2.0)
        total = torch.sparse.sum if z.is_sparse else lambda z: z.to_padded_tensor(0.0).sum()
        loss = total(z)
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
        return str(raised.value)

    assert what_was_modified(message, policy) == what_was_modified(message)


def what_was_modified(message, policy=None) -> str:
    """The message to the end of the brackets, in which the tensor's type and sizes are."""
    text = message(torch.enable_grad() if policy is None else ebb.region(policy))
    return text[: text.index("]", text.index("[")) + 1]


DTYPES = "float32 float64 float16 bfloat16 complex64 complex128 int64 uint8 bool"


@pytest.mark.parametrize("of", ["result", "input"])
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES.split()])
def test_the_error_names_type_and_sizes_as_eager_does(of, dtype):
    def message(region):
        x = torch.ones(4, 3, requires_grad=True)
        scale = torch.ones(3).to(dtype)
        with region:
            saved = scale + scale if of == "result" else scale
            out = x * saved
        saved.zero_()
        with pytest.raises(RuntimeError) as raised:
            out.abs().sum().backward()
        return str(raised.value)

    assert what_was_modified(message, ebb.policies.recompute_all) == what_was_modified(message)


@torch.library.custom_op("ebb_tests::lies", mutates_args=())
def lies(h: torch.Tensor) -> torch.Tensor:
    h.add_(1)
    return h * 2


@torch.library.custom_op("ebb_tests::lies_and_returns_nothing", mutates_args=())
def lies_and_returns_nothing(h: torch.Tensor) -> None:
    h.add_(1)


@pytest.mark.parametrize("lie", [lies, lies_and_returns_nothing])
@pytest.mark.parametrize("alias", [lambda h: h, lambda h: h.data, lambda h: h.detach()])
@like_eager(ebb.policies.recompute_all)
def test_an_operator_that_says_it_writes_nothing_and_calls_one_that_does(region, lie, alias):
    x = torch.arange(1.0, 5.0, requires_grad=True)
    with region:
        h = (x * 2).detach().exp()
        lie(alias(h))
        loss = (x * h.sin()).sum()
    del h
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("alias", [lambda h: h, lambda h: h.data])
@like_eager(ebb.policies.recompute_all)
def test_out_of_an_operator_that_is_hard_to_box(region, alias):
    w = torch.arange(1.0, 5.0, requires_grad=True)
    with region:
        h = torch.arange(4.0).clone().exp()
        torch.std(torch.arange(12.0).reshape(3, 4).sin(), 0, correction=1, out=alias(h))
        loss = (w.exp() * h.clone()).sum()
    del h
    return torch.autograd.grad(loss, w)[0]
