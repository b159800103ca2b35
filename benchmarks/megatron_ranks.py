"""Measures Megatron-Core's GPT on two ranks: its own recomputation, and the same calls as regions.

Prints step time (the slower rank's, divided by that of a step without recomputation), bytes held
for backward, peak bytes (the larger rank's), and whether all gradients on both ranks equal those
without recomputation. Two processes on the CPU, which communicate through gloo:

    pip install --no-deps megatron-core einops
    OMP_NUM_THREADS=1 python benchmarks/megatron_ranks.py
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from frameworks import (
    ROWS,
    TOKENS,
    WORDS,
    Made,
    Way,
    as_regions,
    megatron,
    on_cpu,
)
from held_bytes import held_and_peak_of
from report import table
from timing import steady_memory
from torch import Tensor

import ebb

RANKS = 2
MICROBATCHES = 4

TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
EXPERT = {
    "expert_model_parallel_size": 2,
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
PIPELINE = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
KINDS = {"TP": TENSOR, "TP, SP": SEQUENCE, "EP": EXPERT, "PP": PIPELINE}

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OWN = {
    "full": FULL,
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
}


class Pipelined(Way):
    """One stage of a pipeline. Its backward runs inside the schedule, so only the peak counts."""

    def forward_and_backward(self) -> None:
        self.loss()

    def bytes(self) -> dict[str, int]:
        with self.during():
            return {"held_bytes": 0, "peak_bytes": held_and_peak_of(self.loss)["peak_bytes"]}


def pipeline_stage(settings: dict[str, Any]) -> Made:
    """A stage, and a function that runs forward and backward of all micro-batches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, _ = megatron(**settings)
    words = torch.randint(WORDS, (ROWS, TOKENS + 1))
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    hidden = torch.ones(1, 1, TOKENS, TOKENS).triu(1) > 0

    def forward_step(_: Iterator[None], stage: torch.nn.Module) -> Any:
        output = stage(words[:, :-1], positions, hidden, labels=words[:, 1:])
        return output, lambda output: (output.mean(), {})

    def run() -> Tensor:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([None] * MICROBATCHES),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        return torch.zeros((), requires_grad=True)

    return model, run


def most(value: float) -> float:
    """The largest value of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def least_times(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """The shortest step of each way. Ranks run the ways in the same random order."""
    shuffle = random.Random(0).shuffle
    order = list(ways.items())
    times: dict[str, list[float]] = {name: [] for name in ways}
    with steady_memory():
        for _ in range(rounds):
            shuffle(order)
            for name, way in order:
                dist.barrier()
                times[name].append(most(way.step()["step"]))
    return {name: min(values) for name, values in times.items()}


def least_bytes(way: Way) -> dict[str, int]:
    """The profiler misses what gloo's threads free, so one measurement may be too large."""
    measured = [way.bytes() for _ in range(5)]
    return {key: min(sizes[key] for sizes in measured) for key in measured[0]}


def measure(kind: str, own: str, rounds: int) -> list[list[str]]:
    settings = KINDS[kind]
    is_pipeline = settings is PIPELINE
    make: Callable[..., Made] = (
        pipeline_stage if is_pipeline else lambda settings: megatron(**settings)
    )
    way = Pipelined if is_pipeline else Way
    plain, recomputed = (functools.partial(make, settings | more) for more in ({}, OWN[own]))
    ways = {
        "plain": way(plain, contextlib.nullcontext),
        "by itself": way(recomputed, contextlib.nullcontext),
        "EBB=1": way(recomputed, as_regions),
        "EBB=recompute_collectives": way(
            recomputed, functools.partial(as_regions, ebb.policies.recompute_collectives)
        ),
    }
    expected = ways["plain"].bits()
    differ = {name: most(not all(map(torch.equal, w.bits(), expected))) for name, w in ways.items()}
    sizes = {name: least_bytes(way) for name, way in ways.items()}
    times = least_times(ways, rounds)
    rows = []
    for name in ways:
        held, peak = (most(sizes[name][f"{what}_bytes"]) / 2**20 for what in ("held", "peak"))
        shown = "" if is_pipeline else f"{held:.1f}"
        exact = "no" if differ[name] else "yes"
        ratio = times[name] / times["plain"]
        rows.append([kind, own, name, f"{ratio:.2f}", shown, f"{peak:.1f}", exact])
    return rows


def rank_main(rank: int, store: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    from megatron.core import parallel_state

    rows = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_cpu(monkeypatch)
        for kind, settings in KINDS.items():
            sizes = {key: size for key, size in settings.items() if key.endswith("_parallel_size")}
            parallel_state.initialize_model_parallel(**sizes)
            for own in OWN:
                rows += measure(kind, own, rounds)
            parallel_state.destroy_model_parallel()
    if rank == 0:
        columns = ["", "recomputed", "", "time", "held MiB", "peak MiB", "identical"]
        print(table(columns, rows))
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    rounds = int(os.environ.get("EBB_BENCH_ROUNDS", "20"))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (f"{folder}/store", rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
