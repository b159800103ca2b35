"""TRL's activation offloading: with an OFFLOAD policy it raises, other policies are exact."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.frameworks.own_checkpointing import (
    in_context,
    said_by_ebb,
    same,
    taken_over,
    tiny_llama,
    train,
)

offloading = pytest.importorskip("trl.models.activation_offloading", reason="needs TRL")


@pytest.fixture(autouse=True)
def _as_if_there_were_an_accelerator(monkeypatch):
    if not torch.accelerator.is_available():
        cuda = torch.device("cuda")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: cuda)


def loss(policy):
    torch.manual_seed(0)
    w = torch.randn(16, 16, requires_grad=True)
    with offloading.OffloadActivations(use_pin_memory=False, use_streams=False), ebb.region(policy):
        y = (torch.randn(4, 16) @ w).sin().exp().sum()
    y.backward()
    return w.grad


def test_offloading_twice_is_refused():
    with pytest.raises(RuntimeError, match=r"OffloadActivations.*activation_offloading=False"):
        loss(ebb.policies.offload_inputs)


def test_another_policy_is_exact_with_it():
    torch.manual_seed(0)
    w = torch.randn(16, 16, requires_grad=True)
    expected = torch.autograd.grad((torch.randn(4, 16) @ w).sin().exp().sum(), w)[0]
    assert torch.equal(loss(ebb.policies.recompute_all), expected)


@pytest.mark.parametrize("offloads", [False, True])
def test_its_setting_beside_gradient_checkpointing(offloads, capfd):
    """The checkpointed layers become regions; a line says that these are not offloaded."""

    def make():
        return tiny_llama(True)

    def offloading_hooks():
        return offloading.OffloadActivations(use_pin_memory=False, use_streams=False)

    if offloads:
        make = in_context(make, offloading_hooks)
    expected = train(make)
    capfd.readouterr()
    with taken_over(finds_blocks=True):
        found = train(make)

    assert same(found, expected)
    assert found.entered == 4
    assert offloads or found.held <= expected.held
    line = "ebb: saved-tensor hooks of the job (OffloadActivations) do not get the tensors that"
    assert any(said.startswith(line) for said in said_by_ebb(capfd)) == offloads
