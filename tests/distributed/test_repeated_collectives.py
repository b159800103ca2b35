"""Collectives in replays: recomputed when a rule asks for it, in the same order on all ranks."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from comparing import POLICIES, assert_exact, describe, run
from exactness import same_bits
from stand_ins import fake_accelerator
from torch import nn
from two_ranks import on_two_ranks

import ebb

REPEATED = ebb.policies.recompute_collectives
WIDTH = 8


def reduced(x):
    dist.all_reduce(x)
    return x


def reduced_later(x):
    dist.all_reduce(x, async_op=True).wait()
    return x


def gathered(x):
    whole = x.new_empty(2 * len(x), WIDTH)
    dist.all_gather_into_tensor(whole, x)
    return whole


def scattered(x):
    part = x.new_empty(len(x) // 2, WIDTH)
    dist.reduce_scatter_tensor(part, x)
    return part


def exchanged(x):
    received = x.new_empty(len(x), WIDTH)
    dist.all_to_all_single(received, x)
    return received


def exchanged_unevenly(x):
    mine = [1, 3] if dist.get_rank() == 0 else [3, 1]
    received = x.new_empty(len(x), WIDTH)
    dist.all_to_all_single(received, x, mine, mine)
    return received


def functional(name, *arguments):
    def call(x):
        return funcol.wait_tensor(getattr(funcol, name)(x, *arguments, group=dist.group.WORLD))

    call.__name__ = f"functional_{name}"
    return call


COLLECTIVES = (
    reduced,
    reduced_later,
    gathered,
    scattered,
    exchanged,
    exchanged_unevenly,
    functional("all_reduce", "sum"),
    functional("all_gather_tensor", 0),
    functional("reduce_scatter_tensor", "sum", 0),
    functional("all_to_all_single", None, None),
    functional("broadcast", 1),
)
BY_NAME = {collective.__name__: collective for collective in COLLECTIVES}


class Exchange(torch.autograd.Function):
    """A collective without a backward of its own, as in the layers of Megatron-LM."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.rows = len(x)
        return BY_NAME[name](x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.repeat(2, 1)[: ctx.rows], None


def inputs():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator, requires_grad=True)


def region_of(inside, name, x):
    with inside.region():
        return after(Exchange.apply(x.sin(), name))


def after(y):
    return (y * y.exp()).cos().sum()


@pytest.mark.parametrize("name", BY_NAME)
@on_two_ranks
def test_each_collective(name):
    def train(inside):
        x = inputs()
        loss = region_of(inside, name, x)
        loss.backward()
        return {"loss": loss, "gradient": x.grad}

    assert_exact(train, ["recompute_collectives"])

    with ebb.record_reports():
        train(WithPolicy(REPEATED))
    rows = [(row.op, row.fate, row.reason) for row in ebb.report().rows]
    # The program's wait for gloo's reduce-scatter copies the sum, so copy_ makes the result.
    operator = "copy_" if name == "scattered" else "c10d"
    fates = {fate for op, fate, _ in rows if operator in op}
    # A thread of gloo may hold the result for some time.
    assert fates in ({"recomputed"}, {"escaped"}, {"recomputed", "escaped"}), rows


class WithPolicy:
    def __init__(self, policy):
        self.policy = policy

    def region(self, **settings):
        return ebb.region(self.policy, **settings)


class Layer(nn.Module):
    def __init__(self, collective):
        super().__init__()
        self.collective = collective
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + Exchange.apply(self.up(x).tanh(), self.collective)[: len(x)].sin()


def stack(depth=3):
    torch.manual_seed(5)
    names = ["reduced", "exchanged", "functional_all_reduce"]
    return nn.Sequential(*(Layer(names[index % len(names)]) for index in range(depth)))


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@on_two_ranks
def test_a_second_backward_repeats_nothing():
    def train(inside):
        model = stack()
        inside.apply(model, "*")
        loss = model(inputs()).square().mean()
        loss.backward(retain_graph=True)
        first = ebb.stats()["total"]["ops_replayed"]
        loss.backward()
        assert ebb.stats()["total"]["ops_replayed"] == first
        return gradients_of(model)

    assert_exact(train, ["recompute_collectives"])


@on_two_ranks
def test_one_rank_holds_the_results():
    """What a rank holds does not decide whether it repeats a collective."""
    held = []

    def train(inside):
        model = stack()
        inside.apply(model, "*")
        if dist.get_rank() == 0:
            for layer in model:
                layer.up.register_forward_hook(lambda *call: held.append(call[-1]))
        model(inputs()).square().mean().backward()
        return gradients_of(model)

    assert_exact(train, ["recompute_collectives"])


@pytest.mark.parametrize("settings", [{"escapes": "placeholder"}, {"name": "all"}], ids=str)
@on_two_ranks
def test_one_region_around_all(settings):
    def train(inside):
        model, x = stack(4), inputs()
        with inside.region(**settings):
            loss = model(x).square().mean()
        loss.backward()
        return gradients_of(model) | {"input": x.grad}

    assert_exact(train, ["recompute_collectives"])


@pytest.mark.parametrize("host_bytes", [1 << 30, 0])
@on_two_ranks
def test_with_offloading(host_bytes):
    """In the second case rank 1 has no host memory, and saves what rank 0 offloads."""
    rules = [*REPEATED.rules, ebb.Rule("aten::*", ebb.OFFLOAD, every=3)]
    POLICIES["offloading"] = ebb.Policy(rules, inputs=ebb.OFFLOAD)

    def train(inside):
        model = stack()
        inside.apply(model, "*")
        model(inputs()).square().mean().backward()
        return gradients_of(model)

    def accelerator():
        return fake_accelerator(host_bytes if dist.get_rank() == 1 else 1 << 30, in_flight_bytes=0)

    try:
        assert_exact(train, ["offloading"], accelerator)
        total = ebb.stats()["total"]
        has_memory = host_bytes > 0 or dist.get_rank() == 0
        assert total["bytes_offloaded" if has_memory else "bytes_fell_back"] > 0
    finally:
        del POLICIES["offloading"]


@pytest.mark.parametrize("mode", ["ahead", "verify"])
@on_two_ranks
def test_settings(mode):
    def train(inside):
        model = stack(6)
        inside.apply(model, "*")
        if mode == "verify" and inside.policy is not None:
            with ebb.verify():
                loss = model(inputs()).square().mean()
        else:
            loss = model(inputs()).square().mean()
        loss.backward()
        return gradients_of(model)

    before = ebb.ahead.configure(regions=2 if mode == "ahead" else 0)["regions"]
    try:
        for _ in range(3):
            assert_exact(train, ["recompute_collectives"])
    finally:
        ebb.ahead.configure(regions=before)


def steps_with_sleeps(count, most):
    """Ranks sleep at other places, in forwards, in backwards and before each step."""
    sleeps = random.Random(dist.get_rank())
    model = stack(6)
    second = dist.new_group()

    def sleep(*_):
        time.sleep(sleeps.random() * most)

    def step_of(inside):
        x = inputs()
        for layer in model:
            with inside.region():
                sleep()
                x = layer(x)
                y = x.detach() * 2
                dist.all_reduce(y, group=second)
                x = x * y.tanh()
            x.register_hook(sleep)
        model.zero_grad()
        x.square().mean().backward()
        return gradients_of(model)

    expected = run(step_of, None)
    for _ in range(count):
        actual = run(step_of, REPEATED)
        differing = [name for name in expected if not same_bits(actual[name], expected[name])]
        assert not differing, describe(differing, actual, expected)


@on_two_ranks
def test_ranks_that_sleep():
    steps_with_sleeps(20, 1e-3)


@pytest.mark.slow
@on_two_ranks
def test_a_thousand_steps_of_ranks_that_sleep():
    steps_with_sleeps(1000, 2e-3)


# Ranks that differ --------------------------------------------------------------------------------


def group_with_little_time():
    return dist.new_group(timeout=timedelta(seconds=3))


def error_of(policy, group):
    x = inputs()
    with ebb.region(policy, name="layer"):
        y = x.sin().detach()
        dist.all_reduce(y, group=group)
        y = (x * y).exp().detach()
        dist.all_to_all_single(z := y.new_empty(y.shape), y, group=group)
        loss = (x * z).exp().sum()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@on_two_ranks
def test_one_rank_repeats_nothing():
    group = group_with_little_time()
    is_first = dist.get_rank() == 0
    error = error_of(REPEATED if is_first else ebb.policies.recompute_all, group)
    expected = "region 'layer': rank 1 did not reach this point"
    assert (expected in error) if is_first else error == ""
    dist.barrier()


@on_two_ranks
def test_ranks_repeat_other_collectives():
    one = [rule for rule in REPEATED.rules if "alltoall" not in rule.op]
    policy = ebb.Policy(one) if dist.get_rank() == 0 else REPEATED
    error = error_of(policy, group_with_little_time())
    assert f"rank {1 - dist.get_rank()} repeats other collectives" in error
    assert "with the same policy" in error
    dist.barrier()


@on_two_ranks
def test_a_read_outside_of_backward():
    x = inputs()
    with ebb.region(REPEATED, name="layer"):
        y = x.sin().detach()
        dist.all_reduce(y)
        loss = (x * y.cos()).exp()
    with pytest.raises(RuntimeError, match="region 'layer' was read outside of backward"):
        _ = loss.grad_fn._saved_result
    loss.sum().backward()
    assert x.grad is not None


def test_collectives_that_cannot_be_repeated():
    for op in ("c10d::send.default", "c10d::recv_.default", "c10d::barrier.default"):
        with pytest.raises(ValueError, match="replays cannot repeat"):
            ebb.Policy([ebb.Rule(op, ebb.RECOMPUTE, force=True)])
    rule = ebb.Rule("c10d::allreduce_.default", ebb.RECOMPUTE_EACH_TIME, force=True)
    with pytest.raises(ValueError, match="equally often"):
        ebb.Policy([rule])


@on_two_ranks
def test_an_error_does_not_spoil_what_follows():
    group = group_with_little_time()
    if dist.get_rank() == 0:
        assert "did not reach this point" in error_of(REPEATED, group)
    else:
        x = inputs()
        with ebb.region(REPEATED, name="layer"):
            y = x.sin().detach()
            dist.all_reduce(y, group=group)
            y = (x * y).exp().detach()
            dist.all_to_all_single(y.new_empty(y.shape), y, group=group)
    dist.barrier()
    assert error_of(REPEATED, group) == ""


# Adversarial programs -----------------------------------------------------------------------------


def summed(y):
    return (y * y.exp()).cos().sum()


def dropped_in_backward(inside, x):
    """Rank 0 holds the result of the collective until backward has begun."""
    held = []
    with inside.region():
        y = Exchange.apply(x.sin(), "reduced")
        z = y.exp() * y
        if dist.get_rank() == 0:
            held.append(y.detach())
            z.register_hook(lambda gradient: held.clear())
        return (z.cos() * y.tanh()).sum()


def saved_and_then_overwritten(inside, x):
    with inside.region():
        y = (x * 2).detach()
        dist.all_reduce(y)
        z = x * y.cos()
        y.add_(1)
        return summed(z * y.clone())


def backward_inside(inside, x):
    with inside.region():
        loss = summed(Exchange.apply(x.sin(), "reduced"))
        loss.backward(retain_graph=True)
        return summed(Exchange.apply(x.cos(), "exchanged"))


def twice_inside(inside, x):
    with inside.region():
        for name in ("reduced", "functional_all_reduce"):
            summed(Exchange.apply(x.sin(), name)).backward()
        return summed(x)


PROGRAMS = {
    program.__name__: program
    for program in (
        dropped_in_backward,
        saved_and_then_overwritten,
        backward_inside,
        twice_inside,
    )
}
RULES = {"plain": [], "save": [("mul", ebb.SAVE)], "offload": [("mul", ebb.OFFLOAD)]}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("program", PROGRAMS)
@on_two_ranks
def test_programs(program, rules):
    more = [ebb.Rule(f"aten::{name}", decision) for name, decision in RULES[rules]]
    POLICIES["tried"] = ebb.Policy([*REPEATED.rules, *more])

    def train(inside):
        x = inputs()
        PROGRAMS[program](inside, x).backward()
        return {"gradient": x.grad}

    try:
        assert_exact(train, ["tried"])
    finally:
        del POLICIES["tried"]


@on_two_ranks
def test_many_steps_of_a_small_region():
    """gloo's thread may hold the forward's result while backward repeats the collective."""

    def train(inside):
        total = torch.zeros(())
        for _ in range(300):
            x = inputs()
            for name in ("reduced", "functional_all_reduce"):
                region_of(inside, name, x).backward()
            total += x.grad.sum()
        return {"total": total}

    assert_exact(train, ["recompute_collectives"])


def backwards_of(losses):
    for loss in losses:
        loss.backward()


@pytest.mark.parametrize("name", ["reduced", "reduced_later", "functional_all_reduce"])
@on_two_ranks
def test_ranks_that_change_the_order_later(name):
    """Step 0 agrees. In step 1 rank 1 runs the backwards in another order, which ebb notices."""

    def losses():
        x = inputs()
        found = []
        for number in range(2):
            with ebb.region(REPEATED, name=str(number)):
                found.append(after(Exchange.apply((x * (number + 1)).sin(), name)))
        return found

    backwards_of(losses())
    order = losses()
    if dist.get_rank() == 1:
        order.reverse()
    with pytest.raises(RuntimeError, match="in different orders"):
        backwards_of(order)
    dist.barrier()


@on_two_ranks
def test_a_thread_that_draws_beside():
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.rand(8)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(20):
            x = inputs()
            region_of(WithPolicy(REPEATED), "reduced", x).backward()
    finally:
        stop.set()
        thread.join()


@on_two_ranks
def test_a_group_that_is_destroyed():
    group = dist.new_group()
    x = inputs()
    with ebb.region(REPEATED, name="layer"):
        y = x.sin().detach()
        dist.all_reduce(y, group=group)
        loss = summed(x * y)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="region 'layer': their process group was destroyed"):
        loss.backward()
