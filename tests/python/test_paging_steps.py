"""Steps of paging: how pools are sized, schedules, and what happens when there is no room."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import EVERYTHING, PRODUCTS, Mlp, forget, fresh, gradients, same
from torch import nn

import ebb


@pytest.fixture(autouse=True)
def anew():
    with fresh():
        yield


def region():
    return ebb.region(EVERYTHING)


def run(net, live, seed=0):
    """One step and what eager gives."""
    x, n = net.inputs(seed), torch.tensor(live)
    return gradients(net, x, n), gradients(net, x, n, region)


# Overflow


@pytest.mark.parametrize("tier", ["none", "host"])
def test_overflow_shows_and_the_next_step_is_right(tier):
    if tier == "host":
        ebb.paging.configure(host_headroom=1.0)
    net = Mlp()
    expected, found = run(net, 10)
    assert same(expected, found)
    expected, found = run(net, 40)
    assert not same(expected, found)
    assert not ebb.paging.step_ok()
    assert not ebb.paging.step_ok()  # until another step begins
    for _ in range(2):
        expected, found = run(net, 40)
        assert same(expected, found)
        assert ebb.paging.step_ok()
    assert ebb.paging.stats()["overflows"] == 1
    assert ebb.paging.stats()["recorded_steps"] == 2


def test_pools_grow_by_a_quarter_at_least():
    net = Mlp()
    run(net, 20)
    before = ebb.paging.stats()["pools"][-1]
    run(net, 23)
    assert not ebb.paging.step_ok()
    run(net, 1)  # recorded: it needs little
    after = ebb.paging.stats()["pools"][-1]
    rows = before["device_pages"] * before["page_rows"]
    assert after["device_pages"] * after["page_rows"] >= 1.25 * rows


def test_what_does_not_fit_the_device_spills():
    ebb.paging.configure(host_headroom=3.0)
    net = Mlp()
    run(net, 12)
    for live in (40, 5, 31):
        expected, found = run(net, live)
        assert same(expected, found)
        assert ebb.paging.step_ok()
    assert ebb.paging.stats()["overflows"] == 0
    assert ebb.paging.stats()["spilled_steps"] >= 1
    assert ebb.paging.stats()["host_pool_bytes"] > 0


def test_gradients_after_an_overflow_are_nan():
    net = Mlp()
    run(net, 5)
    _, found = run(net, 40)
    assert any(gradient.isnan().any() for gradient in found)
    assert not ebb.paging.step_ok()


def test_an_overflow_is_not_forgotten_by_steps_that_follow():
    net = Mlp()
    run(net, 5)
    run(net, 40)
    run(net, 5)
    assert not ebb.paging.step_ok()


def test_blocking_mode_raises_in_the_step():
    ebb.paging.configure(overflow="blocking")
    net = Mlp()
    run(net, 5)
    x, n = net.inputs(0), torch.tensor(40)
    with pytest.raises(
        ebb.PageOverflowError, match=r"the output of aten::\w+.* in region 'region'"
    ):
        gradients(net, x, n, region)
    expected, found = run(net, 40)
    assert same(expected, found)
    assert ebb.paging.step_ok()


def test_assert_mode():
    ebb.paging.configure(overflow="assert")
    net = Mlp()
    for _ in range(2):
        expected, found = run(net, 5)
        assert same(expected, found)
    with pytest.raises(RuntimeError, match="a page pool has no room"):
        run(net, 40)


def test_tensors_without_a_nan_raise_instead():
    """Integers would come back as zeros, which looks like something."""
    x = torch.randn(32, 4, requires_grad=True)

    def program(live):
        with ebb.region(ebb.Policy({"aten::gt": ebb.PAGE})):
            h = ebb.mark_rows(x * 1, torch.tensor(live))
            y = torch.where(h > 0, h * 2, h * 3)
        y[:live].sum().backward()

    program(2)
    with pytest.raises(ebb.PageOverflowError, match="cannot be restored"):
        program(30)
    assert not ebb.paging.step_ok()
    x.grad = None
    program(30)
    assert ebb.paging.step_ok()


def test_optimizers_refuse_gradients_that_are_of_no_use():
    net = Mlp()
    optimizer = torch.optim.SGD(net.weights, lr=0.1)
    for live in (5, 40):
        optimizer.zero_grad()
        net(net.inputs(0), torch.tensor(live), region).backward()
        before = [weight.detach().clone() for weight in net.weights]
        if live == 5:
            optimizer.step()
    with pytest.raises(ebb.PageOverflowError, match=r"no tier had pages .*run_step"):
        optimizer.step()
    assert not ebb.paging.step_ok()
    with pytest.raises(ebb.PageOverflowError):
        optimizer.step()  # knowing it does not make them better
    assert same(before, net.weights)
    optimizer.zero_grad()
    net(net.inputs(0), torch.tensor(40), region).backward()
    optimizer.step()
    assert not same(before, net.weights)


def test_found_inf():
    net = Mlp()
    run(net, 5)
    run(net, 5)
    assert ebb.paging.found_inf("cpu").item() == 0.0
    run(net, 40)
    flag = ebb.paging.found_inf("cpu")
    assert (flag.item(), flag.dtype, flag.shape) == (1.0, torch.float32, ())
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    optimizer.found_inf = flag
    forget()  # else it refuses by itself
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(2))


# run_step


def train(net, loads, step):
    optimizer = torch.optim.Adam(net.weights, lr=0.05)
    for seed, live in enumerate(loads):
        x, n = net.inputs(seed), torch.tensor(live)
        step(net, optimizer, x, n)
    return [weight.detach() for weight in net.weights]


def plain_step(net, optimizer, x, n):
    torch.manual_seed(int(n))
    optimizer.zero_grad()
    loss = net(nn.functional.dropout(x, 0.2), n)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("inside", [False, True], ids=["optimizer outside", "optimizer inside"])
@pytest.mark.parametrize("mode", ["deferred", "blocking"])
def test_training_through_overflows(inside, mode):
    ebb.paging.configure(overflow=mode)
    calls = []

    def paged_step(net, optimizer, x, n):
        torch.manual_seed(int(n))
        optimizer.zero_grad()

        def forward_and_backward():
            calls.append(int(n))
            net(nn.functional.dropout(x, 0.2), n, region).backward()
            if inside:
                optimizer.step()

        ebb.paging.run_step(forward_and_backward)
        if not inside:
            optimizer.step()

    loads = [3, 4, 40, 20, 40, 1, 0, 40]
    expected = train(Mlp(), loads, plain_step)

    assert same(expected, train(Mlp(), loads, paged_step))

    assert calls == [3, 4, 4, 40, 40, 20, 40, 1, 0, 40] or len(calls) > len(loads)
    assert ebb.paging.stats()["overflows"] >= 1


def test_gradients_that_were_there_before_are_added_to_once():
    net = Mlp()
    n = torch.tensor(30)

    def accumulate(run_step):
        for weight in net.weights:
            weight.grad = torch.ones_like(weight)
        grads = [weight.grad for weight in net.weights]
        for seed in range(2):
            run_step(lambda seed=seed: net(net.inputs(seed), n, region).backward())
        assert all(weight.grad is grad for weight, grad in zip(net.weights, grads, strict=True))
        return [weight.grad.clone() for weight in net.weights]

    with fresh():
        expected = accumulate(lambda function: function())
    gradients(net, net.inputs(0), torch.tensor(2), region)  # sizes pools that are too small
    assert same(expected, accumulate(ebb.paging.run_step))
    assert ebb.paging.stats()["overflows"] == 1


def test_inputs_and_parameters_outside_of_modules_too():
    net = Mlp()
    scale = torch.ones(8, requires_grad=True)

    def function(x):
        (net(x * scale, torch.tensor(30), region) + scale.sum()).backward()

    x = net.inputs(0)
    function(x)
    expected = (x.grad, scale.grad)
    x.grad = scale.grad = None
    ebb.paging.reset()
    gradients(net, x, torch.tensor(2), region)
    ebb.paging.run_step(lambda: function(x))
    assert same(expected, (x.grad, scale.grad))
    assert ebb.paging.stats()["overflows"] == 1


def test_buffers_are_put_back():
    norm = nn.BatchNorm1d(8)
    net = Mlp()

    def function():
        net(norm(net.inputs(0)), torch.tensor(30), region).backward()

    gradients(net, net.inputs(0), torch.tensor(2), region)
    ebb.paging.run_step(function, state=[norm])
    assert ebb.paging.stats()["overflows"] == 1
    assert norm.num_batches_tracked == 1


def test_what_the_step_returns_and_raises():
    assert ebb.paging.run_step(lambda: 3) == 3

    def fails():
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        ebb.paging.run_step(fails)
    assert ebb.paging.run_step(lambda: 4) == 4
    with pytest.raises(TypeError, match="state takes modules and tensors; got int"):
        ebb.paging.run_step(lambda: 5, state=[3])


def test_a_step_that_fails_because_of_what_came_back():
    """An error that garbage causes is no error of the program's."""
    net = Mlp()
    seen = []

    def function():
        loss = net(net.inputs(0), torch.tensor(30), region)
        found = torch.autograd.grad(loss, net.weights)
        seen.append(any(gradient.isnan().any() for gradient in found))
        if seen[-1]:
            raise FloatingPointError("the gradients are not finite")
        return found

    gradients(net, net.inputs(0), torch.tensor(2), region)
    found = ebb.paging.run_step(function)
    assert seen == [True, False]
    assert same(gradients(net, net.inputs(0), torch.tensor(30))[1:], found)


def test_another_function_for_the_second_time():
    net = Mlp()
    gradients(net, net.inputs(0), torch.tensor(2), region)
    result = ebb.paging.run_step(
        lambda: gradients(net, net.inputs(0), torch.tensor(30), region),
        again=lambda: "eager",
    )
    assert result == "eager"


# Schedules


class Pipeline:
    """Layers of one stage each, run forward and backward one by one."""

    def __init__(self, layers):
        self.layers = [Mlp(layers=1, seed=i) for i in range(layers)]
        self.paged = True
        self.losses = {}

    def forward(self, layer, batch, live, stage=None):
        net = self.layers[layer]
        named = (
            contextlib.nullcontext() if stage is None else ebb.paging.microbatch(batch, stage=stage)
        )
        inside = ebb.region(EVERYTHING, f"layers.{layer}") if self.paged else torch.enable_grad()
        with named, inside:
            h = ebb.mark_rows(net.inputs(batch) * 1.5, torch.tensor(live))
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
    ebb.paging.configure(headroom=8.0, prefetch=prefetch)
    order = SCHEDULES[name]
    stages = Pipeline(3)
    expected = stages.plain(order, [30] * 6)
    for _ in range(4):
        with ebb.paging.step():
            stages.run(order, [30] * 6)
        assert ebb.paging.step_ok()
        found = stages.gradients()
        assert [g is None for g in found] == [g is None for g in expected]
        assert same([g for g in expected if g is not None], [g for g in found if g is not None])
        stages.losses.clear()
    stats = ebb.paging.stats()
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
        with ebb.paging.step():
            stages.run(order, [20] * 6)
    stats = ebb.paging.stats()
    assert stats["resident"] == 2 * stats["stashed"] / 3 / 3  # one layer of three, in two of three
    with fresh():
        stages.run(order, [20] * 6)
        assert stats["live_bytes"] < 0.75 * ebb.paging.stats()["live_bytes"]


def test_a_layer_that_stays_may_be_written():
    w = torch.randn(4, 4, requires_grad=True)

    def program():
        h = ebb.mark_rows(torch.arange(32.0).view(8, 4) @ w, torch.tensor(3))
        y = h.sin()
        h.data.mul_(2)  # as in eager, backward sees it
        return y[:3].sum()

    (expected,) = torch.autograd.grad(program(), [w])
    for _ in range(3):
        with ebb.paging.step():
            with ebb.region(EVERYTHING):
                loss = program()
            (found,) = torch.autograd.grad(loss, [w])
        assert torch.equal(expected, found)


def test_another_order_raises_and_names_both_entries():
    stages = Pipeline(2)
    with ebb.paging.step():
        stages.run(one_f_one_b(2, 1, 0), [20])
    message = (
        r"entry 1 is the forward of 'layers.0', stage 0, micro-batch 1, and was the forward of "
        r"'layers.1', stage 0, micro-batch 0"
    )
    with pytest.raises(RuntimeError, match=message), ebb.paging.step():
        stages.run([("F", 0, 0), ("F", 0, 1)], [20, 20])
    stages.losses.clear()
    stages.gradients()
    for _ in range(2):  # it is recorded again
        with ebb.paging.step():
            stages.run([("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)], [20, 20])
        assert ebb.paging.step_ok()


def test_a_step_that_is_too_short_or_too_long_raises():
    stages = Pipeline(2)
    order = one_f_one_b(2, 2, 1)
    with ebb.paging.step():
        stages.run(order, [20, 20])
    with (
        pytest.raises(RuntimeError, match="entry 6 is the end of the step, and was the backward"),
        ebb.paging.step(),
    ):
        stages.run(order[:6], [20, 20])
    stages.losses.clear()
    with ebb.paging.step():
        stages.run(order, [20, 20])
    with (
        pytest.raises(RuntimeError, match=r"is the forward of .*, and was the end of the step"),
        ebb.paging.step(),
    ):
        stages.run([*order, ("F", 0, 2)], [20, 20, 20])
    stages.losses.clear()


def test_stages_and_micro_batches_may_be_named():
    stages = Pipeline(1)
    for _ in range(2):
        with ebb.paging.step():
            stages.forward(0, 7, 20, stage=2)
            stages.backward(0, 7)
    assert ebb.paging.stats()["schedule"] == [
        "forward of 'layers.0', stage 2, micro-batch 7",
        "backward of 'layers.0', stage 2, micro-batch 7",
    ]
    for wrong in ({"index": -1}, {"stage": -1}):
        with pytest.raises(ValueError, match="from 0"), ebb.paging.microbatch(**wrong):
            pass
    with pytest.raises(TypeError, match="must be an int"), ebb.paging.microbatch("first"):
        pass


def test_steps_do_not_nest_and_failing_ones_are_forgotten():
    with (
        ebb.paging.step(),
        pytest.raises(RuntimeError, match="is going on already"),
        ebb.paging.step(),
    ):
        pass
    stages = Pipeline(2)
    order = one_f_one_b(2, 2, 1)
    with pytest.raises(KeyError), ebb.paging.step():
        stages.run([*order[:3], ("B", 5, 5)], [20, 20])
    stages.losses.clear()
    for _ in range(2):
        with ebb.paging.step():
            stages.run(order, [20, 20])
        assert ebb.paging.step_ok()
    with ebb.paging.step(), pytest.raises(RuntimeError, match="reset after it"):
        ebb.paging.reset()
    ebb.paging.step_ok()


@settings(max_examples=80, deadline=None)
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
            with ebb.paging.step() if bracketed else contextlib.nullcontext():
                stages.run(order, loads)
            assert ebb.paging.step_ok()
            assert same(expected, stages.gradients())


# Settings


@pytest.mark.parametrize(
    ("given_", "error", "message"),
    [
        ({"page_rows": 0}, ValueError, "a page has at least one row"),
        ({"page_rows": "many"}, TypeError, "page_rows must be an int"),
        ({"headroom": 0.5}, ValueError, "headroom is from 1 to 1000"),
        ({"headroom": float("nan")}, ValueError, "headroom is from 1 to 1000"),
        ({"headroom": "much"}, TypeError, "headroom must be a number"),
        ({"host_headroom": -1}, ValueError, "host_headroom is from 0 to 1000"),
        ({"device_limit": "1 mile"}, ValueError, "device_limit must be a number of bytes"),
        ({"overflow": "ignore"}, ValueError, "overflow must be one of deferred, blocking, assert"),
        ({"dead_rows": 0}, ValueError, "dead_rows must be one of repeat, zero, nan, none"),
        ({"prefetch": 2}, ValueError, "prefetch must be 0, 1 or -1"),
        ({"prefetch": True}, TypeError, "prefetch must be an int"),
    ],
)
def test_settings_that_make_no_sense(given_, error, message):
    before = ebb.paging.settings()
    with pytest.raises(error, match=message):
        ebb.paging.configure(**given_)
    assert ebb.paging.settings() == before


def test_a_device_limit_too_small_for_one_tensor():
    ebb.paging.configure(device_limit=16)
    net = Mlp()
    with pytest.raises(ValueError, match=r"device limit of 16 bytes .* one tensor needs"):
        gradients(net, net.inputs(0), torch.tensor(20), region)
    ebb.paging.configure(device_limit="1MiB")
    for _ in range(2):
        expected, found = run(net, 20)
        assert same(expected, found)


def test_a_device_limit_is_kept():
    net = Mlp(layers=6, width=64, rows=64)
    limit = 100_000
    ebb.paging.configure(device_limit=limit, host_headroom=1.0)
    for _ in range(3):
        expected, found = run(net, 60)
        assert same(expected, found)
        assert ebb.paging.step_ok()
    stats = ebb.paging.stats()
    pages = sum(p["device_pages"] * p["page_rows"] * p["row_bytes"] for p in stats["pools"])
    assert pages <= limit < stats["live_bytes"]


def environment(**variables):
    code = "import ebb; s = ebb.paging.settings(); print(s)"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


def test_the_environment():
    done = environment(
        EBB_PAGING_PAGE_ROWS="16",
        EBB_PAGING_HEADROOM="1.5",
        EBB_PAGING_HOST_HEADROOM="0.5",
        EBB_PAGING_DEVICE_LIMIT="2GiB",
        EBB_PAGING_OVERFLOW="blocking",
        EBB_PAGING_DEAD_ROWS="nan",
        EBB_PAGING_PREFETCH="0",
    )
    assert done.returncode == 0, done.stderr
    assert "there is no environment variable" not in done.stderr
    found = eval(done.stdout)
    assert found == {
        "page_rows": 16,
        "headroom": 1.5,
        "host_headroom": 0.5,
        "device_limit": 2**31,
        "overflow": "blocking",
        "dead_rows": "nan",
        "prefetch": 0,
    }
    assert "EBB_PAGING_OVERFLOW" in environment(EBB_PAGING_OVERFLOW="soon").stderr


def test_products_only():
    net = Mlp()
    for live in (30, 12):
        x, n = net.inputs(live), torch.tensor(live)
        found = gradients(net, x, n, lambda: ebb.region(PRODUCTS))
        assert same(gradients(net, x, n), found)
