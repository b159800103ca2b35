"""Plans from files, in jobs with several models, optimizers, or checkpoint calls of their own."""

from __future__ import annotations

import torch

import ebb
from ebb._launch import takeover
from ebb._launch.budget_phases import Measure
from ebb._launch.taken import Taken
from ebb_tests.budget_jobs import PLANNED, STEPS, Job, Net, assert_same, regions


class Pair(Job):
    """A second model of the same class, which is first called in the middle of a step."""

    def __init__(self, second=Net, **settings):
        super().__init__(**settings)
        self.second = second()
        self.optimizer.add_param_group({"params": list(self.second.parameters())})

    def step(self, step):
        self.optimizer.zero_grad()
        batch = self.batch(step)
        loss = self.model(batch).square().mean() + self.second(batch).square().mean()
        loss.backward()
        self.note(loss)
        self.optimizer.step()


def test_two_models(start, first, told):
    expected = Pair().train()
    first(make=Pair)
    found = start()

    job = Pair().train(1)
    assert regions(job.model)
    assert regions(job.second)
    job.train(STEPS - 1)

    assert len(told()) == 1
    assert isinstance(found.job.phase, Taken)
    assert_same(job, expected)


def test_a_second_model_that_is_another(start, first, told):
    first(make=Pair)
    found = start()

    def make():
        return Pair(lambda: Net(depth=3))

    make().train(1)

    line = told()[-1]
    assert "plan.toml is not for all models and optimizers of this job; ebb profiles" in line
    assert isinstance(found.job.phase, Measure)


class Distilling(Job):
    """A teacher of the same class, whose blocks have no gradients."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.teacher = Net().eval()

    def step(self, step):
        self.optimizer.zero_grad()
        batch = self.batch(step)
        with torch.no_grad():
            wanted = self.teacher(batch)
        loss = (self.model(batch) - wanted).square().mean()
        loss.backward()
        self.note(loss)
        self.optimizer.step()


def test_a_teacher(start, first, told):
    expected = Distilling().train()
    first(make=Distilling)
    found = start()

    job = Distilling().train()

    assert len(told()) == 1
    assert isinstance(found.job.phase, Taken)
    assert_same(job, expected)


class Folds(Job):
    """Another model from some step on; the one before stays."""

    def step(self, step):
        if step == PLANNED:
            self.before = self.model
            self.model = Net()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        super().step(step)


def test_a_plan_for_a_later_model_is_not_one_for_the_first(start, tmp_path, told):
    start()
    Folds().train(3 * PLANNED)
    takeover.remove()
    text = (tmp_path / "plan.toml").read_text()
    assert '"Net.layers.0"' in text
    told()
    found = start()

    job = Folds().train(1)

    assert "the inputs of the first block were Net.layers.0: " in told()[0]
    assert not isinstance(found.job.phase, Taken)
    assert set(regions(job.model).values()) == {ebb.policies.recompute_all}


class Checkpointing(Job):
    def __init__(self):
        super().__init__(checkpoints=True)


def test_calls_of_checkpoint_around_the_blocks(start, first, told):
    expected = Checkpointing().train()
    first(make=Checkpointing)
    found = start()

    job = Checkpointing().train()

    assert isinstance(found.job.phase, Taken)
    assert_same(job, expected)


class Alternating(Job):
    """Its second optimizer steps once in two steps of the first, and marks the steps then."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.second = torch.optim.SGD(self.model.head.parameters(), lr=1e-3)

    def step(self, step):
        super().step(step)
        if step % 2:
            self.second.step()


def test_a_second_optimizer_that_marks_the_steps_later(start, tmp_path, told):
    start()
    Alternating().train(4 * PLANNED)
    takeover.remove()
    assert (tmp_path / "plan.toml").exists()
    told()
    found = start()

    Alternating().train(12)

    assert len(told()) == 1
    assert isinstance(found.job.phase, Taken)
