"""Settings of replays ahead, and the environment."""

from __future__ import annotations

import json
import os
import sys

import pytest

from ebb_tests import fork_server

ASKS = "import torch, json, ebb; print(json.dumps(ebb.config.to_dict()))"


def settings_of_a_job(value):
    done = fork_server.run(
        ["-W", "ignore", "-c", ASKS],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "EBB": "1", "EBB_AHEAD": value},
        check=True,
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("value", "regions", "limit"),
    [
        ("512MiB", 1, 2**29),
        *(
            pytest.param(*case, 2**30, marks=pytest.mark.sweep)
            for case in (("", 0), ("0", 0), ("3", 3))
        ),
    ],
)
def test_the_environment_sets_it(value, regions, limit):
    found, errors = settings_of_a_job(value)

    assert (found["ahead.regions"], found["ahead.limit"]) == (regions, limit)
    assert "EBB_AHEAD" not in errors


@pytest.mark.parametrize(
    "value", ["auto", *(pytest.param(v, marks=pytest.mark.sweep) for v in ("-1", "1 mile"))]
)
def test_an_environment_that_makes_no_sense_is_told(value):
    found, errors = settings_of_a_job(value)

    assert found["ahead.regions"] == 0
    assert f"EBB_AHEAD={value}" in errors
