"""Sharded parameters: FullyShardedDataParallel and fully_shard."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ebb
from ebb import _C
from ebb_tests import fork_server
from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.launched import run_on_ranks
from ebb_tests.ranks.models import Block, Net, batch, step_in_a_region, train_steps
from ebb_tests.ranks.strategies import sharded
from ebb_tests.ranks.two_ranks import on_two_ranks
from ebb_tests.replays import replays_ahead


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


def in_a_with_block(model, inside):
    return step_in_a_region(inside)


def applied(model, inside):
    inside.apply(model, "")
    return


def in_a_checkpointed_call(model, inside):
    def step_of(model, step):
        x = batch(step)
        loss = model(x) if inside.policy is None else ebb.checkpoint(model, x, policy=inside.policy)
        loss = loss.square().mean()
        loss.backward()
        return loss

    return step_of


@pytest.mark.parametrize("enter", [in_a_with_block, applied, in_a_checkpointed_call])
@pytest.mark.parametrize("how", ["fsdp2", "fsdp1"])
@on_two_ranks
def test_a_region_around_several_units_is_split(how, enter):
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        model = resharded(how, Net(), mesh, Block)
        return train_steps(model, step_of=enter(model, inside))

    assert_exact(train)


@on_two_ranks
def test_a_region_stays_whole_if_fsdp_keeps_parameters():
    mesh = init_device_mesh("cpu", (2,))

    def train(inside):
        model = sharded(Net(), mesh, reshard_after_forward=False)
        return train_steps(model, step_of=step_in_a_region(inside))

    with mock.patch.object(_C, "storage_emptied") as split:
        assert_exact(train)
    split.assert_not_called()


ALONE = """
import torch, ebb
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
unit = fully_shard(torch.nn.Linear(2, 2))
ebb.checkpoint(unit, torch.ones(2, 2)).sum().backward()
print(ebb.stats()["total"]["entered"])
"""


def test_fsdp_s_own_operators_are_known():
    """FSDP gathers parameters in a region that repeats operators outside aten."""
    done = fork_server.run(["-c", ALONE], timeout=100)

    assert done.stdout == "1\n", done.stderr
    assert "writes to its argument" not in done.stderr


class Fails(Block):
    def forward(self, x):
        if x.sum() > -1e9:
            raise ArithmeticError
        return x


def forward_with_units_anywhere(model, x, inside):
    """Units in nested regions, one unit twice, without gradients, and one that fails."""
    kept = (x * 2).sin()
    with inside.region(name="inner"):
        h = model.layers[1](model.layers[0](kept))
        h = h * kept
    h.mul_(1.5)
    with torch.no_grad():
        scale = model.layers[1](h.exp())
    h = model.layers[0](h * scale.cos())
    with contextlib.suppress(ArithmeticError):
        model.layers[2](h)
    return model.last(h.tanh() + kept.exp()).square().mean()


@pytest.mark.parametrize("setting", ["plain", "verify", "ahead", "placeholder", "named results"])
@on_two_ranks
def test_units_anywhere_in_a_region(setting):
    mesh = init_device_mesh("cpu", (2,))
    settings = {"verify": ebb.verify, "ahead": lambda: replays_ahead(2)}
    escapes = "placeholder" if setting in ("placeholder", "named results") else "keep"

    def train(inside):
        model = Net()
        model.layers[2] = Fails()
        sharded(model, mesh, reshard_after_forward=True)

        def step_of(model, step):
            with inside.region(escapes=escapes) as region:
                loss = model(batch(step), inside)
                if setting == "named results" and region is not None:
                    region.returns(loss)
            loss.backward()
            return loss

        model.forward = functools.partial(forward_with_units_anywhere, model)
        return train_steps(model, step_of=step_of)

    with settings.get(setting, contextlib.nullcontext)():
        assert_exact(train)


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


@pytest.mark.sweep
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
