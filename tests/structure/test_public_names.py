"""The names that ebb promises. A new one, or one that goes, changes this file on purpose."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ebb
from ebb._launch.variables import VARIABLES

NAMES = {
    "ebb": (
        "BudgetError ModulePolicies OFFLOAD PAGE PageOverflowError PlaceholderError Plan Policy "
        "Profile RECOMPUTE RECOMPUTE_EACH_TIME ReplayMismatch Report Rule SAVE ahead apply "
        "discard discardable mark_rows offload opaque paging plan policies profile record_reports "
        "region report reset_stats share_storage stats verify"
    ),
    "ebb.ahead": "configure",
    "ebb.offload": "configure",
    "ebb.paging": "configure found_inf microbatch reset run_step step step_ok",
    "ebb.policies": (
        "either offload_inputs recompute_all recompute_collectives save_all save_matmuls"
    ),
}
# Names that other libraries gave to the same thing: torch.utils.checkpoint, JAX, torchtitan,
# Megatron-Core.
NAMES_OF_OTHERS = {
    "ebb": "checkpoint checkpoint_name",
    "ebb.policies": (
        "dots_saveable dots_with_no_batch_dims_saveable everything_saveable megatron "
        "nothing_saveable offload_dot_with_no_batch_dims save_and_offload_only_these_names "
        "save_only_these_names torchtitan torchtitan_full"
    ),
}
METHODS = {
    ebb.ModulePolicies: "apply groups load offload save",
    ebb.Plan: "apply explain groups load measure offload pareto save summary",
    ebb.Policy: "default dump explain inputs load parse rules save to_sac to_toml",
    ebb.Profile: "load peak save",
    ebb.Report: "DECISIONS FATES advice collapsed eager held plan save text to_dict totals",
}
FEW_NAMES, FEW_VARIABLES = 48, 13


def test_names_of_modules():
    for module in NAMES:
        expected = (NAMES[module] + " " + NAMES_OF_OTHERS.get(module, "")).split()
        assert sorted(sys.modules[module].__all__) == sorted(expected)
        assert all(hasattr(sys.modules[module], name) for name in expected)


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_names_of_classes(kind):
    fields = getattr(kind, "__dataclass_fields__", {})

    found = {name for name in dir(kind) if name[0] != "_"} - fields.keys()

    assert found == set(METHODS[kind].split()) - fields.keys()


def test_programs_call_functions_that_the_library_has():
    root = Path(__file__).resolve().parents[2]
    call = re.compile(r"(?<!torch\.)\b_C\.(\w+)\(")

    called = {
        (str(file.relative_to(root)), name)
        for folder in ("python", "benchmarks", "examples", "integration", "tests")
        for file in (root / folder).rglob("*.py")
        for name in call.findall(file.read_text())
    }

    assert len(called) > 100
    assert not [(file, name) for file, name in sorted(called) if not hasattr(ebb._C, name)]


def test_there_are_few():
    assert sum(len(names.split()) for names in NAMES.values()) <= FEW_NAMES
    assert len(VARIABLES) == FEW_VARIABLES


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ebb.Decision", "ebb._policy.decision.Decision"),
        ("ebb.Pareto", "ebb._plan.pareto.Pareto"),
        ("ebb.ParetoPoint", "ebb._plan.pareto.ParetoPoint"),
        ("ebb.RegionHandle", "ebb._region.apply.RegionHandle"),
        ("ebb.paging.PageOverflowError", "ebb.PageOverflowError"),
        ("ebb.ahead.settings()", "ebb.ahead.configure()"),
        ("ebb.offload.settings()", "ebb.offload.configure()"),
        ("ebb.paging.settings()", "ebb.paging.configure()"),
        ("ebb.ahead.stats()", 'ebb.stats()["ahead"]'),
        ("ebb.offload.stats()", 'ebb.stats()["offload"]'),
        ("ebb.paging.stats()", 'ebb.stats()["paging"]'),
    ],
)
def test_names_of_the_last_release_work_and_warn(name, instead):
    with pytest.warns(FutureWarning, match="will be removed in the next release") as warned:
        found = eval(name)

    assert warned[0].filename == "<string>"  # where the name is used
    assert f"ebb: {name} is deprecated" in str(warned[0].message)
    assert instead in str(warned[0].message)
    assert found == eval(instead)


def test_other_names_raise():
    for module in (ebb, ebb.paging):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute"):
            module.nothing  # noqa: B018


def test_a_policy_is_saved_by_its_old_name(tmp_path):
    policy = ebb.Policy({"aten::mm": ebb.SAVE})
    with pytest.warns(FutureWarning, match=r"Policy.dump\(\) is deprecated"):
        text = policy.dump(tmp_path / "policy.toml")

    assert text == policy.to_toml() == (tmp_path / "policy.toml").read_text()


def test_a_file_has_no_plan(tmp_path):
    with pytest.raises(TypeError, match=r"ebb.ModulePolicies.load\('plan.toml'\)"):
        ebb.Plan.load("plan.toml")


def test_importing_warns_of_nothing():
    program = "import ebb, ebb.paging; dir(ebb); from ebb import *"
    subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", program], check=True)
