"""EBB_BUDGET in jobs that call torch.utils.checkpoint, see Note [Calls around blocks]."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebb
from ebb._plan.plan import plan_of
from ebb_tests.budget_jobs import PLANNED, STEPS, WIDTH, Job, Net, Quiet, peak_of, regions


class Calls(Net):
    """Each layer runs in a call of torch.utils.checkpoint."""

    def __init__(self, call, use_reentrant=False, **settings):
        super().__init__(**settings)
        self.call, self.use_reentrant = call, use_reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.call(self, layer), x, use_reentrant=self.use_reentrant)
        return self.head(x)

    def run(self, layer, x):
        return layer(x)

    def runner(self, layer):
        place = list(self.layers).index(layer)
        return lambda x: self.layers[place](x)


CALLS = {
    "the module": lambda net, layer: layer,
    "its method": lambda net, layer: layer.__call__,
    "part of a method": lambda net, layer: functools.partial(net.run, layer),
    "a function made anew": lambda net, layer: lambda x: layer(x),
    "a function of the model": lambda net, layer: net.runner(layer),
}


def entered_in_a_step(job):
    """How many regions one more step of a job enters."""
    ebb.reset_stats()
    job.train(1)
    return ebb.stats()["total"]["entered"]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_call_around_a_block_recomputes_nothing_that_the_plan_saves(trained, call, use_reentrant):
    class Asked(Job):
        def batch(self, step):
            return super().batch(step).requires_grad_()

    found = trained(
        "1GiB", lambda: Asked(Calls, call=call, use_reentrant=use_reentrant), plain=Asked
    )

    assert regions(found.model) == {}
    assert entered_in_a_step(found) == 0


def test_policy_for_calls_does_not_apply_to_blocks(trained, told):
    calls = (ebb.policies.save_matmuls, "save_matmuls")

    found = trained("1GiB", lambda: Job(checkpoints=True), plain=Job, calls=calls)

    assert entered_in_a_step(found) == 0
    assert "EBB=save_matmuls applies only to calls" in "".join(told())


def test_one_line_says_that_calls_do_not_checkpoint(trained, capsys):
    trained("60%", lambda: Job(checkpoints=True), plain=Job)

    calls = [line for line in capsys.readouterr().err.splitlines() if "ebb: calls of" in line]
    assert calls == [
        "ebb: calls of torch.utils.checkpoint inside or around the budget's blocks do not "
        "checkpoint any more, and a budget in percent counts from the peak without checkpointing; "
        "other calls are regions (EBB_BUDGET=60%); EBB_DISABLE=1 turns ebb off"
    ]


@pytest.mark.not_sanitized
def test_block_in_a_call_frees_as_much_as_one_without(install, monkeypatch):
    """RECOMPUTE_EACH_TIME counts in a block's own region only."""
    plans, freed = [], []  # freed: gradients, with which a step begins

    def least(measured, budget, **arguments):
        plans.append(plan_of(measured, 1, at_least=True))
        freed.append(measured.freed)
        return plans[-1]

    monkeypatch.setattr("ebb._launch.budget_phases.plan_of", least)
    install("60%")

    job = Quiet(depth=6, checkpoints=True).train(PLANNED)

    peak_of(job)
    found, _ = peak_of(job)
    assert abs(found + freed[0] - plans[0].peak) <= 0.0025 * found


class WithHead(Net):
    def forward(self, x):
        if not self.checkpoints:
            return self.of_head(super().forward(x))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return checkpoint(lambda x: self.of_head(self.head(x)), x, use_reentrant=False)

    def of_head(self, x):
        return x.sin().exp()


def test_call_beside_the_blocks_stays_a_region(trained):
    plain = functools.partial(Job, WithHead)
    found = trained("1GiB", functools.partial(plain, checkpoints=True), plain=plain)

    assert entered_in_a_step(found) == 1


class Later(Net):
    """Steps with a block inside of the call are profiled once there is one."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.head(checkpoint(self.inside, x, use_reentrant=False))

    def inside(self, x):
        for layer in self.layers[: 2 if self.step < PLANNED + 2 else 4]:
            x = layer(x)
        return x


class Inside(Net):
    """Its blocks checkpoint inside."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.forward = lambda x, run=layer.forward: checkpoint(run, x, use_reentrant=False)


class ReadsLaterVariable(Net):
    """The closure of its function has a variable that has no value yet."""

    def forward(self, x):
        def run(x):
            return later(x) if x is None else layer(x)

        for layer in self.layers:  # noqa: B007
            x = checkpoint(run, x, use_reentrant=False)
        later = self.head
        return later(x)


class TwoKinds(nn.Module):
    """Calls run modules of two kinds: the module tells a call from others of the same function."""

    def __init__(self, calls=True):
        super().__init__()
        self.layers, self.last = Net(), nn.Linear(1, WIDTH)
        self.calls = calls

    def forward(self, x):
        if not self.calls:
            return self.last(self.layers(x))
        for part in (self.layers, self.last):
            x = checkpoint(part, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(
    ("model", "plain", "steps"),
    [
        (Later, Later, 3 * PLANNED),
        (Inside, Net, STEPS),
        (ReadsLaterVariable, Net, STEPS),
        (TwoKinds, lambda: TwoKinds(calls=False), STEPS),
    ],
)
def test_job_with_unusual_calls_has_a_plan_and_the_same_bits(trained, model, plain, steps):
    found = trained("60%", lambda: Job(model), steps, plain=lambda: Job(plain))

    assert regions(found.model)
    assert torch.is_grad_enabled()
