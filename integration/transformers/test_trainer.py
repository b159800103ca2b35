"""Runs an unchanged script, with ebb enabled only by environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebb_tests.frameworks.unchanged_script import check

pytest.importorskip("transformers")


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_unchanged_script():
    check(Path(__file__).with_name("train.py"), "--gradient-checkpointing")
