"""The blocks of a budget: a module around blocks, coarser blocks, and a model of layers."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ebb
from ebb import _C
from ebb._launch import budgeted, budgeted_job, takeover
from ebb._launch.taken import Taken
from ebb._plan.plan import plan_of
from ebb._plan.profile.measuring import base_bytes
from ebb._region.blocks import find_blocks
from ebb_tests.budget_jobs import (
    PLANNED,
    STEPS,
    WIDTH,
    Job,
    Net,
    Quiet,
    assert_same,
    peak_of,
    regions,
    step_bytes,
)
from ebb_tests.programs.planned import UNet, double

DEPTH = 16


class Narrow(nn.Module):
    """Hands on more than it keeps."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.linear(x).sin())


Stack = functools.partial(Net, depth=DEPTH, block=Narrow)


@pytest.fixture
def tight(install, monkeypatch):
    """The least that there is a plan for."""
    plans = []

    def least(measured, budget, **arguments):
        plans.append(plan_of(measured, 1, at_least=True))
        return plans[-1]

    monkeypatch.setattr("ebb._launch.budget_phases.plan_of", least)
    budget = install("60%")
    return plans, budget


def test_module_around_blocks_becomes_a_region_with_the_same_bits(tight, told):
    found = Job(Stack).train()

    ((plan,), _) = tight
    assert set(plan.policies) == {"Net", *(f"layers.{n}" for n in range(DEPTH))}
    assert set(regions(found.model)) == {"", *(f"layers.{n}" for n in range(DEPTH))}
    assert any("regions (Net, layers.0-15)" in line for line in told())
    takeover.remove()
    assert_same(found, Job(Stack).train())


@pytest.mark.not_sanitized
def test_peak_is_the_predicted_one(tight):
    job = Quiet(Stack).train(PLANNED)

    peak_of(job)
    found, _ = peak_of(job)

    assert found <= tight[0][0].peak * 1.0025


def test_region_around_blocks_goes_when_steps_are_profiled_again(tight):
    job = Job(Stack).train()
    assert "" in regions(job.model)
    _, budget = tight

    budget.blocks.put(ebb.policies.recompute_all)

    assert set(regions(job.model)) == {f"layers.{n}" for n in range(DEPTH)}
    budget.blocks.follow({"Net": ebb.policies.save_all})
    assert set(regions(job.model)) == {""}


def test_second_model_of_one_kind_is_no_region_around_others(tight):
    def train():
        one, two = Job(Stack), Job(Stack)
        for step in range(STEPS):
            one.train(1)
            two.step(step)
        return one

    found = train()
    takeover.remove()
    assert_same(found, train())


def test_process_among_others_has_a_region_for_each_block(tight, monkeypatch):
    monkeypatch.setattr(budgeted, "has_ranks", lambda: True)
    job = Job(Stack).train()

    assert "" not in regions(job.model)
    assert regions(job.model)


class Around(nn.Module):
    """Calls the blocks of a module that does not run itself."""

    def __init__(self):
        super().__init__()
        self.inner = Stack()

    def forward(self, x):
        for layer in self.inner.layers:
            x = layer(x)
        return self.inner.head(x)


def test_module_that_does_not_call_the_blocks_is_no_region(tight):
    job = Job(Around).train()

    assert set(regions(job.model)) <= {f"inner.layers.{n}" for n in range(DEPTH)}
    assert regions(job.model)
    assert not any(one._forward_pre_hooks for one in job.model.modules())


# Coarser blocks -----------------------------------------------------------------------------------

MORE = STEPS + 3 * budgeted_job.number_of_steps([])  # steps, for all candidates


class Pictures(Job):
    def batch(self, step):
        return torch.randn(2, 3, 16, 16)

    def note(self, loss):
        super().note(loss)
        self.bits[-1].append(_C.tensor_bytes()[1])


class Bare(nn.Module):
    """Calls what is in its part, and never the part, which looks as if it could be a region."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(*(double(4, 4) for _ in range(4)))

    def forward(self, x):
        x = torch.cat([x, x[:, :1]], 1)
        for block in self.part:
            pictures = F.interpolate(x, scale_factor=2)
            x = block(F.max_pool2d(torch.cat([pictures, pictures.exp()], 2).tanh(), (4, 2)))
        return x


def peaks_of_steps(model, budget=None, install=None):
    if budget is not None:
        install(budget)
    job = Pictures(model)
    peaks = []
    for step in range(MORE):
        _C.reset_most_tensor_bytes()
        before = _C.tensor_bytes()[0]
        job.step(step)
        peaks.append(job.bits[-1].pop() - before)
    return job, peaks


@pytest.mark.parametrize("model", [UNet, Bare])
def test_coarser_blocks_keep_a_budget_that_finer_ones_cannot(install, told, model):
    _C.use_counting_allocator()
    expected, plain = peaks_of_steps(model)

    found, peaks = peaks_of_steps(model, "55%", install)

    assert_same(found, expected)
    lines = told()
    assert "too small" in lines[1], lines
    assert (
        f"ebb profiles again with other modules as regions: {'UNet' if model is UNet else ''}"
        in lines[1]
    )
    assert "too small" not in lines[-1]
    assert set(regions(found.model)) == {""}
    # A step frees the gradients of the one before first, and a share counts from there.
    gradients = sum(parameter.nbytes for parameter in found.model.parameters())
    assert peaks[-1] + gradients <= 0.56 * (plain[-1] + gradients) + 4096


def test_without_free_memory_no_coarser_blocks_are_profiled(install, told, monkeypatch):
    monkeypatch.setattr(budgeted_job, "free", lambda device: 1 << 10)
    _C.use_counting_allocator()
    expected, _ = peaks_of_steps(UNet)

    found, peaks = peaks_of_steps(UNet, "60%", install)

    assert_same(found, expected)
    assert [line for line in told() if "other modules as regions" in line] == []
    assert "" not in regions(found.model)
    assert max(peaks[2:]) <= 1.02 * peaks[1]


def test_too_small_budget_takes_the_blocks_that_need_least(install, told):
    _C.use_counting_allocator()
    expected, plain = peaks_of_steps(UNet)

    found, peaks = peaks_of_steps(UNet, "5%", install)

    assert_same(found, expected)
    lines = told()
    assert sum("other modules as regions" in line for line in lines) in (1, 2)
    assert "the plan with the lowest peak" in lines[-1]
    assert peaks[-1] <= min(peaks) + 4096
    assert peaks[-1] < 0.6 * plain[-1]


def test_named_blocks_stay(install, told):
    found = Pictures(UNet)
    install("50%", "down.*", "up.*")
    found.train(MORE)
    assert [line for line in told() if "other modules as regions" in line] == []


@pytest.mark.parametrize("model", [UNet, Bare])
def test_restart_has_coarser_blocks_from_the_first_step_on(start, told, model):
    """Other modules are the blocks from the first step on."""
    _C.use_counting_allocator()
    expected, plain = peaks_of_steps(model)
    peaks_of_steps(model, "55%", start)
    takeover.remove()
    told()
    found = start("55%")

    job, peaks = peaks_of_steps(model)

    (line,) = told()
    assert "the plan from plan.toml, without profiling" in line
    assert isinstance(found.job.phase, Taken)
    assert set(regions(job.model)) == {""}
    assert_same(job, expected)
    gradients = sum(parameter.nbytes for parameter in job.model.parameters())
    assert max(peaks[1:]) + gradients <= 0.56 * (plain[-1] + gradients) + 4096


def test_restart_with_another_budget_has_the_usual_blocks(start, told):
    peaks_of_steps(UNet, "55%", start)
    takeover.remove()
    told()
    start("60%")

    job = Pictures(UNet).train(1)

    assert "no plan from plan.toml: the budget was" in told()[0]
    assert "" not in regions(job.model)
    assert len(regions(job.model)) > 1


# Models without blocks ----------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 1.5
        return x


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(6))

    def forward(self, x):
        for weight in self.weights:
            x = nn.functional.gelu(x @ weight)
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)[0])
        return x


@pytest.mark.not_sanitized
@pytest.mark.parametrize("model", [Layers, Weights, Recurrent])
def test_model_of_layers_is_a_block_itself(install, model):
    is_recurrent = model is Recurrent  # an LSTM has many operators inside: each is a block
    assert find_blocks(model()) == (("layers.0", "layers.1", "layers.2") if is_recurrent else ("",))
    job = Quiet(model)
    plain = max(step_bytes(job, PLANNED + 3)[1:])
    held = base_bytes([job.model], [job.optimizer])
    budget = held + 7 * (plain - held) // 10
    expected = Job(model).train()
    install(budget)

    found = step_bytes(Quiet(model), PLANNED + 4)

    # a model is met within its first call, which is no region yet
    assert max(found[PLANNED + 1 :]) <= budget
    assert_same(Job(model).train(), expected)
