"""EBB_BUDGET in jobs of many kinds: micro-batches, scalers, evaluations, several models."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from torch import nn

import ebb
from ebb._region.modules import marks_of
from ebb_tests.budget_jobs import (
    PLANNED,
    ROWS,
    STEPS,
    WIDTH,
    Job,
    Net,
    Quiet,
    assert_same,
    peak_of,
    regions,
)
from ebb_tests.exactness import same_bits


class Accumulating(Job):
    def step(self, step):
        self.optimizer.zero_grad()
        for _ in range(3):
            loss = self.model(self.batch(step)).square().mean()
            loss.backward()
        self.note(loss)
        self.optimizer.step()


class Scaled(Job):
    """Autocast, and a scaler that skips some steps."""

    scaler = None

    def step(self, step):
        self.scaler = self.scaler or torch.amp.GradScaler("cpu", init_scale=2.0**15)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(self.batch(step)).square().mean()
        self.scaler.scale(loss).backward()
        if step in (0, 1, 5, 9):
            self.model.head.bias.grad.fill_(torch.inf)
        self.note(loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Evaluating(Job):
    def step(self, step):
        super().step(step)
        if step % 4 == 3:
            self.model.eval()
            with torch.no_grad():
                self.model(self.batch(step))
            self.model.train()


class CriticFirst(Job):
    """The generator runs for the first time when its critic has stepped some times."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.critic = Net(3)
        self.of_critic = torch.optim.AdamW(self.critic.parameters())

    def step(self, step):
        for _ in range(4):
            self.of_critic.zero_grad()
            self.critic(self.batch(step)).square().mean().backward()
            self.of_critic.step()
        super().step(step)


class Idle(Job):
    """Some steps have no backward."""

    def step(self, step):
        if step % 5 == 4:
            self.optimizer.step()
            self.note(torch.zeros(()))
        else:
            super().step(step)


class Closures(Job):
    def step(self, step):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model(self.batch(step)).square().mean()
            loss.backward()
            return loss

        self.note(self.optimizer.step(closure))


class EvaluatingMuch(Quiet):
    """Before each n-th step: 16 times the rows of a step."""

    def __init__(self, every, **settings):
        super().__init__(**settings)
        self.every = every

    def step(self, step):
        if step % self.every == self.every - 1:
            with torch.no_grad():
                batch = self.batch(step).repeat(16, 1)
                results = [self.model(batch) for _ in range(2)]
            del batch, results
        super().step(step)


@pytest.mark.parametrize("every", [1, 2, 7])
@pytest.mark.parametrize("budget", ["60%", "bytes"])
def test_evaluation_does_not_count_as_part_of_the_step(install, told, every, budget):
    if budget == "bytes":
        step, total = peak_of(Quiet().train(3))
        budget = total - step // 3
    expected = EvaluatingMuch(every).train(4 * PLANNED)
    planned = install(str(budget))

    found = EvaluatingMuch(every).train(4 * PLANNED)

    assert all(map(same_bits, found.model.parameters(), expected.model.parameters()))
    assert "too small" not in told()
    assert "a step allocated" not in told()
    assert planned.job.plans == 1


class Unsteady(Net):
    """Calls blocks now more, now less often."""

    steps = 0

    def forward(self, x):
        self.steps += 1
        for layer in self.layers[: 1 + self.steps % 4]:
            x = layer(x)
        return self.head(x)


class Generating(Job):
    """Calls its blocks also without gradients, in each step another number of times."""

    def step(self, step):
        with torch.no_grad():
            for _ in range(1 + step * 7 % 5):
                self.model(torch.ones(2, WIDTH))
        super().step(step)


class Hooked(Job):
    def step(self, step):
        with torch.autograd.graph.save_on_cpu():
            super().step(step)


@pytest.mark.parametrize(
    ("make", "steps", "line"),
    [
        (Accumulating, 2 * PLANNED, "; predicted peak "),
        (Scaled, 2 * PLANNED, "; predicted peak "),
        (Evaluating, 2 * PLANNED, "; predicted peak "),
        (Idle, 2 * PLANNED, "; predicted peak "),
        (Closures, 2 * PLANNED, "; predicted peak "),
        (CriticFirst, STEPS + 4, "; predicted peak "),
        (Generating, STEPS, "; predicted peak "),
        (lambda: Job(Unsteady), 45, "the peak memory of steps varies"),
    ],
)
def test_job_has_a_plan_and_the_same_bits(trained, told, make, steps, line):
    found = trained("60%", make, steps)

    assert regions(found.model)
    assert any(line in one for one in told())


def test_saved_tensor_hooks_of_the_job_are_told_of_once(trained, told):
    trained("60%", Hooked)

    assert sum("job's saved-tensor hooks" in line for line in told()) == 1


class Random(Net):
    """Never calls blocks twice as often as the step before, and rarely as often as the first."""

    steps = 0

    def forward(self, x):
        self.steps += 1
        for _ in range(self.steps):
            x = self.layers[0](x)
        return self.head(x)


class SteppingInBackward(Job):
    def __init__(self):
        super().__init__()
        for parameter in self.model.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())

    def step(self, step):
        loss = self.model(self.batch(step)).square().mean()
        loss.backward()
        self.note(loss)
        self.model.zero_grad()


class WithoutBackward(Job):
    """The backward of the loss does not reach a block."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def step(self, step):
        with torch.no_grad():
            y = self.model(self.batch(step)).mean()
        loss = (y * self.weight).sum()
        loss.backward()
        self.note(loss)
        self.optimizer.step()


class FreesItsBatch(Quiet):
    """Frees the last batch, which is larger than the model, when a step begins."""

    def batch(self, step):
        self.inputs = None
        self.inputs = super().batch(step)
        return self.inputs


def compiled_net():
    return torch.compile(Net(), backend="eager")


ALL_RECOMPUTED = {ebb.policies.recompute_all}
ROW = functools.partial(Quiet, rows=lambda step: 1)
MANY_ROWS = functools.partial(FreesItsBatch, rows=lambda step: 32 * ROWS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("budget", "make", "steps", "line", "policies"),
    [
        ("60%", lambda: Job(Random), 24, "in each step; all blocks are recomputed", ALL_RECOMPUTED),
        ("60%", SteppingInBackward, 4, "60%: no plan: an optimizer steps during backward", None),
        ("60%", WithoutBackward, 25, "60%: no plan yet: no block ran a backward", None),
        ("60%", lambda: Job(compiled_net), 30, "60%: no plan", set()),
        ("50%", ROW, STEPS + 2 * PLANNED, "ebb cannot lower the memory of this job: ", None),
        ("1%", MANY_ROWS, STEPS + PLANNED, ". 0 B are in use when the step begins, ", None),
    ],
)
def test_last_line_tells_why_no_plan_fits(trained, told, budget, make, steps, line, policies):
    found = trained(budget, make, steps)

    assert line in told()[-1]
    assert policies is None or set(regions(found.model).values()) == policies


def test_model_that_never_runs_backward_has_no_regions(install, told):
    install("60%")
    torch.manual_seed(0)
    model, teacher = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH)
        with torch.no_grad():
            wanted = teacher(x)
        optimizer.zero_grad()
        (model(x) - wanted).square().mean().backward()
        optimizer.step()

    assert regions(model)
    assert regions(teacher) == {}


def test_strict_job_without_blocks_ends(install, monkeypatch):
    monkeypatch.setenv("EBB_STRICT", "1")
    install("60%")

    with pytest.raises(ValueError, match=r"EBB_BUDGET=60%: ebb found no blocks .* EBB_STRICT"):
        Job(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())).train(25)


# Several models and optimizers -------------------------------------------------------------------


class Gan(Job):
    critic_steps = 1

    def __init__(self):
        super().__init__()
        self.critic = Net()
        self.second = torch.optim.SGD(self.critic.parameters(), lr=0.01)

    def step(self, step):
        for _ in range(self.critic_steps):
            self.second.zero_grad()
            fake = torch.randn(ROWS, WIDTH) * self.model(self.batch(step)).detach()
            self.critic(fake).mean().backward()
            self.second.step()
        self.optimizer.zero_grad()
        made = torch.randn(ROWS, WIDTH) * self.model(self.batch(step))
        loss = -self.critic(made).mean()
        loss.backward()
        self.note(loss)
        self.optimizer.step()

    def note(self, loss):
        super().note(loss)
        self.bits[-1] += [p.detach().clone() for p in self.critic.parameters()]


class Wasserstein(Gan):
    critic_steps = 5


@pytest.mark.parametrize("kind", [Gan, Wasserstein])
def test_two_models_and_two_optimizers(install, told, kind):
    expected = kind().train(STEPS + 5)
    job = install("50%")

    found = kind().train(STEPS + 5)

    assert_same(found, expected)
    assert regions(found.model) or regions(found.critic)
    names = [block.name for block in job.blocks.alive()]
    assert len(names) == len(set(names))
    assert found.critic.layers[0] in [block.module() for block in job.blocks.alive()]


def test_second_stage_is_profiled_too(install, told):
    install("60%")
    first = Job().train()
    assert regions(first.model)
    first_told = told()
    del first
    gc.collect()

    second = Job().train(STEPS + 3)

    assert regions(second.model)
    assert len(told()) == 1, first_told


def test_late_model_is_planned_with_the_others(install, told):
    install("60%")
    job = Gan()
    Job.train(job, 0)
    for step in range(STEPS):
        Job.step(job, step)
    assert regions(job.model)
    told()

    job.train(STEPS)

    lines = told()
    assert len(lines) == 2
    assert "ebb profiles steps again" in lines[0]
    assert regions(job.model) or regions(job.critic)


def test_copy_of_a_model_has_blocks_of_its_own(install):
    expected = Job().train(STEPS)
    install("60%")
    first = Job().train(STEPS)

    second = Job()
    state = torch.get_rng_state()
    second.model = copy.deepcopy(first.model)
    del first
    gc.collect()
    second.model.load_state_dict(Job().model.state_dict())
    torch.set_rng_state(state)
    second.optimizer = torch.optim.AdamW(second.model.parameters(), lr=1e-2)
    second.train(STEPS)

    assert_same(second, expected)
    assert regions(second.model)
    assert all(marks_of(inner).region.module() is inner for inner in second.model.layers[:1])
