"""A budget's plan in a file: the next start of the job takes it from its first step on, or says why
it does not; with the same bits.
"""

from __future__ import annotations

import re
import tomllib

import pytest
import torch
from torch import nn

import ebb
from ebb import _C
from ebb._launch import step_memory_monitor, takeover
from ebb._launch.budget_phases import Measure, Planned
from ebb._launch.plan_file import StoredPlan
from ebb._launch.taken import Taken
from ebb_tests.budget_jobs import (
    PLANNED,
    ROWS,
    STEPS,
    WIDTH,
    Block,
    Job,
    Net,
    Quiet,
    assert_same,
    regions,
)
from ebb_tests.report_page import can_be_shown, shown

# A start that takes the plan ----------------------------------------------------------------------


def test_the_next_start_takes_the_plan_from_its_first_step_on(start, first, told):
    expected = Job().train()
    text = first()
    budget = start()
    job = Job()

    job.train(1)
    assert isinstance(budget.job.phase, Taken)
    planned = {name: policy.to_toml() for name, policy in regions(job.model).items()}
    job.train(STEPS - 1)

    (line,) = told()
    assert re.match(
        r"60%: the plan from plan.toml, without profiling: \d regions? \(layers\.", line
    )
    assert_same(job, expected)
    document = tomllib.loads(text)
    names = [name for table in document["regions"] for name in table["modules"]]
    assert sorted(planned) == sorted(names) != []
    assert {n: p.to_toml() for n, p in regions(job.model).items()} == planned
    assert isinstance(budget.job.phase, Taken)


def test_no_step_is_measured(start, first, monkeypatch):
    first()
    begun = []
    monkeypatch.setattr(Measure, "begin", lambda phase: begun.append(phase))
    monkeypatch.setattr(_C, "begin_profile", lambda *_: begun.append("a profile"))
    start()

    Job().train(STEPS)

    assert begun == []


class Counting(Job):
    """Counts the operators that each step replays."""

    def note(self, loss):
        self.bits.append(_C.stats()["total"]["ops_replayed"])


def test_the_first_step_replays_as_little_as_later_ones(start, first):
    everything = Counting()
    with ebb.apply(everything.model, ebb.policies.recompute_all, "layers.*"):
        everything.train(2)
    first()
    start()

    job = Counting().train(3)

    assert 0 < job.bits[0] == job.bits[1] == job.bits[2] < everything.bits[0]


@pytest.mark.not_sanitized
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_the_peak_of_the_first_steps_is_in_the_budget(start, first, share):
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


@pytest.mark.parametrize("budget", ["1GiB", "700KiB"])
def test_a_budget_in_bytes(start, first, told, budget):
    expected = Quiet().train()
    first(budget, make=Quiet)
    found = start(budget)

    job = Quiet().train()

    assert len(told()) == 1
    assert isinstance(found.job.phase, Taken)
    assert bool(regions(job.model)) == (budget != "1GiB")
    assert_same(job, expected)


def test_a_step_above_a_budget_in_bytes_is_noticed(start, first, told):
    first("700KiB", make=Quiet)
    found = start("700KiB")
    job = Quiet(rows=lambda step: ROWS if step < 3 else 3 * ROWS).train(3)
    assert isinstance(found.job.phase, Taken)

    job.train(1)

    assert "but the budget leaves only" in told()[-1]
    assert isinstance(found.job.phase, Measure)


class Wide(nn.Module):
    """The outputs of its blocks need most of the memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout=0.0) for _ in range(16))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


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
    assert "Wide" in regions(job.model) or "" in regions(job.model)
    job.train(PLANNED + 1)

    (line,) = told()
    assert "the plan from plan.toml" in line
    assert isinstance(found.job.phase, Taken)
    assert_same(job, expected)


def test_evaluation_before_the_first_step(start, first, told):
    first()
    found = start()
    job = Job()
    state = torch.get_rng_state()
    job.model.eval()
    with torch.no_grad():
        job.model(torch.ones(4, WIDTH))
    job.model.train()
    torch.set_rng_state(state)

    job.train(2)

    assert isinstance(found.job.phase, Taken)
    assert len(told()) == 1


def test_a_report_names_the_file(start, first, tmp_path):
    first()
    with ebb.record_reports():
        start()
        Job().train(9)
        report = ebb.report()

    text = str(report)
    assert f"(from {tmp_path / 'plan.toml'}):" in text
    assert report.plan.measured.peak <= report.plan.budget
    assert abs(report.plan.deviation["peak"]) < 0.03
    report.save(tmp_path / "report.json")


@can_be_shown
def test_the_page_of_a_plan_from_a_file(start, first, tmp_path):
    first(make=Quiet)
    with ebb.record_reports():
        start()
        Quiet().train(9)
        report = ebb.report()

    page = shown(report, tmp_path)

    assert ebb._report.text.size(report.plan.measured.peak) in page["plan-figures"].html
    assert "NaN" not in page["memory"].html + page["plan-curve"].html


# A start that measures ----------------------------------------------------------------------------


def test_another_budget(measures, first):
    first()
    measures("the budget was 60%, and is 50%", "50%")


class Deeper(Job):
    def __init__(self):
        super().__init__(depth=5)


class OtherClass(Job):
    def __init__(self):
        super().__init__(type("Other", (Net,), {}))


class Frozen(Job):
    def __init__(self):
        super().__init__()
        self.model.layers[0].requires_grad_(False)


class Double(Job):
    def __init__(self):
        super().__init__()
        self.model.double()

    def batch(self, step):
        return super().batch(step).double()


@pytest.mark.parametrize("make", [Deeper, OtherClass, Frozen, Double])
def test_another_model(measures, first, make):
    first()
    measures("the model has changed", make=make)


class Larger(Job):
    def __init__(self):
        super().__init__(rows=lambda step: 2 * ROWS)


class Smaller(Job):
    def __init__(self):
        super().__init__(rows=lambda step: ROWS // 2)


class Autocast(Job):
    def step(self, step):
        with torch.autocast("cpu", torch.bfloat16):
            super().step(step)


@pytest.mark.parametrize("make", [Larger, Smaller, Autocast])
def test_another_batch(measures, first, make):
    first()
    before = r"the inputs of the first block were layers.0: float32\[256, 16\], and are layers.0: "
    measures(before, make=make)


def test_other_blocks(measures, first):
    first()
    measures("EBB_MODULES or settings", patterns=("layers.[01]",))


def test_other_settings(measures, first):
    first()
    with ebb.config.patch(offload_min_bytes=1234):
        measures("EBB_MODULES or settings")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("torch_release", "1.0", r"torch was 1\.0, and is "),
        ("ebb_release", "1.0", r"ebb was 1\.0, and is "),
        ("device", "cuda NVIDIA X", "the device was cuda NVIDIA X, and is cpu"),
        ("memory_limit", 1 << 20, "the memory limit was 1048576 bytes, and is "),
        ("ranks", 8, "the job had 8 ranks, and has 1"),
    ],
)
def test_what_else_has_changed(measures, first, tmp_path, name, value, why):
    text = first()
    stored = StoredPlan.parse(text, "")
    vars(stored.made_for)[name] = value
    (tmp_path / "plan.toml").write_text("# Plan of EBB_BUDGET\n" + stored.to_toml())

    measures(why)


def test_a_memory_limit_that_is_almost_the_same(start, first, tmp_path):
    text = first()
    stored = StoredPlan.parse(text, "")
    vars(stored.made_for)["memory_limit"] = int(stored.made_for.memory_limit * 1.01)
    (tmp_path / "plan.toml").write_text(stored.to_toml())
    found = start()

    Job().train(1)

    assert isinstance(found.job.phase, Taken)


def test_a_later_batch_that_is_larger(start, first, tmp_path, told):
    """The step exceeds the budget: the file is written again, for the new batch."""

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


def test_later_batches_that_are_smaller(start, first, tmp_path, told):
    def rows(step):
        return ROWS if step < 1 else ROWS // 2

    first("50%")
    start("50%")

    Job(rows=rows).train(3 + step_memory_monitor._STEPS_BELOW + PLANNED)

    assert any("steps allocate less than planned; ebb profiles steps again" in x for x in told())
    assert "float32[128, 16]" in (tmp_path / "plan.toml").read_text()


def test_batches_of_many_sizes(start, tmp_path, told):
    """A step takes the plan unless its batch is larger than all that were measured."""

    def varied(step):
        return ROWS - 32 * (step % 3)

    start()
    Job(rows=varied).train(3 * PLANNED)
    takeover.remove()
    table = tomllib.loads((tmp_path / "plan.toml").read_text())["plan"]
    assert len(table["inputs"]) > 1
    told()

    for rows, is_taken in ((ROWS - 50, True), (ROWS, True), (ROWS + 1, False)):
        found = start()
        Job(rows=lambda step, rows=rows: rows).train(1)
        assert isinstance(found.job.phase, Taken) == is_taken, rows
        takeover.remove()
