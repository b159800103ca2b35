"""A tiny model and its training step for each kind of parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import WIDTH, Net, batch
from test_expert_parallel import Experts
from test_fsdp import sharded
from test_megatron_parallel import Stack
from test_pipeline_parallel import loss_of, stage_modules
from test_repeated_collectives import stack
from test_tensor_parallel import mesh, split_sequence
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel


class Mixed(nn.Module):
    """A layer with a collective of its own, and another one in a second process group."""

    def __init__(self, layer, group):
        super().__init__()
        self.layer, self.group = layer, group

    def forward(self, x):
        x = self.layer(x)
        y = x.detach() * 2
        dist.all_reduce(y, group=self.group)
        return x * y.tanh()


def mixed(inside):
    group = dist.new_group()
    model = nn.Sequential(*(Mixed(layer, group) for layer in stack(6)))
    inside.apply(model, "[0-9]")
    return model, step_of


def data(inside):
    model = Net(2)
    inside.apply(model, "layers.*")
    return DistributedDataParallel(model), step_of


def fully_sharded(inside):
    model = Net(2)
    inside.apply(model, "layers.*")
    return sharded(model, mesh()), step_of


def tensor(inside):
    model = Net(2, dropout=0.0, last=WIDTH)
    inside.apply(model, "layers.*")
    split_sequence(model)
    return model, step_of_the_same


def megatron(inside):
    model = Stack("plain")
    inside.apply(model, "layers.*")
    return model, step_of_the_same


def experts(inside):
    model = nn.Sequential(*[Experts("functional"), Experts("single")])
    inside.apply(model, "[0-9]")
    return model, step_of


def pipeline(inside):
    model = stage_modules(2)[dist.get_rank()]
    inside.apply(model, "[0-9]")
    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)

    def step_of(model, step):
        losses = []
        x = batch(step, 8, same=True)
        if dist.get_rank() == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.flip(0), losses=losses)
        return torch.stack(losses or [torch.zeros(())])

    return model, step_of


def step_of(model, step, same=False):
    loss = model(batch(step, same=same)).square().mean()
    loss.backward()
    return loss


def step_of_the_same(model, step):
    return step_of(model, step, same=True)


STRATEGIES = {
    strategy.__name__: strategy
    for strategy in (data, fully_sharded, tensor, megatron, experts, pipeline, mixed)
}


def blocks_of(model):
    """The modules that are regions."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return list(getattr(inner, "layers", inner))
