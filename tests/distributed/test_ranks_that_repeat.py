"""Ranks that repeat other collectives, or in another order, get an error."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from repeating import REPEATED, Exchange, after, inputs
from two_ranks import on_two_ranks

import ebb


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


@pytest.mark.sweep
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


@on_two_ranks
def test_a_rank_that_comes_late():
    """The other rank meanwhile asks gloo whether this one is alive."""
    group = dist.new_group()

    def losses():
        x = inputs()
        with ebb.region(REPEATED, name="layer"):
            y = x.sin().detach()
            dist.all_reduce(y, group=group)
            loss = (x * y.cos()).exp().sum()
        if is_late and dist.get_rank() == 1:
            time.sleep(1.8)
        loss.backward()
        return [loss, x.grad]

    is_late = True
    late = losses()
    is_late = False
    for _ in range(20):
        assert all(map(torch.equal, losses(), late))
    sent = torch.full((3,), float(dist.get_rank()))
    received = torch.empty(3)
    works = [dist.isend(sent, 1 - dist.get_rank(), group=group)]
    dist.recv(received, 1 - dist.get_rank(), group=group)
    works[0].wait()
    assert torch.equal(received, 1 - sent)
    dist.destroy_process_group(group)


def test_collectives_that_cannot_be_repeated():
    for op in ("c10d::send.default", "c10d::recv_.default", "c10d::barrier.default"):
        with pytest.raises(ValueError, match="replays cannot repeat"):
            ebb.Policy([ebb.Rule(op, ebb.RECOMPUTE, force=True)])
    rule = ebb.Rule("c10d::allreduce_.default", ebb.RECOMPUTE_EACH_TIME, force=True)
    with pytest.raises(ValueError, match="equally often"):
        ebb.Policy([rule])


@pytest.mark.sweep
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
def test_a_group_that_is_destroyed():
    group = dist.new_group()
    x = inputs()
    with ebb.region(REPEATED, name="layer"):
        y = x.sin().detach()
        dist.all_reduce(y, group=group)
        loss = after(x * y)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="region 'layer': their process group was destroyed"):
        loss.backward()
