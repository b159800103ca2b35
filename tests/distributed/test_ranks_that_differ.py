"""Ranks that repeat other collectives, or in another order, get an error."""

from __future__ import annotations

import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ebb
from ebb import _C
from ebb._region.repeated_collectives import compare
from ebb_tests.ranks.collectives import peer, rank
from ebb_tests.ranks.repeating import REPEATED, WIDTH, Exchange, after, inputs
from ebb_tests.ranks.two_ranks import on_two_ranks

SOON = 30  # seconds; on a busy machine, a comparison alone takes several


def new_group(seconds=2 * SOON):
    return dist.new_group(timeout=timedelta(seconds=seconds))


def loss_of(policy, group):
    x = inputs()
    with ebb.region(policy, name="layer"):
        y = x.sin().detach()
        dist.all_reduce(y, group=group)
        y = (x * y).exp().detach()
        dist.all_to_all_single(z := y.new_empty(y.shape), y, group=group)
        return (x * z).exp().sum()


def error_of(policy, group):
    loss = loss_of(policy, group)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


MISSING = "region 'layer': rank 1 did not reach this point"


@pytest.mark.sweep
@on_two_ranks
def test_rank_whose_peer_repeats_nothing_raises():
    error = error_of(REPEATED if rank() == 0 else ebb.policies.recompute_all, new_group(seconds=3))
    assert (MISSING in error) if rank() == 0 else error == ""
    dist.barrier()


@pytest.mark.sweep
@on_two_ranks
def test_backward_works_after_an_error():
    group = new_group(seconds=3)
    if rank() == 0:
        assert MISSING in error_of(REPEATED, group)
    else:
        loss_of(REPEATED, group)  # without backward
    dist.barrier()
    assert error_of(REPEATED, group) == ""


@on_two_ranks
def test_ranks_that_repeat_different_collectives_raise():
    one = [rule for rule in REPEATED.rules if "alltoall" not in rule.op]
    policy = ebb.Policy(one) if rank() == 0 else REPEATED
    error = error_of(policy, new_group(seconds=3))
    assert f"rank {peer()} repeats other collectives" in error
    assert "with the same policy" in error
    dist.barrier()


def region_with_all_reduce(x, group=None):
    with ebb.region(REPEATED, name="layer"):
        y = x.sin().detach()
        dist.all_reduce(y, group=group)
        return (x * y.cos()).exp()


@on_two_ranks
def test_read_outside_of_backward_raises():
    x = inputs()
    loss = region_with_all_reduce(x)
    with pytest.raises(RuntimeError, match="region 'layer' was read outside of backward"):
        _ = loss.grad_fn._saved_result
    loss.sum().backward()
    assert x.grad is not None


@on_two_ranks
def test_late_rank_is_waited_for():
    """The other rank meanwhile asks gloo whether this one is alive."""
    group = dist.new_group()

    def losses(is_late=False):
        x = inputs()
        loss = region_with_all_reduce(x, group).sum()
        if is_late and rank() == 1:
            time.sleep(1.8)
        loss.backward()
        return [loss, x.grad]

    late = losses(is_late=True)
    for _ in range(20):
        assert all(map(torch.equal, losses(), late))
    sent = torch.full((3,), float(rank()))
    received = torch.empty(3)
    work = dist.isend(sent, peer(), group=group)
    dist.recv(received, peer(), group=group)
    work.wait()
    assert torch.equal(received, 1 - sent)
    dist.destroy_process_group(group)


def test_rules_that_repeat_unrepeatable_collectives_raise():
    for op in ("c10d::send.default", "c10d::recv_.default", "c10d::barrier.default"):
        with pytest.raises(ValueError, match="replays cannot repeat"):
            ebb.Policy([ebb.Rule(op, ebb.RECOMPUTE, force=True)])
    rule = ebb.Rule("c10d::allreduce_.default", ebb.RECOMPUTE_EACH_TIME, force=True)
    with pytest.raises(ValueError, match="equally often"):
        ebb.Policy([rule])


def error_soon(step):
    """The error that `step` raises. Each rank raises one long before the group's timeout."""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="cannot recompute") as error:
        step()
    assert time.monotonic() - began < SOON
    dist.barrier()
    return str(error.value)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Stack(torch.nn.Module):
    """Layers that need the collective's result in backward only for the second weight's gradient.

    Args:
        regions: "root": one region around all; "layers": one for each.
    """

    def __init__(self, group, regions, name="layer {}"):
        super().__init__()
        torch.manual_seed(5)
        self.up = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.down = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.group, self.regions, self.name = group, regions, name

    def enter(self, which, index=0):
        if which != self.regions:
            return contextlib.nullcontext()
        return ebb.region(REPEATED, name=self.name.format(index))

    def forward(self, x):
        with self.enter("root"):
            for index, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
                with self.enter("layers", index):
                    x = x + down(Reduce.apply(up(x), self.group))
        return x.square().mean()

    def steps(self, count=1):
        for _ in range(count):
            self(inputs().detach()).backward()


def assert_same_gradients(modules, expected):
    pairs = zip(modules.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(mine.grad, other.grad) for mine, other in pairs)


@contextlib.contextmanager
def mode_of(name):
    """Regions keep recomputable values: for replays "ahead", or while there is "room"."""
    _C.keep_while_there_is_room(1 << 40 if name == "room" else 0)
    try:
        with (
            ebb.config.patch(ahead_regions=2 if name == "ahead" else 0),
            ebb.verify() if name == "verify" else contextlib.nullcontext(),
        ):
            yield
    finally:
        _C.keep_while_there_is_room(0)


MODES = ["plain", "ahead", "verify"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("regions", ["root", "layers"])
@on_two_ranks
def test_weights_frozen_on_one_rank_raise(regions, mode):
    """From step 2 on, rank 1 repeats fewer collectives, or none."""
    model = Stack(new_group(), regions)
    with mode_of(mode):
        model.steps(2)
        if rank() == 1:
            model.down.requires_grad_(False)
        error = error_soon(model.steps)
    counts = {"root": (3, 2), "layers": (1, 0)}[regions]
    mine, theirs = counts if rank() == 0 else reversed(counts)
    words = {0: "none"}
    assert f"rank {peer()} repeats other collectives" in error
    assert words.get(theirs, f"({theirs} x c10d::allreduce_") in error
    assert words.get(mine, f"this rank: {mine} x c10d::allreduce_") in error


@on_two_ranks
def test_weights_unfrozen_on_one_rank_raise():
    """In the first steps, no rank repeats any."""
    model = Stack(new_group(), "layers")
    model.down.requires_grad_(False)
    model.steps(2)
    if rank() == 1:
        model.down.requires_grad_(True)

    assert "none" in error_soon(lambda: model.steps(1000))


@pytest.mark.parametrize("mode", MODES)
@on_two_ranks
def test_names_of_regions_may_differ(mode):
    group = new_group()
    model = Stack(group, "layers", f"rank {rank()}, layer {{}}")
    eager = Stack(group, "")
    with mode_of(mode):
        model.steps(3)
    eager.steps(3)
    assert_same_gradients(model, eager)


@on_two_ranks
def test_one_rank_may_leave_out_regions_without_collectives_in_backward():
    """Rank 1 has no backward in the first layer, whose list is empty on both ranks."""
    group = new_group()
    model = Stack(group, "layers")
    model.down[0].requires_grad_(False)
    if rank() == 1:
        model.up[0].requires_grad_(False)
    eager = Stack(group, "")
    for one in (model, eager) * 3:
        one.steps()
    assert_same_gradients(model.down[1:], eager.down[1:])


def backwards_of(losses):
    for loss in losses if rank() == 0 else reversed(losses):
        loss.backward()


@on_two_ranks
def test_different_orders_in_the_first_step_raise():
    """The first comparison finds that each rank waits for the other one elsewhere."""
    group = new_group()
    losses = []
    for number in range(2):
        x = inputs()
        with ebb.region(REPEATED, name=str(number)):
            y = Reduce.apply((x * (number + 1)).sin(), group)
            if number == 1:
                y = Reduce.apply(y.exp() * y, group)
            losses.append(after(y))
    assert "repeats them before others" in error_soon(lambda: backwards_of(losses))


@pytest.mark.parametrize("name", ["reduced", "reduced later", "functional all_reduce"])
@on_two_ranks
def test_different_orders_in_a_later_step_raise(name):
    """Step 0 agrees. In step 1 rank 1 runs the backwards in another order, which ebb notices."""

    def losses():
        x = inputs()
        found = []
        for number in range(2):
            with ebb.region(REPEATED, name=str(number)):
                found.append(after(Exchange.apply((x * (number + 1)).sin(), name)))
        return found

    for loss in losses():
        loss.backward()
    with pytest.raises(RuntimeError, match="in different orders"):
        backwards_of(losses())
    dist.barrier()


HELD = {"dropped": lambda y: None, "held": lambda y: y}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("mode", ["plain", "ahead", "room"])
@on_two_ranks
def test_backward_left_out_on_one_rank_raises(mode, held):
    """Its next forward takes part in the collective that the other rank repeats."""
    group = new_group()
    results = []

    def loss(step):
        x = inputs() + step
        with ebb.region(REPEATED, name="layer"):
            y = x.mean(0, keepdim=True).detach()
            dist.all_reduce(y, group=group)
            results.append(HELD[held](y))
            return ((x.sin() - y).square() * x.detach()).sum()

    with mode_of(mode):
        loss(0).backward()
        late = loss(1)
        if rank() == 0:
            loss(2)
        else:
            with pytest.raises(RuntimeError, match=r"region 'layer'.*in different orders"):
                late.backward()
    dist.barrier()


@on_two_ranks
def test_destroyed_group_raises():
    group = dist.new_group()
    loss = region_with_all_reduce(inputs(), group)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="region 'layer': their process group was destroyed"):
        loss.sum().backward()


@on_two_ranks
def test_comparisons_leave_few_keys_in_the_store():
    group, places = dist.new_group(), itertools.count()

    def keys_after(count):
        for _ in range(count):
            assert compare(group.group_name, "layer", str(next(places)), "a, b", True) == ""
        dist.barrier()
        keys = dist.distributed_c10d._get_default_store().num_keys()
        dist.barrier()
        return keys

    assert abs(keys_after(70) - keys_after(20)) <= 1  # a rank that has waited leaves one more


@on_two_ranks
def test_groups_are_compared_at_once():
    """From two threads; the ranks differ in one group only."""
    groups = [new_group() for _ in range(2)]

    def compare_all(index):
        lists = ["a"] * 10
        if index == 1:
            lists[-1] = f"of rank {rank()}"
        name = groups[index].group_name
        return [compare(name, "layer", str(place), own, True) for place, own in enumerate(lists)]

    with ThreadPoolExecutor(2) as pool:
        same, other = pool.map(compare_all, range(2))
    assert same == [""] * 10
    assert other[:9] == [""] * 9
    assert f"rank {peer()} repeats other collectives" in other[9]
    dist.barrier()
