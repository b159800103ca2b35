"""Whether replays run ahead: settings, the environment, and the number of cores."""

from __future__ import annotations

import json
import os
import sys

import fork_server
import pytest
import torch
from ahead_programs import X, blocks, chain, counts, replays_ahead

import ebb

CORES = len(os.sched_getaffinity(0))


def program():
    chain(blocks(3), torch.randn(X, requires_grad=True)).sum().backward()


def test_without_an_idle_core_nothing_is_replayed_ahead_but_the_last_region_is_held():
    """No thread is started for it."""
    torch.set_num_threads(CORES)
    ebb._C.stop_ahead()
    with replays_ahead():
        ebb.ahead.configure(busy_cores=False)
        did = counts(program)
        assert ebb.stats()["ahead"]["workers"] == 0

    del did["most_bytes"]
    assert {name for name, count in did.items() if count} == {"regions_held"}


@pytest.mark.skipif(CORES < 2, reason="one core is not enough")
def test_where_each_thread_has_two_cores_replays_run_ahead():
    torch.set_num_threads(1)
    with replays_ahead():
        ebb.ahead.configure(busy_cores=False)
        program()  # a worker that has another number of threads ends
        did = counts(program)

    assert did["regions_in_time"] == 2
    assert did["regions_held"] == 1


ASKS = "import torch, json, ebb; print(json.dumps(ebb.ahead.configure()))"


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

    assert (found["regions"], found["limit"], found["busy_cores"]) == (regions, limit, False)
    assert "EBB_AHEAD" not in errors


@pytest.mark.parametrize(
    "value", ["auto", *(pytest.param(v, marks=pytest.mark.sweep) for v in ("-1", "1 mile"))]
)
def test_an_environment_that_makes_no_sense_is_told(value):
    found, errors = settings_of_a_job(value)

    assert found["regions"] == 0
    assert f"EBB_AHEAD={value}" in errors


@pytest.mark.parametrize("name", ["busy_cores", "side_stream"])
def test_a_switch_must_be_a_bool(name):
    before = ebb.ahead.configure()

    with pytest.raises(TypeError, match=f"ebb: {name} must be a bool; got 1"):
        ebb.ahead.configure(regions=7, **{name: 1})

    assert ebb.ahead.configure() == before
