"""What the region that backward meets first has not freed is the values' own if the program had
dropped it when the region ended. Else the program may have written to it: recipes that read such a
value run its recipe first."""

from __future__ import annotations

import contextlib
import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.programs.ahead import counts, give_other_memory
from ebb_tests.replays import replays_ahead

COPIES = 64
ROOM = 1024  # for what is not `wide`


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(64, requires_grad=True)


def empty(tensor):
    torch.ops.inductor.resize_storage_bytes_(tensor.detach(), 0)


def give_other_contents(tensor):
    give_other_memory(tensor)
    tensor.data.fill_(9.0)


@torch.no_grad()
def write(tensor):
    tensor.add_(1)


@torch.no_grad()
def write_and_preserve_the_version(tensor):
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.add_(1)


def write_through_a_pointer(tensor):
    ctypes.memset(tensor.data_ptr(), 1, tensor.nbytes)
    torch.autograd.graph.increment_version(tensor)


def elsewhere(act):
    """`act` on a thread that is in no region, so ebb does not see its operators."""

    def run(tensor):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(act, tensor).result()

    return run


def program(x, entered, inside=None, after=None, late=None, dropped=None):
    """`held` is saved for `side`, whose backward never runs, and `wide`, which is not held, is made
    of it again. With `dropped`, nothing needs `side` any more when that writes to `held`."""
    with entered():
        held = x * 1.5
        side = held.sin()
        wide = torch.cat([held] * COPIES)
        total = wide.sin().sum()
        if dropped is not None:
            del side
            dropped(held)
        first = (x * 3).sin().sum()  # where backward arrives
        if inside is not None:
            inside(held)
        if after is late is None:
            del held
    if after is not None:
        after(held)
    if late is not None:
        total.register_hook(lambda gradient, held=held: late(held))
    held = wide = None
    (gradient,) = torch.autograd.grad(total + first, x)
    side = None
    return gradient


def assert_exact(x, replayed, **does):
    expected = program(x, contextlib.nullcontext)
    found = []
    with replays_ahead(limit=ROOM):
        ebb.reset_stats()
        did = counts(
            lambda: found.append(program(x, lambda: ebb.region(ebb.policies.recompute_all), **does))
        )
    assert did["regions_held"] == 1
    assert same_bits(found[0], expected)
    assert ebb.stats()["total"]["ops_replayed"] == replayed


def write_unseen(held):
    held.data.mul_(2)


def write_one_element_unseen(held):
    held.data[1:2].mul_(2)


@pytest.mark.parametrize(
    ("when", "act"),
    [
        ("after", len),  # the program has it, and does nothing
        *(("after", act) for act in (write, write_unseen, write_one_element_unseen)),
        *(("inside", act) for act in (write, write_through_a_pointer, empty, give_other_contents)),
        *(("inside", elsewhere(act)) for act in (empty, give_other_contents, give_other_memory)),
        *(("dropped", act) for act in (write, write_and_preserve_the_version)),
        ("late", write),  # when backward has arrived
        ("after", empty),
        ("after", give_other_contents),
    ],
)
def test_what_the_program_may_have_written_is_made_again(x, when, act):
    assert_exact(x, 2, **{when: act})


def test_what_the_program_has_dropped_is_not_made_again(x):
    assert_exact(x, 1)


def test_handles_follow_what_was_written_without_moving_its_version(x):
    """As eager's saved tensors do; what was computed before does not."""
    policy = ebb.Policy({"aten::exp": ebb.RECOMPUTE_EACH_TIME}, default=ebb.RECOMPUTE)
    w = torch.randn(64, requires_grad=True)

    def step(entered):
        with entered():
            held = x * 1.5
            product, power = held * w, held.exp()
            out = (product + power).sum()
        held.data.mul_(2)
        del held, product, power
        return torch.autograd.grad(out, [x, w])

    expected = step(contextlib.nullcontext)
    with replays_ahead():
        assert all(map(same_bits, step(lambda: ebb.region(policy)), expected))
