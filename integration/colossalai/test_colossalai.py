"""Colossal-AI: its legacy checkpoint function recomputes by itself."""

from __future__ import annotations

import pytest

from ebb_tests.frameworks.own_checkpointing import check_left_alone, load, plain, stack

legacy = load("colossalai.legacy.utils.activation_checkpoint")


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch):
    """Its random states are those of CUDA."""
    for name in ("sync_states", "set_seed_states", "set_mode"):
        monkeypatch.setattr(legacy, name, lambda *_: None)
    monkeypatch.setattr(legacy, "get_states", lambda copy: {})
    monkeypatch.setattr(legacy, "get_current_mode", lambda: None)


@pytest.mark.parametrize("offloads", [False, True])
def test_the_legacy_function_is_left_alone(offloads, capfd):
    own = stack(lambda block, x: legacy.checkpoint(block, offloads, x))

    check_left_alone(
        stack(plain), own, capfd, "ebb: modules are no regions inside CheckpointFunction"
    )
