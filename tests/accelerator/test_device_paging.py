"""PAGE and run_step where the accelerator has no page pools."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import device as late

EVERYTHING = ebb.Policy(default=ebb.PAGE, inputs=ebb.PAGE)


def step(live, device="cpu"):
    """The gradient of a product of which `live` rows count."""
    torch.manual_seed(3)
    x, w = torch.randn(64, 8).to(device), torch.randn(8, 8).to(device).requires_grad_()
    count = torch.tensor(live).to(device)
    with ebb.region(EVERYTHING):
        loss = (ebb.experimental.mark_rows(x.clone(), count) @ w).sigmoid()[:live].sum()
    return torch.autograd.grad(loss, w)[0]


def test_a_step_that_runs_twice_draws_the_same_on_the_device(device):
    drawn = []

    def draws_and(live):
        drawn.append([torch.rand(3, device=device).cpu(), torch.rand(3)])
        return step(live)

    for live in (4, 4, 60):
        drawn.clear()
        found = ebb.experimental.paging.run_step(lambda live=live: draws_and(live))

    assert len(drawn) == 2
    for first, second in zip(*drawn, strict=True):
        assert torch.equal(first, second)
    assert torch.equal(found, step(60))


def test_a_device_without_a_generator(device):
    with late.drawing("from cpu", generator=False):
        found = [
            ebb.experimental.paging.run_step(lambda live=live: step(live)) for live in (4, 4, 60)
        ]

    assert torch.equal(found[-1], step(60))


def test_that_page_means_save_is_said_once(device):
    _testing.set_page_mover(0)  # other tests may have given it one
    with pytest.warns(UserWarning, match="tensors on late:0 are saved instead of paged") as caught:
        found = [step(5, device) for _ in range(2)]

    assert len([w for w in caught if "saved instead of paged" in str(w.message)]) == 1
    assert torch.equal(found[0].cpu(), found[1].cpu())


def operators_of(function):
    """The operators that it calls by itself."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    calls = [event for event in profile.events() if event.name.startswith("aten::")]
    return [event.name for event in calls if event.cpu_parent is None]


@pytest.mark.parametrize(("counts", "most"), [(5, 4), ([5], 4), ([2, 0, 3], 8)], ids=str)
def test_a_count_that_is_given_again_costs_no_kernel(device, counts, most):
    x = torch.randn(64, 8).to(device)
    count = torch.tensor(counts).to(device)
    with ebb.region(EVERYTHING):
        first, second = x * 1, x * 2

        once = operators_of(lambda: ebb.experimental.mark_rows(first, count))
        again = operators_of(lambda: ebb.experimental.mark_rows(second, count))
        count.add_(1)
        written = operators_of(lambda: ebb.experimental.mark_rows(second.clone(), count))

    assert 0 < len(once) <= most
    assert not again
    assert len(written) >= len(once)
