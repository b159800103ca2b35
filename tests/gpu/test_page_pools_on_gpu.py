"""Page pools where only a GPU can tell: that they are there, and how fast they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ebb
from ebb._testing import PagePool
from ebb_tests.gpus import MIB, NEEDS_GPU, RUNS_PAGE_KERNELS

pytestmark = [*NEEDS_GPU, RUNS_PAGE_KERNELS]


def bytes_on(device, *shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def test_the_kernels_are_built_and_ebb_is_for_this_torch():
    assert Path(ebb._C.__file__).with_name("libebb_cuda.so").exists(), "build with EBB_CUDA=1"
    assert torch.__version__.partition("+")[0] == ebb._C.torch_release


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
@pytest.mark.parametrize("stack", [False, True], ids=["pages", "stack"])
def test_rows_go_and_come_back(name, stack):
    page_rows, pages = (1, 24) if stack else (4, 6)
    pool = PagePool(torch.device(name), 256, page_rows, pages, stack=stack)
    data, found = bytes_on(name, 24, 256), torch.full((24, 256), 7, dtype=torch.uint8, device=name)

    ticket = pool.make_ticket(24)
    pool.stash(ticket, data, torch.tensor(17, device=name))
    pool.restore(ticket, found)

    assert torch.equal(found[:17], data[:17])
    assert not found[17:].any()
    assert pool.status()["errors"] == 0


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 16, 100, 1002, 4100, 65536])
def test_rows_of_any_width(row_bytes):
    rows = max(1, 4 * MIB // row_bytes)
    pool = PagePool(torch.device("cuda"), row_bytes, 64, rows // 64 + 1)
    data = bytes_on("cuda", rows, row_bytes)
    found = torch.empty_like(data)

    for live in (rows, rows // 2, 1):
        ticket = pool.make_ticket(rows)
        pool.stash(ticket, data, torch.tensor(live, device="cuda"))
        pool.restore(ticket, found)
        assert torch.equal(found[:live], data[:live])
        assert not found[live:].any()
    assert pool.status()["errors"] == 0


def test_what_does_not_fit_goes_to_pinned_memory():
    pool = PagePool(torch.device("cuda"), 4096, 16, 4, 4)
    tensors = [bytes_on("cuda", 64, 4096) for _ in range(2)]
    tickets = [pool.make_ticket(64) for _ in tensors]
    for ticket, data in zip(tickets, tensors, strict=True):
        pool.stash(ticket, data, torch.tensor(60, device="cuda"))
    assert pool.status()["spilled"]

    for ticket, data in zip(reversed(tickets), reversed(tensors), strict=True):
        found = torch.empty_like(data)
        pool.restore(ticket, found)
        assert torch.equal(found[:60], data[:60])
    assert pool.status()["errors"] == 0


def milliseconds(function):
    """The least of many, on the device alone: the host is ahead while the device sleeps."""
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


@pytest.mark.parametrize("row_bytes", [1024, 4096, 16384])
@pytest.mark.parametrize("stack", [False, True], ids=["pages", "stack"])
def test_bandwidth(row_bytes, stack):
    """At least 0.85 of what a copy on the device has, for 64 MiB; the best of many."""
    rows = 64 * MIB // row_bytes
    options = (1, rows) if stack else (64, rows // 64 + 1)
    pool = PagePool(torch.device("cuda"), row_bytes, *options, stack=stack)
    data = bytes_on("cuda", rows, row_bytes)
    target = torch.empty_like(data)
    count = torch.tensor(rows, device="cuda")
    tickets = [pool.make_ticket(rows) for _ in range(20)]

    def there_and_back():
        ticket = tickets.pop()
        pool.stash(ticket, data, count)
        pool.restore(ticket, target)

    paged = milliseconds(there_and_back)
    copied = milliseconds(lambda: (target.copy_(data), target.copy_(data)))

    assert torch.equal(target, data)
    assert copied / paged >= 0.85
