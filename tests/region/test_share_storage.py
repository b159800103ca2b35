"""Storages that share memory: no copy, no version, and nothing wrong goes through."""

from __future__ import annotations

import gc

import pytest
import torch
from memory_use import allocations
from torch.multiprocessing.reductions import StorageWeakRef

from ebb import _C


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

    _C.share_storage(dst, src)

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
    _C.share_storage(h, kept)
    y.sum().backward()

    assert torch.equal(x.grad, 2 * (x * 2).cos())


def test_the_memory_lives_as_long_as_either():
    dst, src = emptied(5), torch.ones(5)
    memory = StorageWeakRef(src.untyped_storage())
    _C.share_storage(dst, src)
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
        _C.share_storage(*tensors)

    assert allocations(share) == [4000, 4000, -4000]


def test_sharing_again_and_in_a_circle():
    a, b, c = emptied(5), torch.ones(5), torch.full((5,), 2.0)
    _C.share_storage(a, b)
    _C.share_storage(a, b)
    _C.share_storage(b, a)  # they share it already
    assert a.data_ptr() == b.data_ptr()
    _C.share_storage(a, c)
    assert (a == 2).all()
    assert (b == 1).all()
    watch = [StorageWeakRef(t.untyped_storage()) for t in (a, b, c)]
    del a, b, c
    gc.collect()
    assert all(reference.expired() for reference in watch)


def test_memory_that_another_tensor_shows_cannot_be_taken_away():
    dst, src = emptied(5), torch.ones(5)
    _C.share_storage(dst, src)
    with pytest.raises(RuntimeError, match="not resizable"):
        src.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="an earlier share_storage used it as src"):
        _C.share_storage(src, torch.zeros(5))
    with pytest.raises(ValueError, match="belongs to other code"):
        _C.share_storage(torch.from_numpy(torch.zeros(5).numpy()), torch.zeros(5))

    assert (dst == 1).all()
    dst.untyped_storage().resize_(0)  # its own view of it can go
    assert (src == 1).all()


def test_a_chain_of_a_thousand_dies():
    first = last = torch.ones(5)
    tensors = []
    for _ in range(1000):
        tensors.append(emptied(5))
        _C.share_storage(tensors[-1], last)
        last = tensors[-1]
    del tensors, first
    assert last.sum() == 5


DIFFERENT = {
    "size": (torch.zeros(4), torch.zeros(5)),
    "stride": (torch.zeros(2, 3), torch.zeros(3, 2).t()),
    "storage offset": (torch.zeros(5)[1:], torch.zeros(4)),
    "dtype": (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
    "device": (torch.zeros(4), torch.zeros(4, device="meta")),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_tensors_that_differ(what):
    dst, src = DIFFERENT[what]
    pointer = dst.data_ptr()
    with pytest.raises(ValueError, match="same " + what if what != "device" else "plain strided"):
        _C.share_storage(dst, src)
    assert dst.data_ptr() == pointer


def test_a_storage_that_is_too_small():
    whole = torch.zeros(10)
    with pytest.raises(ValueError, match="at least 40 bytes; its storage has 16"):
        _C.share_storage(whole[:4], torch.zeros(4))
    short = torch.zeros(4)
    short.untyped_storage().resize_(4)
    with pytest.raises(ValueError, match="at least 16 bytes; its storage has 4"):
        _C.share_storage(emptied(4), short)


class Wrapper(torch.Tensor):
    """Its memory is not what it shows."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, operator, types, arguments=(), options=None):
        return operator(*arguments, **(options or {}))


OTHER_KINDS = {
    "sparse": torch.zeros(3).to_sparse(),
    "meta": torch.zeros(3, device="meta"),
    "wrapper": Wrapper(torch.zeros(3)),
    "nested": torch.nested.nested_tensor([torch.zeros(3)]),
    "quantized": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("other", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_tensors_of_other_kinds(other):
    for dst, src in ((torch.zeros(3), other), (other, torch.zeros(3))):
        with pytest.raises(ValueError, match="plain strided tensors"):
            _C.share_storage(dst, src)
