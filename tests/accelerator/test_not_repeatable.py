"""Operators whose kernels may give other bits in a second run: see Note [Kernels that do not repeat
their bits]. The device is unsteady: each call of such an operator gives other bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb_tests import device as late

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "src/core/intercept/op_tables.cpp").read_text()
ROWS = 6
INDEX = torch.tensor([0, 2, 2, 5, 0, 1])  # some repeat


def index(x):
    return INDEX.to(x.device)


def wide(x):
    return index(x)[:, None].expand(ROWS, x.shape[1])


def unpooled(x, pool, unpool):
    pooled, where = pool(x, 2, stride=1, return_indices=True)
    return unpool(pooled, where, 2, stride=1)


def image(x):
    return x.reshape(1, 1, *x.shape)


# Called with x.sin(), which is recomputed.
UNSTEADY = {
    "index_add": lambda x: torch.zeros_like(x).index_add(0, index(x), x),
    "index_add_": lambda x: torch.zeros_like(x).index_add_(0, index(x), x),
    "index_reduce": lambda x: x.index_reduce(0, index(x), x * 2, "mean"),
    "index_reduce_": lambda x: x.clone().index_reduce_(0, index(x), x * 2, "mean"),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, wide(x), x),
    "scatter_add_": lambda x: torch.zeros_like(x).scatter_add_(0, wide(x), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, wide(x), x * 2, "sum"),
    "scatter_reduce_": lambda x: x.clone().scatter_reduce_(0, wide(x), x * 2, "sum"),
    "bincount": lambda x: x * index(x).bincount(x.detach()[:, 0])[:, None],
    "histc": lambda x: x * x.detach().histc(4),
    "nll_loss2d_forward": lambda x: F.nll_loss(
        x.reshape(1, ROWS, 2, 2), torch.ones(1, 2, 2, dtype=torch.long, device=x.device)
    ),
    "cumsum": lambda x: x.flatten().cumsum(0),
    "cumsum_": lambda x: x.flatten().clone().cumsum_(0),
    "cumprod": lambda x: x.flatten().cumprod(0),
    "cumprod_": lambda x: x.flatten().clone().cumprod_(0),
    "_logcumsumexp": lambda x: x.flatten().logcumsumexp(0),
    "index_put": lambda x: x.index_put((index(x),), x * 2),
    "index_put_": lambda x: x.clone().index_put_((index(x),), x * 2),
    "_unsafe_index_put": lambda x: torch.ops.aten._unsafe_index_put(x, [index(x)], x * 2),
    "index_copy": lambda x: x.index_copy(0, index(x), x * 2),
    "index_copy_": lambda x: x.clone().index_copy_(0, index(x), x * 2),
    "scatter": lambda x: x.scatter(0, wide(x), x * 2),
    "scatter_": lambda x: x.clone().scatter_(0, wide(x), x * 2),
    "put": lambda x: x.put(index(x), x[:, 0] * 2, accumulate=True),
    "put_": lambda x: x.clone().put_(index(x), x[:, 0] * 2, accumulate=True),
    "kthvalue": lambda x: x.kthvalue(2)[0],
    "median": lambda x: x.median(0)[0],
    "nanmedian": lambda x: x.nanmedian(0)[0],
    "max_unpool2d": lambda x: unpooled(image(x), F.max_pool2d, F.max_unpool2d),
    "max_unpool3d": lambda x: unpooled(x.reshape(1, 1, 2, 3, 4), F.max_pool3d, F.max_unpool3d),
    "convolution": lambda x: F.conv_transpose2d(image(x), image(x)[..., :2, :2]),
}
# The same operators where their order does not matter.
STEADY = {
    "index_add of one number": lambda x: x.flatten().index_add(0, index(x)[:1], x[0, :1]),
    "scatter of a number": lambda x: x.scatter(0, wide(x), 3.0),
    "index_put with a mask": lambda x: x.index_put((x.detach() > 0,), x[x.detach() > 0] * 2),
    "index_put of a number": lambda x: x.index_put((index(x),), torch.ones((), device=x.device)),
    "scatter_add of integers": lambda x: x
    * torch.zeros(ROWS, device=x.device, dtype=torch.long).scatter_add(0, index(x), index(x))[
        :, None
    ],
    "a scan of a row each": lambda x: x.cumsum(1),
    "the median of all": lambda x: x * x.detach().median(),
    "convolution": lambda x: F.conv2d(image(x), image(x)[..., :2, :2]),
}


def gradient(x, operator, region):
    """The gradient of a program in which backward needs the operator's result."""
    with late.unsteady():
        with region:
            loss = operator(x.sin()).exp().sin().sum()
        (found,) = torch.autograd.grad(loss, x)
        return found.cpu()


@pytest.fixture
def x(device):
    return torch.randn(ROWS, 4).to(device).requires_grad_()


def reasons(x, operator, policy=ebb.policies.recompute_all):
    """Why results of the operator are saved though the policy recomputes them."""
    with ebb.record_reports():
        gradient(x, operator, ebb.region(policy))
    return [row.reason for row in ebb.report().rows if "force=True" in row.reason]


@pytest.mark.parametrize("operator", UNSTEADY.values(), ids=UNSTEADY)
def test_a_result_that_a_replay_would_change_is_saved(x, operator):
    expected = gradient(x, operator, torch.enable_grad())

    found = gradient(x, operator, ebb.region(ebb.policies.recompute_all))

    assert torch.equal(found, expected)
    assert len({*reasons(x, operator)}) == 1


@pytest.mark.parametrize("operator", STEADY.values(), ids=STEADY)
def test_a_result_that_does_not_depend_on_the_order_is_recomputed(x, operator):
    assert reasons(x, operator) == []


def test_a_rule_with_force_recomputes_it(x):
    forced = ebb.Policy([ebb.Rule("aten::index_add", ebb.RECOMPUTE, force=True)])

    assert reasons(x, UNSTEADY["index_add"], forced) == []


def test_on_the_cpu_it_is_recomputed(device):
    x = torch.randn(ROWS, 4).requires_grad_()

    assert reasons(x, UNSTEADY["index_add"]) == []


@pytest.fixture
def deterministic():
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("operator", ["index_add", "index_put", "cumsum", "convolution"])
def test_deterministic_algorithms_are_recomputed(x, operator, deterministic):
    deterministic(True)

    assert reasons(x, UNSTEADY[operator]) == []


def test_an_operator_for_which_torch_has_no_deterministic_algorithm_is_saved(x, deterministic):
    deterministic(True)

    assert len(reasons(x, UNSTEADY["cumprod"])) == 1


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_algorithms_of_which_torch_only_warns_are_saved(x, deterministic):
    deterministic(True, warn_only=True)

    assert len(reasons(x, UNSTEADY["index_add"])) == 1


@pytest.mark.parametrize("setting", ["deterministic", "enabled"])
def test_a_transposed_convolution_is_recomputed_if_cudnn_repeats_its_bits(x, setting, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, setting, setting == "deterministic")

    assert reasons(x, UNSTEADY["convolution"]) == []


def test_a_backward_inside_the_region_is_saved(x):
    def operator(x):
        y = F.interpolate(image(x), scale_factor=2, mode="bilinear")
        return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]

    expected = gradient(x, operator, torch.enable_grad())

    assert torch.equal(gradient(x, operator, ebb.region()), expected)


def test_each_name_in_the_table_is_an_operator():
    names = re.findall(r'{"(aten::\w+)", Unordered', TABLE)
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}

    assert len(names) > 60
    assert [name for name in names if name not in known] == []
    assert {f"aten::{name}" for name in UNSTEADY} - {*names} == {"aten::convolution"}


# Convolutions whose kernels are chosen by timing too: Note [Kernels chosen by timing]


@pytest.fixture
def times(device, monkeypatch):
    """Switches the timing on or off. The device's convolution is the CPU's."""
    library = torch.library.Library("aten", "IMPL")

    def convolution(x, weight, bias, *rest):
        bias = None if bias is None else bias.cpu()
        return torch.convolution(x.cpu(), weight.cpu(), bias, *rest).to(device)

    def backward(grad, x, weight, *rest):
        *rest, mask = rest
        found = torch.ops.aten.convolution_backward(
            grad.cpu(), x.cpu(), weight.cpu(), None, *rest, mask
        )
        return tuple(None if part is None else part.to(device) for part in found)

    library.impl("convolution_overrideable", convolution, "PrivateUse1")
    library.impl("convolution_backward_overrideable", backward, "PrivateUse1")
    yield lambda value: monkeypatch.setattr(torch.backends.cudnn, "benchmark", value)
    library._destroy()


class Block:
    """A convolution between other operators."""

    def __init__(self, device, policy=None):
        self.x = torch.randn(2, 3, 8, 8).to(device).requires_grad_()
        self.weight = torch.randn(4, 3, 3, 3).to(device).requires_grad_()
        self.policy = policy

    def eager(self):
        return F.conv2d(self.x.sin(), self.weight).exp().sum()

    def forward(self):
        with ebb.region(self.policy, "stem"):
            return self.eager()

    def gradients(self, loss):
        return torch.autograd.grad(loss, (self.x, self.weight))


def rows_of_a_block(device, policy):
    """How the report tells of the convolution; gradients are eager's."""
    block = Block(device, policy)
    expected = block.gradients(block.eager())
    with ebb.record_reports():
        found = block.gradients(block.forward())
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, found, strict=True))
    return [row for row in ebb.report().rows if row.op.startswith("aten::convolution")]


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("timed", [False, True])
def test_convolution_chosen_by_timing_is_saved(device, times, timed, forced):
    times(timed)
    policy = (
        ebb.Policy([ebb.Rule("aten::convolution", ebb.RECOMPUTE, force=True)]) if forced else None
    )

    (row,) = rows_of_a_block(device, policy)

    kept = timed and not forced
    assert ("the algorithm by timing" in row.reason) == kept
    assert row.replays == (0 if kept else 1)
    assert (row.fate == "kept") == kept


@pytest.mark.parametrize("where", ["late", "cpu"])
def test_nothing_is_timed_without_cudnn_or_on_the_cpu(where, device, times, monkeypatch):
    times(True)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", where == "cpu")

    (row,) = rows_of_a_block(torch.device(where), None)

    assert "timing" not in row.reason
