"""Advised rules as values of `EBB`, for jobs whose policy is from a variable."""

from __future__ import annotations

import html
import json
import os
import re
import shlex

import pytest

import ebb
from ebb._launch.start import policy_from
from ebb._policy.rule import Rule
from ebb._policy.variable import JobPolicy
from ebb_tests import fork_server
from ebb_tests.one_step_report import no_reports_yet, recorded  # noqa: F401
from ebb_tests.report_page import can_be_shown, shown

FILE = """
default = "save"
inputs = "offload"
[[rules]]
op = "mm"
decision = "recompute"
module = "*.mlp.*"
"""
REGIONS = """
ahead = false
[offload]
keep_last = 3
[[regions]]
modules = ["layers.0", "layers.1"]
rules = [{ op = "mm", decision = "save", nth = 2 }]
[[regions]]
modules = ["head"]
preset = "save_matmuls"
"""
TEXTS = ["1", "on", "save_matmuls", "offload_inputs", "mm:recompute,save_matmuls", "*mm:save"]


@pytest.fixture(params=["", "layers.*.mlp"])
def rule(request):
    return Rule("aten::gelu.default", ebb.SAVE, module=request.param or None)


def put(tmp_path, monkeypatch, text):
    """The policy of the variables, if EBB is `text`, or a file with this content."""
    value = text
    if "\n" in text:
        value = str(tmp_path / "given.toml")
        (tmp_path / "given.toml").write_text(text)
    monkeypatch.setenv("EBB", value)
    return JobPolicy.of_variables(), value


@pytest.mark.parametrize("text", [*TEXTS, FILE])
def test_value_is_the_policy_with_one_more_rule(tmp_path, monkeypatch, rule, text):
    policy, value = put(tmp_path, monkeypatch, text)
    before = policy_from(value)

    value, file = policy.with_first(rule)

    assert bool(file) == (value == "policy.toml") == ("\n" in text or rule.module is not None)
    monkeypatch.chdir(tmp_path)
    if file:
        (tmp_path / value).write_text(file)
    found = policy_from(value)
    assert (found.inputs, found.default) == (before.inputs, before.default)
    assert found.rules == (rule, *before.rules)


def test_file_of_regions_gets_the_rule_in_each_policy(tmp_path, monkeypatch, rule):
    policy, value = put(tmp_path, monkeypatch, REGIONS)
    before = ebb.ModulePolicies.load(value)

    name, file = policy.with_first(rule)
    (tmp_path / name).write_text(file)
    found = ebb.ModulePolicies.load(tmp_path / name)

    assert found._settings == before._settings
    assert found.policies.keys() == before.policies.keys()
    for module, one in found.policies.items():
        assert one.rules == (rule, *before.policies[module].rules)


def test_no_value_if_the_policy_is_not_from_a_variable(tmp_path, monkeypatch):
    for name, value in (("EBB", ""), ("EBB", "0"), ("EBB", str(tmp_path / "none.toml"))):
        monkeypatch.setenv(name, value)
        assert JobPolicy.of_variables() is None
    monkeypatch.setenv("EBB", "1")
    assert JobPolicy.of_variables() is not None
    monkeypatch.setenv("EBB_BUDGET", "40%")
    assert JobPolicy.of_variables() is None
    monkeypatch.delenv("EBB_BUDGET")
    monkeypatch.setenv("EBB", "nonsense:nothing")  # the job runs without it, in its own regions
    report = recorded(ebb.policies.recompute_all)
    assert {(one.variable, one.file) for one in report.advice} == {("", "")}
    assert "by variable" not in str(report)


PROGRAM = """
import torch, ebb
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))
torch.manual_seed(0)
net = torch.nn.Sequential(*(Block() for _ in range(3)))
if named:
    net = torch.nn.Sequential(__import__("collections").OrderedDict(layers=net))
for _ in range(3):
    net(torch.randn(64, 64)).sum().backward()
"""


def report_of_job(folder, value, named):
    variables = {"EBB": value, "EBB_REPORT": str(folder / "r.json")}
    run = fork_server.run(
        ["-c", f"named = {named}\n{PROGRAM}"], env=os.environ | variables, cwd=folder
    )
    assert run.returncode == 0, run.stderr
    return ebb.Report.load(folder / "r.json")


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("text", ["1", "save_matmuls"])
def test_job_that_follows_the_advice_has_the_bytes_that_it_names(tmp_path, text, named):
    before = report_of_job(tmp_path, text, named)
    advice = before.advice[0]

    variable, _, value = shlex.split(advice.variable)[0].partition("=")
    if advice.file:
        (tmp_path / value).write_text(advice.file)
    after = report_of_job(tmp_path, value, named)

    assert variable == "EBB"
    assert bool(advice.module) == bool(advice.file)
    assert after.held - before.held == advice.bytes
    assert not after.idle_rules


def test_text_has_the_value_and_a_short_file(monkeypatch):
    monkeypatch.setenv("EBB", "save_matmuls")
    short = recorded(ebb.policies.save_matmuls)
    monkeypatch.setenv("EBB", ",".join(["silu:recompute"] * 20))
    long = recorded(ebb.policies.recompute_all)

    lines = str(short).splitlines()
    index = lines.index("    by variable: EBB=policy.toml, with this policy.toml:")
    assert lines[index + 1 : index + 3] == [
        f"        {line}" for line in short.advice[0].file.splitlines()
    ]
    assert "EBB=policy.toml; the report as .html or .json has the file" in str(long)


@can_be_shown
def test_page_has_the_whole_texts_to_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("EBB", "save_matmuls")
    report = recorded(ebb.policies.save_matmuls)
    advice = report.advice[0]

    page = shown(report, tmp_path)

    texts = re.findall(
        r'<button type="button">copy</button><pre>(.*?)</pre>', page["advice-how"].html, re.S
    )
    assert list(map(html.unescape, texts)) == [advice.rule, advice.variable, advice.file]
    assert page["advice-rows"].html.count("<tr") == len(report.advice)
    rules = {row.rule for row in report.rows if row.rule}
    cells = html.unescape(page["body"].html)
    assert all(f">{rule}<" in cells for rule in rules)
    assert json.loads(json.dumps(report.to_dict()))["advice"][0]["variable"] == advice.variable
