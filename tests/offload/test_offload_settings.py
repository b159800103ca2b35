"""ebb.offload.configure, its environment variables, and policies that offload."""

from __future__ import annotations

import os

import fork_server
import pytest

import ebb
from ebb._support import job


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_bytes": -1}, "min_bytes must be from 0"),
        ({"min_bytes": "big"}, "min_bytes must be a number of bytes, such as"),
        ({"pinned_limit": "3 GX"}, "units: B, KiB"),
        ({"in_flight_bytes": 1 << 64}, "in_flight_bytes must be from 0"),
        ({"keep_last": -2}, "keep_last must be from 0"),
    ],
)
def test_wrong_settings(settings, message):
    before = ebb.offload.configure()
    with pytest.raises(ValueError, match=message):
        ebb.offload.configure(**settings)
    assert ebb.offload.configure() == before


@pytest.mark.parametrize("value", [1.5, True, b"1", [1]])
def test_settings_of_wrong_types(value):
    for name in ("min_bytes", "keep_last"):
        with pytest.raises(TypeError, match=f"{name} must be an int"):
            ebb.offload.configure(**{name: value})


def test_sizes_as_text():
    before = ebb.offload.configure()
    ebb.offload.configure(min_bytes="2.5KiB", prefetch_bytes="3 mib", in_flight_bytes="7")
    found = ebb.offload.configure()
    ebb.offload.configure(**before)

    assert found["min_bytes"] == 2560
    assert found["prefetch_bytes"] == 3 << 20
    assert found["in_flight_bytes"] == 7
    assert ebb.offload.configure() == before


@pytest.fixture
def launched(monkeypatch):
    """Sets the variables of a launcher."""
    for name in (*job._LOCAL_SIZES, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return lambda **variables: [monkeypatch.setenv(n, v) for n, v in variables.items()]


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"SLURM_NTASKS_PER_NODE": "4", "WORLD_SIZE": "1"}, 4),
    ],
)
def test_a_limit_of_a_node_is_divided_among_its_ranks(launched, variables, ranks):
    launched(**variables)
    found = ebb.offload.configure(pinned_limit="1GiB/node", disk_limit="10 GiB/Node")
    assert found["pinned_limit"] == (1 << 30) // ranks
    assert found["disk_limit"] == (10 << 30) // ranks


def test_a_limit_of_a_node_needs_the_number_of_its_ranks(launched):
    launched(WORLD_SIZE="16")
    with pytest.raises(ValueError, match=r"pinned_limit is given per node.*set LOCAL_WORLD_SIZE"):
        ebb.offload.configure(pinned_limit="1GiB/node")
    for setting in ({"min_bytes": "1MiB/node"}, {"disk_limit": "/node"}):
        with pytest.raises(ValueError, match="must be a number of bytes"):
            ebb.offload.configure(**setting)


@pytest.mark.parametrize(
    ("variables", "settings", "told"),
    [
        (
            {"MIN_BYTES": "4KiB", "PINNED_LIMIT": "3GiB"},
            {"min_bytes": 4096, "pinned_limit": 3 << 30},
            [],
        ),
        (
            {"MIN_BYTES": "many", "PINNED_LIMIT": "x"},
            {"min_bytes": 1 << 20, "pinned_limit": 16 << 30},
            ["EBB_OFFLOAD_MIN_BYTES=many", "EBB_OFFLOAD_PINNED_LIMIT=x"],
        ),
    ],
)
def test_environment_variables(variables, settings, told, tmp_path):
    variables = {f"EBB_OFFLOAD_{name}": value for name, value in variables.items()}
    done = fork_server.run(
        ["-c", "import ebb; print(ebb.offload.configure())"],
        env=os.environ | variables | {"EBB_OFFLOAD_DISK": str(tmp_path)},
        check=True,
    )
    found, lines = eval(done.stdout), done.stderr.splitlines()
    assert settings.items() <= found.items()
    assert found["disk"] == str(tmp_path)
    assert [any(name in line for line in lines) for name in told] == [True] * len(told)
    assert len(lines) == len(told)


def test_policies_that_offload():
    assert ebb.policies.offload_inputs == ebb.Policy(inputs=ebb.OFFLOAD)
    assert ebb.policies.offload_inputs.inputs is ebb.OFFLOAD
    assert ebb.policies.recompute_all.inputs is ebb.SAVE
    assert "inputs=ebb.OFFLOAD" in repr(ebb.policies.offload_inputs)
    with pytest.raises(ValueError, match="SAVE, OFFLOAD or PAGE"):
        ebb.Policy(inputs=ebb.RECOMPUTE)
    with pytest.raises(TypeError, match="inputs must be"):
        ebb.Policy(inputs="offload")
