"""Blocks that torch.compile compiles, as regions in their graphs, under each strategy."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ebb._region import in_graph
from ebb_tests.ranks.comparing import POLICIES, difference_of, run
from ebb_tests.ranks.model_strategies import split_products
from ebb_tests.ranks.models import Net, batch, train_steps
from ebb_tests.ranks.strategies import sharded
from ebb_tests.ranks.two_ranks import on_two_ranks


def assert_exact(train):
    """As in comparing.py, for regions that are in graphs."""
    expected = run(train, None)
    for name in ("recompute_all", "save_matmuls"):
        in_graph._entered.clear()
        found = run(train, POLICIES[name])
        difference = difference_of(found, expected)
        assert not difference, f"policy {name}: {difference}"
        assert len(in_graph.names_entered()) == 3


def data_parallel(model, mesh):
    return DistributedDataParallel(model)


def tensor_parallel(model, mesh):
    split_products(model, mesh)
    return model


def compile_blocks(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager")


@pytest.mark.parametrize("order", ["compile first", "apply first"])
@pytest.mark.parametrize("strategy", [data_parallel, sharded, tensor_parallel])
@on_two_ranks
def test_compiled_blocks(strategy, order):
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        torch._dynamo.reset()
        model = Net()
        if order == "apply first":
            inside.apply(model, "layers.*")
        compile_blocks(model)
        model = strategy(model, mesh)
        if order == "compile first":
            inside.apply(model, "*layers.?")
        return train_steps(model, same=strategy is tensor_parallel)

    assert_exact(train)


@pytest.mark.sweep
@on_two_ranks
def test_compiled_model_that_ddp_splits():
    """DDP's optimizer splits the graph at its buckets, also within regions."""

    def train(inside):
        torch._dynamo.reset()
        model = Net()
        inside.apply(model, "layers.*")
        parallel = DistributedDataParallel(model, bucket_cap_mb=1e-3)
        compiled = torch.compile(parallel, backend="aot_eager")
        return train_steps(compiled)

    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024):
        assert_exact(train)


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", [data_parallel, tensor_parallel])
@on_two_ranks
def test_dropout_with_large_results(strategy):
    mesh = init_device_mesh("cpu", (2,))
    same = strategy is tensor_parallel

    def train(inside):
        torch._dynamo.reset()
        model = Net(width=64, dropout=0.3)
        inside.apply(model, "layers.*")
        compile_blocks(model)

        def step_of(model, step):
            loss = model(batch(step, rows=256, width=64, same=same)).square().mean()
            loss.backward()
            return loss

        return train_steps(strategy(model, mesh), step_of=step_of)

    assert_exact(train)
