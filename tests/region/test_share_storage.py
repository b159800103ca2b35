"""Storages that share memory, without a copy and without a new version."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ebb import _testing
from ebb_tests.memory_use import allocations


def emptied(*shape):
    t = torch.zeros(shape)
    t.untyped_storage().resize_(0)
    return t


def test_every_view_shows_the_data():
    dst, src = torch.zeros(4, 3), torch.randn(4, 3)
    views = [dst[1], dst.t(), dst[:, ::2], dst.view(-1), dst.detach()]
    expected = [src[1], src.t(), src[:, ::2], src.view(-1), src.detach()]
    dst.untyped_storage().resize_(0)
    versions = dst._version, src._version

    _testing.show_memory(dst, src)

    assert (dst._version, src._version) == versions
    assert dst.data_ptr() == src.data_ptr()
    assert all(map(torch.equal, views, expected))
    src.fill_(7)
    assert all((view == 7).all() for view in views)


def test_autograd_takes_it_for_what_it_saved():
    x = torch.randn(4, requires_grad=True)
    h = x * 2
    y = h.sin()
    kept = h.detach().clone()
    h.untyped_storage().resize_(0)
    _testing.show_memory(h, kept)
    y.sum().backward()

    assert torch.equal(x.grad, 2 * (x * 2).cos())


def test_the_memory_lives_as_long_as_either():
    dst, src = emptied(5), torch.ones(5)
    memory = StorageWeakRef(src.untyped_storage())
    _testing.show_memory(dst, src)
    del src
    gc.collect()
    assert not memory.expired()
    assert dst.sum() == 5
    del dst
    assert memory.expired()


def test_the_old_memory_is_freed_and_none_is_allocated():
    tensors = []

    def share():
        tensors.extend((torch.zeros(1000), torch.ones(1000)))
        _testing.show_memory(*tensors)

    assert allocations(share) == [4000, 4000, -4000]


def test_sharing_again_and_in_a_circle():
    a, b, c = emptied(5), torch.ones(5), torch.full((5,), 2.0)
    _testing.show_memory(a, b)
    _testing.show_memory(a, b)
    _testing.show_memory(b, a)  # they share it already
    assert a.data_ptr() == b.data_ptr()
    _testing.show_memory(a, c)
    assert (a == 2).all()
    assert (b == 1).all()
    watch = [StorageWeakRef(t.untyped_storage()) for t in (a, b, c)]
    del a, b, c
    gc.collect()
    assert all(reference.expired() for reference in watch)


def test_memory_that_another_tensor_shows_cannot_be_resized():
    dst, src = emptied(5), torch.ones(5)
    _testing.show_memory(dst, src)
    with pytest.raises(RuntimeError, match="not resizable"):
        src.untyped_storage().resize_(0)
    assert (dst == 1).all()
    dst.untyped_storage().resize_(0)  # its own view of it can go
    assert (src == 1).all()


def test_a_chain_of_a_thousand_dies():
    first = last = torch.ones(5)
    tensors = []
    for _ in range(1000):
        tensors.append(emptied(5))
        _testing.show_memory(tensors[-1], last)
        last = tensors[-1]
    del tensors, first
    assert last.sum() == 5
