"""Runs tests on a device out of tree, which their process has for good: the tests of that device in
some processes, and the tests of exactness in others.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebb_tests.device import TELLS_OF_CAPTURES
from ebb_tests.exactness import (
    assert_rules_hold_in_verify_mode,
    assert_tests_of_exactness_pass,
    run_process,
)

FOLDER = Path(__file__).parents[1] / "accelerator"


# Each in a process, of about as long. The tests of backends begin before there is this device.
GROUPS = {
    "backends": ["backends"],
    "programs": ["paging_programs"],
    "waits": ["paging_waits", "offload_waits"],
    "ahead": ["pages_ahead", "replays_ahead", "plans", "budgets"],
}
NAMES = [file.stem.removeprefix("test_") for file in FOLDER.glob("test_*.py")]
GROUPS["others"] = sorted({*NAMES}.difference(*GROUPS.values()))


def run_on_it(names, which):
    command = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-m", which]
    files = (str(FOLDER / f"test_{name}.py") for name in names)
    return run_process([*command, *files], EBB_TEST_ACCELERATOR="1")


@pytest.mark.sweep
@pytest.mark.parametrize("group", GROUPS)
def test_on_a_device_out_of_tree(group):
    printed = run_on_it(GROUPS[group], "not slow")

    for name in GROUPS[group]:
        if TELLS_OF_CAPTURES or not name.endswith("captures"):
            passed = f"PASSED .*{FOLDER.name}/test_{name}.py"
            assert re.search(passed, printed), f"nothing ran in {name}"


@pytest.mark.slow
def test_slow_ones_on_a_device_out_of_tree():
    run_on_it(NAMES, "slow")


MORE = (
    "adversarial_programs",
    "shrunk_programs",
    "escapes",
    "inputs_and_results",
    "regions",
    "state",
    "verify",
)
ENVIRONMENTS = {
    "recompute": {"EBB_TEST_DEVICE": "late:0"},
    "offload": {"EBB_TEST_DEVICE": "late:1", "EBB_TEST_OFFLOAD": "device"},  # late:0 is the current
    "page": {"EBB_TEST_DEVICE": "late:1", "EBB_TEST_PAGING": "1"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_the_rules_hold_on_it(kind):
    assert_tests_of_exactness_pass(*MORE, **ENVIRONMENTS[kind])


# What the rules say and verify mode does otherwise there: it keeps storages alive, so recipes live
# longer and writes that nobody counts are found; and a convolution of that device reads a setting
# of the CPU's when it runs, which is after the program has changed it: no real device's does.
NOT_IN_VERIFY_MODE = (
    "test_copy_is_made_only_when_a_recipe_needs_the_old_bytes",
    "test_write_through_data_after_the_region_is_seen_by_backward_as_in_eager",
    "test_onednn_switched_off_between_forward_and_backward",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recompute", "offload"])
def test_the_rules_hold_on_it_in_verify_mode(kind):
    assert_rules_hold_in_verify_mode(*NOT_IN_VERIFY_MODE, **ENVIRONMENTS[kind])
