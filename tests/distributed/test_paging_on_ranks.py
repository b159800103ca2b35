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

    def forward(self, x, valid):
        with ebb.region(EVERYTHING) if self.is_paged else contextlib.nullcontext():
            h = ebb.experimental.mark_rows(self.up(x).clone(), torch.tensor(valid)).sin()
            if self.masks:
                h = torch.where(h > 0, h * 2, h * 3)
        return self.down(h)[:valid].square().sum()


def batch(step, *, rows=ROWS):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * step + rank()))


# Ways to step: each gets the model and a function that runs backward of a loss.


def by_adamw(net, backward, **settings):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, **settings)
    return lambda loss: (optimizer.zero_grad(), backward(loss), optimizer.step())


def in_one_kernel(net, backward):
    return by_adamw(net, backward, fused=True)


def by_closure(net, backward):
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.05, max_iter=1)
    return lambda loss: optimizer.step(lambda: (optimizer.zero_grad(), backward(loss))[1])


def by_several_optimizers(net, backward, first=0):
    optimizers = [torch.optim.AdamW([one], lr=0.05) for one in list(net.parameters())[first:]]
    return lambda loss: (net.zero_grad(), backward(loss), [one.step() for one in optimizers])


def by_one_optimizer_less_on_rank_1(net, backward):
    """Its first parameter is frozen."""
    return by_several_optimizers(net, backward, first=rank())


def on_rank_0_only(net, backward):
    return by_adamw(net, backward) if rank() == 0 else backward


def in_backward(net, backward):
    optimizers = {one: torch.optim.SGD([one], lr=0.05) for one in net.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    return lambda loss: (net.zero_grad(), backward(loss))


def clip(net):
    nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)


def scaled(net, backward, clips=False):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scaler = net.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(loss):
        optimizer.zero_grad()
        backward(lambda: scaler.scale(loss()))
        if clips:
            scaler.unscale_(optimizer)
            clip(net)
        scaler.step(optimizer)
        scaler.update()

    return step


def scaled_and_clipped(net, backward):
    return scaled(net, backward, clips=True)


def clipped_if_step_is_ok(net, backward):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)

    def step(loss):
        optimizer.zero_grad()
        backward(loss)
        if ebb.experimental.paging.step_ok():
            clip(net)
            optimizer.step()

    return step


def train(steps_of, *, is_paged, is_shared, masks=False, accumulates=1):
    """Parameters after some steps, and the scale. More rows are valid on rank 1 in the third."""
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
        valid = MANY if step in (2, 4) and rank() == (step == 2) else FEW
        x = batch(step)

        def function(x=x, valid=valid):
            step_of(lambda: model(x, valid))

        ebb.experimental.paging.run_step(function) if is_paged else function()
    scaler = getattr(net, "scaler", None)
    scale = [] if scaler is None else [torch.tensor(scaler.get_scale())]
    return [one.detach() for one in net.parameters()] + scale


def assert_exact(steps_of, settings, **paging):
    with fresh(**paging):
        expected = train(steps_of, is_paged=False, **settings)

        assert same(expected, train(steps_of, is_paged=True, **settings))

        assert ebb.stats()["paging"]["overflows"] == 1  # on each rank, in a step of its own


SHARED = [
    by_adamw,
    in_one_kernel,
    by_closure,
    by_several_optimizers,
    scaled,
    clipped_if_step_is_ok,
]
OWN = [*SHARED, by_one_optimizer_less_on_rank_1, on_rank_0_only, in_backward, scaled_and_clipped]


@pytest.mark.parametrize(
    ("is_shared", "steps_of"), [(True, one) for one in SHARED] + [(False, one) for one in OWN]
)
@on_two_ranks
def test_no_optimizer_steps_before_all_ranks_agree(is_shared, steps_of):
    assert_exact(steps_of, {"is_shared": is_shared})


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@on_two_ranks
def test_no_rank_raises_before_others_have_left_their_collectives(is_shared, masks):
    settings = {"is_shared": is_shared, "masks": masks, "accumulates": 2}
    assert_exact(by_adamw, settings, overflow="blocking")


# Errors. Each rank has its own.


def raises(*of_ranks):
    """For each rank, the message of its PageOverflowError, another error, or None."""
    mine = of_ranks[rank()]
    if mine is None:
        return contextlib.nullcontext()
    if isinstance(mine, str):
        return pytest.raises(ebb.experimental.PageOverflowError, match=mine)
    return pytest.raises(mine)


@on_two_ranks
def test_error_of_one_rank_meets_no_collective_of_another():
    for steps in range(3):
        values = torch.full((3,), float(rank() + steps))

        def reduce(values=values):
            dist.all_reduce(values)
            return "reduced"

        def fails():
            raise KeyError

        with raises(None, KeyError):
            assert ebb.experimental.paging.run_step([reduce, fails][rank()]) == "reduced"
        if rank() == 1:
            reduce()
        assert torch.equal(values, torch.full((3,), 2.0 * steps + 1))


@on_two_ranks
def test_rank_without_error_steps_as_in_eager():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def function():
        weight.sum().backward()
        if rank() == 1:
            raise KeyError
        optimizer.step()

    with raises(None, KeyError):
        ebb.experimental.paging.run_step(function)
    assert torch.equal(weight.detach(), torch.full((2,), 0.5 if rank() == 0 else 1.0))
    assert ebb.experimental.paging.run_step(lambda: 3) == 3


@contextlib.contextmanager
def small_pools():
    """A paged model, and pools that have room for few rows."""
    with fresh():
        net = Net(is_paged=True)
        ebb.experimental.paging.run_step(lambda: net(batch(0), FEW).backward())
        net.zero_grad()
        yield net


@pytest.mark.parametrize("others", ["have an optimizer", "have none", "raise"])
@on_two_ranks
def test_rank_whose_gradients_are_not_finite_raises(others):
    """It did not reach what the other one has reached."""
    with small_pools() as net:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

        def function():
            net(batch(1), MANY if rank() == 1 else FEW).backward()
            if rank() == 1:
                clip(net)
            elif others == "raise":
                raise KeyError
            elif others == "have an optimizer":
                optimizer.step()

        before = [parameter.detach().clone() for parameter in net.parameters()]
        of_first = KeyError if others == "raise" else "paging failed on rank 1"
        with raises(of_first, "raised before it returned"):
            ebb.experimental.paging.run_step(function)

        assert same(before, net.parameters())
        assert ebb.experimental.paging.run_step(lambda: 3) == 3


@on_two_ranks
def test_rank_cannot_run_a_step_again_if_another_raised():
    with small_pools() as net:

        def function():
            if rank() == 0:
                raise KeyError
            net(batch(1), MANY).backward()

        with raises(KeyError, "raised another error"):
            ebb.experimental.paging.run_step(function)

        net.zero_grad()
        ebb.experimental.paging.run_step(lambda: net(batch(1), MANY).backward())
        assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("found_by", ["the next optimizer", "run_step"])
@on_two_ranks
def test_too_little_room_after_gradients_have_been_used_raises(found_by):
    """As of a generator and a discriminator in one step."""
    with small_pools() as net:
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

        advice = r"Call run_step\(\) once for each optimizer"
        of_first = "paging failed on rank 1" if found_by == "the next optimizer" else advice
        with raises(of_first, advice):
            ebb.experimental.paging.run_step(function)

        assert len(calls) == 1


@on_two_ranks
def test_error_while_ranks_agree_is_raised_on_both():
    class CannotRunAgain(RuntimeError):
        pass

    def fails():
        raise CannotRunAgain

    for at_end in (False, True):
        agreement = Agreement(None)
        with raises("on rank 1", CannotRunAgain):
            agreement.ask(fails if rank() == 1 else lambda: True, at_end)
    assert ebb.experimental.paging.run_step(lambda: 3) == 3


@on_two_ranks
def test_too_little_room_before_a_step_raises_on_both():
    with small_pools() as net:
        net(batch(1), MANY if rank() == 1 else FEW).backward()

        with raises("paging failed on rank 1", "ran before this step"):
            ebb.experimental.paging.run_step(lambda: 3)


@pytest.mark.sweep
@on_two_ranks
def test_missing_rank_is_an_error_after_the_timeout():
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
def test_groups_agree_apart():
    """Each rank for itself, which may raise where it has too little room; and then both."""
    apart = [dist.new_group([0]), dist.new_group([1])][rank()]
    with fresh(overflow="blocking"):
        net = Net(is_paged=True)
        calls = []

        def function(valid):
            calls.append(valid)
            net(batch(1), valid).backward()

        for valid in (FEW, MANY) if rank() == 1 else (FEW, FEW, FEW):
            net.zero_grad()
            ebb.experimental.paging.run_step(lambda valid=valid: function(valid), group=apart)
        assert ebb.experimental.paging.step_ok()
        assert calls == ([FEW, MANY, MANY] if rank() == 1 else [FEW] * 3)


@on_two_ranks
def test_groups_may_be_made_anew():
    for _ in range(3):
        group = dist.new_group([0, 1])
        found = ebb.experimental.paging.run_step(lambda: 3, group=group)
        assert (found, ebb.experimental.paging.step_ok(group)) == (3, True)
        dist.destroy_process_group(group)


@on_two_ranks
def test_steps_leave_no_keys_in_the_store():
    def keys_after_steps(count):
        for _ in range(count):
            ebb.experimental.paging.run_step(lambda: 3)
        dist.barrier()
        count = dist.distributed_c10d._get_default_store().num_keys()
        dist.barrier()
        return count

    assert keys_after_steps(3) == keys_after_steps(5)
