"""verl: activation offload of its FSDP engine, with and without checkpointing."""

from __future__ import annotations

import functools

import pytest

from ebb_tests.frameworks.own_checkpointing import (
    absent,
    check_offloading,
    load,
    plain,
    same,
    stack,
    taken_over,
    train,
)

with absent("ray", "tensordict", "omegaconf", "hydra", "codetiming"):
    offload = load("verl.utils.activation_offload")


@pytest.fixture(autouse=True)
def _without_pinned_memory(monkeypatch):
    handler = offload.SynchronizedGroupOffloadHandler
    copy = functools.partial(handler.offload, pin_memory=False)
    monkeypatch.setattr(handler, "offload", staticmethod(copy))


def offloaded(*, checkpoints):
    """As `enable_activation_offloading`, which needs CUDA streams, without FSDP and streams."""

    def make():
        model, loss = stack(plain)()
        handler = offload.SynchronizedGroupOffloadHandler(3, offload.FSDPParameterFilter())
        hooks = offload.CpuOffloadHookWithOffloadHandler(handler)
        around = offload.ActivationHandler(
            hooks,
            lambda x: offload.group_prefetch_offload_commit(x, handler),
            handler.tensor_need_offloading_checker,
            checkpoints,
        )
        for layer in model.layers:
            around.wrap_module_forward_method(layer)

        def step():
            handler.groupid_reset()
            return loss()

        return model, step

    return make


def test_offloading_with_checkpoints(capfd):
    own = offloaded(checkpoints=True)
    check_offloading(stack(plain), own, capfd)


def test_offloading_without_checkpoints():
    with taken_over(finds_blocks=True):
        found = train(offloaded(checkpoints=False))

    assert same(found, train(stack(plain)))
    assert found.replayed == 0  # verl offloads what the blocks save
