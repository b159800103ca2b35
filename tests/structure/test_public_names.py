"""The names that ebb promises. A new one, or one that goes, changes this file on purpose."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import _ebb_switches
import pytest

import ebb

ROOT = Path(__file__).resolve().parents[2]

NAMES = {
    "ebb": (
        "BudgetError ModulePolicies OFFLOAD PAGE Plan Policy Profile RECOMPUTE RECOMPUTE_EACH_TIME "
        "ReplayMismatch Report Rule SAVE apply config disable experimental metrics opaque plan "
        "policies profile record_reports region remove report reset_stats stats verify"
    ),
    "ebb.experimental": "PageOverflowError PlaceholderError discard discardable mark_rows paging",
    "ebb.experimental.paging": "found_inf microbatch reset run_step step step_ok",
    "ebb.policies": ("offload_inputs recompute_all recompute_collectives save_all save_matmuls"),
}
# Names that other libraries gave to the same thing: torch.utils.checkpoint, JAX, torchtitan,
# Megatron-Core.
NAMES_OF_OTHERS = {
    "ebb": "checkpoint checkpoint_name",
    "ebb.policies": (
        "dots_saveable dots_with_no_batch_dims_saveable megatron save_only_these_names torchtitan"
    ),
}
METHODS = {
    ebb.ModulePolicies: "apply load save",
    ebb.Plan: "apply explain measure pareto policies pool_bytes replays save summary",
    ebb.Policy: "default explain inputs load parse rules save to_sac to_toml",
    ebb.Profile: "peak",
    ebb.Report: "FATES advice collapsed eager held load notes plan policy save text to_dict totals",
}
FEW_NAMES, FEW_VARIABLES = 35, 9


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


# The example of a class that a function returns or raises is the function's.
BY_FUNCTIONS = {
    "BudgetError": "plan",
    "PageOverflowError": "paging",
    "PlaceholderError": "discard",
    "Plan": "plan",
    "Profile": "profile",
    "ReplayMismatch": "verify",
    "Report": "report",
    "discardable": "discard",
    "paging": "mark_rows",
}


@pytest.mark.parametrize("module", ["ebb", "ebb.policies", "ebb.experimental"])
def test_each_name_has_an_example(module):
    names = sys.modules[module].__all__
    named = [BY_FUNCTIONS.get(name, name) for name in names]
    described = {name: getattr(sys.modules[module], name, None) for name in named}
    plain = (ebb.Policy, type(ebb.SAVE), type(ebb))  # presets, decisions, modules

    without = [
        name
        for name, value in described.items()
        if not isinstance(value, plain) and ">>>" not in (inspect.getdoc(value) or "")
    ]

    assert without == []


def test_programs_call_functions_that_the_library_has():
    call = re.compile(r"(?<!torch\.)\b_C\.(\w+)\(")

    called = {
        (str(file.relative_to(ROOT)), name)
        for folder in ("python", "benchmarks", "examples", "integration", "tests")
        for file in (ROOT / folder).rglob("*.py")
        for name in call.findall(file.read_text())
    }

    assert len(called) > 100
    assert not [(file, name) for file, name in sorted(called) if not hasattr(ebb._C, name)]


def test_there_are_few():
    stable = [names for module, names in NAMES.items() if "experimental" not in module]
    assert sum(len(names.split()) for names in stable) <= FEW_NAMES
    assert len(_ebb_switches.NAMES) == FEW_VARIABLES


def test_importing_warns_of_nothing():
    program = "import ebb, ebb.experimental; dir(ebb); from ebb import *"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_variables_in_documents_exist():
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("integration/**/*.md")]
    named = {
        (name, document.name)
        for document in documents
        for name in re.findall(r"(?<!_)\b(?:-D)?EBB_[A-Z_]+", document.read_text())
    }
    sources = "CMakeLists.txt", "setup.py", "include/ebb/fields.h"
    others = "".join((ROOT / source).read_text() for source in sources)
    assert len(named) > 40
    assert not [
        (name, document)
        for name, document in named
        if name not in _ebb_switches.NAMES
        and not name.startswith(_ebb_switches.PREFIXES)
        and name.removeprefix("-D") not in others
    ]
