"""Strategies that split the model: tensor, pipeline, expert and context parallelism."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ebb_tests.ranks.collectives import rank
from ebb_tests.ranks.experts import WAYS, Experts
from ebb_tests.ranks.megatron import KINDS, AsyncLinear, Stack
from ebb_tests.ranks.models import (
    WIDTH,
    Block,
    Net,
    Training,
    batch,
    forward_and_backward,
    with_the_same_batch,
)
from ebb_tests.ranks.repeating import stack
from ebb_tests.ranks.ring_attention import RingAttention
from ebb_tests.ranks.strategies import sharded, strategy

# Tensor parallelism


def mesh():
    return init_device_mesh("cpu", (2,))


def split_products(model, mesh):
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_sequence(model, mesh):
    """Activations between the products are sharded too; the norm's parameters are replicated."""
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": PrepareModuleInput(
                input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=False
            ),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(layer, mesh, plan)
        parallelize_module(layer, mesh, {"up": ColwiseParallel(use_local_output=False)})
    plan = {
        "first": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
        ),
        "last": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def split_with_wrappers_between(model, mesh):
    """The activation is a DTensor between the two products."""
    for layer in model.layers:
        plan = {
            "up": ColwiseParallel(use_local_output=False),
            "act": PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Shard(-1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)


@strategy("TP", split=split_products)
@strategy("TP, sequence", split=split_sequence, last=WIDTH)
@strategy("TP, wrappers between", split=split_with_wrappers_between)
@strategy("TP, dropout", split=split_products, dropout=0.2)
def tensor_parallel(way, split, dropout=0.0, **settings):
    torch.manual_seed(5)  # replicated parameters are the same on both ranks
    model = Net(dropout=dropout, **settings)
    way.before(model, renames=False)
    split(model, mesh())
    way.after(model)
    return Training(model, with_the_same_batch)


@strategy("TP, loss_parallel")
def loss_in_parallel(way):
    torch.manual_seed(5)
    model = Net(dropout=0.0, last=6)
    way.before(model, renames=False)
    split_products(model, mesh())
    last = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh(), {"last": last})
    way.after(model)

    def step_of(model, step):
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(batch(step, same=True)), torch.arange(4))
            loss.backward()
        return loss.full_tensor()

    return Training(model, step_of)


@strategy("TP, then FSDP2", shape=(1, 2))
@strategy("FSDP2, TP of one", shape=(2, 1))
def tensor_parallel_in_fsdp(way, shape):
    torch.manual_seed(5)
    both = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    model = Net(dropout=0.0)
    way.before(model, renames=False)
    split_products(model, both["tensor"])
    sharded(model, both["data"])
    way.after(model)
    return Training(model, with_the_same_batch)


def as_in_megatron(way, kind):
    AsyncLinear.buffer = None
    model = Stack(kind)
    way.before(model)
    way.after(model)
    same = not kind.startswith("sequence")
    return Training(model, with_the_same_batch if same else forward_and_backward)


for kind in KINDS:
    strategy(f"Megatron, {kind}", kind=kind)(as_in_megatron)


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


@strategy("two groups")
def two_groups(way):
    group = dist.new_group()
    model = nn.Sequential(*(Mixed(layer, group) for layer in stack(6)))
    way.before(model, "[0-9]")
    way.after(model, "[0-9]")
    return Training(model)


# Pipelines


def stages(count):
    """The same modules on both ranks; each rank keeps its own."""
    torch.manual_seed(11)
    return [nn.Sequential(Block(), Block()) for _ in range(count)]


def loss_of(output, target):
    return (output - target).square().mean()


@strategy("GPipe", schedule=ScheduleGPipe)
@strategy("1F1B", schedule=Schedule1F1B)
@strategy("1F1B, another shape each step", schedule=Schedule1F1B, shapes=3)
@strategy("1F1B, FSDP2", schedule=Schedule1F1B, fsdp=True)
@strategy("interleaved 1F1B", schedule=ScheduleInterleaved1F1B, stage_ids=(0, 2))
@strategy("looped BFS", schedule=ScheduleLoopedBFS, stage_ids=(0, 2))
@strategy("zero bubble", schedule=ScheduleInterleavedZeroBubble, stage_ids=(0, 2))
def pipeline(way, schedule, stage_ids=(0,), shapes=1, fsdp=False):
    """`stage_ids`: of rank 0; rank 1 has the neighbours of these stages."""
    if rank() == 1:
        stage_ids = [stage ^ 1 for stage in stage_ids]
    count = 2 * len(stage_ids)
    modules = [stages(count)[stage] for stage in stage_ids]
    for module in modules:
        way.before(module, "[0-9]")
        if fsdp:
            alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))["data"]
            for block in module:
                fully_shard(block, mesh=alone)
            fully_shard(module, mesh=alone)
        way.after(module, "[0-9]")

    @functools.cache
    def built(rows):
        """Stages receive the shapes of their first step."""
        found = [
            PipelineStage(module, stage, count, torch.device("cpu"))
            for module, stage in zip(modules, stage_ids, strict=True)
        ]
        return schedule(found if count > 2 else found[0], n_microbatches=4, loss_fn=loss_of)

    def step_of(module, step):
        losses = []
        rows = 8 * (1 + step % shapes)
        run = built(rows)
        inputs = (batch(step, rows, same=True),) if 0 in stage_ids else ()
        if count - 1 in stage_ids:
            run.step(*inputs, target=torch.zeros(rows, WIDTH), losses=losses)
        else:
            run.step(*inputs)
        return torch.stack(losses or [torch.zeros(())])

    return Training(nn.ModuleList(modules), step_of)


if torch.__version__ >= "2.13":  # earlier versions send from a stage to the same rank's next one
    v_shaped = {"ZBV": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}
    for name, schedule in v_shaped.items():
        strategy(name, schedule=schedule, stage_ids=(0, 3))(pipeline)


# Experts and sequences on both ranks


def trained_sequence(way, layers):
    """Layers of other weights on each rank, one after the other."""
    torch.manual_seed(20 + rank())
    model = nn.Sequential(*(layer() for layer in layers))
    way.before(model, "[0-9]")
    way.after(model, "[0-9]")

    def step_of(model, step):
        loss = model(batch(step, rows=7)).square().mean()
        loss.backward()
        return loss

    return Training(model, step_of)


def experts(way, how):
    return trained_sequence(way, [lambda: Experts(how)] * 2)


for how in WAYS:
    strategy(f"experts, {how}", how=how)(experts)


class Attention(nn.Module):
    """Over the tokens of both ranks. `attend` gets this rank's queries, keys and values."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).tanh().chunk(3, -1)
        return x + self.attend(q.sin(), k.contiguous(), v.contiguous()).sin()


def gather_and_attend(q, k, v):
    k, v = (funcol.all_gather_tensor_autograd(t, 0, dist.group.WORLD) for t in (k, v))
    return (q @ k.t()).softmax(-1) @ v


@strategy("context parallel, gathered", attend=gather_and_attend)
@strategy("context parallel, ring", attend=RingAttention.apply)
def context_parallel(way, attend):
    return trained_sequence(way, [lambda: Attention(attend)] * 2)
