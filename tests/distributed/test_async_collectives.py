"""A collective that has returned may still be writing, until somebody waits for it.

Rank 1 comes late, so on rank 0 the contents are not there when the operator returns. What reads
other memory meanwhile, and what autograd saves without reading it, is legal in eager.
"""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import ebb
from ebb import _testing
from ebb_tests import fork_server
from ebb_tests.engines import disk_tier
from ebb_tests.ranks.collectives import WRITES, peer, rank, source, write
from ebb_tests.ranks.collectives import wait as wait_for
from ebb_tests.ranks.comparing import assert_exact, difference_of, run
from ebb_tests.ranks.two_ranks import on_two_ranks

START = ("all_reduce", "reduce", "all_to_all_single", "isend_and_irecv")


class Meetings:
    """For the one of them that comes next, rank 1 waits until rank 0 lets it."""

    count = 0

    @classmethod
    def come_late(cls):
        cls.count += 1
        if rank() == 1:
            store().wait([f"meeting {cls.count}"])

    @classmethod
    def let_come(cls):
        if rank() == 0:
            store().set(f"meeting {cls.count}", "")


def store():
    return dist.distributed_c10d._get_default_store()


def start(name, t):
    Meetings.come_late()
    return WRITES[name](t, True)


def wait(works):
    Meetings.let_come()
    wait_for(works)


def nap():
    """Rank 1 sleeps where the wait is inside of an operator, so that rank 0 cannot tell of it. No
    test relies on who is first; it finds less if rank 1 is.
    """
    if rank() == 1:
        time.sleep(0.03)


def trains(program):
    def train(inside):
        torch.manual_seed(rank())
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        loss = program(x, inside)
        return {"loss": loss, "gradient": torch.autograd.grad(loss, x)[0]}

    return train


class Saves(torch.autograd.Function):
    """Saves a tensor that it does not read before backward."""

    @staticmethod
    def forward(ctx, x, t):
        ctx.save_for_backward(t)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


@pytest.mark.sweep
@on_two_ranks
def test_rank_0_sees_the_contents_late():
    """What the other tests rely on: the operator has returned, and the contents are not there."""
    h = source(torch.empty(4, 3))
    before = h.clone()
    works = start("all_reduce", h)
    early = h.clone()
    wait(works)
    assert rank() == 1 or torch.equal(early, before)
    assert not torch.equal(h, before)


@pytest.mark.parametrize("policy", ["recompute_all", "save_matmuls", "mixed"])
@pytest.mark.parametrize("made", ["computed", "leaf"])
@pytest.mark.parametrize("collective", START)
@pytest.mark.parametrize("waited", ["in the region", "after it"])
@on_two_ranks
def test_saved_before_it_is_there(waited, collective, made, policy):
    def program(x, inside):
        h = source(x)
        with inside.region():
            h = (x * 2).detach() if made == "computed" else h
            works = start(collective, h)
            y = Saves.apply(x.sin(), h)
            y = (y * x).sin().exp()
            if waited == "in the region":
                wait(works)
                return y.sum()
        wait(works)
        with inside.region():
            y = (y * h).sin().exp()
        return y.sum()

    assert_exact(trains(program), [policy])


@pytest.mark.parametrize("made", ["empty", "computed", "zeros"])
@pytest.mark.parametrize("way", ["read", "computed with"])
@on_two_ranks
def test_the_other_half_is_read_meanwhile(made, way):
    """As when halos are exchanged, or chunks of a ring."""

    def program(x, inside):
        with inside.region():
            if made == "computed":
                both = torch.cat([x, x * 3]).detach()
            else:
                both = torch.empty(8, 3, dtype=x.dtype) if made == "empty" else x.new_zeros(8, 3)
                both[:4].copy_(x.detach())
            Meetings.come_late()
            works = [dist.irecv(both[4:], peer()), dist.isend(source(x), peer())]
            ready = both[:4].sin() if way == "read" else both[:4]
            y = (x * ready).sin()
            wait(works)
            y = (y * both[4:].sin() * both[4:]).exp()
        return y.sum()

    assert_exact(trains(program))


@on_two_ranks
def test_a_buffer_used_twice_by_two_regions():
    """As a pipeline's buffers: written again after the region, before its backward. A leaf that is
    needed again must not be; copied by the region, or kept, it need not be read again.
    """

    def program(x, inside):
        buffer = torch.empty(4, 3, dtype=x.dtype)
        total = torch.zeros((), dtype=x.dtype)
        for i in range(3):
            Meetings.come_late()
            works = [dist.irecv(buffer, peer()), dist.isend(source(x) * (i + 1), peer())]
            wait(works)
            with inside.region():
                total = total + (x * buffer.clone().sin()).exp().sum()
        return total

    with pytest.raises(RuntimeError, match=r"recompute aten::clone.default .* has changed since"):
        assert_exact(trains(program), ["recompute_all"])


@on_two_ranks
def test_sent_from_a_tensor_that_nobody_holds():
    def program(x, inside):
        with inside.region():
            received = torch.empty_like(x).detach()
            Meetings.come_late()
            works = [
                dist.isend((x * 2).exp().detach(), peer()),
                dist.irecv(received, peer()),
            ]
            y = ((x * 2).exp() * x).sin()
            for _ in range(20):
                torch.empty(4, 3, dtype=x.dtype).fill_(9.0)
            wait(works)
            y = (y * received).sin()
        return y.sum()

    assert_exact(trains(program))


@on_two_ranks
def test_what_is_sent_is_recomputed_meanwhile():
    def program(x, inside):
        with inside.region():
            h = (x * 2).sin()
            y = h.exp().sum()
        received = torch.empty_like(x).detach()
        Meetings.come_late()
        works = [dist.isend(h.detach(), peer()), dist.irecv(received, peer())]
        del h
        gradient = torch.autograd.grad(y, x)[0]
        wait(works)
        with inside.region():
            z = (x * received).sin().exp()
        return z.sum() + (gradient.detach() * x).sum()

    assert_exact(trains(program))


@pytest.mark.parametrize("collective", ["of a result", "with a backward"])
@pytest.mark.parametrize("where", ["inside", "before"])
@on_two_ranks
def test_an_async_collective_tensor_is_saved_before_it_is_there(where, collective):
    """Autograd packs it before the function that waits for it runs."""

    def gathered(x):
        nap()
        if collective == "of a result":
            return funcol.all_gather_tensor((x * 2).detach(), 0, dist.group.WORLD)
        return funcol.all_gather_tensor_autograd((x * 2).sin(), 0, dist.group.WORLD)

    def program(x, inside):
        if where == "before":
            h = gathered(x)
        with inside.region():
            if where == "inside":
                h = gathered(x)
            y = (torch.cat([x, x]) * h).sin().exp() * h.sin() * (h * h)
        return y.sum()

    assert_exact(trains(program))


@on_two_ranks
def test_a_differentiable_functional_collective_is_waited_for_late():
    def program(x, inside):
        with inside.region():
            nap()
            h = funcol.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD)
            y = (x * 3).cos().exp()
            y = y * (h * h)[:4] * h[4:]
        return y.sin().sum()

    assert_exact(trains(program))


@pytest.mark.parametrize("collective", START)
@on_two_ranks
def test_leaves_memory_for_the_disk(collective):
    """Its copies are made by threads, at once."""

    def meanwhile():
        if rank() == 0:
            _testing.drain_offload()
        Meetings.come_late()
        Meetings.let_come()

    def program(x, inside):
        with inside.region():
            h = (x * 2).detach()
            write(collective, h, "late", meanwhile)
            y = Saves.apply(x.sin(), h)
            y = (y * x * h).sin().exp()
        return y.sum()

    assert_exact(trains(program), ["mixed"], accelerator=disk_tier)


REPEATED_AND_OFFLOADED = {
    "inherited": (ebb.RECOMPUTE, ebb.Rule("aten::mul", ebb.OFFLOAD)),
    "by a rule": (ebb.OFFLOAD, ebb.Rule("aten::mul", ebb.SAVE)),
    "by name": (ebb.RECOMPUTE, ebb.Rule("*", ebb.OFFLOAD, name="reduced")),
}


@pytest.mark.parametrize("how", REPEATED_AND_OFFLOADED)
@pytest.mark.parametrize("collective", ["in place", "functional"])
@on_two_ranks
def test_a_result_that_may_be_repeated_stays_in_memory(collective, how):
    """A rule with force names the collective. The disk tier would copy at once."""
    operator = "c10d::allreduce_" if collective == "in place" else "_c10d_functional::all_reduce"
    decision, other = REPEATED_AND_OFFLOADED[how]
    rules = [other, ebb.Rule(f"{operator}.default", decision, force=True)]

    def program(x, inside):
        with inside.region():
            h = (x * 2).detach()
            Meetings.come_late()
            if collective == "in place":
                works = [dist.all_reduce(h, async_op=True)]
            else:
                h = torch.ops._c10d_functional.all_reduce(h, "sum", dist.group.WORLD.group_name)
                works = []
            ebb.checkpoint_name(h, "reduced")
            y = Saves.apply(x.sin(), h)
            if rank() == 0:
                _testing.drain_offload()
            wait(works)
            h = torch.ops._c10d_functional.wait_tensor(h) if collective == "functional" else h
            y = (y * x * h).sin().exp()
        return y.sum()

    expected = run(trains(program), None)
    with disk_tier():
        actual = run(trains(program), ebb.Policy(rules))

    assert not difference_of(actual, expected)


@pytest.mark.parametrize("force", [False, True])
@on_two_ranks
def test_a_tensor_whose_other_half_is_written_meanwhile_stays_in_memory(force):
    rules = [ebb.Rule("c10d::allreduce_.default", ebb.RECOMPUTE, force=True)] if force else []

    def program(x, inside):
        with inside.region():
            h = (x * 2).detach()
            Meetings.come_late()
            works = [dist.all_reduce(h[:2], async_op=True)]
            h[2:].mul_(3)
            y = Saves.apply(x.sin(), h)
            if rank() == 0:
                _testing.drain_offload()
            wait(works)
            works.clear()  # a Work holds its tensors
            y = (y * x * h).sin().exp()
        return y.sum()

    expected = run(trains(program), None)
    with disk_tier():
        actual = run(trains(program), ebb.Policy(rules, default=ebb.OFFLOAD))

    assert not difference_of(actual, expected)


@on_two_ranks
def test_a_result_that_the_program_has_waited_for_may_leave():
    rules = [ebb.Rule("c10d::allreduce_.default", ebb.OFFLOAD, force=True)]

    def program(x, inside):
        with inside.region():
            h = (x * 2).detach()
            dist.all_reduce(h)
            y = (x * h).sin()
        return y.sum()

    ebb.reset_stats()
    with disk_tier():
        run(trains(program), ebb.Policy(rules))

    assert ebb.stats()["total"]["bytes_offloaded"] > 0


@on_two_ranks
def test_a_functional_result_may_leave_once_the_program_has_waited():
    x = torch.ones(3)

    h = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
    assert _testing.is_in_transit(h)
    torch.ops._c10d_functional.wait_tensor(h)
    assert not _testing.is_in_transit(h)


BEFORE_THE_FIRST_REGION = """
import torch, ebb
import torch.distributed as dist
from ebb import _testing
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
waited, begun = torch.ones(2), torch.ones(2)
dist.all_reduce(waited)
dist.all_reduce(begun, async_op=True)
print(_testing.is_in_transit(waited), _testing.is_in_transit(begun))
"""


def test_collectives_before_the_first_region_are_known():
    done = fork_server.run(["-c", BEFORE_THE_FIRST_REGION], timeout=100)

    assert done.stdout == "False True\n", done.stderr


@on_two_ranks
def test_a_collective_moves_no_version_that_eager_leaves():
    """ebb notes the storage, which is no value of a region."""
    with ebb.region(ebb.policies.recompute_all):
        torch.ones(1).sin()
    h = torch.ones(3, requires_grad=True) * 2
    y = h.sin()
    with torch.no_grad():
        for _ in range(2):
            dist.all_reduce(h, async_op=True).wait()
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([h]).wait()

    y.sum().backward()


@pytest.mark.parametrize("begun", ["outside", "in another region"])
@on_two_ranks
def test_an_input_that_is_not_there_stays_in_memory(begun):
    def program(x, inside):
        h = x * 2
        with contextlib.nullcontext() if begun == "outside" else inside.region():
            Meetings.come_late()
            works = [dist.all_reduce(h.detach(), async_op=True)]
        with inside.region():
            y = Saves.apply(x.sin(), h)
            if rank() == 0:
                _testing.drain_offload()
            wait(works)
            y = (y * x * h).sin().exp()
        return y.sum()

    expected = run(trains(program), None)
    with disk_tier():
        actual = run(trains(program), ebb.Policy(default=ebb.RECOMPUTE, inputs=ebb.OFFLOAD))

    assert not difference_of(actual, expected)


@pytest.mark.parametrize("collective", START)
@on_two_ranks
def test_ten_in_a_row_on_one_buffer(collective):
    def program(x, inside):
        y = x
        with inside.region():
            h = torch.zeros(4, 3, dtype=x.dtype)
            for i in range(10):
                h.add_(y.detach(), alpha=0.1)
                works = start(collective, h) if i == 5 else WRITES[collective](h, True)
                y = (y * 1.1).sin()
                wait(works)
                y = (y * (h + 1)).sin() + x
        return y.sum()

    assert_exact(trains(program))
