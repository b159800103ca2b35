"""torchtune: activation checkpointing, and its OffloadActivations."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.frameworks.own_checkpointing import (
    absent,
    check_regions,
    cuda_is_cpu,
    in_context,
    load,
    plain,
    same,
    stack,
    taken_over,
    train,
)

activations = load("torchtune.training.activations")
with absent("torchao"):
    offloading = load("torchtune.training._activation_offloading")


def checkpointed():
    model, loss = stack(plain)()
    activations.apply_selective_activation_checkpointing(model, "full", None)
    return model, loss


def test_activation_checkpointing():
    """torchtune draws other dropout masks when it recomputes: preserve_rng_state=False."""
    check_regions(stack(plain), checkpointed, regions=4, is_exact=False)


@pytest.fixture
def offloads(monkeypatch):
    cuda_is_cpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: None)
    return lambda: offloading.OffloadActivations(use_pin_memory=False, use_streams=False)


def test_offloading_around_checkpoints(offloads, capfd):
    with taken_over():
        found = train(in_context(checkpointed, offloads))

    assert same(found, train(stack(plain)))
    assert found.entered == 4
    assert "saved-tensor hooks of the job" not in capfd.readouterr().err  # they get the arguments


def test_offloading_twice_is_refused(offloads):
    with (
        offloads(),
        pytest.raises(RuntimeError, match="OffloadActivations"),
        ebb.region(ebb.policies.offload_inputs),
    ):
        pass
