"""Names and on/off values of environment variables. Imports nothing of ebb, since they are also
read before ebb is imported."""

from __future__ import annotations

import os


def is_set(name: str) -> bool:
    """True if a variable is set and is not an off value."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


# The rows of docs/reference/environment.md. Other names are misspelt.
NAMES = frozenset((
    "EBB", "EBB_MODULES", "EBB_BUDGET", "EBB_DISABLE", "EBB_STRICT", "EBB_VERIFY", "EBB_REPORT",
    "EBB_AHEAD", "EBB_CONFIG",
))  # fmt: skip
# Variables for builds, tests and benchmarks of ebb.
PREFIXES = (
    "EBB_BENCH_", "EBB_BUILD_DIR", "EBB_CMAKE_ARGS", "EBB_CUDA", "EBB_SANITIZE", "EBB_TEST_",
    "EBB_TESTING", "EBB_TORCH_DIR",
)  # fmt: skip


def unknown_names() -> list[str]:
    """Environment variables that begin with ``EBB_`` and that ebb does not know."""
    return [
        name
        for name in os.environ
        if name.startswith("EBB_") and name not in NAMES and not name.startswith(PREFIXES)
    ]
