"""Regions in which the program frees parameters after their use, as FSDP does.

See Note [Regions that are split].
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from ahead_programs import replays_ahead
from exactness import same_bits
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ebb

WIDTH = 8


@pytest.fixture(scope="module", autouse=True)
def _job_of_several_ranks():
    """ebb splits regions only there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Unit:
    """A layer whose weight has memory only during its forward and its backward."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.contents = torch.randn(WIDTH, WIDTH, generator=generator)
        self.weight = self.contents.clone().requires_grad_()
        self.free()

    def free(self, *_):
        self.weight.untyped_storage().resize_(0)

    def gather(self, *_):
        storage = self.weight.untyped_storage()
        storage.resize_(self.contents.untyped_storage().nbytes())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.weight):
            self.weight.copy_(self.contents)

    def __call__(self, x):
        """FSDP's hooks, too, run before and after the backward of the unit alone."""
        if x.requires_grad:
            x.register_hook(self.free)
        self.gather()
        y = (x.sin() @ self.weight).tanh() * x
        self.free()
        y.register_hook(self.gather)
        return y


def gradients(enter, *, between=lambda h: h * 2, last=torch.square):
    units = [Unit(seed) for seed in range(3)]
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
    with enter():
        h = x * 3
        for unit in units:
            h = unit(between(h))
        loss = last(h).sum()
    loss.backward()
    return [loss, x.grad, *(unit.weight.grad for unit in units)]


def nested():
    @contextlib.contextmanager
    def both():
        with ebb.region(name="outer"), ebb.region(ebb.policies.save_matmuls, name="inner"):
            yield

    return both()


ENTER = {
    "recompute_all": ebb.region,
    "save_matmuls": lambda: ebb.region(ebb.policies.save_matmuls),
    "each time": lambda: ebb.region(ebb.Policy({"aten::sin": ebb.RECOMPUTE_EACH_TIME})),
    "placeholder": lambda: ebb.region(escapes="placeholder"),
    "nested": nested,
}
BETWEEN = {
    "an op": lambda h: h * 2,
    "nothing": lambda h: h,
    "a write": lambda h: h.mul_(2),
    "a view": lambda h: h.view(2, 2, WIDTH).reshape(4, WIDTH),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("enter", ENTER)
def test_a_region_is_split_where_parameters_are_freed(enter, between):
    settings = {"between": BETWEEN[between]}
    expected = gradients(contextlib.nullcontext, **settings)
    ways = contextlib.nullcontext, ebb.verify, ebb.record_reports, lambda: replays_ahead(2)
    for around in ways:
        ebb.reset_stats()
        with around():
            actual = gradients(ENTER[enter], **settings)
        assert all(map(same_bits, actual, expected))
        assert ebb.stats()["total"]["ops_replayed"] > 0


def test_a_backward_in_the_region_follows_at_once():
    def gradient_of(enter):
        unit = Unit(0)
        x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
        with enter():
            y = unit(x * 3)
            y.backward(torch.ones(4, WIDTH))
        return [y, x.grad, unit.weight.grad]

    actual, expected = gradient_of(ebb.region), gradient_of(contextlib.nullcontext)
    assert all(map(same_bits, actual, expected))


def test_all_units_keep_nothing_but_their_inputs():
    """A split saves what one part hands to the next."""
    ebb.reset_stats()
    gradients(ebb.region, between=lambda h: h)

    total = ebb.stats()["total"]
    assert total["bytes_saved"] <= 4 * 4 * WIDTH * 4, total


def test_emptying_what_the_region_has_computed_does_not_split_it():
    x = torch.ones(4, requires_grad=True)
    with ebb.region(escapes="placeholder"):
        h = x.sin()
        y = h.cos().exp()
        scratch = torch.ones(4).mul(2)
        scratch.untyped_storage().resize_(0)
        y = y * 2
    with pytest.raises(RuntimeError, match="was read before backward restored it"):
        h.add(1)
    y.sum().backward()
    assert torch.equal(h, x.sin())


class Later:
    """A region that a freed unit splits, and a write in its second part."""

    def __init__(self):
        self.unit = Unit(0)
        self.x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
        self.buffer = torch.linspace(1, 2, 4 * WIDTH).reshape(4, WIDTH)
        self.computed = self.unread = None

    def run(self, enter, write):
        with enter():
            self.computed = self.x * self.buffer
            self.unread = self.computed.sin()
            h = self.unit(self.unread)
            y = h * 2
            write(self)
            y = y.exp()
        y.sum().backward()
        return [y, self.x.grad, self.unit.weight.grad]


def through_data(tensor):
    tensor.data[1, 2] = 5.0


def by_a_collective(tensor):
    dist.broadcast(tensor.detach(), src=0)


def by_a_backend(tensor):
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    group.broadcast([tensor.detach()], dist.BroadcastOptions())


def in_a_dispatch_mode(tensor):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return tensor.detach().add_(1)

    with Mode():
        torch.ones(())


@pytest.mark.parametrize("write", [through_data, by_a_collective, by_a_backend, in_a_dispatch_mode])
@pytest.mark.parametrize("what", ["buffer", "computed"])
def test_a_later_part_writes_without_a_count_to_what_an_earlier_part_needs(what, write):
    with pytest.raises(RuntimeError, match=r"in region 'region' writes to .* torch does not count"):
        Later().run(ebb.region, lambda job: write(getattr(job, what)))


@pytest.mark.parametrize("what", ["buffer", "computed"])
def test_a_later_part_writes_with_a_count(what):
    """As in eager, backward raises if it needs the old contents."""

    def write(job):
        with torch.no_grad():
            getattr(job, what)[1, 2] = 5.0

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Later().run(ebb.region, write)


def test_a_later_part_may_write_to_what_is_not_needed():
    def write(job):
        job.unit.weight.untyped_storage().resize_(job.unit.contents.untyped_storage().nbytes())
        job.unit.weight.data.copy_(job.unit.contents)  # gathered again: it was emptied before
        job.unit.free()
        job.other = torch.ones(4)
        job.other.data.mul_(2)

    actual = Later().run(ebb.region, write)
    expected = Later().run(contextlib.nullcontext, write)
    assert all(map(same_bits, actual, expected))


def test_writes_are_allowed_again_when_the_region_has_ended():
    job = Later()
    job.run(ebb.region, lambda job: None)
    with ebb.region():
        through_data(job.buffer)
    assert job.buffer[1, 2] == 5


def test_running_statistics_are_written_in_each_part():
    def gradients_of(enter):
        units = [Unit(seed) for seed in range(3)]
        norm = torch.nn.BatchNorm1d(WIDTH)
        x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
        with enter():
            h = x * 3
            for unit in units:
                h = unit(norm(h))
            y = h.sum()
        y.backward()
        return [y, x.grad, norm.weight.grad, norm.running_mean, norm.num_batches_tracked]

    actual, expected = gradients_of(ebb.region), gradients_of(contextlib.nullcontext)
    assert all(map(same_bits, actual, expected))
