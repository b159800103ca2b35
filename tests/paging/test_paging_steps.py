"""Steps of paging: schedules, and settings."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ebb
from ebb_tests.programs.paged import EVERYTHING, Mlp, check, fresh, gradients, region, same


class Pipeline:
    """Layers of one stage each, run forward and backward one by one."""

    def __init__(self, layers):
        self.layers = [Mlp(layers=1, seed=i) for i in range(layers)]
        self.paged = True
        self.losses = {}

    def forward(self, layer, batch, live, stage=None):
        net = self.layers[layer]
        named = (
            contextlib.nullcontext()
            if stage is None
            else ebb.experimental.paging.microbatch(batch, stage=stage)
        )
        inside = ebb.region(EVERYTHING, f"layers.{layer}") if self.paged else torch.enable_grad()
        with named, inside:
            h = ebb.experimental.mark_rows(net.inputs(batch) * 1.5, torch.tensor(live))
            self.losses[layer, batch] = net.layer(h, 0)[:live].square().sum()

    def backward(self, layer, batch):
        self.losses.pop((layer, batch)).backward()

    def run(self, order, loads, **options):
        for direction, layer, batch in order:
            if direction == "F":
                self.forward(layer, batch, loads[batch], **options)
            else:
                self.backward(layer, batch)

    def plain(self, order, loads):
        self.paged = False
        self.run(order, loads)
        self.losses.clear()
        self.paged = True
        return self.gradients()

    def gradients(self):
        found = [weight.grad for net in self.layers for weight in net.weights]
        for net in self.layers:
            for weight in net.weights:
                weight.grad = None
        return found


def one_f_one_b(layers, batches, depth):
    order, open_ = [], []
    for batch in range(batches):
        order += [("F", layer, batch) for layer in range(layers)]
        open_.append(batch)
        if len(open_) > depth:
            first = open_.pop(0)
            order += [("B", layer, first) for layer in reversed(range(layers))]
    for batch in open_:
        order += [("B", layer, batch) for layer in reversed(range(layers))]
    return order


SCHEDULES = {
    "forward then backward": one_f_one_b(3, 1, 0),
    "all forwards first": one_f_one_b(2, 4, 4),
    "1F1B": one_f_one_b(2, 6, 2),
    "interleaved": [
        (d, layer, batch)
        for d, layer, batch in [
            ("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("F", 0, 2),
            ("B", 0, 0), ("B", 1, 1), ("F", 1, 2), ("B", 0, 1), ("B", 1, 2), ("B", 0, 2),
        ]
    ],
    "ends with a forward": [("F", 0, 0), ("B", 0, 0), ("F", 1, 0)],
}  # fmt: skip


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name, prefetch):
    ebb.config.update(paging_headroom=8.0, paging_prefetch=prefetch)
    order = SCHEDULES[name]
    stages = Pipeline(3)
    expected = stages.plain(order, [30] * 6)
    for _ in range(4):
        with ebb.experimental.paging.step():
            stages.run(order, [30] * 6)
        assert ebb.experimental.paging.step_ok()
        found = stages.gradients()
        assert [g is None for g in found] == [g is None for g in expected]
        assert same([g for g in expected if g is not None], [g for g in found if g is not None])
        stages.losses.clear()
    stats = ebb.stats()["paging"]
    assert stats["recorded_steps"] == 1
    assert len(stats["schedule"]) == len(order)
    assert stats["schedule"][0] == "forward of 'layers.0', stage 0, micro-batch 0"
    turns = sum(
        a[0] == "F" and b[0] == "B" and a[1:] == b[1:] for a, b in itertools.pairwise(order)
    )
    assert (stats["resident"] > 0) == (turns > 0)


def test_a_layer_whose_backward_comes_next_stays():
    stages = Pipeline(3)
    order = SCHEDULES["forward then backward"]
    for _ in range(3):
        with ebb.experimental.paging.step():
            stages.run(order, [20] * 6)
    stats = ebb.stats()["paging"]
    assert stats["resident"] == 2 * stats["stashed"] / 3 / 3  # one layer of three, in two of three
    with fresh():
        stages.run(order, [20] * 6)
        assert stats["live_bytes"] < 0.75 * ebb.stats()["paging"]["live_bytes"]


def read_by_backward(h):
    y = h.sin()
    h.data.mul_(2)  # as in eager, backward sees it
    return y, None


def read_by_a_recipe(h):
    """What is computed again is computed from a copy of what was there."""
    y = h.exp().cos()
    kept = h.sin()
    h.data.mul_(2)
    return y, kept


@pytest.mark.parametrize(
    ("write", "policy"),
    [(read_by_backward, EVERYTHING), (read_by_a_recipe, ebb.Policy({"aten::mm": ebb.PAGE}))],
    ids=["read by backward", "read by a recipe"],
)
def test_a_layer_that_stays_may_be_written(write, policy):
    w = torch.randn(4, 4, requires_grad=True)

    def program():
        h = ebb.experimental.mark_rows(torch.arange(32.0).view(8, 4) / 10 @ w, torch.tensor(3))
        y, kept = write(h)
        return y[:3].sum(), kept

    (expected,) = torch.autograd.grad(program()[0], [w])
    for _ in range(3):
        with ebb.experimental.paging.step():
            with ebb.region(policy):
                loss, kept = program()
            (found,) = torch.autograd.grad(loss, [w])
        assert torch.equal(expected, found)
        assert (kept is None) == (write is read_by_backward)
    assert policy is EVERYTHING or ebb.stats()["paging"]["resident"] == 2


def test_unneeded_graphs_give_their_pages_back(net):
    ebb.config.paging.page_rows = 1
    x, n = net.inputs(0), torch.tensor(20)

    def forward():
        return net(x, n, region)

    def backward(loss):
        torch.autograd.grad(loss, net.weights)

    with ebb.experimental.paging.step(False):
        first, second = forward(), forward()
        backward(first)
        first = forward()
        backward(second)
        backward(first)
    assert not any(pool["stack"] for pool in ebb.stats()["paging"]["pools"])
    for dropped in (0, 1, 2, 1, 0, 2):
        with ebb.experimental.paging.step(False):
            losses = [forward(), forward()]
            del losses[:dropped]
            for loss in losses:
                backward(loss)
        assert ebb.experimental.paging.step_ok()


def test_another_order_raises_and_names_both_entries():
    stages = Pipeline(2)
    with ebb.experimental.paging.step():
        stages.run(one_f_one_b(2, 1, 0), [20])
    message = (
        r"entry 1 is the forward of 'layers.0', stage 0, micro-batch 1, but was the forward of "
        r"'layers.1', stage 0, micro-batch 0"
    )
    with pytest.raises(RuntimeError, match=message), ebb.experimental.paging.step():
        stages.run([("F", 0, 0), ("F", 0, 1)], [20, 20])
    stages.losses.clear()
    stages.gradients()
    for _ in range(2):  # it is recorded again
        with ebb.experimental.paging.step():
            stages.run([("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)], [20, 20])
        assert ebb.experimental.paging.step_ok()


def test_a_step_that_is_too_short_or_too_long_raises():
    stages = Pipeline(2)
    order = one_f_one_b(2, 2, 1)
    with ebb.experimental.paging.step():
        stages.run(order, [20, 20])
    with (
        pytest.raises(RuntimeError, match="entry 6 is the end of the step, but was the backward"),
        ebb.experimental.paging.step(),
    ):
        stages.run(order[:6], [20, 20])
    stages.losses.clear()
    with ebb.experimental.paging.step():
        stages.run(order, [20, 20])
    with (
        pytest.raises(RuntimeError, match=r"is the forward of .*, but was the end of the step"),
        ebb.experimental.paging.step(),
    ):
        stages.run([*order, ("F", 0, 2)], [20, 20, 20])
    stages.losses.clear()


def test_stages_and_micro_batches_may_be_named():
    stages = Pipeline(1)
    for _ in range(2):
        with ebb.experimental.paging.step():
            stages.forward(0, 7, 20, stage=2)
            stages.backward(0, 7)
    assert ebb.stats()["paging"]["schedule"] == [
        "forward of 'layers.0', stage 2, micro-batch 7",
        "backward of 'layers.0', stage 2, micro-batch 7",
    ]
    for wrong in ({"index": -1}, {"stage": -1}, {"index": 2**40}):
        with (
            pytest.raises(ValueError, match="from 0 to 2147483647; got"),
            ebb.experimental.paging.microbatch(**wrong),
        ):
            pass
    with (
        pytest.raises(TypeError, match="must be an int"),
        ebb.experimental.paging.microbatch("first"),
    ):
        pass


def test_steps_do_not_nest_and_failing_ones_are_forgotten():
    with ebb.experimental.paging.step(), pytest.raises(RuntimeError, match="is already open"):
        ebb.experimental.paging.step().__enter__()
    stages = Pipeline(2)
    order = one_f_one_b(2, 2, 1)
    with pytest.raises(KeyError), ebb.experimental.paging.step():
        stages.run([*order[:3], ("B", 5, 5)], [20, 20])
    stages.losses.clear()
    for _ in range(2):
        with ebb.experimental.paging.step():
            stages.run(order, [20, 20])
        assert ebb.experimental.paging.step_ok()
    with (
        ebb.experimental.paging.step(),
        pytest.raises(RuntimeError, match="was called inside a step"),
    ):
        ebb.experimental.paging.reset()
    ebb.experimental.paging.step_ok()


@settings(max_examples=80)
@given(st.data())
def test_random_schedules(data):
    layers = data.draw(st.integers(1, 3))
    batches = data.draw(st.integers(1, 4))
    loads = data.draw(st.lists(st.integers(0, 40), min_size=batches, max_size=batches))
    order, todo, started = [], [(la, b) for b in range(batches) for la in range(layers)], []
    while todo or started:
        if todo and (not started or data.draw(st.booleans())):
            started.append(todo.pop(0))
            order.append(("F", *started[-1]))
        else:
            order.append(("B", *started.pop(data.draw(st.integers(0, len(started) - 1)))))
    stages = Pipeline(layers)
    bracketed = data.draw(st.booleans())
    if not bracketed:  # a step is over when nothing is away: it may be one micro-batch
        loads = [40] * batches
    expected = stages.plain(order, loads)
    with fresh(
        page_rows=data.draw(st.sampled_from([1, 8, 64])),
        prefetch=data.draw(st.integers(0, 1)),
        headroom=1.0 if bracketed else 16.0,
    ):
        for _ in range(3):
            with ebb.experimental.paging.step() if bracketed else contextlib.nullcontext():
                stages.run(order, loads)
            assert ebb.experimental.paging.step_ok()
            assert same(expected, stages.gradients())


# Settings


@pytest.mark.parametrize(
    ("given_", "error", "message"),
    [
        ({"page_rows": 0}, ValueError, "page_rows must be from 1 to"),
        ({"page_rows": "many"}, TypeError, "page_rows must be an int"),
        ({"headroom": 0.5}, ValueError, "headroom must be from 1 to 1000"),
        ({"headroom": float("nan")}, ValueError, "headroom must be from 1 to 1000"),
        ({"headroom": 1e30}, ValueError, "headroom must be"),
        ({"headroom": float("inf")}, ValueError, "headroom must be"),
        ({"headroom": 10**400}, ValueError, "headroom must be"),
        ({"headroom": "much"}, TypeError, "headroom must be a number"),
        ({"host_headroom": -1}, ValueError, "host_headroom must be from 0 to 1000"),
        ({"device_limit": "1 mile"}, ValueError, "device_limit must be a number of bytes"),
        ({"overflow": "ignore"}, ValueError, "overflow must be one of deferred, blocking, assert"),
        ({"dead_rows": 0}, ValueError, "dead_rows must be one of repeat, zero, nan, none"),
        ({"prefetch": 2}, ValueError, "prefetch must be from -1 to 1; got 2"),
        ({"prefetch": True}, TypeError, "prefetch must be an int"),
    ],
)
def test_settings_that_make_no_sense(given_, error, message):
    before = ebb.config.to_dict()
    with pytest.raises(error, match=message):
        ebb.config.update({f"paging.{name}": value for name, value in given_.items()})
    assert ebb.config.to_dict() == before


def test_a_device_limit_too_small_for_one_tensor(net):
    ebb.config.paging.device_limit = 16
    with pytest.raises(ValueError, match=r"device_limit, 16 bytes, is too small"):
        gradients(net, net.inputs(0), torch.tensor(20), region)
    ebb.config.paging.device_limit = "1MiB"
    for _ in range(2):
        check(net, 20)


def test_a_device_limit_is_kept():
    net = Mlp(layers=6, width=64, rows=64)
    limit = 100_000
    ebb.config.update(paging_device_limit=limit, paging_host_headroom=1.0)
    for _ in range(3):
        check(net, 60)
    stats = ebb.stats()["paging"]
    pages = sum(p["device_pages"] * p["page_rows"] * p["row_bytes"] for p in stats["pools"])
    assert pages <= limit < stats["live_bytes"]


def _rows_of(count, weight, policy):
    lives = (torch.arange(512) < count).unsqueeze(1)
    x = torch.where(lives, torch.randn(512, 16), 0)
    with ebb.region(policy):
        y = (ebb.experimental.mark_rows(x, torch.tensor(count)) @ weight).tanh().exp()
    return torch.where(lives, y, 0).mean()


def test_run_step_does_not_take_what_came_before_for_its_own():
    """Gradients of a micro-batch outside of it are NaN, and stay so when the step runs again."""
    policy = ebb.Policy({"aten::mm": ebb.PAGE})
    weight = torch.randn(16, 16, requires_grad=True)
    for _ in range(2):
        weight.grad = None
        _rows_of(60, weight, policy).backward()
        ebb.experimental.paging.run_step(lambda: _rows_of(60, weight, policy).backward())
        assert weight.grad.isfinite().all()
    weight.grad = None
    _rows_of(400, weight, policy).backward()

    with pytest.raises(
        ebb.experimental.PageOverflowError, match="in a backward that ran before this"
    ):
        ebb.experimental.paging.run_step(lambda: _rows_of(60, weight, policy).backward())

    weight.grad = None
    assert not ebb.experimental.paging.step_ok()  # they were told, and cleared the gradients
    ebb.experimental.paging.run_step(lambda: _rows_of(400, weight, policy).backward())
    assert weight.grad.isfinite().all()


def test_a_step_that_fails_is_not_kept_alive():
    policy = ebb.Policy({"aten::mm": ebb.PAGE})
    weight = torch.randn(16, 16, requires_grad=True)
    held = []

    def fails():
        held.append(weakref.ref(_rows_of(40, weight, policy)))
        raise KeyError

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with contextlib.suppress(KeyError):
                ebb.experimental.paging.run_step(fails)
        assert [one() for one in held] == [None] * 3
    finally:
        gc.enable()
