"""axolotl: its offloading checkpoint functions, hooks that offload, and selective policies."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ebb_tests.frameworks.own_checkpointing import (
    check_left_alone,
    check_offloading,
    check_regions,
    cuda_is_cpu,
    in_context,
    plain,
    stack,
    without_dropout,
)

pytest.importorskip("axolotl", reason="needs axolotl")
gradient = pytest.importorskip("axolotl.monkeypatch.gradient_checkpointing")
hooks = pytest.importorskip("axolotl.monkeypatch.checkpoint_activation_offload")
selective = pytest.importorskip("axolotl.monkeypatch.selective_checkpointing")


def test_the_offloading_checkpointer_is_left_alone(monkeypatch, capfd):
    cuda_is_cpu(monkeypatch)
    own = stack(without_dropout(gradient.CPU_Offloaded_Gradient_Checkpointer.apply))

    check_left_alone(
        stack(without_dropout(plain)),
        own,
        capfd,
        "ebb: modules are no regions inside CPU_Offloaded_Gradient_Checkpointer",
    )


def test_hooks_that_offload(capfd):
    def offloads():
        return hooks.CheckpointHiddenStatesOffload(use_pin_memory=False, use_streams=False)

    own = in_context(stack(partial(checkpoint, use_reentrant=False)), offloads)
    check_offloading(stack(plain), own, capfd)


def test_selective_checkpointing():
    def context():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(
            selective.build_sac_policy(save=["aten::addmm"])
        )

    own = stack(partial(checkpoint, use_reentrant=False, context_fn=context))
    check_regions(stack(plain), own, regions=4)
