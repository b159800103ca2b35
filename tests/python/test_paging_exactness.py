"""PAGE where all rows live: then whatever operators do, gradients have the bits of eager."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_rules_hold_with_pages():
    """The tests of exactness again, with policies that page."""
    folder = Path(__file__).parent
    files = sorted(str(f) for f in folder.glob("test_rule*.py"))
    names = ("nasty_programs", "nasty_memory", "nasty_functions", "handles", "subclasses", "opaque")
    files += [str(folder / f"test_{name}.py") for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env=os.environ | {"EBB_TEST_PAGING": "1"},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
