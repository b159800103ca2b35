"""TransformerEngine, which needs CUDA: stand-ins with the same names."""

from __future__ import annotations

import sys
import types

import pytest

from ebb_tests.frameworks import transformer_engine
from ebb_tests.frameworks.own_checkpointing import (
    check_offloading,
    in_context,
    plain,
    said_by_ebb,
    same,
    stack,
    taken_over,
    train,
)

NAME = "transformer_engine.pytorch.distributed"


@pytest.fixture
def distributed(monkeypatch):
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType(NAME)
    module.checkpoint = transformer_engine.checkpoint
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


@pytest.mark.parametrize("reentrant", [True, False])
def test_its_checkpoint_is_left_alone(distributed, reentrant, capfd):
    def call(block, x):
        return distributed.checkpoint(block, x, use_reentrant=reentrant)

    expected, own = train(stack(plain)), train(stack(call))
    capfd.readouterr()
    with taken_over(finds_blocks=True):
        found = train(stack(call))

    assert same(found, expected)
    assert found.held <= own.held + 2**10
    # Without use_reentrant, blocks are regions in forward, and its hooks get no tensor.
    assert found.entered == (0 if reentrant else 4)
    said = said_by_ebb(capfd)
    line = "modules are no regions inside _CheckpointFunction" if reentrant else "4 modules are reg"
    assert any(text.startswith(f"ebb: {line}") for text in said), said


def test_its_offloading(capfd):
    context, _ = transformer_engine.get_cpu_offload_context()
    own = in_context(stack(plain), lambda: context)
    check_offloading(stack(plain), own, capfd, "OffloadSynchronizer")
