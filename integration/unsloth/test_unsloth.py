"""unsloth_zoo exchanges torch.utils.checkpoint's functions by its own, which recompute."""

from __future__ import annotations

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint

from ebb_tests.frameworks.own_checkpointing import (
    check_left_alone,
    load,
    plain,
    same,
    stack,
    taken_over,
    train,
    without_dropout,
)


def by_name(block, x):
    return torch_checkpoint.checkpoint(block, x, use_reentrant=True)


@pytest.fixture
def exchanged(monkeypatch):
    """As unsloth's `patch_gradient_checkpointing`, undone after the test."""
    unsloth = load("unsloth_zoo.gradient_checkpointing")
    monkeypatch.setattr(torch_checkpoint, "checkpoint", unsloth.unsloth_gradient_checkpoint)


@pytest.mark.usefixtures("exchanged")
def test_its_function_is_left_alone(capfd):
    check_left_alone(
        stack(without_dropout(plain)),
        stack(without_dropout(by_name)),
        capfd,
        "ebb: modules are no regions inside Unsloth_Gradient_Checkpointer",
    )


class Exchanged(torch.autograd.Function):
    """A stand-in: unsloth puts a function with these arguments in place of torch's."""

    @staticmethod
    def forward(ctx, function, preserve_rng_state, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, None, x.grad


def test_an_exchanged_checkpoint_function(monkeypatch, capfd):
    own = stack(without_dropout(by_name))
    expected = train(own)
    torchs = torch_checkpoint.CheckpointFunction
    capfd.readouterr()

    with taken_over(finds_blocks=True):
        monkeypatch.setattr(torch_checkpoint, "CheckpointFunction", Exchanged)
        found = train(own)
        monkeypatch.undo()
        assert torch_checkpoint.CheckpointFunction is torchs

    assert same(found, expected)
    assert found.entered == 0
    assert "ebb: modules are no regions inside Exchanged" in capfd.readouterr().err
    assert "apply" not in vars(torchs)


def test_it_takes_the_calls_back(monkeypatch):
    """Names that unsloth exchanged are still exchanged after ebb was removed."""
    with taken_over():
        monkeypatch.setattr(torch_checkpoint, "CheckpointFunction", Exchanged)

    assert torch_checkpoint.CheckpointFunction is Exchanged
    assert Exchanged.apply.__self__ is Exchanged
