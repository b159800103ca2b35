"""A budget's plan in a file: the next start of the job takes it from its first step on, with the
same bits, and plans again where the plan does not fit.
"""

from __future__ import annotations

import functools
import tomllib

import pytest
import torch

import ebb
from ebb import _C
from ebb._launch import step_memory_monitor, takeover
from ebb._launch.budget_phases import Measure, Planned
from ebb._launch.taken import Taken
from ebb_tests.budget_jobs import (
    PLANNED,
    ROWS,
    STEPS,
    WIDTH,
    Job,
    Net,
    Quiet,
    assert_same,
    regions,
)
from ebb_tests.report_page import can_be_shown, shown


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


class Alternating(Job):
    """Its second optimizer steps once in two steps of the first, and marks the steps then."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.second = torch.optim.SGD(self.model.head.parameters(), lr=1e-3)

    def step(self, step):
        super().step(step)
        if step % 2:
            self.second.step()


class EvaluatingFirst(Job):
    def __init__(self, **settings):
        super().__init__(**settings)
        state = torch.get_rng_state()
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(4, WIDTH))
        self.model.train()
        torch.set_rng_state(state)


@pytest.mark.parametrize(
    ("make", "budget", "steps", "plan"),
    [
        (Job, "60%", PLANNED, r"\d regions? \(layers\."),
        (Quiet, "1GiB", PLANNED, ""),
        (Quiet, "700KiB", PLANNED, r"\d regions? \(layers\."),
        (Job, "1KiB", PLANNED, r"a budget of 1\.0 KiB is too small"),
        (EvaluatingFirst, "60%", PLANNED, r"\d regions? \(layers\."),
        (Pair, "60%", PLANNED, r"\d regions? \("),
        (Distilling, "60%", PLANNED, r"\d regions? \("),
        (functools.partial(Job, checkpoints=True), "60%", PLANNED, r"\d regions? \("),
        (Alternating, "60%", 4 * PLANNED, r"\d regions? \("),
    ],
)
def test_next_start_takes_the_plan(restarted, tmp_path, make, budget, steps, plan):
    job = restarted(budget, make, steps, plan)

    assert bool(regions(job.model)) == (budget != "1GiB")
    assert make is not Pair or regions(job.second)
    table = tomllib.loads((tmp_path / "plan.toml").read_text())["plan"]
    assert ("is too small" in table["too_small"]) == (budget == "1KiB")


def test_no_step_is_profiled(start, first, monkeypatch):
    text = first()
    begun = []
    monkeypatch.setattr(Measure, "begin", lambda phase: begun.append(phase))
    monkeypatch.setattr(_C, "begin_profile", lambda *_: begun.append("a profile"))
    start()

    job = Job().train(STEPS)

    assert begun == []
    names = [name for table in tomllib.loads(text)["regions"] for name in table["modules"]]
    assert sorted(regions(job.model)) == sorted(names) != []


class Counting(Job):
    """Counts the operators that each step replays."""

    def note(self, loss):
        self.bits.append(_C.stats()["total"]["ops_replayed"])


def test_first_step_replays_as_little_as_later_ones(start, first):
    everything = Counting()
    with ebb.apply(everything.model, ebb.policies.recompute_all, "layers.*"):
        everything.train(2)
    first()
    start()

    job = Counting().train(3)

    assert 0 < job.bits[0] == job.bits[1] == job.bits[2] < everything.bits[0]


@pytest.mark.not_sanitized
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_peak_of_the_first_steps_is_in_the_budget(start, first, share):
    """The first step has no gradients and no optimizer states when it begins: without the bytes
    that it adds to them, its peak is that of a later one."""

    def peaks():
        job, found = Quiet(), []
        for _ in range(2):
            _C.reset_most_tensor_bytes()
            before = _C.tensor_bytes()[0]
            loss = job.model(job.batch(0)).square().mean()
            loss.backward()
            found.append(_C.tensor_bytes()[1] - before)
            job.optimizer.step()
            job.optimizer.zero_grad()
            del loss
        return found

    plain = peaks()
    first(f"{100 * share:.0f}%", make=Quiet)
    start(f"{100 * share:.0f}%")

    found = peaks()

    assert found[0] <= share * plain[0] * 1.02
    assert found[1] <= share * plain[1] * 1.02
    assert found[1] > 0.7 * share * plain[1]


Wide = functools.partial(Net, depth=16, dropout=0.0)  # outputs of blocks need most of the memory


def test_regions_around_blocks_follow_after_the_first_step(start, tmp_path, told):
    expected = Job(Wide).train(PLANNED + 2)
    for budget in ("16%", "20%", "25%", "30%"):
        start(budget)
        Job(Wide).train(PLANNED)
        takeover.remove()
        table = tomllib.loads((tmp_path / "plan.toml").read_text())["plan"]
        if table["around"] and not table["too_small"]:
            break
    assert table["around"], "no plan had regions around blocks"
    told()
    found = start(budget)
    job = Job(Wide).train(1)
    assert "Net" in regions(job.model) or "" in regions(job.model)
    job.train(PLANNED + 1)

    (line,) = told()
    assert "the plan from plan.toml" in line
    assert isinstance(found.job.phase, Taken)
    assert_same(job, expected)


@pytest.fixture
def report(start, first):
    first(make=Quiet)
    with ebb.record_reports():
        start()
        Quiet().train(9)
        return ebb.report()


def test_report_names_the_file(report, tmp_path):
    assert f"(from {tmp_path / 'plan.toml'}):" in str(report)
    assert report.plan.measured.peak <= report.plan.budget
    assert abs(report.plan.deviation["peak"]) < 0.03
    report.save(tmp_path / "report.json")


@can_be_shown
def test_page_of_a_plan_from_a_file(report, tmp_path):
    page = shown(report, tmp_path)

    assert ebb._report.text.size(report.plan.measured.peak) in page["plan-figures"].html
    assert "NaN" not in page["memory"].html + page["plan-curve"].html


# A plan that does not fit -------------------------------------------------------------------------


def test_step_above_a_budget_in_bytes_ends_the_plan(start, first, told):
    first("700KiB", make=Quiet)
    found = start("700KiB")
    job = Quiet(rows=lambda step: ROWS if step < 3 else 3 * ROWS).train(3)
    assert isinstance(found.job.phase, Taken)

    job.train(1)

    assert "but the budget leaves only" in told()[-1]
    assert isinstance(found.job.phase, Measure)


def test_larger_batch_later_gives_another_plan_and_file(start, first, tmp_path, told):
    def rows(step):
        return ROWS if step < 3 else 3 * ROWS

    text = first("50%")
    expected = Job(rows=rows).train(6 + STEPS)
    found = start("50%")

    job = Job(rows=rows).train(6 + STEPS)

    lines = told()
    assert "the plan from plan.toml" in lines[0]
    assert "more than the budget of" in lines[1]
    assert lines[1].endswith("; ebb profiles steps again")
    assert any("the next start of the job takes this plan from" in line for line in lines)
    assert_same(job, expected)
    assert type(found.job.phase) is Planned
    again = (tmp_path / "plan.toml").read_text()
    assert again != text
    assert "float32[768, 16]" in again


def test_smaller_batches_later_give_another_plan_and_file(start, first, tmp_path, told):
    first("50%")
    start("50%")

    job = Job(rows=lambda step: ROWS if step < 1 else ROWS // 2)
    job.train(3 + step_memory_monitor._STEPS_BELOW + PLANNED)

    assert any("steps allocate less than planned; ebb profiles steps again" in x for x in told())
    assert "float32[128, 16]" in (tmp_path / "plan.toml").read_text()


def test_plan_is_taken_unless_the_batch_is_larger_than_all_profiled_ones(start, tmp_path, told):
    start()
    Job(rows=lambda step: ROWS - 32 * (step % 3)).train(3 * PLANNED)
    takeover.remove()
    table = tomllib.loads((tmp_path / "plan.toml").read_text())["plan"]
    assert len(table["inputs"]) > 1
    told()

    for rows, is_taken in ((ROWS - 50, True), (ROWS, True), (ROWS + 1, False)):
        found = start()
        Job(rows=lambda step, rows=rows: rows).train(1)
        assert isinstance(found.job.phase, Taken) == is_taken, rows
        takeover.remove()


def test_second_model_that_differs_ends_the_plan(start, first, told):
    first(make=Pair)
    found = start()

    Pair(lambda: Net(depth=3)).train(1)

    line = told()[-1]
    assert "plan.toml is not for all models and optimizers of this job; ebb profiles" in line
    assert isinstance(found.job.phase, Measure)


class Folds(Job):
    """Another model from some step on; the one before stays."""

    def step(self, step):
        if step == PLANNED:
            self.before = self.model
            self.model = Net()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        super().step(step)


def test_plan_for_a_later_model_is_not_one_for_the_first(start, tmp_path, told):
    start()
    Folds().train(3 * PLANNED)
    takeover.remove()
    assert '"Net.layers.0"' in (tmp_path / "plan.toml").read_text()
    told()
    found = start()

    job = Folds().train(1)

    assert "the inputs of the first block were Net.layers.0: " in told()[0]
    assert not isinstance(found.job.phase, Taken)
    assert set(regions(job.model).values()) == {ebb.policies.recompute_all}
