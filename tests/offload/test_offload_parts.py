"""OFFLOAD of tensors that show a small part of their storage: the whole storage moves."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.programs.offloaded import OFFLOAD_ALL, finish_copies, gradients
from ebb_tests.stand_ins import fake_accelerator

# Sums are to be offloaded, since their result does not depend on itself in backward.
SUMS = ebb.Policy({"aten::add": ebb.OFFLOAD})

PARTS = {
    "rows": lambda h: h[2:4],
    "column": lambda h: h[:, 3],
    "strided": lambda h: h[1::3, ::4],
    "transposed": lambda h: h[:, 2:5].t(),
    "a row, repeated": lambda h: h[5].expand(8, -1),
    "a number": lambda h: h[3, 3],
    "conjugated": lambda h: torch.view_as_complex(h.view(10, 5, 2))[:, 1].conj(),
}


def program(x, part, reads=lambda h: h):
    h = x + 1
    return part(reads(h)).sin()


@pytest.fixture
def x():
    return torch.randn(10, 10, requires_grad=True)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("advance", [0, 1, 1000])
def test_whole_storage_is_moved_once(part, advance, x):
    y = program(x, part)
    expected = gradients(y.abs().sum(), x)[0]
    with fake_accelerator() as fake:
        with ebb.region(SUMS, "parts"):
            y = program(x, part)
        fake.advance(advance)
        assert ebb.stats()["regions"]["parts"]["bytes_offloaded"] == x.nbytes
        assert same_bits(gradients(y.abs().sum(), x)[0], expected)
        fake.advance(1000)
        assert fake.counts()["copies_out"] == 1


def test_storage_is_freed(accelerator, x):
    with ebb.region(SUMS):
        h = x + 1
        watch = StorageWeakRef(h.untyped_storage())
        y = h[3].sin()
        del h
    finish_copies(accelerator)
    assert watch.expired()
    y.sum().backward()


OTHERS = {
    "read as a whole": lambda h: (h[:, 1].sin(), h.cos()),
    "read as a whole before": lambda h: (h.cos(), h[:, 1].sin()),
    "other rows": lambda h: (h[1].sin(), h[2].sin(), h[1].cos()),
    "the same numbers in another shape": lambda h: (h[1].sin(), h[1].view(2, 5).cos()),
    "read by a recipe only": lambda h: (h[:, 1].sin(), (h * 2).sin()),
    "read by the recipe of a recipe": lambda h: (h[:, 1].sin(), (h * 2).exp().cos()),
    "a part read by a recipe": lambda h: ((h[3] * 2).sin(), h[3].sin()),
}


@pytest.mark.parametrize("policy", [SUMS, OFFLOAD_ALL], ids=["sums", "all"])
@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_other_operators_read_more_of_the_storage(others, swept, policy, x):
    def both(policy):
        h = x + 1
        results = []
        for result in others(h):
            results.append(result.sum())
            if swept and policy is not None:
                for _ in range(600):  # the map is swept now and then
                    torch.zeros(1).add_(1)
        return sum(results)

    expected = gradients(both(None), x)[0]
    with fake_accelerator() as fake:
        with ebb.region(policy):
            loss = both(policy)
        finish_copies(fake)
        assert same_bits(gradients(loss, x)[0], expected)


@pytest.mark.parametrize("sent", [False, True])
def test_write_through_an_alias_after_a_part_was_saved(sent, x):
    """Through an alias whose version is its own: eager's backward sees it, and so must ours."""

    def both(region):
        with region:
            h = x + 1
            y = (h[3] * 3).sin()
            z = h[3].cos()
            if sent:
                ebb.stats()["offload"]
            with torch.no_grad():
                h.data.mul_(2)
            loss = y.sum() + z.sum()
        return gradients(loss, x)[0]

    with fake_accelerator():
        expected = both(torch.enable_grad())
        for policy in (SUMS, OFFLOAD_ALL):
            assert torch.equal(both(ebb.region(policy)), expected)


def test_overlapping_elements_move_with_their_storage(accelerator):
    x = torch.randn(100, requires_grad=True)

    def overlapping():
        return (x + 1).as_strided((3, 4), (2, 1)).sin().sum()

    with ebb.region(SUMS, "overlapping"):
        y = overlapping()
    finish_copies(accelerator)
    assert torch.equal(gradients(y, x)[0], gradients(overlapping(), x)[0])
    assert ebb.stats()["regions"]["overlapping"]["bytes_offloaded"] == 400


def test_storage_without_room_is_recomputed(x):
    with fake_accelerator(pinned_limit=0) as fake:
        with ebb.region(SUMS):
            y = (x + 1)[3].sin()
        assert torch.equal(gradients(y.sum(), x)[0], gradients((x + 1)[3].sin().sum(), x)[0])
        assert fake.counts()["copies_out"] == 0
        assert ebb.stats()["total"]["ops_replayed"] == 1


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_write_to_an_input_that_found_no_room_raises(limit):
    """The handle on the part holds no storage, so the program's own reference must not count as
    the handle's."""
    w = torch.randn(400, 10, requires_grad=True)
    with fake_accelerator(pinned_limit=limit):
        x = w * 1.5
        with ebb.region(ebb.Policy(inputs=ebb.OFFLOAD)):
            a = x[3:100].sin()
            b = (x[3:100] * 2).cos()
            large = torch.zeros(1 << 22, requires_grad=True)
            for _ in range(2):
                (large * 2).sin()  # reads so much that the map is swept
        with torch.no_grad():
            x.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(b.sum(), w)
        del a


def test_operator_that_reads_beyond_its_argument(accelerator):
    def through_a_row(x):
        h = x + 1
        every = torch.as_strided_copy(h[3].detach(), (10, 10), (10, 1), 0)
        return (x * every.sin()).sum()

    x = torch.randn(10, 10, requires_grad=True)
    with ebb.region(SUMS):
        y = through_a_row(x)
    finish_copies(accelerator)
    assert same_bits(gradients(y, x)[0], gradients(through_a_row(x), x)[0])


@pytest.mark.parametrize("policy", [SUMS, OFFLOAD_ALL], ids=["sums", "all"])
def test_storage_freed_in_the_region_is_not_sent(accelerator, policy, x):
    with ebb.region(policy):
        h = x + 1
        y = (h * 2).cos()
        storage, nbytes = h.untyped_storage(), h.untyped_storage().nbytes()
        storage.resize_(0)
    storage.resize_(nbytes)
    with torch.no_grad():
        h.data.copy_(x + 1)
    finish_copies(accelerator)
    assert accelerator.take_violations() == []
    assert same_bits(gradients(y.sum(), x)[0], gradients(((x + 1) * 2).cos().sum(), x)[0])


@pytest.mark.parametrize(
    "policy", [SUMS, ebb.Policy({"aten::add": ebb.SAVE})], ids=["sent", "kept"]
)
def test_storage_freed_by_an_operator_is_neither_sent_nor_read(accelerator, policy):
    def product(x):
        return ((x + 1) * 2).cos()

    x = torch.randn(10, 10, requires_grad=True)
    with ebb.region(policy):
        h = x + 1
        y = (h * 2).cos()
        torch.ops.inductor.resize_storage_bytes_(h, 0)
        del h
    assert same_bits(gradients(y.sum(), x)[0], gradients(product(x).sum(), x)[0])
