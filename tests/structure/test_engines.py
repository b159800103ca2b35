"""No test of exactness is left out under an engine unnoticed."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from ebb_tests import TESTS
from ebb_tests.engines import BY_NAME, ENGINES
from ebb_tests.exactness import run_process
from ebb_tests.work_units import ENGINE

GROUPS = {
    "exactness": {
        "functions_and_hooks",
        "handles",
        "memory",
        "opaque",
        "pieces_of_one_storage",
        "regressions",
        "subclasses",
    },
    "device": {
        "adversarial_programs",
        "escapes",
        "inputs_and_results",
        "regions",
        "shrunk_programs",
        "state",
        "verify",
    },
    "checked": {"handles", "regressions"},
}
RULES = {file.stem.removeprefix("test_") for file in TESTS.glob("*/test_rule*.py")}
GROUPS["exactness"] |= RULES
GROUPS["device"] |= GROUPS["exactness"]
GROUPS["checked"] |= RULES

# Tests under each engine, at least: tests in a module's group, with each policy where they ask.
LEAST = {
    "ahead": 400,
    "ahead at once": 400,
    "offload late": 350,
    "offload prompt": 350,
    "offload disk": 350,
    "page": 315,
    "each time": 425,
    "each time, ahead": 400,
    "each time, offload": 425,
    "each time, page": 425,
    "device": 595,
    "device, offload": 520,
    "device, page": 480,
    "verify": 285,
    "verify, each time": 285,
    "verify, device": 280,
    "verify, device, offload": 240,
    "reports": 295,
}


def test_modules_name_their_groups():
    found = {group: set() for group in GROUPS}
    for file in TESTS.glob("*/test_*.py"):
        if marks := re.search(r"pytest\.mark\.engines\((\"[^)]*)\)", file.read_text()):
            for group in re.findall(r"\"(\w+)\"", marks[1]):
                found[group].add(file.stem.removeprefix("test_"))
    assert found == GROUPS


def test_modules_under_engines_have_no_fixed_policies():
    """POLICIES are those of one engine; `policies` gives those of the current one."""
    texts = {file: file.read_text() for file in TESTS.glob("*/test_*.py")}
    fixed = [file.name for file, text in texts.items() if "POLICIES" in text]
    under = [file.name for file, text in texts.items() if "pytest.mark.engines(" in text]
    assert under
    assert not {*fixed} & {*under} - {Path(__file__).name}


def test_names_of_engines_can_be_read_from_ids():
    assert len(BY_NAME) == len(ENGINES)
    assert not any(mark in name for name in BY_NAME for mark in "-[]")


@pytest.mark.sweep
@pytest.mark.skipif(
    not all(engine.is_built for engine in ENGINES), reason="ebb was built without some plug-ins"
)
def test_each_engine_has_its_tests():
    files = [str(file) for file in TESTS.glob("*/test_*.py") if "mark.engines(" in file.read_text()]
    printed = run_process(["-m", "pytest", "--collect-only", "-q", *files])
    names = (found[1] for line in printed.splitlines() if (found := ENGINE.search(line)))
    counts = Counter(names)
    assert {name: count for name, count in LEAST.items() if counts[name] < count} == {}
    assert {*LEAST} == {*BY_NAME} - {"plain"}
