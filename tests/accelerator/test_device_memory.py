"""Queries of a device and its allocator, and memory that is shared or not aligned."""

from __future__ import annotations

import gc

import pytest
import torch

import ebb
from ebb import _C, _testing
from ebb._region import unseen_writes
from ebb._report.metrics import Metrics
from ebb_tests import device as late
from ebb_tests.device_leaves import needs_captures

ANOTHER_CAPTURE, OTHER_ERROR = 906, 710  # CUDA's numbers


@pytest.fixture
def asked_of_captures():
    """Sets the error's number that a query of a stream's capture raises; 0: without a number."""
    yield torch.ops.late.fail_asked_of_captures
    torch.ops.late.fail_asked_of_captures(-1)


@needs_captures
@pytest.mark.parametrize(
    ("error", "captures"),
    [(-1, False), (ANOTHER_CAPTURE, True), (OTHER_ERROR, False), (0, False)],
)
def test_error_about_another_capture_means_capturing(error, captures, device, asked_of_captures):
    asked_of_captures(error)

    assert _testing.captures("late") == (captures, captures)


@needs_captures
def test_captured_stream_is_known(device):
    stream = torch.Stream(device=device)
    with late.Graph().capture(stream):
        inside = _testing.captures("late")
    assert inside == (True, True)


def test_threads_that_record_events_at_once_get_different_ones(device):
    assert _testing.events_are_apart("late", 4, 400_000)


def test_profile_that_cannot_begin_leaves_the_peak_inexact(device):
    """A peak below the allocator's is then unknown."""
    large = torch.empty(1 << 20, device=device)
    del large
    _C.begin_profile()
    try:
        with pytest.raises(RuntimeError, match="already recording"):
            _C.begin_profile()
    finally:
        _C.end_profile()
    _C.reset_most_tensor_bytes()
    small = torch.empty(16, device=device)

    _, _, is_exact = _C.tensor_bytes()

    assert not is_exact
    del small


def test_metrics_read_the_allocators_peak_and_never_reset_it(device):
    first, second = Metrics(), Metrics()

    large = torch.empty(1 << 22, dtype=torch.uint8, device=device)
    del large
    found = first.read()["ebb/peak_bytes"]
    larger = torch.empty(1 << 24, dtype=torch.uint8, device=device)
    now, most, is_exact = _C.tensor_bytes()
    del larger

    assert 1 << 22 <= found < 1 << 24 <= most
    assert second.read()["ebb/peak_bytes"] == first.read()["ebb/peak_bytes"] == most
    # The allocator's peak is from before, so it is only a limit of the peak since then.
    assert second.read()["ebb/peak_bytes"] == most
    assert _C.tensor_bytes() == (now - (1 << 24), most, is_exact)


# Memory that is not aligned as its allocator aligns: Note [Alignment]


@pytest.fixture
def address(device):
    """An operator whose result depends on where its argument is, as a vectorised kernel's does."""
    library = torch.library.Library("ebb_test", "FRAGMENT")
    library.define("add_address(Tensor x) -> Tensor")
    library.impl("add_address", lambda x: x + x.data_ptr() % 256, "PrivateUse1")
    yield torch.ops.ebb_test.add_address
    library._destroy()


def unaligned(device, distance):
    """A tensor whose storage begins so many bytes behind an aligned address."""
    whole = torch.randn(64 + distance).to(device)
    storage = whole.untyped_storage()[distance:][: 4 * 64]
    return torch.empty(0, device=device).set_(storage, 0, (64,))


@pytest.mark.parametrize("distance", [4, 16, 64, 128])
def test_copy_before_a_write_has_the_alignment_of_the_original(distance, address, device):
    buffer = unaligned(device, distance)
    w = torch.randn(64).to(device).requires_grad_()

    def forward(region):
        with region:
            loss = (w * address(buffer)).sum()
            buffer.mul_(1)  # ebb copies the bytes before the write
        return torch.autograd.grad(loss, w)[0].cpu()

    assert buffer.data_ptr() % 256 == distance
    recomputed = ebb.Policy({"ebb_test::add_address": ebb.RECOMPUTE})
    assert torch.equal(forward(ebb.region(recomputed)), forward(ebb.region(ebb.policies.save_all)))


# Memory that two storages share. torch's allocator ignores pointers that are not its own: see
# Note [Memory of another storage]

N = 4096


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
    with streams[0], ebb.region(ebb.policies.recompute_all, escapes="placeholder"):
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


def test_escape_filled_on_one_stream_is_freed_after_readers_on_others(device, three):
    x, w = (torch.rand(N).to(device).requires_grad_() for _ in range(2))
    late.synchronize()
    read = escaped_and_read(x, w, three)

    reuse(three[1], device)
    assert torch.equal(read.detach().cpu(), 2 * x.detach().cpu().sin())
