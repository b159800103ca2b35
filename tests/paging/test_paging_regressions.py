"""What an adversary found in paging: programs that were silently wrong once."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb_tests import fork_server
from ebb_tests.programs.paged import EVERYTHING, same
from ebb_tests.time_limits import HANGS

X = torch.randn(64, 4)
PRODUCTS = ebb.Policy({"aten::mm": ebb.PAGE})
POLICIES = pytest.mark.parametrize("policy", [EVERYTHING, PRODUCTS], ids=["all", "products"])


def weight():
    return torch.randn(4, 4, requires_grad=True)


def check(program, leaves, policy=EVERYTHING, loads=(7, 20, 0, 3, 20)):
    """The gradients of `program(rows)` are eager's, after the pools have been sized."""
    ebb.config.paging.headroom = 8.0
    for live in (20, *loads):
        expected = torch.autograd.grad(program(live), leaves)
        with ebb.region(policy):
            loss = program(live)
        found = torch.autograd.grad(loss, leaves)
        assert ebb.experimental.paging.step_ok()
        assert same(expected, found)


def mark(h, live):
    return ebb.experimental.mark_rows(h, torch.tensor(live))


def standardised(h):
    mean = h.mean(-1, keepdim=True)
    return (h - mean) / (h.var(-1, keepdim=True) + 1e-5).sqrt()


# Zeros in dead rows would be 0 / 0 in backward, and NaN in the whole of a weight's gradient.
HARD_AT_ZERO = {
    "over its sum": lambda h: h.exp() / h.exp().sum(-1, keepdim=True),
    "softmax over its sum": lambda h: (s := h.softmax(-1)) / s.sum(-1, keepdim=True),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "over its norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "standardised": standardised,
    "log": lambda h: h.sigmoid().log(),
    "logit": lambda h: h.sigmoid().logit(),
    "pow": lambda h: (h.sigmoid()) ** -0.5,
    "xlogy": lambda h: torch.xlogy(h, h.sigmoid()),
    "lgamma": lambda h: h.exp().lgamma(),
    "addcdiv": lambda h: torch.addcdiv(h, h, h.exp()),
    "prod": lambda h: h.exp().prod(-1),
}


@POLICIES
@pytest.mark.parametrize("name", HARD_AT_ZERO)
def test_operators_that_zeros_are_hard_for(name, policy):
    w = weight()
    check(lambda n: HARD_AT_ZERO[name](mark(X @ w, n))[:n].square().sum(), [w], policy)


LIVES = (torch.arange(64) < 7)[:, None]


@pytest.mark.parametrize(
    "join",
    [
        lambda h, r: torch.where(LIVES, h, r),
        lambda h, r: h * LIVES + r,
        lambda h, r: h.masked_fill(~LIVES, 0) + r,
        lambda h, r: torch.cat([h, r], 1)[:, 4:],
        lambda h, r: (h * 1).copy_(r),
        lambda h, r: torch.add(r, h * LIVES),
        lambda h, r: torch.addmm(r, h * LIVES, torch.eye(4)),
        lambda h, r: (h * LIVES).add_(r),
    ],
)
def test_a_residual_makes_live_rows_of_dead_ones(join):
    w, residual = weight(), torch.randn(64, 4, requires_grad=True)
    check(lambda n: join(mark(X @ w, 7), residual).sin().sum(), [residual], loads=(7, 7))


def test_counts_of_one_storage():
    counts, w = torch.tensor([[1, 2], [9, 3]]), weight()

    def program(_):
        a = ebb.experimental.mark_rows((X @ w).clone(), counts[0]).sin()[:3].sum()
        return a + ebb.experimental.mark_rows((X @ w).clone(), counts[:, 0]).sin()[:10].sum()

    check(program, [w], loads=(7, 7))


def test_a_count_that_is_written_unseen():
    w = weight()

    def program(_):
        count = torch.tensor(3)
        a = ebb.experimental.mark_rows((X @ w).clone(), count).sin()[:3].sum()
        count.data.fill_(10)
        return a + ebb.experimental.mark_rows((X @ w).clone(), count).sin()[:10].sum()

    check(program, [w], loads=(7, 7))


@POLICIES
@pytest.mark.parametrize(
    "mix",
    [
        lambda a, q: a.detach().t() @ q,
        lambda a, q: q.t() @ a.detach(),
        lambda a, q: a.detach()[1:] * q[1:],
        lambda a, q: a.detach()[None] * q[:, None],
        lambda a, q: torch.dot(a.detach().flatten(), q.flatten()),
    ],
)
def test_an_operator_that_mixes_saves_what_was_made_of_paged_rows(mix, policy):
    w, q = weight(), torch.randn(64, 4, requires_grad=True)
    check(lambda n: mix(mark(X @ w, n).sin(), q).sum(), [q], policy)


@pytest.mark.parametrize("order", ["mark, name, mix", "mark, mix, name", "name, mark, mix"])
def test_names(order):
    w = weight()
    policy = ebb.Policy([ebb.Rule("*", ebb.PAGE, name="h")])

    def program(n):
        h, mixed = X @ w, None
        for what in order.split(", "):
            if what == "mark":
                mark(h, n)
            elif what == "name":
                ebb.checkpoint_name(h, "h")
            else:
                mixed = h.detach().sum(0)
        return (h * mixed)[:n].sum()

    check(program, [w], policy)


def test_groups_along_columns():
    w, q = weight(), torch.randn(8, 8, 8, requires_grad=True)

    def program(n):
        h = mark((X[:8] @ w).repeat(1, 2), 2)
        ends = torch.arange(1, 9).int()
        return (torch._grouped_mm(h.detach(), torch.ones(8, 8), offs=ends) * q)[:, :2].sum()

    check(program, [q], loads=(2, 2))


@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings(options):
    table = torch.randn(10, 4, requires_grad=True)
    rows = torch.full((24,), 9)
    rows[:5] = torch.arange(5) % 3

    def program(_):
        i = mark(rows + 0, 5)
        return F.embedding(i, table, padding_idx=9, **options)[:5].sum()

    for _ in range(3):
        (expected,) = torch.autograd.grad(program(5), [table])
        with ebb.region(EVERYTHING):
            loss = program(5)
        (found,) = torch.autograd.grad(loss, [table])
        assert torch.equal(expected.to_dense(), found.to_dense())
        assert expected.layout == found.layout
        if options.get("sparse"):
            assert torch.equal(expected._indices(), found._indices())


def test_a_prefix_that_is_no_whole_number_of_rows():
    x, w = torch.randn(4, 9), torch.randn(9, 9, requires_grad=True)

    def program(_):
        y = mark((x @ w).clone(), 2).flatten()[:32].sin()
        return (y * y)[:18].sum()

    check(program, [w], loads=(2, 2))


@POLICIES
def test_a_part_is_written_from_rows_of_another_count(policy):
    w, v = weight(), torch.randn(4, 4)

    def blocks(n):
        n = min(n, 8)
        buffer = mark(X[:16] @ w, n + 8)
        for e in (0, 1):
            buffer[8 * e : 8 * e + 8] = F.silu(mark(X[8 * e : 8 * e + 8] @ w, n))
        y = (buffer.tanh() * buffer) @ v
        return y[:n].sum() + y[8 : 8 + n].sum()

    def columns(n):
        a, b = mark(X @ w, 40), mark(X @ w * 2, min(n, 40))
        a[:, :2] = b[:, :2]
        return a[:, 2:].sin()[:40].sum()

    check(blocks, [w], policy)
    check(columns, [w], policy)


def test_a_residual_of_one_dimension():
    w, residual = weight(), torch.randn(64, requires_grad=True)

    def program(n):
        h = mark(torch.where((torch.arange(64) < n)[:, None], X @ w, 0), n)
        return torch.addmv(residual, h, torch.ones(4)).sin().sum()

    check(program, [residual])


def test_one_number_in_two_tensors():
    w = weight()

    def program(n):
        h = (X @ w).clone()
        return (mark(h, n) * 2 + mark(h, n) * 3)[:n].square().sum()

    check(program, [w])


# Overflow


def loss_of(w, live, dtype=torch.float):
    with ebb.region(EVERYTHING):
        h = ebb.experimental.mark_rows((X @ w).to(dtype).clone(), torch.tensor(live))
        return h.sin()[:live].sum().float()


def warm():
    w = weight()
    loss_of(w, 2).backward()
    w.grad = None
    return w


@pytest.mark.parametrize("by_name", [False, True])
def test_closures_of_optimizers(by_name):
    w = warm()
    before = w.detach().clone()
    optimizer = torch.optim.SGD([w], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(w, 60)
        loss.backward()
        return loss

    with pytest.raises(ebb.experimental.PageOverflowError):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert torch.equal(before, w)
    assert not ebb.experimental.paging.step_ok()
    optimizer.step(closure)
    assert not torch.equal(before, w)
    assert w.isfinite().all()


@pytest.mark.parametrize("gone", ["with a new kind", "by a reset"])
def test_errors_are_told_though_the_pools_have_gone(gone):
    w = warm()
    loss_of(w, 60).backward()
    if gone == "by a reset":
        ebb.experimental.paging.reset()
    else:
        loss_of(w, 2, torch.double).backward()  # has no pool: the next step is recorded
        loss_of(w, 2).backward()
    with pytest.raises(ebb.experimental.PageOverflowError):
        torch.optim.SGD([w], lr=0.1).step()
    assert not ebb.experimental.paging.step_ok()
    loss_of(w, 60 if gone == "by a reset" else 2).backward()
    assert ebb.experimental.paging.step_ok()


def test_what_a_dropped_pool_cannot_give_back_raises():
    w = warm()
    innocent, full = loss_of(w, 1), loss_of(w, 60)
    del full
    ebb.experimental.paging.reset()
    with pytest.raises(RuntimeError, match="its page pool failed in the meantime"):
        innocent.backward()


def test_a_step_that_is_not_of_one_order_overflows_in_a_micro_batch():
    w = warm()

    def step():
        for live in (3, 60, 3):
            loss_of(w, live).backward()

    ebb.experimental.paging.run_step(step)
    found, w.grad = w.grad, None
    for live in (3, 60, 3):
        (X @ w).sin()[:live].sum().backward()
    assert torch.equal(found, w.grad)


def test_backward_from_a_gradient_edge():
    w = warm()
    edge = torch.autograd.graph.get_gradient_edge

    def step():
        torch.autograd.backward([edge(loss_of(w, 60))], [torch.ones(())])

    ebb.experimental.paging.run_step(step)
    found, w.grad = w.grad, None
    loss_of(w, 60).backward()
    assert torch.equal(found, w.grad)
    assert ebb.stats()["paging"]["overflows"] == 1


def test_backward_into_chosen_tensors():
    w = warm()
    features = X @ w
    features.retain_grad()

    def step():
        with ebb.region(EVERYTHING):
            loss = ebb.experimental.mark_rows(features * 1, torch.tensor(60)).sin()[:60].sum()
        loss.backward(inputs=[features], retain_graph=True)

    ebb.experimental.paging.run_step(step)
    expected = features.detach().cos()
    expected[60:] = 0
    assert torch.equal(features.grad, expected)


def test_steps_in_two_threads():
    """They come one after the other, or say so; torch's backward is left as it was."""
    w = warm()
    go, inside = threading.Event(), threading.Event()

    def step():
        inside.set()
        go.wait()

    thread = threading.Thread(target=lambda: ebb.experimental.paging.run_step(step))
    thread.start()
    inside.wait()
    try:
        with pytest.raises(RuntimeError, match="is already open"):
            ebb.experimental.paging.run_step(lambda: loss_of(w, 60).backward())
    finally:
        go.set()
        thread.join()
    ebb.experimental.paging.run_step(lambda: loss_of(w, 60).backward())
    found, w.grad = w.grad, None
    (X @ w).sin()[:60].sum().backward()
    assert torch.equal(found, w.grad)


DEADLOCK = """
import threading, torch, ebb
ebb.config.paging.overflow = "blocking"
x, w = torch.randn(64, 4), torch.randn(4, 4, requires_grad=True)
over = threading.Event()
def ask():
    while not over.is_set():
        ebb.stats()["paging"]
thread = threading.Thread(target=ask); thread.start()
policy = ebb.Policy(default=ebb.PAGE)
for i in range(1500):
    live = 2 if i % 2 == 0 else 60
    try:
        with ebb.region(policy):
            marked = ebb.experimental.mark_rows((x @ w).clone(), torch.tensor(live))
            loss = marked.sin()[:live].sum()
        loss.backward()
    except ebb.experimental.PageOverflowError:
        ebb.experimental.paging.reset()
over.set(); thread.join()
print("done")
"""


@pytest.mark.sweep
def test_no_deadlock_between_the_lock_and_the_gil():
    done = fork_server.run(["-c", DEADLOCK], timeout=HANGS)
    assert done.stdout == "done\n", done.stderr


def test_a_graph_that_is_kept_does_not_keep_recording_on():
    w = weight()
    kept = loss_of(w, 3)
    for _ in range(10_100):
        with ebb.region(EVERYTHING):
            ebb.experimental.mark_rows(X @ w, torch.tensor(3)).sin()
    assert ebb.stats()["paging"]["recorded_steps"] >= 1
    kept.backward()
    with contextlib.suppress(RuntimeError):
        ebb.experimental.paging.step_ok()


def test_found_inf_knows_of_pools_that_have_gone():
    w = warm()
    loss_of(w, 60).backward()
    assert ebb.experimental.paging.found_inf("cpu").item() == 1.0
    loss_of(w, 2, torch.double).backward()
    loss_of(w, 2).backward()
    assert ebb.experimental.paging.found_inf("cpu").item() == 1.0
    ebb.experimental.paging.reset()
    assert ebb.experimental.paging.found_inf("cpu").item() == 1.0


def test_a_reset_does_not_make_gradients_good():
    w = warm()
    loss_of(w, 60).backward()
    assert not ebb.experimental.paging.step_ok()
    ebb.experimental.paging.reset()
    with pytest.raises(ebb.experimental.PageOverflowError):
        torch.optim.SGD([w], lr=0.1).step()
    assert w.isfinite().all()


@pytest.mark.parametrize("mode", ["deferred", "blocking", "assert"])
def test_an_error_that_was_raised_is_dealt_with(mode):
    ebb.config.paging.overflow = mode
    w = warm()
    optimizer = torch.optim.SGD([w], lr=0.01)
    raised = []
    for live in (60, 2, 60, 2):
        optimizer.zero_grad()
        try:
            loss_of(w, live).backward()
            optimizer.step()
        except RuntimeError as error:
            raised.append(str(error))
    assert len(raised) == 1
    assert w.isfinite().all()


def test_optimizers_that_have_nothing_to_do_with_it():
    w, other = warm(), weight()
    loss_of(w, 60).backward()
    assert not ebb.experimental.paging.step_ok()
    (X @ other).sum().backward()
    torch.optim.SGD([other], lr=0.1).step()
    with pytest.raises(ebb.experimental.PageOverflowError):
        torch.optim.SGD([w], lr=0.1).step()


def test_optimizers_that_can_be_called():
    class Callable(torch.optim.SGD):
        def __call__(self):
            raise AssertionError

    w = warm()
    loss_of(w, 2).backward()
    Callable([w], lr=0.1).step()
