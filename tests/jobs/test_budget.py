"""EBB_BUDGET in jobs that do not know of it: they are measured, planned and switched, with the same
bits.
"""

from __future__ import annotations

import copy
import gc
import re
import time

import pytest
import torch
import torch.nn.functional as F
from exactness import same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebb
from ebb import _C
from ebb._launch import budget as module
from ebb._launch import measured_steps, takeover
from ebb._plan.budget import BudgetError, read_budget
from ebb._plan.measured import base_bytes
from ebb._plan.plan import plan_of
from ebb._region.modules import marks_of

WIDTH = 16
ROWS = 256
PLANNED = measured_steps.number_of_steps([])  # steps, after which there is a plan
STEPS = PLANNED + 3


class Block(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth=4, checkpoints=False, **settings):
        super().__init__()
        self.layers = nn.ModuleList(Block(**settings) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)
        self.checkpoints = checkpoints

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


class Job:
    """A training: what it came to, and what it told.

    Attributes:
        bits: losses, gradients and parameters of each step.
    """

    def __init__(self, model=Net, rows=lambda step: ROWS, **settings):
        torch.manual_seed(0)
        self.model = model(**settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.rows = rows
        self.bits = []

    def train(self, steps=STEPS):
        for step in range(len(self.bits), len(self.bits) + steps):
            self.step(step)
        return self

    def step(self, step):
        self.optimizer.zero_grad()
        loss = self.model(self.batch(step)).square().mean()
        loss.backward()
        self.note(loss)
        self.optimizer.step()

    def batch(self, step):
        return torch.randn(self.rows(step), WIDTH)

    def note(self, loss):
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        parameters = [p.detach().clone() for p in self.model.parameters()]
        self.bits.append([loss.detach().clone(), *gradients, *parameters, torch.get_rng_state()])


def assert_same(found, expected):
    assert len(found.bits) == len(expected.bits)
    for step, (one, other) in enumerate(zip(found.bits, expected.bits, strict=True)):
        assert all(map(same_bits, one, other)), f"step {step}"


def regions(model):
    """Modules that are regions, and their policies."""
    return {
        name: block.region.policy
        for name, inner in model.named_modules()
        if (block := marks_of(inner)) is not None
        and block.region is not None
        and block.region.policy is not None
    }


@pytest.fixture
def install():
    def with_budget(text, *patterns, calls=None):
        return takeover.install_budget(read_budget(text), str(text), patterns, calls)

    yield with_budget
    takeover.remove()


@pytest.fixture
def told(capsys):
    def lines():
        return [
            line.removeprefix("ebb: EBB_BUDGET=")
            for line in capsys.readouterr().err.splitlines()
            if line.startswith("ebb: EBB_BUDGET")
        ]

    return lines


def peak_of(job):
    """Bytes of the next step, above what is there and with it."""
    before = base_bytes([job.model], [job.optimizer])
    _C.begin_profile()
    job.step(len(job.bits))
    job.bits.pop()
    now = most = 0
    for _, _, taken in _C.end_profile()["allocations"]:
        now += taken
        most = max(most, now)
    return most, before + most


class Quiet(Job):
    """Keeps no copies, which would count as memory of the step."""

    def note(self, loss):
        self.bits.append([])


def test_a_job_is_measured_planned_and_switched(install, told):
    expected = Job().train()
    install("60%")

    found = Job().train(PLANNED - 1)
    assert len(told()) == 1
    assert found.train(1 + STEPS - PLANNED).bits

    assert_same(found, expected)
    assert 0 < len(regions(found.model)) <= 4
    (line,) = told()
    assert re.match(r"60%: \d regions? \(layers\.\S+\); the step will allocate .* more time", line)


def test_while_it_is_measured_all_blocks_go_through_three_ways(install):
    install("60%")
    job = Job()

    ways = []
    for _ in range(PLANNED - 1):
        job.train(1)
        ways.append(set(map(str, regions(job.model).values())))

    dropped, kept = {str(ebb.policies.recompute_all)}, {str(ebb.policies.save_all)}
    assert ways == [dropped] * 5 + [kept] * 3 + [set()] * 4


@pytest.mark.not_sanitized
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_the_peak_is_in_the_budget(install, share):
    plain = Quiet().train(3)
    peak_of(plain)
    allowed, _ = peak_of(plain)
    install(share)
    job = Quiet().train(PLANNED)

    peak_of(job)
    found, _ = peak_of(job)

    assert 0.7 * share * allowed < found <= share * allowed


@pytest.mark.not_sanitized
def test_a_budget_in_bytes_is_all_told(install):
    plain = Quiet().train(3)
    peak_of(plain)
    peak, in_all = peak_of(plain)
    budget = in_all - peak // 3
    install(f"{budget}")
    job = Quiet().train(PLANNED)

    peak_of(job)
    _, found = peak_of(job)

    assert budget - peak // 5 < found <= budget


def test_nothing_is_left_where_all_fits(install, told):
    install("1GiB")

    job = Job().train()

    assert regions(job.model) == {}
    marked = [name for name, inner in job.model.named_modules() if marks_of(inner) is not None]
    assert marked == ["layers.0"], "by which a change of shapes is seen"
    assert len(nn.modules.module._global_forward_pre_hooks) == 0
    assert "fits as it is" in told()[-1]


def test_a_budget_that_is_too_small(install, told):
    expected = Job().train()
    install("1KiB")

    found = Job().train()

    assert_same(found, expected)
    assert len(regions(found.model)) == 4
    line = told()[-1]
    assert "1KiB: a budget of 1.0 KiB is too small: the least is" in line
    assert "what needs least: 4 regions" in line


def test_a_budget_that_is_too_small_ends_a_strict_job(install, monkeypatch):
    monkeypatch.setenv("EBB_STRICT", "1")
    install("1KiB")

    with pytest.raises(BudgetError, match=r"EBB_BUDGET=1KiB: a budget of 1\.0 KiB is too small"):
        Job().train()


def test_what_was_measured_counts_more_than_an_estimate(install, told, monkeypatch):
    def too_small(measured, budget, *, at_least=False):
        if not at_least:
            raise BudgetError("ebb: a budget of 60% is too small", 1)
        plan = plan_of(measured, 1.0)
        plan.budget, plan.peak = measured.plain_peak, measured.plain_peak
        return plan

    monkeypatch.setattr(module, "plan_of", too_small)
    monkeypatch.setenv("EBB_STRICT", "1")
    install("60%")

    job = Job().train()

    assert set(regions(job.model).values()) == {ebb.policies.recompute_all}
    assert "60%: 4 regions (layers.0-3), where all is recomputed; the step allocated" in told()[-1]


# What a step is ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", [Accumulating, Scaled, Evaluating, Idle, Closures])
def test_kinds_of_steps(install, told, kind):
    expected = kind().train(2 * PLANNED)
    install("60%")

    found = kind().train(2 * PLANNED)

    assert_same(found, expected)
    assert regions(found.model)
    assert "region" in told()[-1]


class Unsteady(Net):
    """Calls blocks now more, now less often."""

    steps = 0

    def forward(self, x):
        self.steps += 1
        for layer in self.layers[: 1 + self.steps % 4]:
            x = layer(x)
        return self.head(x)


def test_steps_that_differ_each_time_get_no_plan(install, told):
    expected = Job(Unsteady).train(45)
    install("60%")

    found = Job(Unsteady).train(45)

    assert_same(found, expected)
    assert told()[-1] == (
        "60%: no plan: steps call blocks now more, now less often; all blocks are recomputed"
    )
    assert set(regions(found.model).values()) == {ebb.policies.recompute_all}


def test_an_optimizer_that_steps_in_backward(install, told):
    def train():
        torch.manual_seed(0)
        model = Net()
        for parameter in model.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
        for _ in range(4):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            model.zero_grad()
        return list(model.parameters())

    expected = train()
    install("60%")

    found = train()

    assert all(map(same_bits, found, expected))
    assert told()[-1].startswith("60%: no plan: an optimizer steps while backward runs")


def test_a_model_that_never_runs_backward(install, told):
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


def test_a_job_of_no_blocks_with_a_backward(install, told):
    install("60%")
    model = Net()
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    for _ in range(25):
        with torch.no_grad():
            y = model(torch.randn(4, WIDTH)).mean()
        (y * weight).sum().backward()
        optimizer.step()

    assert told()[-1].startswith("60%: no plan: no block has a backward")


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


def test_a_second_stage_is_measured_too(install, told):
    install("60%")
    first = Job().train()
    assert regions(first.model)
    first_told = told()
    del first
    gc.collect()

    second = Job().train(STEPS + 3)

    assert regions(second.model)
    assert len(told()) == 1, first_told


def test_a_model_that_comes_late_is_planned_with_the_others(install, told):
    install("60%")
    job = Gan()
    Job.train(job, 0)
    for step in range(STEPS):
        Job.step(job, step)
    assert regions(job.model)
    told()

    job.train(STEPS)

    assert len(told()) == 1
    assert regions(job.model) or regions(job.critic)


def test_a_copy_has_blocks_of_its_own(install):
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


# Shapes that change ------------------------------------------------------------------------------


def test_shapes_that_change_for_good_are_measured_again(install, told):
    def rows(step):
        return ROWS if step < STEPS else 2 * ROWS

    expected = Job(rows=rows).train(2 * STEPS + module._FOR_GOOD)
    install("60%")

    found = Job(rows=rows).train(2 * STEPS + module._FOR_GOOD)

    assert_same(found, expected)
    plans = [line for line in told() if "the step will allocate" in line]
    assert len(plans) == 2
    sizes = [float(re.search(r"of ([\d.]+) [KM]iB, and", line)[1]) for line in plans]
    assert sizes[1] != sizes[0]


def test_a_batch_that_is_larger_makes_a_tighter_plan(install, told):
    def rows(step):
        return 2 * ROWS if step == STEPS else ROWS

    plain = Quiet().train(3)
    peak, in_all = peak_of(plain)
    install(in_all - peak // 5)

    job = Job(rows=rows).train(STEPS)
    before = len(regions(job.model))
    told()
    job.train(2)

    assert len(regions(job.model)) > before
    lines = told()
    assert "a batch is 2.00 times as large as those that were measured" in lines[0]


def test_batches_whose_size_changes_each_time(install, told):
    def rows(step):
        return ROWS + 9 * (step % 5)

    expected = Job(rows=rows).train(STEPS + 8)
    install("60%")

    found = Job(rows=rows).train(STEPS + 8)

    assert_same(found, expected)
    assert regions(found.model)
    assert told()[-1] == (
        "60%: the sizes of batches change; the plan is made for the largest that was measured"
    )


# What else there is ------------------------------------------------------------------------------


def test_modules_that_are_named_are_the_blocks(install, told):
    install("60%", "layers.[01]")

    job = Job().train()

    assert "layers.0-1;" in told()[0]
    assert set(regions(job.model)) <= {"layers.0", "layers.1"}


@pytest.mark.parametrize("calls", [None, (ebb.policies.save_matmuls, "save_matmuls")])
def test_calls_of_checkpoint_are_planned_with_their_blocks(install, told, calls):
    expected = Job().train()
    install("1GiB", calls=calls)

    found = Job(checkpoints=True).train(STEPS)

    assert_same(found, expected)
    assert set(regions(found.model).values()) == {ebb.policies.save_all}
    assert ebb.stats()["total"]["ops_replayed"] == 0
    assert ("EBB=save_matmuls counts for calls" in "".join(told())) == (calls is not None)


def test_a_block_that_checkpoints_inside(install):
    class Inside(Net):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer.forward = lambda x, run=layer.forward: checkpoint(run, x, use_reentrant=False)

    expected = Job().train()
    install("60%")

    found = Job(Inside).train()

    assert_same(found, expected)
    assert regions(found.model)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears")
def test_torchs_profiler_runs_beside_it(install, told):
    expected = Job().train(STEPS + 8)
    install("60%")
    found = Job()

    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    ) as profiler:
        for _ in range(STEPS + 8):
            found.train(1)
            profiler.step()

    assert_same(found, expected)
    assert regions(found.model)
    assert len(profiler.events()) > 0


def test_a_profiler_that_never_ends(install, told):
    install("60%")

    with torch.profiler.profile():
        Job().train(25)

    assert "since torch's profiler runs; all blocks are recomputed" in told()[-1]


def test_replays_ahead_are_off_only_while_it_is_measured(install):
    ebb.ahead.configure(regions=1)
    install("60%")

    job = Job().train(2)
    assert ebb.ahead.settings()["regions"] == 0
    job.train(STEPS)

    assert ebb.ahead.settings()["regions"] == 1


def test_modules_that_are_regions_already_are_left_alone(install, told):
    install("60%")
    job = Job()
    handle = ebb.apply(job.model, ebb.policies.save_matmuls, "layers.0")

    job.train()

    assert "layers.1-3;" in told()[0]
    handle.remove()


def test_what_fails_ends_no_job(install, told, monkeypatch):
    def fails(*_):
        raise RuntimeError("a fault")

    monkeypatch.setattr(module, "plan_of", fails)
    expected = Job().train()
    install("60%")

    found = Job().train()

    assert_same(found, expected)
    assert told()[-1] == "60%: no plan: RuntimeError: a fault; all blocks are recomputed"


def test_taking_it_away_in_the_middle(install):
    install("60%")
    job = Job().train(4)

    takeover.remove()

    job.train(4)
    _C.begin_profile()
    _C.end_profile()


def test_a_steady_step_costs_microseconds(install):
    budget = install("60%")
    Job(depth=32).train()
    looks = []
    for _ in range(20):
        begin = time.perf_counter()
        budget._at_boundary(True)
        looks.append(time.perf_counter() - begin)

    assert min(looks) < 50e-6


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_compiled_has_no_blocks(install, told):
    install("60%")
    model = torch.compile(Net(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for _ in range(30):
        model(torch.randn(8, WIDTH)).mean().backward()
        optimizer.step()

    assert told()[-1].startswith("60%: no plan")
    assert regions(model) == {}
    torch._dynamo.reset()
