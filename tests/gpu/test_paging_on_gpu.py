"""PAGE where only a GPU can tell: kernels, streams, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

import ebb
from ebb._C._testing import PagePool

pytestmark = [
    pytest.mark.needs_cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

EVERYTHING = ebb.Policy(default=ebb.PAGE, inputs=ebb.PAGE)
ROWS, WIDTH = 512, 64
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _anew():
    before = {k: v for k, v in ebb.paging.settings().items() if v is not None}
    ebb.paging.reset()
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()
    ebb.paging.reset()
    ebb.paging.configure(**before)


def weights(layers=3):
    return [torch.randn(WIDTH, WIDTH, device="cuda").div(8).requires_grad_() for _ in range(layers)]


def program(x, count, all_weights, paged):
    """Dead rows do not reach the loss; nobody reads the count on the host."""
    lives = (torch.arange(ROWS, device="cuda") < count).unsqueeze(1)
    x = torch.where(lives, x, 0)
    for w in all_weights:
        if paged:
            with ebb.region(EVERYTHING):
                x = layer_norm(gelu(ebb.mark_rows(x * 1.5, count) @ w), (WIDTH,))
        else:
            x = layer_norm(gelu((x * 1.5) @ w), (WIDTH,))
    return torch.where(lives, x, 0).square().sum()


def gradients(x, count, all_weights, paged):
    return torch.autograd.grad(program(x, count, all_weights, paged), all_weights)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("settings", [{}, {"page_rows": 7}, {"host_headroom": 4.0}])
def test_gradients_at_every_load(settings):
    ebb.paging.configure(headroom=1.0, **settings)
    all_weights = weights()
    for live in (300, 5, 0, 300, 299, 511 if "host_headroom" in settings else 300):
        x, count = torch.randn(ROWS, WIDTH, device="cuda"), torch.tensor(live, device="cuda")
        expected = gradients(x, count, all_weights, False)
        assert same(expected, gradients(x, count, all_weights, True))
        assert ebb.paging.step_ok()
    assert ebb.paging.stats()["recorded_steps"] == 1


def test_overflow_and_rerun():
    all_weights = weights()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    gradients(x, torch.tensor(10, device="cuda"), all_weights, True)
    for live in (200, 400):
        count = torch.tensor(live, device="cuda")
        found = ebb.paging.run_step(lambda count=count: gradients(x, count, all_weights, True))
        assert same(gradients(x, count, all_weights, False), found)
    assert ebb.paging.stats()["overflows"] == 2


def test_nobody_waits_in_steady_state():
    all_weights = weights()
    x, count = torch.randn(ROWS, WIDTH, device="cuda"), torch.tensor(300, device="cuda")
    for _ in range(2):
        gradients(x, count, all_weights, True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for fixed_order in (False, False, False):
            with ebb.paging.step(fixed_order):
                gradients(x, count, all_weights, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ebb.paging.step_ok()


def test_a_captured_step_replays_with_other_counts():
    all_weights = weights()
    x, count = torch.randn(ROWS, WIDTH, device="cuda"), torch.tensor(400, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(x, count, all_weights, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = gradients(x, count, all_weights, True)
        flag = ebb.paging.found_inf("cuda")
    for live in (400, 3, 0, 399, 128):
        count.fill_(live)
        x.copy_(torch.randn(ROWS, WIDTH, device="cuda"))
        graph.replay()
        assert flag.item() == 0.0
        assert same(gradients(x, count, all_weights, False), found)
        assert ebb.paging.step_ok()
    count.fill_(512)
    graph.replay()
    assert flag.item() == 1.0
    assert not ebb.paging.step_ok()


@pytest.mark.parametrize("row_bytes", [1024, 4096, 16384, 1002, 4100])
@pytest.mark.parametrize("stack", [False, True])
def test_bandwidth(row_bytes, stack):
    """At least 0.85 of what a copy on the device has, for 4 MiB and more; the best of many."""
    rows = 64 * MIB // row_bytes
    pool = PagePool(
        torch.device("cuda"), row_bytes, 1 if stack else 64, rows if stack else rows // 64 + 1,
        stack=stack,
    )  # fmt: skip
    data = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(data)
    count = torch.tensor(rows, device="cuda")

    def best(function):
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    tickets = [pool.make_ticket(rows) for _ in range(20)]

    def there_and_back():
        ticket = tickets.pop()
        pool.stash(ticket, data, count)
        pool.restore(ticket, target)

    paged = best(there_and_back)
    copied = 2 * best(lambda: target.copy_(data))
    assert torch.equal(target, data)
    if row_bytes % 16 == 0:
        assert copied / paged > 0.85
