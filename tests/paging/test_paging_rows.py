"""Which operators pass on which rows live, and what happens where nobody knows. See Note [Rows]."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.programs.paged import EVERYTHING, Keep, same

R, D, LIVE = 24, 6, 7


def weights():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(D, D, generator=generator, device="cpu").requires_grad_()


W, B = weights(), torch.randn(D)
COUNT = torch.tensor(LIVE)
OFFSETS = torch.arange(1, 9).int()

KEEP = {
    "mm": lambda h: h @ W,
    "addmm": lambda h: torch.addmm(B, h, W),
    "linear": lambda h: F.linear(h, W, B),
    "add": lambda h: h + B,
    "add with rows": lambda h: h * (h + 1),
    "gelu": F.gelu,
    "where": lambda h: torch.where(h > 0, h, h.exp()),
    "clamp": lambda h: h.clamp(-1, 1),
    "pow": lambda h: h**3,
    "to": lambda h: h.double(),
    "clone": lambda h: h.clone(),
    "layer_norm": lambda h: F.layer_norm(h, (D,)),
    "rms_norm": lambda h: F.rms_norm(h, (D,)),
    "softmax": lambda h: h.softmax(-1),
    "log_softmax": lambda h: h.log_softmax(1),
    "sum": lambda h: h.sum(-1, keepdim=True),
    "mean": lambda h: h.mean(1),
    "amax": lambda h: h.amax(-1),
    "max": lambda h: h.max(dim=1).values,
    "logsumexp": lambda h: h.logsumexp(1),
    "cumsum": lambda h: h.cumsum(-1),
    "sort": lambda h: h.sort(dim=-1).values,
    "topk": lambda h: h.topk(2, dim=1).values,
    "glu": lambda h: F.glu(h, -1),
    "cat": lambda h: torch.cat([h, h * 2, h[:, :1]], dim=1),
    "dropout": lambda h: torch.native_dropout(h, 0.5, True)[0],
    "a marked column": lambda h: h
    * ebb.experimental.mark_rows(torch.arange(R).view(R, 1) * 2, COUNT),
    "halves": lambda h: F.silu(h[:, : D // 2]) * h[:, D // 2 :],
    "three dimensions": lambda h: (h.view(R, 2, D // 2) * 2).flatten(1),
    "linear of three": lambda h: F.linear(h.view(R, 2, D // 2), W[: D // 2, : D // 2]),
    "bmm": lambda h: torch.bmm(h.view(R, 2, D // 2), h.view(R, D // 2, 2)),
    "in place": lambda h: (h * 1).mul_(2).relu_(),
    "masked_fill": lambda h: h.masked_fill(h > 1, 0),
    "copy into": lambda h: torch.empty_like(h).copy_(h),
    "grouped_mm": lambda h: torch._grouped_mm(
        torch.cat([h, h[:, :2]], 1), torch.ones(2, 8, 8), offs=torch.tensor([3, LIVE]).int()
    ),
}

MIX = {
    "a column without a mark": lambda h: h * torch.arange(R).view(R, 1),
    "a residual": lambda h: h + torch.ones(R, D),
    "a mask": lambda h: torch.where(torch.arange(R).view(R, 1) < LIVE, h, 0),
    "a mask written": lambda h: h.masked_fill(torch.arange(R).view(R, 1) >= LIVE, 0),
    "columns of something else": lambda h: torch.cat([h, torch.ones(R, 1)], dim=1),
    "a residual in a product": lambda h: torch.addmm(torch.ones(R, D), h, W),
    "batches without a mark": lambda h: torch.bmm(h.view(R, 2, 3), torch.ones(R, 3, 3)),
    "written over": lambda h: (h * 1).copy_(torch.ones(R, D)),
    "filled": lambda h: (h * 1).fill_(3.0),
    "an out": lambda h: torch.add(torch.ones(R, D), torch.ones(R, D), out=h.detach() * 1),
    "groups along columns": lambda h: torch._grouped_mm(
        h.view(2 * R, D // 2)[:4].repeat(2, 8)[:8, :8], torch.ones(8, 8), offs=OFFSETS
    ),
    "a prefix of all elements": lambda h: h.flatten()[: R * 5] * 2,
    "prod": lambda h: h.prod(1),
    "embedding": lambda h: F.embedding(h.long().clamp(0, 5)[:, 0], W),
    "sum over rows": lambda h: h.sum(0),
    "sum of all": lambda h: h.sum(),
    "softmax over rows": lambda h: h.softmax(0),
    "softmax over rows, from the end": lambda h: h.softmax(-2),
    "cumsum over rows": lambda h: h.cumsum(0),
    "transposed product": lambda h: h.t() @ h,
    "product from the left": lambda h: torch.ones(R, R) @ h,
    "transposed copy": lambda h: h.t().contiguous(),
    "flipped": lambda h: h.flip(0),
    "shifted": lambda h: h[1:] * h[:-1],
    "index": lambda h: h[torch.arange(R - 1, -1, -1)],
    "gather": lambda h: h.gather(0, torch.zeros(R, D, dtype=torch.long)),
    "index_add": lambda h: torch.zeros(R, D).index_add(0, torch.arange(R).flip(0), h),
    "cat of rows": lambda h: torch.cat([h, h]),
    "roll": lambda h: h.roll(1, 0),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "broadcast to more": lambda h: h + torch.ones(R, R, D),
    "another count": lambda h: h
    * ebb.experimental.mark_rows(torch.ones(R, D), torch.tensor(LIVE - 1)),
    "std over rows": lambda h: h.std(0),
    "written across rows": lambda h: (h * 1).index_add_(0, torch.arange(R).flip(0), h),
    "stack": lambda h: torch.stack([h, h]),
}


def paged(function, policy=EVERYTHING):
    """Whether what a function makes of marked rows is paged when it is saved."""
    x = torch.randn(R, D).requires_grad_()
    with ebb.region(policy):
        h = ebb.experimental.mark_rows(x * 1, COUNT)
        with torch.no_grad():
            y = function(h)
        before = ebb.stats()["paging"]["stashed"]
        kept = Keep.apply(y.requires_grad_())
        stashed = ebb.stats()["paging"]["stashed"] - before
    assert kept is not None
    return stashed == 1


@pytest.mark.parametrize("name", [*KEEP, *MIX])
def test_operators_that_keep_rows_apart_are_paged(name):
    ebb.reset_stats()

    assert paged((KEEP | MIX)[name]) == (name in KEEP)

    assert name in KEEP or ebb.stats()["total"]["bytes_not_paged"] > 0


MIXED = ebb.Policy({"aten::mul": ebb.PAGE, "aten::mm": ebb.PAGE})


@pytest.mark.parametrize("name", [*KEEP, *MIX])
@pytest.mark.parametrize("policy", ["pages", "pages and recomputes"])
def test_gradients_behind_each(name, policy):
    """Dead rows matter to what mixes rows: it is kept as it was, and never made again of them."""
    function = (KEEP | MIX)[name]

    def program(x):
        torch.manual_seed(0)
        h = ebb.experimental.mark_rows(x * 1.5, COUNT)
        y = function(h).sin()
        if name in KEEP:
            y = y[:LIVE]
        return (y * y).sum() + h[:LIVE].sum()

    x = torch.randn(R, D).requires_grad_()
    expected = torch.autograd.grad(program(x), [x])[0]
    for _ in range(3):
        with ebb.region(EVERYTHING if policy == "pages" else MIXED):
            loss = program(x)
        found = torch.autograd.grad(loss, [x])[0]
        rows = LIVE if name == "grouped_mm" else R  # torch leaves the others as they are in memory
        assert torch.equal(expected[:rows], found[:rows])
        assert ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("late", [False, True], ids=["marked before", "marked after"])
def test_what_mixes_rows_is_not_made_again_of_paged_rows(late):
    """A sum over all rows, dead ones too, that only a recipe would know. If the mark comes after
    it, it is too late: the rows are kept, and counted."""
    w = torch.randn(D, D, requires_grad=True)
    x = torch.randn(R, D)

    def program():
        h = x @ w
        if not late:
            ebb.experimental.mark_rows(h, torch.tensor(LIVE))
        mixed = h.detach().sum(0)  # dead rows count
        if late:
            ebb.experimental.mark_rows(h, torch.tensor(LIVE))
        return ((h * mixed.exp())[:LIVE] * mixed).sum()

    (expected,) = torch.autograd.grad(program(), [w])
    for _ in range(3):
        ebb.reset_stats()
        with ebb.region(ebb.Policy({"aten::mm": ebb.PAGE})):
            loss = program()
        assert same_bits(expected, torch.autograd.grad(loss, [w])[0])
        assert not late or ebb.stats()["total"]["bytes_not_paged"] >= R * D * 4


def test_without_a_mark_page_means_save():
    x = torch.randn(R, D, requires_grad=True)
    ebb.reset_stats()
    with ebb.region(EVERYTHING):
        loss = (x * 2).sin().sum()
    expected = torch.autograd.grad((x * 2).sin().sum(), [x])
    assert same(expected, torch.autograd.grad(loss, [x]))
    total = ebb.stats()["total"]
    assert total["bytes_paged"] == 0
    assert total["bytes_not_paged"] == total["bytes_saved"] == R * D * 4


def test_inputs():
    w = torch.randn(D, D, requires_grad=True)
    x = torch.randn(R, D, requires_grad=True)
    inputs = ebb.Policy({}, inputs=ebb.PAGE)

    def program(region=None):
        h = x * 2
        with ebb.region(inputs) if region else torch.enable_grad():
            y = ebb.experimental.mark_rows(h, torch.tensor(LIVE)) @ w
        return (y[:LIVE] ** 2).sum()

    expected = torch.autograd.grad(program(), [x, w])
    for _ in range(3):
        ebb.reset_stats()
        assert same(expected, torch.autograd.grad(program(True), [x, w]))
        assert ebb.stats()["total"]["bytes_paged"] == R * D * 4


@pytest.mark.parametrize(
    "counts",
    [torch.tensor(LIVE), torch.tensor([3, 0, 4]), torch.tensor([LIVE]), torch.tensor([3, 4]).int()],
    ids=str,
)
def test_counts(counts):
    x = torch.randn(R, D, requires_grad=True)
    expected = torch.autograd.grad((x * 2).sin()[:LIVE].sum(), [x])
    for _ in range(2):
        given = counts.clone()
        with ebb.region(EVERYTHING):
            h = ebb.experimental.mark_rows(x * 2, given)
            given.zero_()  # it may be written
            loss = h.sin()[:LIVE].sum()
        assert same(expected, torch.autograd.grad(loss, [x]))


@pytest.mark.parametrize(
    ("x", "rows", "error", "message"),
    [
        (torch.ones(4, 2), torch.tensor(-1), ValueError, "rows is negative"),
        (torch.ones(4, 2), torch.tensor(5), ValueError, r"rows is 5, .* \[4, 2\]"),
        (torch.ones(4, 2), torch.tensor([-1, 3]), ValueError, "rows is negative"),
        (torch.ones(4, 2), torch.tensor(1.0), TypeError, "an integer dtype"),
        (torch.ones(4, 2), torch.tensor(True), TypeError, "an integer dtype"),
        (torch.ones(4, 2), torch.tensor([[1]]), ValueError, "1-D tensor of counts"),
        (torch.ones(4, 2), torch.tensor([]).long(), ValueError, "1-D tensor of counts"),
        (torch.ones(4, 2), 3, TypeError, "rows must be a tensor; got int"),
        ([1, 2], torch.tensor(1), TypeError, "x must be a tensor; got list"),
        (torch.ones(()), torch.tensor(1), ValueError, "needs a contiguous tensor"),
        (torch.ones(4, 2).t(), torch.tensor(1), ValueError, "needs a contiguous tensor"),
        (torch.ones(4, 2)[:2], torch.tensor(1), ValueError, "needs a contiguous tensor"),
        (torch.ones(4, 2)[:, :1], torch.tensor(1), ValueError, "needs a contiguous tensor"),
        (torch.ones(4, 2), torch.tensor(1, device="meta"), ValueError, "on x's device"),
        (torch.ones(8, 4), torch.tensor([2**62] * 4 + [1]), ValueError, "rows is negative"),
        (torch.ones(8, 4), torch.tensor([1, 0]).to_sparse(), ValueError, "must be a dense tensor"),
    ],
)
def test_marks_that_make_no_sense(x, rows, error, message):
    with ebb.region(EVERYTHING), pytest.raises(error, match=message):
        ebb.experimental.mark_rows(x, rows)
    if isinstance(x, torch.Tensor) and isinstance(rows, torch.Tensor):
        assert ebb.experimental.mark_rows(x, rows) is x  # outside of regions it does nothing


def test_a_second_count():
    with ebb.region(EVERYTHING):
        h = ebb.experimental.mark_rows(torch.ones(R, D), torch.tensor(3))
        ebb.experimental.mark_rows(h, torch.tensor(4))  # before any operator reads it
        _read = h.exp()
        with pytest.raises(ValueError, match="with another row count"):
            ebb.experimental.mark_rows(h, torch.tensor(5))


def test_no_rows_at_all():
    x = torch.randn(0, D, requires_grad=True)
    w = torch.randn(D, D, requires_grad=True)
    for _ in range(2):
        with ebb.region(EVERYTHING):
            loss = (ebb.experimental.mark_rows(x * 1, torch.tensor(0)) @ w).sin().sum()
        found = torch.autograd.grad(loss, [x, w])
        assert same((torch.zeros(0, D), torch.zeros(D, D)), found)


def test_a_tensor_marked_with_one_row():
    x = torch.randn(1, D, requires_grad=True)
    for live in (1, 1):
        expected = torch.autograd.grad(x.mul(2).sin()[:live].sum(), [x])
        with ebb.region(EVERYTHING):
            loss = ebb.experimental.mark_rows(x * 2, torch.tensor(live)).sin()[:live].sum()
        assert same(expected, torch.autograd.grad(loss, [x]))


def test_compiled_programs_pass_marks_by():
    def program(x):
        return ebb.experimental.mark_rows(x * 2, torch.tensor(3)).sin().sum()

    x = torch.randn(R, D)
    assert torch.compile(program, backend="eager")(x) == program(x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("counts", [7, [7], [3, 0, 4]], ids=str)
def test_counts_on_the_cpu_are_read_where_they_are(counts, dtype):
    """Two numbers of one count are all that is made of it, the first time."""
    count = torch.tensor(counts, dtype=dtype)
    with ebb.region(EVERYTHING):
        h = torch.randn(16, 8) * 1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(5):
                ebb.experimental.mark_rows(h, count)

    made = [event.name for event in profile.events() if event.name == "aten::empty"]
    converted = 0 if dtype == torch.int64 else 5
    assert len(made) <= 2 + 2 * converted


@pytest.mark.parametrize("counts", [-1, [3, -1], [1 << 62, 1 << 62, 1 << 62, 1 << 62], 17, [9, 8]])
def test_a_count_that_cannot_be_right_is_refused_on_the_cpu(counts):
    with ebb.region(EVERYTHING):
        h = torch.randn(16, 8) * 1
        with pytest.raises(ValueError, match=r"rows is .* which has shape \[16, 8\]"):
            ebb.experimental.mark_rows(h, torch.tensor(counts))
