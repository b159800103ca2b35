"""What happens when a page pool has no room, and running a step again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.programs.paged import Mlp, check, forget, fresh, gradients, region, run, same


@pytest.mark.parametrize("tier", ["none", "host"])
def test_overflow_shows_and_the_next_step_is_right(tier, net):
    if tier == "host":
        ebb.config.paging.host_headroom = 1.0
    check(net, 10)
    _, found = run(net, 40)
    assert any(gradient.isnan().any() for gradient in found)
    assert not ebb.experimental.paging.step_ok()
    assert not ebb.experimental.paging.step_ok()  # until another step begins
    for _ in range(2):
        check(net, 40)
    assert ebb.stats()["paging"]["overflows"] == 1
    assert ebb.stats()["paging"]["recorded_steps"] == 2


def test_pools_grow_by_a_quarter_at_least(net):
    run(net, 20)
    before = ebb.stats()["paging"]["pools"][-1]
    run(net, 23)
    assert not ebb.experimental.paging.step_ok()
    run(net, 1)  # recorded: it needs little
    after = ebb.stats()["paging"]["pools"][-1]
    rows = before["device_pages"] * before["page_rows"]
    assert after["device_pages"] * after["page_rows"] >= 1.25 * rows


def test_what_does_not_fit_the_device_spills(net):
    ebb.config.paging.host_headroom = 3.0
    run(net, 12)
    for live in (40, 5, 31):
        check(net, live)
    assert ebb.stats()["paging"]["overflows"] == 0
    assert ebb.stats()["paging"]["spilled_steps"] >= 1
    assert ebb.stats()["paging"]["host_pool_bytes"] > 0


def test_an_overflow_is_not_forgotten_by_steps_that_follow(net):
    run(net, 5)
    run(net, 40)
    run(net, 5)
    assert not ebb.experimental.paging.step_ok()


def test_blocking_mode_raises_in_the_step(net):
    ebb.config.paging.overflow = "blocking"
    run(net, 5)
    x, n = net.inputs(0), torch.tensor(40)
    with pytest.raises(
        ebb.experimental.PageOverflowError, match=r"the output of aten::\w+.* in region 'region'"
    ):
        gradients(net, x, n, region)
    check(net, 40)


def test_assert_mode(net):
    ebb.config.paging.overflow = "assert"
    for _ in range(2):
        expected, found = run(net, 5)
        assert same(expected, found)
    with pytest.raises(RuntimeError, match="a page pool was too small"):
        run(net, 40)


def test_tensors_without_a_nan_raise_instead():
    """Integers would come back as zeros, which looks like something."""
    x = torch.randn(32, 4, requires_grad=True)

    def program(live):
        with ebb.region(ebb.Policy({"aten::gt": ebb.PAGE})):
            h = ebb.experimental.mark_rows(x * 1, torch.tensor(live))
            y = torch.where(h > 0, h * 2, h * 3)
        y[:live].sum().backward()

    program(2)
    with pytest.raises(ebb.experimental.PageOverflowError, match="cannot be restored"):
        program(30)
    assert not ebb.experimental.paging.step_ok()
    x.grad = None
    program(30)
    assert ebb.experimental.paging.step_ok()


def test_optimizers_refuse_gradients_that_are_of_no_use(net):
    optimizer = torch.optim.SGD(net.weights, lr=0.1)
    for live in (5, 40):
        optimizer.zero_grad()
        net(net.inputs(0), torch.tensor(live), region).backward()
        before = [weight.detach().clone() for weight in net.weights]
        if live == 5:
            optimizer.step()
    with pytest.raises(
        ebb.experimental.PageOverflowError, match=r"a page pool was too small.*run_step"
    ):
        optimizer.step()
    assert not ebb.experimental.paging.step_ok()
    with pytest.raises(ebb.experimental.PageOverflowError):
        optimizer.step()  # knowing it does not make them better
    assert same(before, net.weights)
    optimizer.zero_grad()
    net(net.inputs(0), torch.tensor(40), region).backward()
    optimizer.step()
    assert not same(before, net.weights)


def test_found_inf(net):
    run(net, 5)
    run(net, 5)
    assert ebb.experimental.paging.found_inf("cpu").item() == 0.0
    run(net, 40)
    flag = ebb.experimental.paging.found_inf("cpu")
    assert (flag.item(), flag.dtype, flag.shape) == (1.0, torch.float32, ())
    assert (
        ebb.experimental.paging.found_inf(torch.device("cpu", 0)).item() == 1.0
    )  # the same, with an index
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
    ebb.config.paging.overflow = mode
    calls = []

    def paged_step(net, optimizer, x, n):
        torch.manual_seed(int(n))
        optimizer.zero_grad()

        def forward_and_backward():
            calls.append(int(n))
            net(nn.functional.dropout(x, 0.2), n, region).backward()
            if inside:
                optimizer.step()

        ebb.experimental.paging.run_step(forward_and_backward)
        if not inside:
            optimizer.step()

    loads = [3, 4, 40, 20, 40, 1, 0, 40]
    expected = train(Mlp(), loads, plain_step)

    assert same(expected, train(Mlp(), loads, paged_step))

    assert calls == [3, 4, 4, 40, 40, 20, 40, 1, 0, 40] or len(calls) > len(loads)
    assert ebb.stats()["paging"]["overflows"] >= 1


def test_gradients_that_were_there_before_are_added_to_once(net):
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
    assert same(expected, accumulate(ebb.experimental.paging.run_step))
    assert ebb.stats()["paging"]["overflows"] == 1


def test_inputs_and_parameters_outside_of_modules_too(net):
    scale = torch.ones(8, requires_grad=True)

    def function(x):
        (net(x * scale, torch.tensor(30), region) + scale.sum()).backward()

    x = net.inputs(0)
    function(x)
    expected = (x.grad, scale.grad)
    x.grad = scale.grad = None
    ebb.experimental.paging.reset()
    gradients(net, x, torch.tensor(2), region)
    ebb.experimental.paging.run_step(lambda: function(x))
    assert same(expected, (x.grad, scale.grad))
    assert ebb.stats()["paging"]["overflows"] == 1


def test_buffers_are_put_back(net):
    norm = nn.BatchNorm1d(8)

    def function():
        net(norm(net.inputs(0)), torch.tensor(30), region).backward()

    gradients(net, net.inputs(0), torch.tensor(2), region)
    ebb.experimental.paging.run_step(function, state=[norm])
    assert ebb.stats()["paging"]["overflows"] == 1
    assert norm.num_batches_tracked == 1


def test_what_the_step_returns_and_raises():
    assert ebb.experimental.paging.run_step(lambda: 3) == 3

    def fails():
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        ebb.experimental.paging.run_step(fails)
    assert ebb.experimental.paging.run_step(lambda: 4) == 4
    with pytest.raises(TypeError, match="state must consist of modules and tensors; got int"):
        ebb.experimental.paging.run_step(lambda: 5, state=[3])


def test_a_step_that_fails_because_of_what_came_back(net):
    """An error that garbage causes is no error of the program's."""
    seen = []

    def function():
        loss = net(net.inputs(0), torch.tensor(30), region)
        found = torch.autograd.grad(loss, net.weights)
        seen.append(any(gradient.isnan().any() for gradient in found))
        if seen[-1]:
            raise FloatingPointError("the gradients are not finite")
        return found

    gradients(net, net.inputs(0), torch.tensor(2), region)
    found = ebb.experimental.paging.run_step(function)
    assert seen == [True, False]
    assert same(gradients(net, net.inputs(0), torch.tensor(30))[1:], found)


def test_another_function_for_the_second_time(net):
    gradients(net, net.inputs(0), torch.tensor(2), region)
    result = ebb.experimental.paging.run_step(
        lambda: gradients(net, net.inputs(0), torch.tensor(30), region), again=lambda: "eager"
    )
    assert result == "eager"


@pytest.mark.parametrize("asks", [False, True], ids=["optimizer", "step_ok"])
def test_too_little_room_after_gradients_have_been_used(asks):
    """Running the step again would have the first optimizer step twice."""
    nets = [Mlp(seed=0), Mlp(seed=1)]
    gradients(nets[0], nets[0].inputs(0), torch.tensor(2), region)
    optimizers = [torch.optim.SGD(net.weights, lr=0.1) for net in nets]

    def function():
        for net, optimizer, live in zip(nets, optimizers, (2, 40), strict=True):
            net(net.inputs(0), torch.tensor(live), region).backward()
            if not asks:
                optimizer.step()
            elif live == 2:
                assert ebb.experimental.paging.step_ok()

    with pytest.raises(
        ebb.experimental.PageOverflowError, match=r"Call run_step\(\) once for each optimizer"
    ):
        ebb.experimental.paging.run_step(function)

    assert ebb.experimental.paging.run_step(lambda: 3) == 3


def test_a_closure_that_is_called_again_after_the_parameters_have_changed(net):
    gradients(net, net.inputs(0), torch.tensor(2), region)
    optimizer = torch.optim.LBFGS(net.weights, lr=0.1, max_iter=3)
    loads = iter((2, 40, 40, 40))

    def closure():
        optimizer.zero_grad()
        loss = net(net.inputs(0), torch.tensor(next(loads)), region)
        loss.backward()
        return loss

    with pytest.raises(
        ebb.experimental.PageOverflowError, match=r"Call run_step\(\) once for each optimizer"
    ):
        ebb.experimental.paging.run_step(lambda: optimizer.step(closure))


class OwnScaler(torch.amp.GradScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, OwnScaler])
def test_scalers_do_not_take_an_overflow_for_one_of_half_precision(scaler_type, net):
    optimizer = torch.optim.SGD(net.weights, lr=0.1)
    scaler = scaler_type("cpu", init_scale=1024.0)

    def function():
        optimizer.zero_grad()
        scaler.scale(net(net.inputs(0), torch.tensor(40), region)).backward()
        scaler.step(optimizer)
        scaler.update()

    for inside in (False, True):
        forget()
        gradients(net, net.inputs(0), torch.tensor(2), region)
        if inside:
            ebb.experimental.paging.run_step(function)
        else:
            with pytest.raises(ebb.experimental.PageOverflowError):
                function()
            assert not ebb.experimental.paging.step_ok()
        assert scaler.get_scale() == 1024.0
