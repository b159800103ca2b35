"""Operators that have kernels at keys above ebb's: of sparse, nested, MKL-DNN tensors.

What they read and write is dense too, and a region computes it. Each operator is called with
arguments of several layouts that its schema allows; a program around such a call must give what
eager gives, or raise.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import ebb
from ebb_tests.exactness import exact, same_bits
from ebb_tests.isolation import each_isolated
from ebb_tests.operators.inputs import Guess, Named, copy_of, overload, schemas, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

KEYS = ("SparseCPU", "SparseCsrCPU", "NestedTensorCPU", "MkldnnCPU", "QuantizedCPU")

# Before the call: writes that change nothing, after which an unseen one may be taken for theirs.
BEFORE: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda h: None,
    "resize_as_": lambda h: h.resize_as_(torch.empty(h.shape)),
    "resize_": lambda h: h.resize_(h.shape),
    "set_": lambda h: h.set_(h),
    "add_": lambda h: h.add_(1) if h.is_floating_point() else None,
    "increment_version": lambda h: torch.autograd.graph.increment_version(h),
}


def is_dense(x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.layout is torch.strided
        and not (x.is_nested or x.is_quantized or x.is_meta)
    )


def is_differentiable(x: Any) -> bool:
    return is_dense(x) and (x.is_floating_point() or x.is_complex()) and x.numel() > 0


def operators() -> list[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in schemas() if any(has(name, key) for key in KEYS)]


class Program:
    """A call in the midst of a computation: dense arguments are computed, and used again."""

    def __init__(self, name: str, args: Any, kwargs: Named, before: str, *, with_grad: bool):
        self.name, self.before, self.with_grad = name, before, with_grad
        self.arguments = (args, kwargs)

    def run(self, region: contextlib.AbstractContextManager[Any]) -> list[Any]:
        torch.manual_seed(0)
        arguments = tree_map(copy_of, self.arguments)
        leaves = [
            t.detach().clone().requires_grad_()
            for t in tree_leaves(arguments)
            if is_differentiable(t)
        ]
        waiting = iter(leaves)
        with region:
            computed = tree_map(
                lambda t: next(waiting) * 1 if is_differentiable(t) else t, arguments
            )
            args, kwargs = computed
            if not self.with_grad:
                args, kwargs = tree_map(
                    lambda t: t.detach() if is_differentiable(t) else t, computed
                )
            with torch.set_grad_enabled(self.with_grad):
                for tensor in filter(is_differentiable, tree_leaves((args, kwargs))):
                    BEFORE[self.before](tensor)
                made = overload(self.name)(*args, **kwargs)
            used = [self.use(t) for t in tree_leaves((made, computed))]
            shown = [t.detach().clone() for t in used if t is not None]
            wanted = [t for t in used if t is not None and t.requires_grad]
            wanted += [leaves[0].sum()] if leaves else []
            total = sum(t.sum() for t in wanted).real if wanted else None
            del made, computed, args, kwargs, used, wanted
        if total is None or not total.requires_grad:
            return shown
        return [*shown, *torch.autograd.grad(total, leaves, allow_unused=True)]

    def gives(self, expected: list[Any], times: int) -> bool:
        """Whether eager gives that, however often: some kernels read memory that nothing wrote."""
        try:
            return all(same(self.run(contextlib.nullcontext()), expected) for _ in range(times))
        except Exception:
            return False

    def use(self, x: Any) -> torch.Tensor | None:
        """Its backward needs `x` itself."""
        if not isinstance(x, torch.Tensor) or x.is_meta:
            return None
        if x.is_nested:
            return None if x.layout is torch.jagged else self.use(x.to_padded_tensor(0.0))
        if x.is_quantized:
            return self.use(x.dequantize())
        if x.layout is not torch.strided:
            return self.use(x.to_dense())
        return x.sin() if is_differentiable(x) else None


def calls_of(name: str, count: int) -> Iterator[tuple[int, Any, Named]]:
    """Guesses that have both a dense argument and one of another layout, or no dense one at all."""
    for number in range(1, 2 * count, 2):  # odd ones have layouts
        with contextlib.suppress(Exception):
            args, kwargs = Guess(name, number).arguments()
            if not all(map(is_dense, tensors_of((args, kwargs)))):
                yield number, args, kwargs


# Eager gives something else, or raises, one time in 150 where a kernel reads what nothing wrote.
OFTEN = 3000

Found = tuple[int, list[str], list[str]]  # programs that eager runs, that are wrong, that raise


def try_operator(
    name: str, tell: Callable[[int], None], skipped: frozenset[int], *, count: int, enough: int
) -> Found:
    warnings.simplefilter("ignore")
    ran, wrong, loud = 0, [], []
    draw = random.Random(name)
    for number, args, kwargs in calls_of(name, count):
        if number in skipped:
            continue
        tell(number)
        runs = False
        for with_grad in (True, False):
            for before in ("nothing", draw.choice(list(BEFORE)[1:])):
                program = Program(name, args, kwargs, before, with_grad=with_grad)
                try:
                    expected = program.run(contextlib.nullcontext())
                    if not program.gives(expected, times=1):
                        continue  # it reads memory that nothing has written
                except Exception:
                    continue
                runs = True
                about = f"{name}, guess {number}, after {before}, grad {with_grad}"
                try:
                    right = same(program.run(ebb.region()), expected)
                    if not right and program.gives(expected, times=OFTEN):
                        wrong.append(about)
                except Exception as error:
                    if program.gives(expected, times=OFTEN):
                        loud.append(f"{about}: {type(error).__name__}: {str(error)[:200]}")
        ran += runs
        if ran >= enough:
            break
    return ran, wrong, loud


def same(actual: list[Any], expected: list[Any]) -> bool:
    return len(actual) == len(expected) and all(map(same_bits, actual, expected))


def sweep(count: int, enough: int) -> tuple[dict[str, int], list[str], list[str]]:
    ran, wrong, loud = {}, [], []

    def work(name: str, tell: Callable[[int], None], skipped: frozenset[int]) -> Found:
        return try_operator(name, tell, skipped, count=count, enough=enough)

    for name, found, _ in each_isolated(operators(), work):
        if found is not None:
            ran[name] = found[0]
            wrong += found[1]
            loud += found[2]
    return ran, wrong, loud


# What these return is, now and then, memory that nothing has written.
UNINITIALISED = (
    "aten::empty",
    "aten::_nested_sum_backward",
    "aten::resize_as_sparse",
    "aten::mkldnn_linear",
    "mkldnn::_linear_pointwise",
)


def unexplained(wrong: list[str]) -> list[str]:
    return [w for w in wrong if not w.startswith(UNINITIALISED)]


@pytest.mark.not_sanitized
@pytest.mark.parametrize(
    ("count", "enough", "least"),
    [
        pytest.param(12, 2, 250, marks=pytest.mark.sweep),
        pytest.param(200, 15, 330, marks=pytest.mark.slow),  # many arguments
    ],
)
def test_kernels_above_leave_results_and_gradients_as_they_are(count, enough, least):
    ran, wrong, loud = sweep(count, enough)

    assert unexplained(wrong) == []
    assert loud == []
    assert sum(times > 0 for times in ran.values()) > least


# The same by hand, where a computed tensor meets one of another layout most often.


def thinned(*shape: int) -> torch.Tensor:
    values = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return values * (values > 0.3)


COO, CSR = thinned(4, 4).to_sparse(), thinned(4, 4).to_sparse_csr()
DENSE = thinned(4, 4) + 1

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_ coo": lambda h: h.add_(COO, alpha=2),
    "+= coo": lambda h: h.__iadd__(COO),
    "-= coo": lambda h: h.__isub__(COO),
    "*= coo": lambda h: h.__imul__(COO),
    "add_ csr": lambda h: h.add_(CSR),
    "addmm_ coo": lambda h: h.addmm_(COO, DENSE),
    "addmm_ csr": lambda h: h.addmm_(CSR, DENSE),
    "sparse rows": lambda h: h.add_(
        torch.sparse_coo_tensor([[0, 2]], DENSE[:2], (4, 4), check_invariants=False)
    ),
    "mm, out": lambda h: torch.mm(COO, DENSE, out=h),
    "mm of csr, out": lambda h: torch.mm(CSR, DENSE, out=h),
    "addmm, out": lambda h: torch.addmm(DENSE, COO, DENSE, out=h),
    "addmm of csr, out": lambda h: torch.addmm(DENSE, CSR, DENSE, out=h),
    "add, out": lambda h: torch.add(DENSE, COO, out=h),
    "add of csr, out": lambda h: torch.add(DENSE, CSR, out=h),
    "sparse_mask, then add_": lambda h: h.add_(DENSE.sparse_mask(COO.coalesce())),
    "index_add_ of its own sparse form": lambda h: h.add_(h.to_sparse()),
    "copy_ of what is dense again": lambda h: h.copy_(COO.to_dense()),
}


def loss_of(write: Callable[[torch.Tensor], Any], before: str, region: Any) -> list[torch.Tensor]:
    x = (torch.arange(16, dtype=torch.float64).reshape(4, 4) * 0.1 + 0.3).requires_grad_()
    with region:
        h = x * 2
        with torch.no_grad():
            BEFORE[before](h)
            write(h)
        y = h.sin() * x
        with torch.no_grad():
            write(h.detach())
        loss = (y * h.detach()).sum()
        del h, y
    return [loss.detach(), torch.autograd.grad(loss, x)[0]]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", WRITES)
def test_a_dense_tensor_written_by_a_sparse_kernel(name, before):
    try:
        expected = loss_of(WRITES[name], before, contextlib.nullcontext())
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            loss_of(WRITES[name], before, ebb.region())
        return

    assert same(loss_of(WRITES[name], before, ebb.region()), expected)


@pytest.mark.parametrize("before", BEFORE)
@exact((4, 4))
def test_with_grad_mode_too(x, before):
    h = x * 2
    BEFORE[before](h.detach())
    h += COO
    return h.sin() * x


@pytest.mark.parametrize("layout", ["coo", "csr"])
@exact((4, 4))
def test_results_of_mixed_arguments_are_dense_and_kept(x, layout):
    other = {"coo": COO, "csr": CSR}[layout]
    h = x * 2
    total = (h + other).sin() + torch.mm(other, h).cos()
    return torch.addmm(h, other, total).sin() * x


@exact((3,))
def test_parts_of_sparse_tensors_made_of_computed_ones(x):
    values = x * 2
    sparse = torch.sparse_coo_tensor([[0, 1, 2]], values, (4,)).coalesce()
    with torch.no_grad():
        sparse._values().mul_(3)
    return sparse.to_dense().sin()[:3] * x * values.exp()


@exact((2, 4, 8, 8), dtype=torch.float32)
def test_mkldnn_and_nested_tensors_of_computed_ones(x):
    h = x * 2
    packed = torch.nn.functional.max_pool2d(h.to_mkldnn(), 2, 2).to_dense()
    nested = torch.nested.as_nested_tensor([h[0], h[1] * 2]) * 3
    padded = torch.nested.to_padded_tensor(nested, 0.0)
    return (packed.sin().sum() + (padded.cos() * h).sin().sum()) * x.mean()


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, one by one": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad, one by one": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("around", ["forward", "step", "everything"])
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_sparse_gradients(name, bag, around):
    def region_if(ours: bool, part: str) -> contextlib.AbstractContextManager[Any]:
        return ebb.region() if ours and around == part else contextlib.nullcontext()

    def train(ours: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        table = nn.EmbeddingBag(8, 4, sparse=True) if bag else nn.Embedding(8, 4, sparse=True)
        optimizer = OPTIMIZERS[name](list(table.parameters()))
        losses = []
        for step in range(3):
            with region_if(ours, "everything"):
                indices = torch.tensor([[step, 1, 2], [3, step, 1]])
                with region_if(ours, "forward"):
                    loss = (table(indices).sin() * (step + 1)).square().sum()
                optimizer.zero_grad()
                loss.backward()
                with region_if(ours, "step"):
                    optimizer.step()
                    regular = (table.weight * 2).sin().sum()
            losses += [loss.detach(), torch.autograd.grad(regular, table.weight)[0]]
        return [*losses, table.weight.detach()]

    assert same(train(True), train(False))
