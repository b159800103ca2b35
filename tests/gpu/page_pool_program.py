"""Page pools of each kind at work, for compute-sanitizer: python tests/gpu/page_pool_program.py

Small, and with few of torch's own kernels, since each memory access is looked at. Set
PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of its own.
"""

from __future__ import annotations

import sys

import torch

import ebb  # noqa: F401
from ebb._testing import PagePool

ROWS = 40


def goes_and_comes_back(
    device: str, row_bytes: int, page_rows: int, tiers: tuple[int, int], live: int
) -> None:
    stack = page_rows == 1
    pool = PagePool(torch.device(device), row_bytes, page_rows, *tiers, stack=stack)
    data = torch.arange(ROWS * row_bytes).remainder(251).to(torch.uint8).view(ROWS, row_bytes)
    source = data.to(device)
    found = [torch.empty_like(source) for _ in range(2)]
    for target in found:  # the second finds what the first has given back
        ticket = pool.make_ticket(ROWS)
        pool.stash(ticket, source, torch.tensor(live, device=device))
        pool.restore(ticket, target)
    dropped = pool.make_ticket(ROWS)
    pool.stash(dropped, source, torch.tensor(live, device=device))
    pool.give_back(dropped)
    assert pool.status()["errors"] == 0, pool.status()["error_text"]
    for target in found:
        assert torch.equal(target.cpu()[:live], data[:live])
        assert not target.cpu()[live:].any()


def runs_out_of_pages(device: str) -> None:
    pool = PagePool(torch.device(device), 64, 4, 2)
    source = torch.zeros(ROWS, 64, dtype=torch.uint8, device=device)
    ticket = pool.make_ticket(ROWS)
    pool.stash(ticket, source, torch.tensor(ROWS, device=device))
    pool.restore(ticket, source)
    assert pool.status()["errors"] != 0
    assert bool((source.cpu() == 255).all())
    pool.reset()
    assert pool.status()["errors"] == 0


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    for row_bytes in (1, 16, 100, 1024, 4100):
        for page_rows, tiers in ((4, (10, 0)), (4, (0, 10)), (1, (ROWS, 0)), (7, (2, 10))):
            for live in (ROWS, 17, 1, 0):
                goes_and_comes_back(device, row_bytes, page_rows, tiers, live)
    runs_out_of_pages(device)
    print("page pools: all rows came back")


if __name__ == "__main__":
    main()
