"""Functions of a job that recompute or offload themselves; integration/ tests real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ebb
from ebb._launch import takeover


class Recomputes(torch.autograd.Function):
    """Keeps the input of a block, and computes the block again in backward."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Model(nn.Module):
    def __init__(self, call=lambda block, x: block(x)):
        super().__init__()
        self.call = call
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


@pytest.fixture
def install(take_over, monkeypatch):
    """Takes jobs over; with `patterns`, modules with these names."""
    monkeypatch.setenv("_EBB_TOLD", "")  # lines that were printed once
    return lambda *patterns: take_over(*patterns, finds_blocks=not patterns)


def gradients(call=lambda block, x: block(x)):
    torch.manual_seed(1)
    model = Model(call)
    x = torch.randn(4, 8, requires_grad=True)
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def entered():
    return ebb.stats()["total"]["entered"]


@pytest.mark.parametrize("patterns", [(), ("layers.*",)], ids=["found", "named"])
def test_function_that_recomputes_is_left_alone_or_ends_a_strict_job(
    install, capfd, monkeypatch, patterns
):
    expected = gradients()
    install(*patterns)

    found = gradients(Recomputes.apply)

    assert all(map(torch.equal, found, expected))
    assert ebb.stats()["total"]["ops_replayed"] == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "no regions" in line]
    assert lines == [
        "ebb: modules are no regions inside Recomputes: it recomputes them by itself. Turn it off "
        "to let ebb recompute them; if it offloads, set EBB=offload_inputs to offload the inputs "
        "of blocks"
    ]
    takeover.remove()
    monkeypatch.setenv("EBB_STRICT", "1")
    install(*patterns)
    with pytest.raises(ValueError, match="no regions inside Recomputes"):
        gradients(Recomputes.apply)


def test_other_blocks_stay_regions(install):
    calls = iter([Recomputes.apply, *[lambda block, x: block(x)] * 2])
    install()

    gradients(lambda block, x: next(calls)(block, x))

    assert entered() == 2


def test_only_the_function_is_told_of(install, capfd):
    install()
    torch.manual_seed(1)
    model = Model(Recomputes.apply)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
        optimizer.step()

    assert len(capfd.readouterr().err.splitlines()) == 1


def test_model_that_runs_in_a_hook_has_regions(install, capfd):
    """Losses with a cache of gradients run the model with gradients only in such a hook."""
    install()
    model, x = Model(), torch.randn(4, 8)
    with torch.no_grad():
        y = model(x)
    y.requires_grad_()

    def run_again(gradient):
        with torch.enable_grad():
            model(x).backward(gradient)

    y.register_hook(run_again)
    y.square().sum().backward()

    assert entered() == 3
    assert "no regions" not in capfd.readouterr().err
    assert model.layers[0][0].weight.grad is not None


class OffloadsAll:
    def pack(self, tensor):
        return tensor.clone()


def saves_a_copy(tensor):
    return tensor.clone()


@pytest.mark.parametrize("pack", [OffloadsAll().pack, saves_a_copy], ids=["offload", "another"])
@pytest.mark.parametrize("kind", ["found", "named", "calls"])
def test_hooks_of_the_job_do_not_reach_modules_that_are_regions(install, kind, pack, capfd):
    call = checkpointed if kind == "calls" else lambda block, x: block(x)
    expected = gradients(call)
    install(*(["layers.*"] if kind == "named" else []))

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found = gradients(call)

    assert all(map(torch.equal, found, expected))
    assert entered() == 3
    line = (
        f"ebb: saved-tensor hooks of the job ({pack.__qualname__.split('.')[0]}) do not get the "
        "tensors that regions save"
    )
    told = capfd.readouterr().err.count(line)
    assert told == (0 if kind == "calls" else 1)  # calls give the hooks their arguments


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


def test_exchanged_class_is_not_changed(install, monkeypatch):
    """As unsloth does, a class takes the place of torch's while ebb is on."""
    module = torch.utils.checkpoint
    torchs = module.CheckpointFunction
    install()
    monkeypatch.setattr(module, "CheckpointFunction", Recomputes)

    takeover.remove()

    assert "apply" not in vars(torchs)
    assert "apply" not in vars(Recomputes)


def test_torchs_class_stays_a_region_beside_an_exchanged_one(install, monkeypatch):
    module = torch.utils.checkpoint
    torchs = module.CheckpointFunction
    install()
    monkeypatch.setattr(module, "CheckpointFunction", Recomputes)

    gradients(lambda block, x: torchs.apply(block, True, x))

    assert entered() == 3
