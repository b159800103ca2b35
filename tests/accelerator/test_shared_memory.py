"""record_stream of memory that one storage shares with another: torch's allocator ignores pointers
that are not its own. See Note [Memory of another storage]."""

from __future__ import annotations

import gc

import pytest
import torch

import ebb
from ebb import _testing
from ebb._region import unseen_writes
from ebb_tests import device as late

N = 4096
EVERYTHING = ebb.policies.recompute_all


@pytest.fixture
def three(device):
    return [torch.Stream(device=device) for _ in range(3)]


def reuse(stream, device):
    """Fills what is free on the stream with other bytes."""
    gc.collect()
    with stream:
        kept = [torch.empty(N, device=device).fill_(7) for _ in range(4)]
    late.synchronize()
    return kept


@pytest.mark.parametrize("how", ["positional", "named"])
def test_record_stream_of_shared_memory(how, device, three):
    unseen_writes.install()
    with three[0]:
        source, shared = torch.ones(N, device=device), torch.zeros(N, device=device)
        _testing.show_memory(shared, source)
    del source
    late.synchronize()
    with three[1]:
        y = shared * 2
    if how == "named":
        shared.record_stream(s=three[1])
    else:
        shared.record_stream(three[1])
    del shared

    reuse(three[0], device)
    assert torch.equal(y.cpu(), torch.full((N,), 2.0))


def escaped_and_read(x, w, streams):
    """An escape that is filled on the second stream, and read by backward on the third."""
    with streams[0], ebb.region(EVERYTHING, escapes="placeholder"):
        h = x.sin()
        escaped = h.detach()
        product = w * h
        y = product * 1
        function = product.grad_fn
        del h, product
    late.synchronize()
    with streams[1]:
        filled = function._saved_other
        del filled
    late.synchronize()
    with streams[2]:
        read = function._saved_other * 2
    del escaped, function, y
    return read


def test_an_escape_that_three_streams_use(device, three):
    x, w = (torch.rand(N).to(device).requires_grad_() for _ in range(2))
    late.synchronize()
    read = escaped_and_read(x, w, three)

    reuse(three[1], device)
    assert torch.equal(read.detach().cpu(), 2 * x.detach().cpu().sin())
