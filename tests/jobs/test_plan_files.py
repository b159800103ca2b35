"""The file of a budget's plan: what may be wrong with it, and who may read it."""

from __future__ import annotations

import os
import re
import stat
import tomllib

import pytest

import ebb
from ebb._launch import plan_file
from ebb._launch.memory_limit import Limit
from ebb._launch.plan_file import PlanFileError, StoredPlan
from ebb._launch.start import budget_and_file
from ebb._launch.taken import Taken
from ebb_tests import fork_server
from ebb_tests.budget_jobs import Job, assert_same, regions


def cut(text):
    return text[: text.index("[[regions]]", text.index("[[regions]]") + 5)]


def edited(text):
    return text.replace('decision = "save"', 'decision = "recompute"', 1)


def with_another_peak(text):
    return re.sub(r"^peak = \d+", "peak = 5", text, flags=re.M)


def without_plan(text):
    return text[text.index("[[regions]]") :]


DAMAGE = {
    "cut": (lambda text: text[:-10], "it is damaged|it was changed"),
    "cut between tables": (cut, "it was changed after ebb had written it"),
    "edited": (edited, "it was changed after ebb had written it"),
    "another peak": (with_another_peak, "it was changed after ebb had written it"),
    "no plan": (without_plan, "it is damaged: 'plan' is missing"),
    "no TOML": (lambda text: text + "]]", "it is damaged: "),
    "bytes": (lambda text: text.encode()[:400] + b"\xff\xfe", "it cannot be read: 'utf-8' codec"),
    "a table less": (lambda text: text.replace("\n[plan]", "\n[plan.a]"), "it is damaged: "),
    "nested": (lambda text: text + "\na = " + "[" * 5000, "it is damaged: "),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file(measures, first, tmp_path, name):
    damage, why = DAMAGE[name]
    text = damage(first("50%"))
    path = tmp_path / "plan.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    measures(why, "50%")


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


def test_a_file_that_is_no_plan_is_not_replaced(start, tmp_path, told):
    path = tmp_path / "plan.toml"
    path.write_text("import torch\n")
    expected = Job().train()
    start()

    job = Job().train()

    lines = told()
    assert "no plan from plan.toml: it is damaged" in lines[0]
    assert "the file exists and is no plan of ebb, which does not replace it" in lines[-1]
    assert path.read_text() == "import torch\n"
    assert_same(job, expected)


@pytest.mark.parametrize("kind", ["folder", "fifo", "no folder", "device", "read-only"])
def test_a_path_that_cannot_be_a_file(start, tmp_path, told, kind):
    others = {
        "no folder": tmp_path / "none" / "plan.toml",
        "device": "/dev/null",
        "read-only": "/proc/self/plan.toml",  # not even root may write there
    }
    path = others.get(kind, tmp_path / "plan.toml")
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


def test_a_disk_that_is_full(start, first, told, tmp_path, monkeypatch):
    """The old file stays, and nothing else."""
    text = first()

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    start("50%")
    Job().train()

    assert told()[-1].endswith("No space left on device")
    assert (tmp_path / "plan.toml").read_text() == text
    assert os.listdir(tmp_path) == ["plan.toml"]


def test_a_file_is_its_owners_only(first, tmp_path):
    before = os.umask(0)
    try:
        first()
    finally:
        os.umask(before)

    assert stat.S_IMODE(os.stat(tmp_path / "plan.toml").st_mode) == 0o600
    assert os.listdir(tmp_path) == ["plan.toml"]


def test_a_file_that_was_there_becomes_its_owners_only(measures, first, tmp_path):
    first()
    os.chmod(tmp_path / "plan.toml", 0o644)
    measures("the budget was", "50%")
    assert stat.S_IMODE(os.stat(tmp_path / "plan.toml").st_mode) == 0o600


@pytest.mark.parametrize(
    ("damage", "why"), [(None, "the budget was"), DAMAGE["cut"], DAMAGE["edited"]]
)
def test_a_strict_job_plans_again(measures, first, tmp_path, monkeypatch, damage, why):
    """A job that restarts by itself continues: it measures again and writes a new plan."""
    text = first()
    if damage is not None:
        (tmp_path / "plan.toml").write_text(damage(text))
    monkeypatch.setenv("EBB_STRICT", "1")

    measures(why, "50%")


def test_a_strict_job_without_a_file_yet_begins(start, tmp_path, monkeypatch):
    monkeypatch.setenv("EBB_STRICT", "1")
    start()

    Job().train()

    assert (tmp_path / "plan.toml").exists()


def test_a_strict_job_that_cannot_write_ends(start, tmp_path, monkeypatch):
    monkeypatch.setenv("EBB_STRICT", "1")
    start(path=tmp_path / "none" / "plan.toml")

    with pytest.raises(PlanFileError, match="could not be written"):
        Job().train()


def test_a_budget_that_is_too_small(start, first, told):
    expected = Job().train()
    text = first("1KiB")
    assert "is too small" in tomllib.loads(text)["plan"]["too_small"]
    found = start("1KiB")

    job = Job().train()

    (line,) = told()
    assert "without profiling: a budget of 1.0 KiB is too small" in line
    assert isinstance(found.job.phase, Taken)
    assert_same(job, expected)


def test_an_error_in_ebb_costs_no_job(start, first, told, monkeypatch):
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


def test_a_file_holds_any_policy(tmp_path):
    """With settings of OFFLOAD, odd names, and no replays ahead."""
    mixed = ebb.Policy(
        [ebb.Rule("aten::mm", ebb.OFFLOAD, every=2), ebb.Rule("aten::gelu", ebb.SAVE)],
        default=ebb.RECOMPUTE_EACH_TIME,
        inputs=ebb.OFFLOAD,
    )
    names = ["", "layers.0", 'a"b', "a\\b", "a\x7fb", "[[regions]]\n", "ünï"]
    made_for = plan_file.MadeFor("60%", "2", "0", "cpu", 1, 1, 'a"b\x7f', ["é\n", "b"])
    for policies, ahead in ((dict.fromkeys(names, mixed), False), ({}, True)):
        regions = ebb.ModulePolicies(policies, {"keep_last": 3}, ahead=ahead)
        plan = plan_file.Decided(regions, "four\nregions", 10, 2**60, "small", None)
        terms = plan_file.Terms(2**40, None, 5)
        stored = StoredPlan(made_for, {"a": 2, 'é"': 3}, ("b", "\n"), 2, True, plan, terms)
        text = stored.to_toml()

        found = StoredPlan.parse(text, "")

        assert found.to_toml() == text
        assert (found.made_for, found.inputs) == (made_for, {"a": 2, 'é"': 3})
        assert (found.candidate, found.is_around, found.terms) == (2, True, terms)
        assert found.profiled == ("b", "\n")
        assert list(found.decided.regions.policies) == list(policies)
        (tmp_path / "plan.toml").write_text(text)
        loaded = ebb.ModulePolicies.load(tmp_path / "plan.toml")
        assert list(loaded.policies) == list(policies)
        assert loaded._settings == regions._settings


# Variables ----------------------------------------------------------------------------------------


def test_a_file_is_part_of_the_budget(monkeypatch, tmp_path):
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


def run_job(folder, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EBB")} | variables
    run = fork_server.run(["-c", "import ebb\n" + PROGRAM], env=environment, cwd=folder)
    assert run.returncode == 0, run.stderr
    return run


def test_jobs_that_do_not_know_of_it(tmp_path):
    """The path is relative, and the job changes its working directory before the first step."""
    plain = run_job(tmp_path)
    one = run_job(tmp_path, EBB_BUDGET="60%@plan.toml")
    two = run_job(tmp_path, EBB_BUDGET="60%@plan.toml")
    by_policy = run_job(tmp_path, EBB="plan.toml")
    disabled = run_job(tmp_path, EBB_BUDGET="60%@plan.toml", EBB_DISABLE="1")

    assert "ebb profiles 6 steps" in one.stderr
    assert "the plan from plan.toml" in two.stderr
    assert "profiles" not in two.stderr
    assert "regions: " in by_policy.stderr or "region: " in by_policy.stderr
    assert "ebb" not in disabled.stderr
    assert len({run.stdout for run in (plain, one, two, by_policy, disabled)}) == 1, plain.stderr


def test_a_disabled_job_writes_no_file(tmp_path):
    run_job(tmp_path, EBB_BUDGET="60%@plan.toml", EBB_DISABLE="1")
    assert os.listdir(tmp_path) == []


def test_the_command_line(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EBB")}
    command = ["-m", "ebb", "--budget", "60%@plan.toml", "train.py"]
    one, two = (fork_server.run(command, env=environment, cwd=tmp_path) for _ in range(2))

    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert "ebb profiles 6 steps" in one.stderr
    assert "the plan from plan.toml" in two.stderr
    assert one.stdout == two.stdout


def test_a_process_without_a_rank_of_its_own_has_no_file(start, first, tmp_path, monkeypatch, told):
    """multiprocessing may have started several that train."""
    text = first()
    monkeypatch.setattr(plan_file.job, "is_helper", lambda: True)
    start("50%")

    Job().train()

    assert not any("plan.toml" in line for line in told())
    assert (tmp_path / "plan.toml").read_text() == text
    assert os.listdir(tmp_path) == ["plan.toml"]
