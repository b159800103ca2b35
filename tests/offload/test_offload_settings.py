"""ebb.config.offload, and policies that offload."""

from __future__ import annotations

import pytest

import ebb
from ebb._support import job


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_bytes": -1}, "min_bytes must be from 0"),
        ({"min_bytes": "big"}, "min_bytes must be a number of bytes, such as"),
        ({"pinned_limit": "3 GX"}, "units: B; KiB"),
        ({"in_flight_bytes": 1 << 64}, "in_flight_bytes must be from 0"),
        ({"keep_last": -2}, "keep_last must be from 0"),
    ],
)
def test_invalid_setting_raises(settings, message):
    before = ebb.config.to_dict()
    with pytest.raises(ValueError, match=message):
        ebb.config.update({f"offload.{name}": value for name, value in settings.items()})
    assert ebb.config.to_dict() == before


@pytest.mark.parametrize("value", [1.5, True, b"1", [1]])
def test_setting_of_a_wrong_type_raises(value):
    for name in ("min_bytes", "keep_last"):
        with pytest.raises(TypeError, match=f"{name} must be an int"):
            setattr(ebb.config.offload, name, value)


def test_sizes_as_text():
    before = ebb.config.to_dict()
    ebb.config.update(
        offload_min_bytes="2.5KiB", offload_prefetch_bytes="3 mib", offload_in_flight_bytes="7"
    )
    found = ebb.config.to_dict()
    ebb.config.update(before)

    assert found["offload.min_bytes"] == 2560
    assert found["offload.prefetch_bytes"] == 3 << 20
    assert found["offload.in_flight_bytes"] == 7
    assert ebb.config.to_dict() == before


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
def test_limit_per_node_is_divided_among_its_ranks(launched, variables, ranks):
    launched(**variables)
    ebb.config.update(offload_pinned_limit="1GiB/node", offload_disk_limit="10 GiB/Node")
    found = ebb.config.to_dict()
    assert found["offload.pinned_limit"] == (1 << 30) // ranks
    assert found["offload.disk_limit"] == (10 << 30) // ranks


def test_limit_per_node_needs_the_number_of_its_ranks(launched):
    launched(WORLD_SIZE="16")
    with pytest.raises(ValueError, match=r"pinned_limit is given per node.*set LOCAL_WORLD_SIZE"):
        ebb.config.offload.pinned_limit = "1GiB/node"
    for setting in ({"min_bytes": "1MiB/node"}, {"disk_limit": "/node"}):
        with pytest.raises(ValueError, match="must be a number of bytes"):
            ebb.config.update({f"offload.{name}": value for name, value in setting.items()})


def test_policies_that_offload():
    assert ebb.policies.offload_inputs == ebb.Policy(inputs=ebb.OFFLOAD)
    assert ebb.policies.offload_inputs.inputs is ebb.OFFLOAD
    assert ebb.policies.recompute_all.inputs is ebb.SAVE
    assert "inputs=ebb.OFFLOAD" in repr(ebb.policies.offload_inputs)
    with pytest.raises(ValueError, match="SAVE, OFFLOAD or PAGE"):
        ebb.Policy(inputs=ebb.RECOMPUTE)
    with pytest.raises(TypeError, match="inputs must be"):
        ebb.Policy(inputs="offload")
