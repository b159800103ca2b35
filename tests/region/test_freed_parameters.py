"""Regions in which the program frees parameters after their use, as FSDP does.

See Note [Parts of a region].
"""

from __future__ import annotations

import contextlib
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ebb
from ebb import _C, _testing
from ebb_tests.exactness import same_bits
from ebb_tests.memory_use import least_growth
from ebb_tests.replays import replays_ahead

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


@contextlib.contextmanager
def entered(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


MATMULS = ebb.policies.save_matmuls
ENTER = {
    "recompute_all": ebb.region,
    "save_matmuls": lambda: ebb.region(MATMULS),
    "each time": lambda: ebb.region(ebb.Policy({"aten::sin": ebb.RECOMPUTE_EACH_TIME})),
    "placeholder": lambda: ebb.region(escapes="placeholder"),
    "nested": lambda: entered(ebb.region(name="outer"), ebb.region(MATMULS, name="inner")),
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


def test_a_finalizer_that_runs_when_a_part_ends_is_outside_of_the_region():
    """See Note [Python while a region closes]."""
    inside = []

    def finalizer():
        inside.append(_C.in_region())
        with ebb.region():
            torch.ones(2, requires_grad=True).exp().sum()

    def between(h):
        array = np.linspace(0, 1, 4)
        weakref.finalize(array, finalizer)
        torch.from_numpy(array).exp()  # only the region holds the array from now on
        return h * 2

    actual = gradients(ebb.region, between=between)

    assert inside == [False] * 3
    assert all(map(same_bits, actual, gradients(contextlib.nullcontext)))


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


def test_a_tensor_is_marked_just_before_a_split():
    """The mark asks for the recorder while the next op has yet to begin the next part."""
    unit = Unit(0)
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
    with ebb.region():
        y = x * 3
        unit(y)
        y = ebb.experimental.discardable(y)

    assert torch.equal(y, x * 3)


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
        with torch.inference_mode():
            self.inference = self.buffer.clone()
        self.computed = self.unsaved = None

    def run(self, enter, write):
        with enter():
            self.computed = self.x * self.buffer + self.inference
            self.unsaved = self.computed.sin() * 3
            h = self.unit((self.unsaved + 1).cos() * self.computed)
            y = h * 2
            write(self)
            y = y.exp()
        self.computed = self.unsaved = None  # backward recomputes them
        y.sum().backward()
        return [y, self.x.grad, self.unit.weight.grad]

    def assert_exact(self, write, enter=ebb.region):
        expected = type(self)().run(contextlib.nullcontext, write)
        assert all(map(same_bits, self.run(enter, write), expected))


def through_data(tensor):
    tensor.data[1, 2] = 5.0


def through_a_view_of_data(tensor):
    tensor.data.view(-1)[3:5].mul_(2)


def by_a_collective(tensor):
    dist.broadcast(tensor.detach(), src=0)
    tensor.data.add_(1)


def by_a_backend(tensor):
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    group.broadcast([tensor.detach()], dist.BroadcastOptions())
    tensor.data.add_(1)


def in_a_dispatch_mode(tensor):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.ones.default:
                tensor.detach().add_(1)
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(())


def with_a_version_that_is_restored(tensor):
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor[1, 2] = 5.0


def by_opaque_code(tensor):
    with ebb.opaque(alias := tensor.data):
        alias.numpy()[1, 2] = 5.0


def by_a_method_without_operators(tensor):
    tensor.data.apply_(lambda element: element + 1)


def to_bytes(tensor):
    tensor.untyped_storage()[8:12].fill_(64)


def through_a_sparse_tensor(tensor):
    indices = torch.arange(len(tensor))[None]
    torch.sparse_coo_tensor(
        indices, tensor.data, tensor.shape, is_coalesced=True, check_invariants=False
    ).neg_()


def by_a_view_in_place(tensor):
    tensor.data.unsqueeze_(0).mul_(2)


def by_growing(tensor):
    flat = tensor.data.view(-1)
    flat.resize_(3 * tensor.numel())
    flat[: tensor.numel()].mul_(2)


UNCOUNTED = (
    through_data,
    through_a_view_of_data,
    by_a_collective,
    by_a_backend,
    in_a_dispatch_mode,
    with_a_version_that_is_restored,
    by_opaque_code,
    by_a_method_without_operators,
    to_bytes,
    through_a_sparse_tensor,
    by_a_view_in_place,
    by_growing,
)
WAYS = {
    "": ebb.region,
    "verify": lambda: entered(ebb.verify(), ebb.region()),
    "reports": lambda: entered(ebb.record_reports(), ebb.region()),
    "save": lambda: ebb.region(ebb.Policy(default=ebb.SAVE)),
    "each time": lambda: ebb.region(ebb.Policy(default=ebb.RECOMPUTE_EACH_TIME)),
    "offload": lambda: ebb.region(ebb.Policy(default=ebb.OFFLOAD)),
    "ahead": lambda: entered(replays_ahead(2), ebb.region()),
}


@pytest.fixture
def _disk(tmp_path):
    """Host memory to offload to."""
    ebb.config.update(offload_disk=tmp_path, offload_min_bytes=0)


@pytest.mark.usefixtures("_disk")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["buffer", "computed", "unsaved"])
@pytest.mark.parametrize("write", UNCOUNTED)
def test_a_later_part_writes_to_what_an_earlier_part_needs(write, what, way):
    """As in a region that is not split: replays read the old contents, and handles the new ones."""
    Later().assert_exact(lambda job: write(getattr(job, what)), WAYS[way])


def test_a_later_part_writes_to_an_inference_tensor():
    def write(job):
        with torch.inference_mode():
            job.inference[1, 2] = 5.0

    Later().assert_exact(write)


class Unsaved(Later):
    def run(self, enter, write):
        with enter():
            self.unsaved = (self.x * 2).sin()
            h = self.unit((self.unsaved + self.buffer).cos())
            write(self)
            y = h.exp()
        y.sum().backward()
        return [y, self.x.grad, self.unit.weight.grad]


@pytest.mark.parametrize("what", ["buffer", "unsaved"])
def test_a_later_part_writes_with_a_count_to_what_autograd_has_not_saved(what):
    def write(job):
        with torch.no_grad():
            getattr(job, what)[1, 2] = 5.0

    Unsaved().assert_exact(write)


@pytest.mark.parametrize("enter", [contextlib.nullcontext, ebb.region])
def test_a_later_part_writes_with_a_count_to_what_autograd_has_saved(enter):
    def write(job):
        with torch.no_grad():
            job.computed[1, 2] = 5.0

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Later().run(enter, write)


def test_a_later_part_gathers_a_parameter_again():
    def write(job):
        job.unit.weight.untyped_storage().resize_(job.unit.contents.untyped_storage().nbytes())
        job.unit.weight.data.copy_(job.unit.contents)
        job.unit.free()

    ebb.reset_stats()
    Later().assert_exact(write)
    assert ebb.stats()["total"]["bytes_copied"] == 0


@pytest.mark.usefixtures("_disk")
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_later_part_empties_and_fills_what_an_earlier_part_has_computed(way, other):
    def write(job):
        contents = job.computed.detach() + 1
        storage = job.computed.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        keeper = torch.empty_like(contents) if other else None  # may get the old memory
        storage.resize_(size)
        job.computed.data.copy_(contents)
        del keeper

    Later().assert_exact(write, WAYS[way])


@pytest.mark.parametrize("way", ["", "verify", "ahead"])
def test_a_leaf_made_in_the_region_is_emptied_before_a_part_ends(way):
    """ebb must not copy what is in its new memory."""
    contents = torch.linspace(1, 2, WIDTH * WIDTH).reshape(WIDTH, WIDTH)

    def gradients_of(enter):
        unit = Unit(0)
        x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
        with enter():
            gathered = contents.clone()
            dist.broadcast(gathered, src=0)
            h = (x.sin() @ gathered).cos()
            storage = gathered.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            y = unit(h) * 2
            storage.resize_(size)
            gathered.data.fill_(7)
            gathered.data.copy_(contents)
        y.sum().backward()
        return [y, x.grad, unit.weight.grad]

    expected = gradients_of(contextlib.nullcontext)
    actual = gradients_of(WAYS[way])
    assert all(map(same_bits, actual, expected))


def test_a_copy_that_fails_is_noticed():
    """The program catches the error and writes nevertheless."""

    def write(job):
        alias = job.buffer.data
        _testing.fail_allocations(1)
        try:
            with pytest.raises(RuntimeError, match="memory"):
                alias.mul_(2)
        finally:
            _testing.fail_allocations(0)
        alias[1, 2] = 5.0

    with pytest.raises(RuntimeError, match="ebb must recompute"):
        Later().run(ebb.region, write)


@pytest.mark.parametrize("training", [(True, True), (False, True), (True, False)])
def test_running_statistics_are_written_in_later_parts(training):
    def gradients_of(enter):
        units = [Unit(seed) for seed in range(2)]
        norm = torch.nn.BatchNorm1d(WIDTH)
        x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
        with enter():
            h = (x * 3 - norm.running_mean).sin()
            for unit, trains in zip(units, training, strict=True):
                norm.train(trains)
                h = unit(norm(h))
            y = h.sum()
        y.backward()
        return [y, x.grad, norm.weight.grad, norm.running_mean, norm.num_batches_tracked]

    actual, expected = gradients_of(ebb.region), gradients_of(contextlib.nullcontext)
    assert all(map(same_bits, actual, expected))


def test_parts_that_are_over_take_no_memory():
    """While the region is open."""

    def steps():
        for _ in range(300):
            x = torch.ones(4, WIDTH, requires_grad=True)
            Unit(0)((x * 2).sin()).mul(2).sum().backward()

    with ebb.region():
        assert least_growth(steps) < 1024
