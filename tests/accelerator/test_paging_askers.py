"""PAGE where one stream asks for what another has brought back, copied or written."""

from __future__ import annotations

import accelerator
import pytest
import torch

import ebb
from paging import (
    EVERYTHING,
    Keep,
    Masked,
    asks_when_it_dies,
    fresh,
    is_right,
    masked,
    page_and_bring_back,
    paged,
    same,
    wait_for_all,
)

pytestmark = pytest.mark.usefixtures("fresh_pages")


def test_another_stream_asks_again_where_the_step_could_not_end(device, streams):
    """What has come back is there still, behind the stream that brought it."""
    _, x, n = masked(device)
    with fresh(device_limit=16):
        kept = paged(x, n)
        ctx = kept[0][0]
        wait_for_all(device, streams)
        with streams[0], pytest.raises(ValueError, match=r"device_limit .* is too small"):
            ctx.saved_tensors  # noqa: B018
        with streams[1]:
            found = ctx.saved_tensors[0].clone()
        accelerator.synchronize()
        assert is_right(found, x, 1)


def test_a_write_on_another_stream_to_what_stays(device, streams):
    """What stays is copied first, there; backward is on a stream that knows nothing of it."""
    net = Masked(device=device)
    x, n, w = net.inputs(0), net.live(20), net.weights[0]
    lives = net.places < n
    written = ebb.Policy({"aten::mm": ebb.PAGE})

    def program():
        h = ebb.mark_rows(x @ w, n)
        y = h.exp().cos()
        kept = h.sin()
        with accelerator.behind(streams[1], streams[0]):
            h.data.mul_(2.0)
        return torch.where(lives, y, 0).sum(), (kept, h)

    accelerator.synchronize()
    for _ in range(3):
        with ebb.paging.step(), streams[0]:
            with ebb.region(written):
                loss, kept = program()
            found = torch.autograd.grad(loss, [w])
        accelerator.synchronize()
        with streams[0]:
            expected = torch.autograd.grad(torch.where(lives, (x @ w).exp().cos(), 0).sum(), [w])
        accelerator.synchronize()
        assert same(expected, found)
        assert kept
        assert ebb.paging.step_ok()
    assert ebb.stats()["paging"]["resident"] > 0


def test_what_dies_when_a_stream_has_waited_may_ask(device):
    """Python's finalizers run when the engine's lock has been given back."""
    _, x, n = masked(device)
    for _ in range(2):
        page_and_bring_back(x, n)
    with ebb.region(EVERYTHING, "a"):
        h = ebb.mark_rows(x + 1, n)
        found = asks_when_it_dies(h.untyped_storage())
        kept = Keep.apply(h)
        del h
    assert found == []  # its rows are leaving
    kept = [kept, *paged(x, n, ("b",))]
    assert found == [True]
    assert kept
