"""A collective that has returned may still be writing, until somebody waits for it.

Rank 1 comes late, so on rank 0 the contents are not there when the operator returns. Reading other
memory meanwhile, and saving the tensor for backward without reading it, are legal in eager.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from types import SimpleNamespace

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
from ebb_tests.ranks.comparing import assert_exact, compared_with_eager, gradient_of, run
from ebb_tests.ranks.two_ranks import on_two_ranks

STARTED = ("all_reduce", "reduce", "all_to_all_single", "isend and irecv")


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


def start_exchange(received, sent):
    Meetings.come_late()
    return [dist.irecv(received, peer()), dist.isend(sent, peer())]


def wait(works):
    Meetings.let_come()
    wait_for(works)


def nap():
    """Rank 1 sleeps where the wait is inside of an operator, so that rank 0 cannot tell of it. No
    test relies on who is first; it finds less if rank 1 is.
    """
    if rank() == 1:
        time.sleep(0.03)


class Saves(torch.autograd.Function):
    """Saves a tensor that it does not read before backward."""

    @staticmethod
    def forward(ctx, x, t):
        ctx.save_for_backward(t)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def saved_before_the_wait(x, h, works):
    """Values leave on rank 0, where the contents of h are not there yet."""
    y = Saves.apply(x.sin(), h)
    if rank() == 0:
        _testing.drain_offload()
    wait(works)
    works.clear()  # a Work holds its tensors
    return (y * x * h).sin().exp()


@pytest.mark.sweep
@on_two_ranks
def test_rank_0_sees_contents_late():
    """The other tests rely on this: the operator has returned, and the contents are not there."""
    h = source(torch.empty(4, 3))
    before = h.clone()
    works = start("all_reduce", h)
    early = h.clone()
    wait(works)
    assert rank() == 1 or torch.equal(early, before)
    assert not torch.equal(h, before)


@pytest.mark.parametrize("made", ["computed", "leaf"])
@pytest.mark.parametrize("collective", STARTED)
@pytest.mark.parametrize("waited", ["in the region", "after it"])
@compared_with_eager("recompute_all", "save_matmuls", "mixed")
def test_tensor_may_be_saved_before_contents_are_there(x, inside, waited, collective, made):
    h = source(x)
    with inside.region():
        h = (x * 2).detach() if made == "computed" else h
        works = start(collective, h)
        y = Saves.apply(x.sin(), h)
        y = (y * x).sin().exp()
        if waited == "in the region":
            wait(works)
            return y
    wait(works)
    with inside.region():
        return (y * h).sin().exp()


@pytest.mark.parametrize("made", ["empty", "computed", "zeros"])
@pytest.mark.parametrize("way", ["read", "computed with"])
@compared_with_eager()
def test_half_of_a_tensor_is_read_while_other_half_is_received(x, inside, made, way):
    """As when halos are exchanged, or chunks of a ring."""
    with inside.region():
        if made == "computed":
            both = torch.cat([x, x * 3]).detach()
        else:
            both = torch.empty(8, 3, dtype=x.dtype) if made == "empty" else x.new_zeros(8, 3)
            both[:4].copy_(x.detach())
        works = start_exchange(both[4:], source(x))
        ready = both[:4].sin() if way == "read" else both[:4]
        y = (x * ready).sin()
        wait(works)
        return (y * both[4:].sin() * both[4:]).exp()


@on_two_ranks
def test_buffer_overwritten_before_backward_raises():
    """As a pipeline's buffers: written again after the region, before its backward. A leaf that is
    needed again must not be; copied by the region, or kept, it need not be read again.
    """

    def program(x, inside):
        buffer = torch.empty(4, 3, dtype=x.dtype)
        total = torch.zeros((), dtype=x.dtype)
        for i in range(3):
            wait(start_exchange(buffer, source(x) * (i + 1)))
            with inside.region():
                total = total + (x * buffer.clone().sin()).exp().sum()
        return total

    with pytest.raises(RuntimeError, match=r"recompute aten::clone.default .* has changed since"):
        assert_exact(gradient_of(program), ["recompute_all"])


@compared_with_eager()
def test_sent_tensor_is_held_until_it_is_sent(x, inside):
    with inside.region():
        received = torch.empty_like(x).detach()
        works = start_exchange(received, (x * 2).exp().detach())
        y = ((x * 2).exp() * x).sin()
        for _ in range(20):
            torch.empty(4, 3, dtype=x.dtype).fill_(9.0)
        wait(works)
        return (y * received).sin()


@compared_with_eager()
def test_tensor_is_recomputed_while_it_is_sent(x, inside):
    with inside.region():
        h = (x * 2).sin()
        y = h.exp().sum()
    received = torch.empty_like(x).detach()
    works = start_exchange(received, h.detach())
    del h
    gradient = torch.autograd.grad(y, x)[0]
    wait(works)
    with inside.region():
        z = (x * received).sin().exp()
    return z.sum() + (gradient.detach() * x).sum()


@pytest.mark.parametrize("collective", ["of a result", "with a backward"])
@pytest.mark.parametrize("where", ["inside", "before"])
@compared_with_eager()
def test_async_collective_tensor_may_be_saved_early(x, inside, where, collective):
    """Autograd packs it before the function that waits for it runs."""

    def gathered():
        nap()
        if collective == "of a result":
            return funcol.all_gather_tensor((x * 2).detach(), 0, dist.group.WORLD)
        return funcol.all_gather_tensor_autograd((x * 2).sin(), 0, dist.group.WORLD)

    if where == "before":
        h = gathered()
    with inside.region():
        if where == "inside":
            h = gathered()
        meanwhile = (x * 3).cos().exp() * x
        y = (torch.cat([x, x]) * h).sin().exp() * h.sin() * (h * h)
        return y * torch.cat([meanwhile, x])


@pytest.mark.parametrize("collective", STARTED)
@compared_with_eager()
def test_ten_collectives_write_to_one_buffer(x, inside, collective):
    y = x
    with inside.region():
        h = torch.zeros(4, 3, dtype=x.dtype)
        for i in range(10):
            h.add_(y.detach(), alpha=0.1)
            works = start(collective, h) if i == 5 else WRITES[collective](h, True)
            y = (y * 1.1).sin()
            wait(works)
            y = (y * (h + 1)).sin() + x
    return y


# Values do not leave memory before their contents are there. The disk tier copies at once.


@pytest.mark.parametrize("collective", STARTED)
@compared_with_eager("mixed", accelerator=disk_tier)
def test_results_leave_for_the_disk_after_the_wait(x, inside, collective):
    def meanwhile():
        if rank() == 0:
            _testing.drain_offload()
        Meetings.come_late()
        Meetings.let_come()

    with inside.region():
        h = (x * 2).detach()
        write(collective, h, "late", meanwhile)
        y = Saves.apply(x.sin(), h)
        return (y * x * h).sin().exp()


REPEATED_AND_OFFLOADED = {
    "inherited": (ebb.RECOMPUTE, ebb.Rule("aten::mul", ebb.OFFLOAD)),
    "by a rule": (ebb.OFFLOAD, ebb.Rule("aten::mul", ebb.SAVE)),
    "by name": (ebb.RECOMPUTE, ebb.Rule("*", ebb.OFFLOAD, name="reduced")),
}


@pytest.mark.parametrize("how", REPEATED_AND_OFFLOADED)
@pytest.mark.parametrize("collective", ["in place", "functional"])
@on_two_ranks
def test_repeatable_result_stays_in_memory_while_it_is_written(collective, how):
    """A rule with force names the collective."""
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
                works = [SimpleNamespace(wait=partial(torch.ops._c10d_functional.wait_tensor, h))]
            ebb.checkpoint_name(h, "reduced")
            return saved_before_the_wait(x, h, works)

    assert_exact(gradient_of(program), [ebb.Policy(rules)], disk_tier)


@pytest.mark.parametrize("force", [False, True])
@on_two_ranks
def test_tensor_stays_in_memory_while_part_of_it_is_written(force):
    rules = [ebb.Rule("c10d::allreduce_.default", ebb.RECOMPUTE, force=True)] if force else []

    def program(x, inside):
        with inside.region():
            h = (x * 2).detach()
            Meetings.come_late()
            works = [dist.all_reduce(h[:2], async_op=True)]
            h[2:].mul_(3)
            return saved_before_the_wait(x, h, works)

    assert_exact(gradient_of(program), [ebb.Policy(rules, default=ebb.OFFLOAD)], disk_tier)


@pytest.mark.parametrize("begun", ["outside", "in another region"])
@compared_with_eager(ebb.Policy(inputs=ebb.OFFLOAD), accelerator=disk_tier)
def test_input_stays_in_memory_while_it_is_written(x, inside, begun):
    h = x * 2
    with contextlib.nullcontext() if begun == "outside" else inside.region():
        Meetings.come_late()
        works = [dist.all_reduce(h.detach(), async_op=True)]
    with inside.region():
        return saved_before_the_wait(x, h, works)


@on_two_ranks
def test_result_of_synchronous_collective_is_offloaded():
    def program(x, inside):
        with inside.region():
            h = (x * 2).detach()
            dist.all_reduce(h)
            return (x * h).sin()

    ebb.reset_stats()
    with disk_tier():
        rules = [ebb.Rule("c10d::allreduce_.default", ebb.OFFLOAD, force=True)]
        run(gradient_of(program), ebb.Policy(rules))

    assert ebb.stats()["total"]["bytes_offloaded"] > 0


@on_two_ranks
def test_functional_result_is_in_transit_until_the_program_waits():
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
def test_collective_outside_of_regions_leaves_the_version():
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
