"""Recomputation on two ranks whose collectives take time: how much of it replays ahead hide.

Each collective ends late, as on a slow network: the program's wait sleeps until then. Prints the
step time of each system divided by the plain step's with the same delays (the slower rank's, least
of the rounds), and checks that gradients equal the plain step's bit for bit. Two processes on the
CPU, which communicate through gloo:

    python benchmarks/delayed_collectives.py
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import table
from timing import steady_memory
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ebb

RANKS = 2
LAYERS, WIDTH, ROWS = 6, 256, 256
MILLISECONDS = (0, 1, 5, 20)
REGIONS_AHEAD = 2


class Late(dist.Work):
    """The work of a collective that ends at the time `end`, or later."""

    def __init__(self, work: Any, end: float) -> None:
        super().__init__()
        self.work, self.end = work, end

    def wait(self, timeout: Any = None) -> bool:
        self.work.wait()
        time.sleep(max(0.0, self.end - time.perf_counter()))
        return True


def delayed(collective: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = Late(collective(*args, async_op=True, **kwargs), time.perf_counter() + seconds)
        return work if async_op else work.wait()

    return call


@contextlib.contextmanager
def delays(seconds: float) -> Any:
    names = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}
    names |= {"all_gather_single", "reduce_scatter_single"}  # of FSDP2 since torch 2.13
    own = {name: getattr(dist, name) for name in names & set(dir(dist))}
    try:
        for name, collective in own.items():
            setattr(dist, name, delayed(collective, seconds))
        yield
    finally:
        for name, collective in own.items():
            setattr(dist, name, collective)


class CopyTo(torch.autograd.Function):
    """Sums the gradient over the ranks, as at the input of Megatron's column-parallel product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Layer(nn.Module):
    """A transformer's two halves, with one pair of collectives each if the ranks split them."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        width = WIDTH // RANKS if split else WIDTH
        self.split = split
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * width) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(2 * width, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            h = CopyTo.apply(norm(x)) if self.split else norm(x)
            h = down(nn.functional.gelu(up(h)))
            x = x + (ReduceFrom.apply(h) if self.split else h)
        return x


class Model(nn.Module):
    def __init__(self, split: bool, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(split) for _ in range(LAYERS))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x.square().mean()


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


SYSTEMS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "plain": (plainly, 0),
    "torch's checkpointing": (functools.partial(checkpoint, use_reentrant=False), 0),
    "ebb": (ebb.checkpoint, 0),
    "ebb, replays ahead": (ebb.checkpoint, REGIONS_AHEAD),
}


def model(strategy: str, call: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(0)
    made = Model(strategy == "tensor parallel", call)
    if strategy == "FSDP2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        for layer in made.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(made, mesh=mesh)
    return made


def step(trained: nn.Module, x: Tensor, regions: int) -> float:
    ebb.config.update(ahead_regions=regions, ahead_limit="1GiB")
    trained.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    trained(x).backward()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def bits(trained: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in trained.parameters()]
    return [g.to_local().clone() if hasattr(g, "to_local") else g.clone() for g in gradients]


def measure(strategy: str, rounds: int) -> list[list[str]]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    models = {name: (model(strategy, call), regions) for name, (call, regions) in SYSTEMS.items()}
    rows = []
    for milliseconds in MILLISECONDS:
        times: dict[str, list[float]] = {name: [] for name in models}
        order = list(models)
        with steady_memory(), delays(milliseconds * 1e-3):
            for _ in range(rounds):
                random.Random(len(times["plain"])).shuffle(order)
                for name in order:
                    times[name].append(step(models[name][0], x, models[name][1]))
        expected = bits(models["plain"][0])
        for trained, _ in models.values():
            assert all(map(torch.equal, bits(trained), expected)), "gradients differ"
        plain = min(times["plain"])
        ratios = [f"{min(times[name]) / plain:.2f}" for name in models if name != "plain"]
        rows.append([strategy, str(milliseconds), f"{plain * 1e3:.1f}", *ratios])
    return rows


def rank_main(rank: int, store: str, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    rows = [row for strategy in ("tensor parallel", "FSDP2") for row in measure(strategy, rounds)]
    if rank == 0:
        print(table(["", "delay ms", "plain ms", *list(SYSTEMS)[1:]], rows))
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    rounds = int(os.environ.get("EBB_BENCH_ROUNDS", "15"))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (f"{folder}/store", rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
