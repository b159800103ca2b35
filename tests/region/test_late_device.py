"""Runs tests on a device out of tree, which their process has for good: the tests of that device in
one process, and the tests of exactness in others.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator import TELLS_OF_CAPTURES
from exactness import assert_rules_hold_in_verify_mode, assert_tests_of_exactness_pass

FOLDER = Path(__file__).parents[1] / "accelerator"
FILES = sorted(FOLDER.glob("test_*.py"))


@functools.cache
def run_of_all(which="not slow"):
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-m", which]
    return subprocess.run(
        [*command, str(FOLDER)],
        env=os.environ | {"EBB_TEST_ACCELERATOR": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_on_a_device_out_of_tree(file):
    if file.stem.endswith("captures") and not TELLS_OF_CAPTURES:
        pytest.skip("torch tells of no captures but CUDA's")
    done = run_of_all()

    output = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode in (0, 1), output  # 1: something failed
    told = [line for line in done.stdout.splitlines() if f"{FOLDER.name}/{file.name}" in line]
    assert any(line.startswith("PASSED") for line in told), output
    assert not any(line.startswith(("FAILED", "ERROR")) for line in told), output


@pytest.mark.slow
def test_slow_ones_on_a_device_out_of_tree():
    done = run_of_all("slow")

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


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
