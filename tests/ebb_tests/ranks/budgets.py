"""Training on two ranks under a budget, for tests."""

from __future__ import annotations

import contextlib
import io

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ebb._launch import agreeing, takeover
from ebb._region.modules import marks_of
from ebb_tests.ranks.comparing import plain
from ebb_tests.ranks.models import Net

STEPS = 18  # more than ebb measures
WIDTH = 16


def policies(model):
    """The policies of a model's regions under a plan, by module name."""
    return {
        name: inner_marks.region.policy.to_toml()
        for name, inner in model.named_modules()
        if (inner_marks := marks_of(inner)) is not None
        and inner_marks.region is not None
        and inner_marks.region.policy is not None
    }


def train(
    wrap=lambda model: model,
    budget=None,
    rows=lambda rank: 64,
    steps=STEPS,
    prepare=lambda optimizer: None,
    before=lambda number: None,
    file="",
):
    """Returns losses and parameters, the last policies, stderr, and the number of plans made."""
    planned = None
    told = io.StringIO()
    torch.manual_seed(3)
    with contextlib.redirect_stderr(told):
        if budget is not None:
            planned = takeover.install_budget(budget, "a budget", (), None, file)
        try:
            model = wrap(Net(4, WIDTH))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            prepare(optimizer)
            found = []
            for number in range(steps):
                before(number)
                found.append(step(model, optimizer, number, rows))
        finally:
            takeover.remove()
    return found, policies(model), told.getvalue(), planned.job.plans if planned else 0


@contextlib.contextmanager
def patience(seconds):
    """How long a rank waits for others."""
    before = agreeing._PATIENCE
    agreeing._PATIENCE = seconds
    try:
        yield
    finally:
        agreeing._PATIENCE = before


def together(optimizer):
    """From now on no rank is a step ahead of the other."""
    real = optimizer.step

    def step():
        dist.barrier()
        return real()

    optimizer.step = step


def step(model, optimizer, number, rows):
    torch.manual_seed(100 * number + dist.get_rank())
    optimizer.zero_grad()
    loss = model(torch.randn(rows(dist.get_rank()), WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    bits = [plain(loss), *(plain(one) for one in model.parameters())]
    return [one.numpy().tobytes() for one in bits]  # kept tensors would count in the budget


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one == other


def of_both(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def sharded(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)
