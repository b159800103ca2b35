"""Steps of which one rank alone has too little room for its pages, or raises."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ebb
from ebb.experimental.paging._agreement import Agreement
from ebb_tests.programs.paged import EVERYTHING, fresh, same
from ebb_tests.ranks.collectives import rank
from ebb_tests.ranks.two_ranks import on_two_ranks

FEW, MANY, ROWS = 5, 60, 64


class Net(nn.Module):
    def __init__(self, is_paged, masks=False):
        super().__init__()
        self.up, self.down = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.is_paged, self.masks = is_paged, masks

    def forward(self, x, live):
        with ebb.region(EVERYTHING) if self.is_paged else contextlib.nullcontext():
            h = ebb.experimental.mark_rows(self.up(x).clone(), torch.tensor(live)).sin()
            if self.masks:
                h = torch.where(h > 0, h * 2, h * 3)
        return self.down(h)[:live].square().sum()


def batch(step, *, rows=ROWS):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * step + rank()))


def plainly(net, backward):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    return lambda loss: (optimizer.zero_grad(), backward(loss), optimizer.step())


def in_one_kernel(net, backward):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, fused=True)
    return lambda loss: (optimizer.zero_grad(), backward(loss), optimizer.step())


def by_closure(net, backward):
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.05, max_iter=1)
    return lambda loss: optimizer.step(lambda: (optimizer.zero_grad(), backward(loss))[1])


def of_several(net, backward):
    optimizers = [torch.optim.AdamW([parameter], lr=0.05) for parameter in net.parameters()]
    return lambda loss: (net.zero_grad(), backward(loss), [one.step() for one in optimizers])


def of_one_rank_more(net, backward):
    """The other one's last parameter is frozen."""
    optimizers = [torch.optim.AdamW([one], lr=0.05) for one in list(net.parameters())[rank() :]]
    return lambda loss: (net.zero_grad(), backward(loss), [one.step() for one in optimizers])


def of_one_rank_only(net, backward):
    return plainly(net, backward) if rank() == 0 else backward


def in_backward(net, backward):
    optimizers = {one: torch.optim.SGD([one], lr=0.05) for one in net.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    return lambda loss: (net.zero_grad(), backward(loss))


def scaled(net, backward):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scaler = net.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(loss):
        optimizer.zero_grad()
        backward(lambda: scaler.scale(loss()))
        scaler.step(optimizer)
        scaler.update()

    return step


def unscaled_and_clipped(net, backward):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scaler = net.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(loss):
        optimizer.zero_grad()
        backward(lambda: scaler.scale(loss()))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()

    return step


def if_it_is_good(net, backward):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)

    def step(loss):
        optimizer.zero_grad()
        backward(loss)
        if ebb.experimental.paging.step_ok():
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()

    return step


def train(steps_of, *, is_paged, is_shared, masks=False, accumulates=1):
    """Parameters after some steps, and the scale; on rank 1 more rows live in the third."""
    torch.manual_seed(0)
    net = Net(is_paged, masks)
    model = DistributedDataParallel(net) if is_shared else net

    def backward(loss):
        for _ in range(accumulates):
            found = loss()
            found.backward()
        return found.detach()

    step_of = steps_of(net, backward)
    for step in range(5):
        live = MANY if step in (2, 4) and rank() == (step == 2) else FEW
        x = batch(step)

        def function(x=x, live=live):
            step_of(lambda: model(x, live))

        ebb.experimental.paging.run_step(function) if is_paged else function()
    scaler = getattr(net, "scaler", None)
    scale = [] if scaler is None else [torch.tensor(scaler.get_scale())]
    return [one.detach() for one in net.parameters()] + scale


SHARED = [plainly, in_one_kernel, by_closure, of_several, scaled, if_it_is_good]
OWN = [*SHARED, of_one_rank_more, of_one_rank_only, in_backward, unscaled_and_clipped]


@pytest.mark.parametrize(
    ("is_shared", "steps_of"), [(True, one) for one in SHARED] + [(False, one) for one in OWN]
)
@on_two_ranks
def test_no_optimizer_steps_before_all_ranks_agree(is_shared, steps_of):
    with fresh():
        expected = train(steps_of, is_paged=False, is_shared=is_shared)

        assert same(expected, train(steps_of, is_paged=True, is_shared=is_shared))

        assert ebb.stats()["paging"]["overflows"] == 1  # on each rank, in a step of its own


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@on_two_ranks
def test_no_rank_raises_half_way_since_others_may_stand_in_a_collective(is_shared, masks):
    given = {"is_shared": is_shared, "masks": masks, "accumulates": 2}
    with fresh(overflow="blocking"):
        expected = train(plainly, is_paged=False, **given)

        assert same(expected, train(plainly, is_paged=True, **given))

        assert ebb.stats()["paging"]["overflows"] == 1


@on_two_ranks
def test_an_error_of_one_rank_meets_nobodys_collective():
    for steps in range(3):
        values = torch.full((3,), float(rank() + steps))

        def reduce(values=values):
            dist.all_reduce(values)
            return "reduced"

        def fails():
            raise ValueError("its own")

        if rank() == 0:
            assert ebb.experimental.paging.run_step(reduce) == "reduced"
        else:
            with pytest.raises(ValueError, match="its own"):
                ebb.experimental.paging.run_step(fails)
            reduce()
        assert torch.equal(values, torch.full((3,), 2.0 * steps + 1))


@on_two_ranks
def test_the_rank_that_goes_on_steps_as_in_eager():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def function():
        weight.sum().backward()
        if rank() == 1:
            raise KeyError
        optimizer.step()

    with contextlib.nullcontext() if rank() == 0 else pytest.raises(KeyError):
        ebb.experimental.paging.run_step(function)
    assert torch.equal(weight.detach(), torch.full((2,), 0.5 if rank() == 0 else 1.0))
    assert ebb.experimental.paging.run_step(lambda: 3) == 3


def small_pools(net):
    """From now on the pools have room for few rows."""
    ebb.experimental.paging.run_step(lambda: net(batch(0), FEW).backward())
    net.zero_grad()


@pytest.mark.parametrize("others", ["have an optimizer", "have none", "raise"])
@on_two_ranks
def test_a_rank_that_raises_since_gradients_are_not_finite(others):
    """It did not reach what the other one has reached."""
    with fresh():
        net = Net(is_paged=True)
        small_pools(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

        def function():
            net(batch(1), MANY if rank() == 1 else FEW).backward()
            if rank() == 1:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            elif others == "raise":
                raise KeyError
            elif others == "have an optimizer":
                optimizer.step()

        before = [parameter.detach().clone() for parameter in net.parameters()]
        if rank() == 0 and others == "raise":
            error, message = KeyError, None
        else:
            error = ebb.experimental.PageOverflowError
            message = "raised before it returned" if rank() == 1 else "paging failed on rank 1"
        with pytest.raises(error, match=message):
            ebb.experimental.paging.run_step(function)

        assert same(before, net.parameters())
        assert ebb.experimental.paging.run_step(lambda: 3) == 3


@on_two_ranks
def test_a_rank_that_cannot_run_the_step_again():
    with fresh():
        net = Net(is_paged=True)
        small_pools(net)

        def function():
            if rank() == 0:
                raise KeyError
            net(batch(1), MANY).backward()

        error, message = (
            (KeyError, None)
            if rank() == 0
            else (ebb.experimental.PageOverflowError, "raised another error")
        )
        with pytest.raises(error, match=message):
            ebb.experimental.paging.run_step(function)

        net.zero_grad()
        ebb.experimental.paging.run_step(lambda: net(batch(1), MANY).backward())
        assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("found_by", ["the next optimizer", "run_step"])
@on_two_ranks
def test_too_little_room_after_gradients_have_been_used(found_by):
    """As of a generator and a discriminator in one step."""
    with fresh():
        net = Net(is_paged=True)
        small_pools(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        calls = []

        def function():
            calls.append(net(batch(1), FEW).backward())
            if rank() == 0:
                optimizer.step()
            else:
                assert ebb.experimental.paging.step_ok()
            net(batch(2), MANY if rank() == 1 else FEW).backward()
            if found_by == "the next optimizer" and rank() == 1:
                optimizer.step()

        if found_by == "the next optimizer" and rank() == 0:
            message = "paging failed on rank 1"
        else:
            message = r"Call run_step\(\) once for each optimizer"
        with pytest.raises(ebb.experimental.PageOverflowError, match=message):
            ebb.experimental.paging.run_step(function)

        assert len(calls) == 1


@on_two_ranks
def test_pages_that_another_run_does_not_mend():
    def cannot_be():
        raise RuntimeError("a count of rows")

    for at_end in (False, True):
        agreement = Agreement(None)
        error, message = (
            (RuntimeError, "a count")
            if rank() == 1
            else (ebb.experimental.PageOverflowError, "on rank 1")
        )
        with pytest.raises(error, match=message):
            agreement.ask(cannot_be if rank() == 1 else lambda: True, at_end)
    assert ebb.experimental.paging.run_step(lambda: 3) == 3


@on_two_ranks
def test_what_came_before_is_told_to_all_ranks():
    with fresh():
        net = Net(is_paged=True)
        small_pools(net)
        net(batch(1), MANY if rank() == 1 else FEW).backward()

        message = "ran before this step" if rank() == 1 else "paging failed on rank 1"
        with pytest.raises(ebb.experimental.PageOverflowError, match=message):
            ebb.experimental.paging.run_step(lambda: 3)


@pytest.mark.sweep
@on_two_ranks
def test_a_rank_that_does_not_come():
    store = dist.distributed_c10d._get_default_store()
    limit = store.timeout
    store.set_timeout(timedelta(seconds=1))
    group = dist.new_group([0, 1])
    try:
        if rank() == 0:
            with pytest.raises(RuntimeError, match="rank 0 timed out: 1 of 2 processes"):
                ebb.experimental.paging.run_step(lambda: 3, group=group)
    finally:
        store.set_timeout(limit)
    dist.barrier()


@on_two_ranks
def test_groups_that_agree_apart():
    """Each rank for itself, which may raise where it has too little room; and then both."""
    apart = [dist.new_group([0]), dist.new_group([1])][rank()]
    with fresh(overflow="blocking"):
        net = Net(is_paged=True)
        calls = []

        def function(live):
            calls.append(live)
            net(batch(1), live).backward()

        for live in (FEW, MANY) if rank() == 1 else (FEW, FEW, FEW):
            net.zero_grad()
            ebb.experimental.paging.run_step(lambda live=live: function(live), group=apart)
        assert ebb.experimental.paging.step_ok()
        assert calls == ([FEW, MANY, MANY] if rank() == 1 else [FEW] * 3)


@on_two_ranks
def test_a_group_that_is_made_anew():
    for _ in range(3):
        group = dist.new_group([0, 1])
        found = ebb.experimental.paging.run_step(lambda: 3, group=group)
        assert (found, ebb.experimental.paging.step_ok(group)) == (3, True)
        dist.destroy_process_group(group)


@on_two_ranks
def test_it_leaves_nothing_in_the_store():
    def keys_after_steps(count):
        for _ in range(count):
            ebb.experimental.paging.run_step(lambda: 3)
        dist.barrier()
        count = dist.distributed_c10d._get_default_store().num_keys()
        dist.barrier()
        return count

    assert keys_after_steps(3) == keys_after_steps(5)
