"""Sharded parameters: FullyShardedDataParallel and fully_shard."""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path

import pytest
import torch
from comparing import assert_exact
from launched import run_on_ranks
from models import Block, Net, batch, step_in_a_region, train_steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from two_ranks import on_two_ranks

import ebb
from ebb._support.log import log


@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_two_ranks
def test_fsdp1(strategy, original):
    def train(inside):
        model = Net()
        inside.apply(model, "layers.*")
        wrapped = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
        return train_steps(wrapped)

    assert_exact(train)


@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_two_ranks
def test_fsdp1_whose_units_are_regions(strategy, original):
    """Parameters are gathered and given up inside of them."""

    def train(inside):
        model = FullyShardedDataParallel(
            Net(),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
        inside.apply(model, "layers.*")
        return train_steps(model)

    assert_exact(train)


@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@on_two_ranks
def test_fsdp1_with_mixed_precision(original):
    def train(inside):
        model = Net()
        inside.apply(model, "layers.*")
        half = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
        )
        wrapped = FullyShardedDataParallel(
            model,
            mixed_precision=half,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
        return train_steps(wrapped)

    assert_exact(train)


def sharded(model, mesh, **settings):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def resharded(how, model, mesh, block):
    """Sharded by FSDP1 or FSDP2, which frees the parameters of each `block` after its forward."""
    if how == "fsdp2":
        return sharded(model, mesh, reshard_after_forward=True)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


@pytest.mark.parametrize("order", ["apply first", "shard first"])
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "gathered"])
@on_two_ranks
def test_fsdp2(reshard, order):
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        model = Net()
        if order == "apply first":
            inside.apply(model, "layers.*")
        sharded(model, mesh, reshard_after_forward=reshard)
        if order == "shard first":
            inside.apply(model, "layers.*")
        return train_steps(model)

    assert_exact(train)


@on_two_ranks
def test_fsdp2_with_mixed_precision():
    mesh = init_device_mesh("cpu", (2,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def train(inside):
        model = sharded(Net(), mesh, mp_policy=half)
        inside.apply(model, "layers.*")
        return train_steps(model)

    assert_exact(train)


@on_two_ranks
def test_fsdp2_accumulates_without_sync():
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        model = sharded(Net(), mesh)
        inside.apply(model, "layers.*")

        def step_of(model, step):
            total = 0
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                loss = model(batch(10 * step + part)).square().mean()
                loss.backward()
                total = total + loss.detach()
            return total

        return train_steps(model, step_of=step_of)

    assert_exact(train)


class Records(logging.Handler):
    """Texts of ebb's log, while it is entered."""

    def __enter__(self):
        self.texts = []
        log.addHandler(self)
        return self.texts

    def __exit__(self, *_):
        log.removeHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


@on_two_ranks
def test_a_with_block_around_several_units():
    """Its replay needs parameters that FSDP has freed, and ebb cannot move the region."""
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        model = sharded(Net(), mesh, reshard_after_forward=True)
        return train_steps(model, step_of=step_in_a_region(inside))

    with pytest.raises(RuntimeError, match=r"aten::.* in region 'region'.*resized|was resized"):
        assert_exact(train, ["recompute_all"])


@pytest.mark.parametrize("order", ["apply first", "shard first"])
@pytest.mark.parametrize("how", ["fsdp2", "fsdp1"])
@on_two_ranks
def test_a_region_around_several_units_moves_to_them(how, order):
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        model = Net()
        if order == "apply first":
            inside.apply(model, "")
        model = resharded(how, model, mesh, Block)
        if order == "shard first":
            inside.apply(model, "")
        return train_steps(model)

    with Records() as texts:
        assert_exact(train)
    assert "these modules are regions in its place: " in texts[0]
    assert all(f"layers.{n}" in texts[0] for n in range(3))


@on_two_ranks
def test_a_region_stays_whole_if_fsdp_keeps_parameters():
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        model = sharded(Net(), mesh, reshard_after_forward=False)
        inside.apply(model, "")
        return train_steps(model)

    with Records() as texts:
        assert_exact(train)
    assert texts == []


@on_two_ranks
def test_remove_after_a_region_has_moved():
    mesh = init_device_mesh("cpu", (2,))
    model = sharded(Net(), mesh, reshard_after_forward=True)
    classes = [type(module) for module in model.modules()]
    handle = ebb.apply(model, ebb.policies.recompute_all, "")
    train_steps(model)
    assert any(type(module) not in classes for module in model.modules())
    handle.remove()
    assert [type(module) for module in model.modules()] == classes
    ebb.reset_stats()
    train_steps(model)
    assert ebb.stats()["total"]["entered"] == 0


class KeepsHidden(Block):
    def forward(self, x):
        self.hidden = self.act(self.up(self.norm(x)))
        return x + self.dropout(self.down(self.hidden))


def train_and_read(model, inside):
    def step_of(model, step):
        loss = model(batch(step)).square().mean()
        hidden = [layer.hidden for layer in model.layers]
        if inside.policy is not None:
            assert all(h.untyped_storage().nbytes() == 0 for h in hidden), "nothing was given up"
        loss.backward()
        return torch.stack([loss, *(h.double().sum() for h in hidden)])

    return train_steps(model, step_of=step_of)


@pytest.mark.parametrize(
    ("how", "order"),
    [
        ("fsdp2", "apply first"),
        ("fsdp2", "shard first"),
        ("fsdp1", "apply first"),
        ("fsdp1", "shard first"),
    ],
)
@on_two_ranks
def test_placeholders_come_back_after_parameters(how, order):
    """Both want to be first in a block's backward: ebb needs what the other one gathers."""
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        model = Net()
        model.layers = torch.nn.ModuleList(KeepsHidden() for _ in range(3))
        if order == "apply first":
            inside.apply(model, "layers.*", escapes="placeholder")
        model = resharded(how, model, mesh, KeepsHidden)
        if order == "shard first":
            inside.apply(model, "layers.*", escapes="placeholder")
        return train_and_read(model, inside)

    assert_exact(train, ["recompute_all"])


@on_two_ranks
def test_fsdp2_recomputes_every_value_as_it_was():
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        with ebb.verify() if inside.policy else contextlib.nullcontext():
            model = sharded(Net(), mesh, reshard_after_forward=True)
            inside.apply(model, "layers.*")
            return train_steps(model)

    assert_exact(train, ["recompute_all"])


def test_the_example():
    program = Path(__file__).parents[2] / "examples" / "fsdp_gpt.py"
    size = "--steps 2 --dim 64 --layers 2"
    for rank, (done, _) in enumerate(run_on_ranks(str(program), *size.split())):
        assert done.returncode == 0, done.stderr
        rows = re.findall(r"^ +(\d)  (.+?) +(\d+\.\d) +[\d.]+ +[\d.]+x  yes$", done.stdout, re.M)
        assert {int(number) for number, *_ in rows} == {rank}
        held = {name: float(size) for _, name, size in rows}
        assert held["ebb recompute_all"] < held["ebb save_matmuls"] < held["plain"]
        assert held["torch AC"] < held["ebb save_matmuls"]
