"""The units in which pytest-xdist gives tests to its workers.

A unit is a file, under one engine, so that its fixtures are made once. Tests that take several
seconds are units by themselves and start first: started last, such a test would run while the other
workers are idle.
"""

from __future__ import annotations

import re
import zlib

import pytest
from xdist.scheduler import LoadScopeScheduling

from ebb_tests.engines import BY_NAME

# Tests that run many other tests, random programs or long scripts in another process.
STARTS_A_LONG_PROCESS = re.compile(
    r"::test_(random_programs|more_random_programs|unchanged_script|a_quick_run)"
)
SWEEPS = re.compile(r"/test_\w+_sweep\.py::test_(first|every|results)_")
ENGINE = re.compile(rf"\[({'|'.join(BY_NAME)})[-\]]")
PARTS = 16  # number of units for each sweep


def unit_of(nodeid: str) -> str:
    if STARTS_A_LONG_PROCESS.search(nodeid):
        return nodeid
    file = nodeid.split("::", 1)[0]  # split once: names of operators contain "::", too
    if SWEEPS.search(nodeid):
        return f"{file} {zlib.crc32(nodeid.encode()) % PARTS}"
    engine = ENGINE.search(nodeid)
    return f"{file} {engine[1]}" if engine else file


def longest_first(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: STARTS_A_LONG_PROCESS.search(item.nodeid) is None)


class Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
