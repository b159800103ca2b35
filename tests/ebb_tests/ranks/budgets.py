"""Training on two ranks under a budget, for tests."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ebb._launch import agreeing, takeover
from ebb._region.modules import marks_of
from ebb_tests.ranks.models import Net, plain

STEPS = 18  # more than ebb measures
WIDTH = 16


class Trained(NamedTuple):
    steps: list[list[bytes]]  # losses and parameters
    policies: dict[str, str]  # of the last regions, by module name
    told: str  # stderr
    plans: int  # number of plans made


def policies(model):
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
    plans = planned.job.plans if planned else 0
    return Trained(found, policies(model), told.getvalue(), plans)


def step(model, optimizer, number, rows):
    torch.manual_seed(100 * number + dist.get_rank())
    optimizer.zero_grad()
    loss = model(torch.randn(rows(dist.get_rank()), WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    bits = [plain(loss), *(plain(one) for one in model.parameters())]
    return [one.numpy().tobytes() for one in bits]  # kept tensors would count in the budget


@contextlib.contextmanager
def patience(steps):
    """How long a rank waits for others."""
    before = agreeing._PATIENCE
    agreeing._PATIENCE = steps
    try:
        yield
    finally:
        agreeing._PATIENCE = before


def in_step(optimizer):
    """From now on no rank is a step ahead of the other."""
    optimizer.register_step_pre_hook(lambda *_: dist.barrier())


def of_both(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def assert_one_plan(found, expected=None):
    """Each rank has made or got a plan, and both have the same; bits are the expected ones."""
    first, second = of_both(found.policies)
    assert first == second != {}, found.told
    assert of_both(found.plans) == [1, 1], found.told
    assert expected is None or found.steps == expected.steps


def assert_told_on_first(line, told):
    assert (line in told) == (dist.get_rank() == 0), told


def sharded(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def stage(model):
    """A stage of a pipeline: rank 1 has more layers."""
    model.layers = model.layers[: 2 + 2 * dist.get_rank()]
    return model
