"""Parallel strategies, each as a training of a small model: STRATEGIES, by name.

A strategy gets a :class:`entries.Way`, calls its `before` and `after` around what it does to the
model, and returns a :class:`models.Training`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from ebb_tests.ranks.collectives import rank
from ebb_tests.ranks.models import (
    WIDTH,
    Block,
    Net,
    Training,
    batch,
    forward_and_backward,
    train_steps,
)

STRATEGIES: dict[str, Callable[[Any], Any]] = {}


def strategy(name, **settings):
    """Adds a training under this name. `settings` are further arguments of it."""

    def add(train):
        STRATEGIES[name] = lambda way: train(way, **settings)
        return train

    return add


# Data parallelism


class Skips(Net):
    """Uses another layer at each step, on each rank."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        x = self.first(x)
        return self.last(self.layers[(self.calls + dist.get_rank()) % 3](x)).tanh()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.GELU())
            for _ in range(2)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = x.reshape(-1, 2, WIDTH // 2)
        for layer in self.layers:
            x = layer(x)
        return x * self.calls


def accumulated(model, step, parts, not_yet):
    """The sum of the losses of several backwards. `not_yet`: entered but for the last."""
    total = 0
    for part in range(parts):
        with not_yet(model) if part < parts - 1 else contextlib.nullcontext():
            loss = model(batch(10 * step + part)).square().mean()
            loss.backward()
        total = total + loss.detach()
    return total


def accumulates(model, step):
    return accumulated(model, step, 3, lambda model: model.no_sync())


def under_autocast(model, step):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch(step)).square().mean()
    loss.backward()
    return loss


def joined(model, step):
    """Rank 1 has one batch more than rank 0."""
    with model.join():
        for part in range(1 + rank()):
            loss = model(batch(10 * step + part)).square().mean()
            loss.backward()
    return loss


def compressed(model):
    model.register_comm_hook(None, fp16_compress_hook)


def approximated(model):
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)


@strategy("DDP")
@strategy("DDP, find_unused_parameters", kind=Skips, find_unused_parameters=True)
@strategy("DDP, static_graph", static_graph=True)
@strategy("DDP, gradient_as_bucket_view", gradient_as_bucket_view=True)
@strategy("DDP, small buckets", bucket_cap_mb=0.0001)
@strategy(
    "DDP, views, static, small",
    gradient_as_bucket_view=True,
    static_graph=True,
    bucket_cap_mb=0.0001,
)
@strategy("DDP, buffers", kind=Convolutions)
@strategy("DDP, own buffers", kind=Convolutions, broadcast_buffers=False)
@strategy("DDP, no_sync", step_of=accumulates)
@strategy("DDP, autocast", step_of=under_autocast)
@strategy("DDP, join", step_of=joined)
@strategy("DDP, fp16 hook", hook=compressed)
@strategy("DDP, PowerSGD", hook=approximated)
def data_parallel(way, kind=Net, step_of=forward_and_backward, hook=None, **settings):
    model = kind()
    way.before(model)
    wrapped = DistributedDataParallel(model, **settings)
    if hook is not None:
        hook(wrapped)
    way.after(wrapped.module)
    return Training(wrapped, step_of)


# Sharded parameters

HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def summoned(model, step):
    """Reads all parameters between forward and backward."""
    loss = model(batch(step)).square().mean()
    with FullyShardedDataParallel.summon_full_params(model):
        total = sum(parameter.detach().sum() for parameter in model.parameters())
    loss.backward()
    return loss + total


@strategy("FSDP1")
@strategy("FSDP1, summon_full_params", step_of=summoned)
@strategy("FSDP1, flat", use_orig_params=False)
@strategy("FSDP1, SHARD_GRAD_OP", sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
@strategy(
    "FSDP1, SHARD_GRAD_OP, flat",
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    use_orig_params=False,
)
@strategy("FSDP1, NO_SHARD", sharding_strategy=ShardingStrategy.NO_SHARD)
@strategy("FSDP1, mixed precision", mixed_precision=MixedPrecision(**HALF))
@strategy(
    "FSDP1, mixed precision, flat",
    mixed_precision=MixedPrecision(**HALF, buffer_dtype=torch.bfloat16),
    use_orig_params=False,
)
def fsdp1(way, use_orig_params=True, step_of=forward_and_backward, **settings):
    model = Net()
    way.before(model)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        **settings,
    )
    way.after(wrapped)
    return Training(wrapped, step_of)


def sharded(model: Any, mesh: DeviceMesh, **settings: Any) -> Any:
    """FSDP2, with a unit for each layer."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


@contextlib.contextmanager
def without_sync(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def accumulates_sharded(model, step):
    return accumulated(model, step, 2, without_sync)


def gathered_between(model, step):
    """Reads all parameters between forward and backward."""
    loss = model(batch(step)).square().mean()
    model.layers[1].unshard()
    total = sum(parameter.detach().sum() for parameter in model.layers[1].parameters())
    model.layers[1].reshard()
    loss.backward()
    return loss + total


def clipped(model, step):
    loss = model(batch(step)).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return loss + norm.full_tensor()


@strategy("FSDP2")
@strategy("FSDP2, gathered", reshard_after_forward=False)
@strategy("FSDP2, resharded to 2", reshard_after_forward=2)
@strategy("FSDP2, mixed precision", mp_policy=MixedPrecisionPolicy(**HALF))
@strategy("FSDP2, CPUOffloadPolicy", offload_policy=CPUOffloadPolicy(pin_memory=False))
@strategy("FSDP2, accumulates", step_of=accumulates_sharded)
@strategy("FSDP2, gathered between", step_of=gathered_between)
@strategy("FSDP2, clip_grad_norm_", step_of=clipped)
@strategy("HSDP", shape=(2, 1))
@strategy("HSDP, one replica", shape=(1, 2))
def fsdp2(way, shape=(2,), step_of=forward_and_backward, **settings):
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = Net()
    way.before(model)
    sharded(model, mesh, **settings)
    way.after(model)
    return Training(model, step_of)


class NoOptimizer:
    def step(self):
        """Parameters were updated in backward."""

    zero_grad = step


@strategy("FSDP2, optimizer in backward")
def optimizer_in_backward(way):
    model = Net()
    way.before(model)
    sharded(model, init_device_mesh("cpu", (2,)))
    way.after(model)

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.05)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return Training(model, optimizer=NoOptimizer())


class SavedAndLoaded(NamedTuple):
    """A second model goes on from what torch.distributed.checkpoint saved of the first."""

    way: Any

    def run(self, steps):
        results = {}
        with shared_folder() as folder:
            for part in ("first", "second"):
                model = fsdp2(self.way).model
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
                if part == "second":
                    state = get_state_dict(model, optimizer)
                    dcp.load({"state": state}, checkpoint_id=folder)
                    set_state_dict(
                        model, optimizer, model_state_dict=state[0], optim_state_dict=state[1]
                    )
                found = train_steps(model, steps=steps, optimizer=optimizer)
                results |= {f"{part}: {name}": value for name, value in found.items()}
                if part == "first":
                    state = get_state_dict(model, optimizer)
                    dcp.save({"state": state}, checkpoint_id=folder)
        return results


strategy("FSDP2, saved and loaded")(SavedAndLoaded)


@contextlib.contextmanager
def shared_folder():
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0)
        yield folder[0]
        dist.barrier()
