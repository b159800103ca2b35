"""Simulates a job on 1,024 ranks, from times that it measures on one CPU core.

    OMP_NUM_THREADS=1 python benchmarks/scale.py

Assumed: all of `Job` and `Network` below. Measured: forward, backward and replay of a Llama layer,
and host time per op. No GPU is measured.

The simulated job has data, tensor and pipeline parallelism, with the 1F1B schedule. Ranks of a
tensor group wait for each other in each layer, stages wait for their neighbours' micro-batches, and
replicas wait for each other once, before the optimizer's step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from host_memory import keep_freed_memory
from report import table
from systems import EAGER, System, ebb_systems
from timing import Trial, interleaved
from torch import Tensor
from workloads import LlamaBlock

import ebb

SHOWN = ("eager", "ebb save_matmuls", "ebb recompute_all")


@dataclass(frozen=True)
class Job:
    """A model with 64 layers on 1,024 GPUs, eight to a node. Assumptions."""

    replicas: int = 16
    tensor: int = 8
    stages: int = 8
    layers: int = 8  # of one stage
    batches: int = 32  # micro-batches of one replica in a step
    tokens: int = 8192  # of a micro-batch
    width: int = 8192
    forward: float = 8e-3  # seconds of one layer's forward on a GPU
    gradients: float = 1.7e9  # bytes that one rank reduces with the other replicas
    jitter: float = 0.02  # the standard deviation of one layer's time on one rank
    spread: float = 0.01  # the standard deviation of a rank's speed, the same in all layers


@dataclass(frozen=True)
class Network:
    """Latency in seconds and bandwidth in bytes per second. Assumptions."""

    latency: float = 10e-6
    inside: float = 300e9  # between the GPUs of a node
    between: float = 40e9  # between nodes, for one GPU

    def ring(self, ranks: int, nbytes: float, bandwidth: float) -> float:
        """An all-reduce."""
        return 2 * (ranks - 1) * (self.latency + nbytes / ranks / bandwidth)


@dataclass(frozen=True)
class Layer:
    """One layer's times under one system, in forwards of eager."""

    forward: float
    backward: float


JOB, NETWORK = Job(), Network()


def times_of(systems: Sequence[System], width: int, tokens: int) -> dict[str, dict[str, float]]:
    """Seconds of a layer's forward and backward. A region's backward includes its replay."""
    torch.manual_seed(0)
    layer = LlamaBlock(width, 8, width * 11 // 4)
    x = torch.randn(1, tokens, width, requires_grad=True)
    angles = torch.randn(2, tokens, width // 8)

    def trial(system: System) -> Trial:
        def run() -> dict[str, float]:
            start = time.perf_counter()
            result: Tensor = system.run(layer, x, *angles)
            middle = time.perf_counter()
            result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]
            end = time.perf_counter()
            return {"forward": middle - start, "backward": end - middle}

        return run

    found = interleaved({system.name: trial(system) for system in systems}, 8, rounds=20)
    return {name: {phase: t.least for phase, t in of.items()} for name, of in found.items()}


def ops_of_layer() -> int:
    layer = LlamaBlock(32, 2, 64)
    x = torch.randn(1, 8, 32, requires_grad=True)
    ebb.reset_stats()
    with ebb.region():
        layer(x, *torch.randn(2, 8, 16))
    return int(ebb.stats()["total"]["ops_recorded"])


def order_of(stage: int, job: Job) -> list[tuple[str, int]]:
    """The schedule 1F1B: forwards and backwards of one stage, in order."""
    ahead = min(job.stages - stage - 1, job.batches)
    order = [("F", batch) for batch in range(ahead)]
    for batch in range(job.batches - ahead):
        order += [("F", ahead + batch), ("B", batch)]
    return order + [("B", batch) for batch in range(job.batches - ahead, job.batches)]


def pipeline(cost: dict[str, Tensor], job: Job, hop: float) -> Tensor:
    """When each replica's last stage is ready. `cost`: replicas x stages x micro-batches."""
    orders = [order_of(stage, job) for stage in range(job.stages)]
    ends: dict[tuple[str, int, int], Tensor] = {}
    clocks = [torch.zeros(job.replicas) for _ in orders]
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, batch = order[0]
                giver = stage - 1 if kind == "F" else stage + 1
                start = clocks[stage]
                if 0 <= giver < job.stages:
                    if (kind, giver, batch) not in ends:
                        break
                    start = torch.maximum(start, ends[kind, giver, batch] + hop)
                ends[kind, stage, batch] = clocks[stage] = start + cost[kind][:, stage, batch]
                order.pop(0)
    return torch.stack(clocks).amax(0)


def step_seconds(layer: Layer, job: Job = JOB, slow: Layer | None = None) -> float:
    """One step of all ranks. `slow`: the times of rank 0, else those of the others."""
    random = torch.Generator().manual_seed(0)
    ranks = (job.replicas, job.stages, 1, 1, job.tensor)
    speed = 1 + job.spread * torch.randn(ranks, generator=random).abs()
    calls = (job.replicas, job.stages, job.batches, job.layers, job.tensor)
    activation = job.tokens * job.width * 2.0  # bytes
    talk = 2 * NETWORK.ring(job.tensor, activation, NETWORK.inside)
    cost = {}
    for kind, name in (("F", "forward"), ("B", "backward")):
        noise = 1 + job.jitter * torch.randn(calls, generator=random).abs()
        time_of_rank = torch.full(ranks, getattr(layer, name))
        if slow is not None:
            time_of_rank[0, 0, 0, 0, 0] = getattr(slow, name)
        slowest = (job.forward * time_of_rank * speed * noise).amax(-1)  # of each tensor group
        cost[kind] = (slowest + talk).sum(-1)
    hop = NETWORK.latency + activation / job.tensor / NETWORK.between
    reduced = NETWORK.ring(job.replicas, job.gradients, NETWORK.between)
    return float(pipeline(cost, job, hop).max()) + reduced


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    systems = [s for s in (EAGER, *ebb_systems()) if s.name in SHOWN]
    large, tiny = times_of(systems, 512, 512), times_of(systems, 32, 8)
    unit = large["eager"]["forward"]
    layers = {name: Layer(t["forward"] / unit, t["backward"] / unit) for name, t in large.items()}
    eager, ops = layers["eager"], ops_of_layer()
    steps = {name: step_seconds(layer) for name, layer in layers.items()}
    rows = []
    for name, layer in layers.items():
        host = {p: (tiny[name][p] - tiny["eager"][p]) / ops * 1e6 for p in ("forward", "backward")}
        columns = [layer.forward, layer.backward, *host.values()]
        columns += [steps[name], steps[name] / steps["eager"]]
        rows.append([name, *(f"{column:.2f}" for column in columns)])
    head = ("system", "forward", "backward", "host us/op forward", "backward", "step, s", "ratio")
    print(table(head, rows))
    print(f"\n{ops} ops in a layer\n")
    rows = []
    for name in SHOWN[1:]:
        one = step_seconds(eager, slow=layers[name]) - steps["eager"]
        alone = layers[name].forward + layers[name].backward - eager.forward - eager.backward
        alone *= JOB.forward * JOB.layers * JOB.batches
        rows.append([name, f"{alone:.2f}", f"{one:.2f}", f"{steps[name] - steps['eager']:.2f}"])
    print(table(("system", "added on rank 0", "to the step", "to the step, on all ranks"), rows))


if __name__ == "__main__":
    main()
