"""The file of a budget's plan: starts that plan again, damaged files, and who may read one."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import stat

import pytest
import torch

import ebb
from ebb._launch import plan_file, takeover
from ebb._launch.budget_phases import Planned
from ebb._launch.decided import Decided
from ebb._launch.memory_limit import Limit
from ebb._launch.plan_file import PlanFileError, StoredPlan
from ebb._launch.start import budget_and_file
from ebb._launch.taken import Taken
from ebb_tests.budget_jobs import ROWS, Job, Net, assert_same, regions
from ebb_tests.programs_apart import run_program


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.toml"


@pytest.fixture
def plans_again(start, told):
    """Checks that a start tells why it takes no plan, and writes another, which the next takes."""

    def check(why, budget="60%", make=Job, patterns=()):
        expected = make().train()
        found = start(budget, *patterns)
        job = make().train()
        lines = told()
        assert re.match(rf"{re.escape(budget)}: no plan from plan.toml: {why}", lines[0]), lines
        assert "ebb profiles 6 steps" in lines[1]
        assert any("the next start of the job takes this plan from" in line for line in lines)
        assert_same(job, expected)
        assert type(found.job.phase) is Planned
        takeover.remove()

        found = start(budget, *patterns)
        make().train(2)
        assert isinstance(found.job.phase, Taken)

    return check


# Another job --------------------------------------------------------------------------------------


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


class Autocast(Job):
    def step(self, step):
        with torch.autocast("cpu", torch.bfloat16):
            super().step(step)


MODEL = "the model has changed"
INPUTS = r"the inputs of the first block were layers.0: float32\[256, 16\], and are layers.0: "
SETTINGS = "EBB_MODULES or settings"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"budget": "50%"}, "the budget was 60%, and is 50%"),
        ({"make": functools.partial(Job, depth=5)}, MODEL),
        ({"make": lambda: Job(type("Other", (Net,), {}))}, MODEL),
        ({"make": Frozen}, MODEL),
        ({"make": Double}, MODEL),
        ({"make": functools.partial(Job, rows=lambda step: 2 * ROWS)}, INPUTS),
        ({"make": functools.partial(Job, rows=lambda step: ROWS // 2)}, INPUTS),
        ({"make": Autocast}, INPUTS),
        ({"patterns": ("layers.[01]",)}, SETTINGS),
    ],
)
def test_another_job_plans_again(plans_again, first, changes, why):
    first()
    plans_again(why, **changes)


def test_other_settings_plan_again(plans_again, first):
    first()
    with ebb.config.patch(offload_min_bytes=1234):
        plans_again(SETTINGS)


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
def test_another_machine_or_release_plans_again(plans_again, first, path, name, value, why):
    stored = StoredPlan.parse(first(), "")
    vars(stored.made_for)[name] = value
    path.write_text("# Plan of EBB_BUDGET\n" + stored.to_toml())

    plans_again(why)


def test_memory_limit_may_differ_a_little(start, first, path):
    stored = StoredPlan.parse(first(), "")
    vars(stored.made_for)["memory_limit"] = int(stored.made_for.memory_limit * 1.01)
    path.write_text(stored.to_toml())
    found = start()

    Job().train(1)

    assert isinstance(found.job.phase, Taken)


# A damaged file -----------------------------------------------------------------------------------


def without_later_regions(text):
    return text[: text.index("[[regions]]", text.index("[[regions]]") + 5)]


def with_another_decision(text):
    return text.replace('decision = "save"', 'decision = "recompute"', 1)


def with_another_peak(text):
    return re.sub(r"^peak = \d+", "peak = 5", text, flags=re.M)


def without_plan(text):
    return text[text.index("[[regions]]") :]


CHANGED = "it was changed after ebb had written it"
DAMAGE = {
    "nothing": (lambda text: text, "the budget was"),
    "cut": (lambda text: text[:-10], "it is damaged|it was changed"),
    "cut between tables": (without_later_regions, CHANGED),
    "edited": (with_another_decision, CHANGED),
    "another peak": (with_another_peak, CHANGED),
    "no plan": (without_plan, "it is damaged: 'plan' is missing"),
    "no TOML": (lambda text: text + "]]", "it is damaged: "),
    "bytes": (lambda text: text.encode()[:400] + b"\xff\xfe", "it cannot be read: 'utf-8' codec"),
    "a table less": (lambda text: text.replace("\n[plan]", "\n[plan.a]"), "it is damaged: "),
    "nested": (lambda text: text + "\na = " + "[" * 5000, "it is damaged: "),
}
STRICT = ("nothing", "cut between tables", "edited")


@pytest.mark.parametrize(
    ("name", "strict"), [*((name, "0") for name in DAMAGE), *((name, "1") for name in STRICT)]
)
def test_job_without_a_file_or_with_a_damaged_one_plans_also_if_it_is_strict(
    plans_again, first, path, monkeypatch, name, strict
):
    monkeypatch.setenv("EBB_STRICT", strict)
    damage, why = DAMAGE[name]
    text = damage(first())
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    plans_again(why, "50%")


def test_no_byte_can_change_unnoticed(first):
    """In the whole file but its comments and white space."""
    text = first("50%")
    begin = text.index("[plan]")
    as_it_is = StoredPlan.parse(text, "")
    for place in range(begin, len(text), 7):
        changed = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        try:
            found = StoredPlan.parse(changed, "")
        except PlanFileError:
            continue
        assert found.to_toml() == as_it_is.to_toml(), changed[place - 20 : place + 20]


def test_file_that_is_no_plan_is_not_replaced(start, path, told):
    path.write_text("import torch\n")
    expected = Job().train()
    start()

    job = Job().train()

    lines = told()
    assert "no plan from plan.toml: it is damaged" in lines[0]
    assert "the file exists and is no plan of ebb, which does not replace it" in lines[-1]
    assert path.read_text() == "import torch\n"
    assert_same(job, expected)


def test_internal_error_keeps_job_running(start, first, told, monkeypatch):
    def fails(*_):
        raise ArithmeticError("a fault")

    expected = Job().train()
    first()
    monkeypatch.setattr(plan_file.MadeFor, "changed", fails)
    start()

    job = Job().train()

    assert "no plan from plan.toml: an error in ebb: ArithmeticError: a fault" in told()[0]
    assert regions(job.model)
    assert_same(job, expected)


# Writing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "fifo", "no folder", "device", "read-only"])
def test_path_that_cannot_be_a_file_is_told_of(start, path, told, kind):
    others = {
        "no folder": path.parent / "none" / "plan.toml",
        "device": "/dev/null",
        "read-only": "/proc/self/plan.toml",  # not even root may write there
    }
    path = others.get(kind, path)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    before = os.stat(path).st_mode if os.path.exists(path) else None
    expected = Job().train()
    start(path=path)

    job = Job().train()

    assert f"the plan could not be written to {path}: " in told()[-1]
    assert (os.stat(path).st_mode if os.path.exists(path) else None) == before
    assert regions(job.model)
    assert_same(job, expected)


def test_full_disk_leaves_the_old_file_and_nothing_else(start, first, told, path, monkeypatch):
    text = first()

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    start("50%")
    Job().train()

    assert told()[-1].endswith("No space left on device")
    assert path.read_text() == text
    assert os.listdir(path.parent) == ["plan.toml"]


def test_only_the_owner_may_read_a_new_or_replaced_file(plans_again, first, path):
    before = os.umask(0)
    try:
        first()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["plan.toml"]

    path.chmod(0o644)
    plans_again("the budget was", "50%")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_strict_job_that_cannot_write_ends(start, tmp_path, monkeypatch):
    monkeypatch.setenv("EBB_STRICT", "1")
    start(path=tmp_path / "none" / "plan.toml")

    with pytest.raises(PlanFileError, match="could not be written"):
        Job().train()


def test_process_without_a_rank_of_its_own_has_no_file(start, first, path, monkeypatch, told):
    """multiprocessing may have started several that train."""
    text = first()
    monkeypatch.setattr(plan_file.job, "is_helper", lambda: True)
    start("50%")

    Job().train()

    assert not any("plan.toml" in line for line in told())
    assert path.read_text() == text
    assert os.listdir(path.parent) == ["plan.toml"]


MIXED = ebb.Policy(
    [ebb.Rule("aten::mm", ebb.OFFLOAD, every=2), ebb.Rule("aten::gelu", ebb.SAVE)],
    default=ebb.RECOMPUTE_EACH_TIME,
    inputs=ebb.OFFLOAD,
)
NAMES = ["", "layers.0", 'a"b', "a\\b", "a\x7fb", "[[regions]]\n", "ünï"]


@pytest.mark.parametrize(
    ("policies", "ahead"), [(dict.fromkeys(NAMES, MIXED), False), ({}, True)], ids=["many", "none"]
)
def test_file_and_other_ranks_get_any_plan(path, policies, ahead):
    offload = {"in_flight_bytes": 2**20, "keep_last": 3}
    regions = ebb.ModulePolicies(policies, offload, ahead=ahead)
    plan = Decided(regions, "four\nregions", 10, 2**60, "small", None)
    made_for = plan_file.MadeFor("60%", "2", "0", "cpu", 1, 1, 'a"b\x7f', ["é\n", "b"])
    terms = plan_file.Terms(2**40, None, 5)
    stored = StoredPlan(made_for, {"a": 2, 'é"': 3}, ("b", "\n"), 2, True, plan, terms)
    text = stored.to_toml()

    found = StoredPlan.parse(text, "")

    assert found.to_toml() == text
    assert (found.made_for, found.inputs) == (made_for, {"a": 2, 'é"': 3})
    assert (found.candidate, found.is_around, found.terms) == (2, True, terms)
    assert found.profiled == ("b", "\n")
    assert list(found.decided.regions.policies) == list(policies)
    path.write_text(text)
    loaded = ebb.ModulePolicies.load(path)
    assert list(loaded.policies) == list(policies)
    assert loaded._settings == regions._settings

    received = Decided.from_json(json.loads(json.dumps(plan.to_json())))

    assert received.regions._to_toml() == regions._to_toml()
    fields = dataclasses.fields(Decided)
    for field in fields[1:]:
        assert getattr(received, field.name) == getattr(plan, field.name)


# Jobs in processes --------------------------------------------------------------------------------


def test_file_is_part_of_the_budget(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert budget_and_file("40%") == (0.4, "40%", "")
    found = budget_and_file(" 24GiB @ a b@c.toml ")
    assert found == (24 * 2**30, "24GiB", str(tmp_path / "a b@c.toml"))
    assert budget_and_file("auto@/x/plan.toml") == (Limit(), "auto", "/x/plan.toml")
    for text in ("40%@", "40%@ ", "40%@a\nb"):
        with pytest.raises(ValueError, match=r"such as 40%@plan\.toml; got"):
            budget_and_file(text)


PROGRAM = """
import os, torch
from torch import nn
torch.manual_seed(0)
def block():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
model = nn.Sequential(*(block() for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
os.chdir("/")
for step in range(12):
    loss = model(torch.randn(256, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item().hex())
"""


@pytest.mark.parametrize("is_command_line", [False, True])
def test_unchanged_job(tmp_path, is_command_line):
    """The path is relative, and the job changes its working directory before the first step."""
    (tmp_path / "train.py").write_text("import ebb\n" + PROGRAM)

    def run(*options, **variables):
        return run_program(*options, "train.py", cwd=tmp_path, **variables)

    budget = "60%@plan.toml"
    disabled = run(EBB_BUDGET=budget, EBB_DISABLE="1")
    assert os.listdir(tmp_path) == ["train.py"]
    if is_command_line:
        one, two = (run("-m", "ebb", "--budget", budget) for _ in range(2))
    else:
        one, two = (run(EBB_BUDGET=budget) for _ in range(2))
    by_policy = run(EBB="plan.toml")

    assert "ebb profiles 6 steps" in one.stderr
    assert "the plan from plan.toml" in two.stderr
    assert "profiles" not in two.stderr
    assert "regions: " in by_policy.stderr or "region: " in by_policy.stderr
    assert "ebb" not in disabled.stderr
    assert len({job.stdout for job in (run(), one, two, by_policy, disabled)}) == 1
