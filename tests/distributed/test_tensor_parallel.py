"""Tensor parallelism by DTensor: parallelize_module and what it redistributes."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_exact
from models import WIDTH, Block, Net, batch, train_steps
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from two_ranks import on_two_ranks


def mesh():
    return init_device_mesh("cpu", (2,))


def split_products(model):
    for layer in model.layers:
        parallelize_module(layer, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_sequence(model):
    """Activations between the products are sharded too; the norm's parameters are replicated."""
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": PrepareModuleInput(
                input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=False
            ),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(layer, mesh(), plan)
        parallelize_module(layer, mesh(), {"up": ColwiseParallel(use_local_output=False)})
    parallelize_module(
        model,
        mesh(),
        {
            "first": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
            ),
            "last": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        },
    )


def split_with_wrappers_between(model):
    """The activation is a DTensor between the two products."""
    for layer in model.layers:
        plan = {
            "up": ColwiseParallel(use_local_output=False),
            "act": PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Shard(-1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(layer, mesh(), plan)


PLANS = {f.__name__: f for f in (split_products, split_sequence, split_with_wrappers_between)}


@pytest.mark.parametrize(
    ("plan", "order"),
    [*((plan, "apply first") for plan in PLANS), ("split_sequence", "split first")],
)
@on_two_ranks
def test_parallelize_module(plan, order):
    def train(inside):
        torch.manual_seed(5)  # replicated parameters are the same on both ranks
        model = Net(dropout=0.0, last=WIDTH)
        if order == "apply first":
            inside.apply(model, "layers.*")
        PLANS[plan](model)
        if order == "split first":
            inside.apply(model, "layers.*")
        return train_steps(model, same=True)

    assert_exact(train)


@on_two_ranks
def test_dropout_on_dtensors():
    def train(inside):
        torch.manual_seed(5)
        model = Net(dropout=0.2)
        split_products(model)
        inside.apply(model, "layers.*")
        return train_steps(model, same=True)

    assert_exact(train)


@on_two_ranks
def test_tensor_parallel_under_fsdp2():
    """On a mesh of one by two and of two by one: there are two ranks."""

    def train(inside):
        results = {}
        for shape in ((1, 2), (2, 1)):
            torch.manual_seed(5)
            both = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
            model = Net(dropout=0.0)
            for layer in model.layers:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(layer, both["tensor"], plan)
                fully_shard(layer, mesh=both["data"])
            fully_shard(model, mesh=both["data"])
            inside.apply(model, "layers.*")
            found = train_steps(model, same=True, steps=2)
            results |= {f"{shape} {name}": value for name, value in found.items()}
        return results

    assert_exact(train)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(dropout=0.0), Block(dropout=0.0)])
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@on_two_ranks
def test_loss_parallel():
    def train(inside):
        torch.manual_seed(5)
        model = Classifier()
        split_products(model)
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh(), {"head": head})
        inside.apply(model, "layers.*")

        def step_of(model, step):
            target = torch.arange(4) % 6
            with loss_parallel():
                with inside.region():
                    loss = nn.functional.cross_entropy(model(batch(step, same=True)), target)
                loss.backward()
            return loss.full_tensor()

        return train_steps(model, step_of=step_of)

    assert_exact(train)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [("shard", "replicate"), ("replicate", "shard"), ("partial", "shard"), ("shard", "other")],
)
@on_two_ranks
def test_redistribute_inside_a_region(before, after, async_op):
    placements = {
        "shard": Shard(0),
        "replicate": Replicate(),
        "partial": Partial(),
        "other": Shard(1),
    }

    def train(inside):
        torch.manual_seed(5)
        x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        with inside.region():
            h = DTensor.from_local((x * 2).sin(), mesh(), [placements[before]])
            h = h.redistribute(placements=[placements[after]], async_op=async_op)
            y = (h * h).exp().to_local().sin()
        loss = y.sum()
        return {"loss": loss, "gradient": torch.autograd.grad(loss, x)[0]}

    assert_exact(train)


@on_two_ranks
def test_products_of_dtensors():
    def train(inside):
        torch.manual_seed(5)
        x = distribute_tensor(torch.randn(4, 6), mesh(), [Shard(1)]).requires_grad_()
        w = distribute_tensor(torch.randn(6, 4), mesh(), [Shard(0)]).requires_grad_()
        with inside.region():
            y = ((x.sin() @ w.exp()).relu() * 2).full_tensor().tanh()
        loss = y.sum()
        x_gradient, w_gradient = torch.autograd.grad(loss, [x, w])
        return {"loss": loss, "x": x_gradient, "w": w_gradient}

    assert_exact(train)
