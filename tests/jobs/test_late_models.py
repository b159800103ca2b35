"""EBB_MODULES finds models that start late, and costs a forward nothing in between."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch import nn

import ebb
from ebb._launch import models
from ebb._support.job import _TOLD
from ebb_tests.exactness import same_bits

hooks = nn.modules.module._global_forward_pre_hooks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.w).sin()


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, steps, optimizer=None):
    optimizer = optimizer or sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def is_region(module):
    marks = ebb._region.modules.marks_of(module)
    return marks is not None and marks.region is not None


def test_forward_has_no_hook_after_two_steps(take_over):
    take_over("[01]")
    model = net()
    optimizer = sgd(model)

    looked_at = []
    for _ in range(3):
        looked_at.append(len(hooks))
        train(model, 1, optimizer)

    assert looked_at == [1, 1, 0]
    assert all(map(is_region, model))


def test_each_fold_has_regions_from_its_first_forward(take_over, capsys):
    expected = train(net(), 4)
    take_over("[01]")

    for _ in range(3):
        model = net()
        ebb.reset_stats()
        found = train(model, 4)

        assert all(map(same_bits, found, expected))
        assert ebb.stats()["total"]["entered"] == 2  # of the last step
        assert all(map(is_region, model))
        assert len(hooks) == 0
    assert capsys.readouterr().err.count("2 modules are regions: 0-1") == 1


@pytest.mark.parametrize(
    "kind", ["built early", "without parts", "optimizer gets parameters later"]
)
def test_model_that_starts_late_becomes_regions(take_over, kind):
    take_over("*" if kind == "without parts" else "[01]")
    first, late = net(), net()
    optimizer, late_optimizer = sgd(first), sgd(late)
    train(first, 5, optimizer)
    if kind == "without parts":
        late = Block()
        late_optimizer = sgd(late)
    elif kind != "built early":
        optimizer.add_param_group({"params": late.parameters()})
        late_optimizer = optimizer

    train(late, 2, late_optimizer)

    assert is_region(late) if kind == "without parts" else all(map(is_region, late))


def test_models_that_are_gone_are_not_kept(take_over):
    take_over("[01]")

    for _ in range(5):
        train(net(), 2)
        gc.collect()

    assert len(models._models.roots) == 1
    assert len(models._models.optimizers) == 0


def test_slices_of_a_list_do_not_prolong_the_search(take_over):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for layer in self.layers[:2]:  # as transformers' Llama
                x = layer(x)
            return x

    take_over("*.layers.*", "layers.*")
    before = len(hooks)
    model = Decoder()
    optimizer = sgd(model)
    train(model, 1, optimizer)
    assert len(hooks) == before
    train(model, 2, optimizer)
    assert len(hooks) == before - 1
    model.layers.append(Block())
    assert len(hooks) == before
    train(model, 1, optimizer)
    assert all(map(is_region, model.layers[:2]))


def test_line_that_nothing_matches_comes_once(take_over, monkeypatch, capsys):
    monkeypatch.delenv(_TOLD, raising=False)
    take_over("layers.*")
    train(net(), 2)

    expected = r"no module matches .*layers.*, .* module names of Sequential: 0-1"
    assert re.search(expected, capsys.readouterr().err)

    train(net(), 4)
    assert capsys.readouterr().err == ""


def test_whole_model_is_named_by_its_class(take_over, capsys):
    take_over("*")

    train(net(), 1)

    assert "ebb: 1 module is a region: Sequential\n" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_model_can_be_exported_after_two_steps(take_over):
    """torch.export refuses a model while there are hooks for all modules."""
    take_over("nothing")
    model = net()
    train(model, 2)

    program = torch.export.export(model, (torch.ones(3, 4),), strict=True)

    assert same_bits(program.module()(torch.ones(3, 4)), model(torch.ones(3, 4)))


@pytest.mark.filterwarnings("ignore")
def test_optimizer_step_that_is_compiled(take_over):
    def trained():
        model = net()
        optimizer = sgd(model)
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        return train(model, 4, optimizer)

    expected = trained()
    torch._dynamo.reset()
    take_over("[01]")
    found = trained()

    assert all(map(same_bits, found, expected))
    torch.testing.assert_close(found, train(net(), 4))  # torch 2.11 compiles to other roundings
    torch._dynamo.reset()
