"""LLaMA-Factory: its gradient checkpointing, and the function that it takes from unsloth."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from ebb_tests.frameworks.own_checkpointing import (
    absent,
    check_left_alone,
    check_regions,
    cuda_is_cpu,
    load,
    plain,
    stack,
    without_dropout,
)

with absent("datasets"):
    checkpointing = load("llamafactory.model.model_utils.checkpointing")


def own(function):
    """As LLaMA-Factory passes a layer's call to its checkpoint function."""
    custom = checkpointing.get_custom_gradient_checkpointing_func(function)
    return lambda block, x: custom(block.__call__, x)


def test_gradient_checkpointing():
    with_checkpoints = stack(own(partial(checkpoint, use_reentrant=True)))
    check_regions(stack(plain), with_checkpoints, regions=4)


def test_its_offloading_function_is_left_alone(monkeypatch, capfd):
    cuda_is_cpu(monkeypatch)
    unsloths = own(checkpointing.get_unsloth_gradient_checkpointing_func())

    check_left_alone(
        stack(without_dropout(plain)),
        stack(without_dropout(unsloths)),
        capfd,
        "ebb: modules are no regions inside UnslothGradientCheckpointing",
    )
