"""What is asked of a device about captures, and events that are used again."""

from __future__ import annotations

import pytest
import torch

from ebb import _C, _testing
from ebb._report.metrics import Metrics
from ebb_tests import device as late
from ebb_tests.device_leaves import needs_captures

ANOTHER_CAPTURE, OTHER_ERROR = 906, 710  # CUDA's numbers


@pytest.fixture
def asked_of_captures():
    """What asking whether a stream is captured raises from now on; 0: an error without a number."""
    yield torch.ops.late.fail_asked_of_captures
    torch.ops.late.fail_asked_of_captures(-1)


@needs_captures
@pytest.mark.parametrize(
    ("error", "captures"),
    [(-1, False), (ANOTHER_CAPTURE, True), (OTHER_ERROR, False), (0, False)],
)
def test_whether_a_stream_is_captured(error, captures, device, asked_of_captures):
    """Also where another capture is why nobody tells, and where nobody can."""
    asked_of_captures(error)

    assert _testing.captures("late") == (captures, captures)


@needs_captures
def test_a_stream_that_is_captured(device):
    stream = torch.Stream(device=device)
    with late.Graph().capture(stream):
        inside = _testing.captures("late")
    assert inside == (True, True)


def test_events_that_many_threads_record(device):
    assert _testing.events_are_apart("late", 4, 400_000)


def test_a_profile_that_cannot_begin_counts_no_allocations(device):
    """Afterwards a peak below the allocator's is unknown, and not taken for exact."""
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
