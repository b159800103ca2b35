"""Programs in processes of their own, without variables of ebb or of a launcher but those given."""

from __future__ import annotations

import os
from subprocess import CompletedProcess

from _ebb_switches import _RANKS, NAMES

from ebb._support.job import _TOLD
from ebb_tests import fork_server

UNSET = {*NAMES, *_RANKS, "RANK", _TOLD}


def run_program(
    *arguments: object,
    cwd: object = None,
    is_fresh: bool = False,
    check: bool = True,
    **variables: str,
) -> CompletedProcess[str]:
    """Runs Python with these arguments and variables, see `fork_server.run`."""
    env = {name: value for name, value in os.environ.items() if name not in UNSET}
    return fork_server.run(
        [*map(str, arguments)],
        env=env | variables,
        cwd=None if cwd is None else str(cwd),
        is_fresh=is_fresh,
        timeout=240,
        check=check,
    )


def ebb_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("ebb")]
