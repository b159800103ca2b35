"""Tools to compare plans with: checkpointed blocks, SAC, torch's knapsack, torch.compile."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch._functorch.config as functorch_config
from systems import in_checkpoint, matmuls_contexts, torchtitan_contexts
from torch import Tensor, nn
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack, greedy_knapsack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from workloads import PreNormBlock, Runner, run_directly

from ebb import Profile

Way: TypeAlias = Callable[[Sequence[nn.Module], Tensor], Tensor]
"""Runs blocks one after the other."""

SEGMENTS, EVERY, FIRST, SAC, KNAPSACK, COMPILED = (
    "AC of segments",
    "AC of every k-th block",
    "AC of the first blocks",
    "SAC",
    "torch's knapsack, as SAC",
    "torch.compile, activation_memory_budget",
)

# Published results for the transformer in Figure 4 of Kirisame et al., "Dynamic Tensor
# Rematerialization" (ICLR 2021): data_files/data-full.json in github.com/uwsampl/dtr-prototype;
# a GPU, 512 tokens, batches of 10. Each pair: peak memory and GPU time (medians) with DTR, over
# those without DTR.
DTR = [(0.825, 1.112), (0.628, 1.142), (0.425, 1.187), (0.236, 1.592)]


class Transformer(nn.Module):
    """Pre-LN blocks. The attribute `way` is the function that runs the blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PreNormBlock(width) for _ in range(depth))
        self.way: Way = in_turn

    def forward(self, x: Tensor) -> Tensor:
        return self.way(list(self.blocks), x).square().mean()


def in_turn(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def each(runner_of: Callable[[int], Runner]) -> Way:
    """A way that runs block number i with `runner_of(i)`."""

    def way(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            x = runner_of(number)(block, x)
        return x

    return way


def in_segments(count: int) -> Way:
    def way(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        with warnings.catch_warnings(action="ignore"):
            result: Tensor = checkpoint_sequential(  # type: ignore[no-untyped-call]
                blocks, count, x, use_reentrant=False, preserve_rng_state=False
            )
        return result

    return way


def checkpointing(depth: int) -> dict[str, tuple[str, Way]]:
    """Ways to checkpoint blocks with torch.utils.checkpoint: family and way by name."""
    ac = in_checkpoint()
    found: dict[str, tuple[str, Way]] = {}
    for every in (1, 2, 3, 4):
        name = "AC of every block" if every == 1 else f"AC of every {every}. block"
        found[name] = EVERY, each(lambda number, k=every: run_directly if number % k else ac)
    for first in sorted({depth // 4, depth // 2, 3 * depth // 4, 5 * depth // 6}):
        name = f"AC of the first {first} blocks"
        found[name] = FIRST, each(lambda number, k=first: ac if number < k else run_directly)
    for count in sorted({depth // 3, depth // 2}):
        found[f"AC of {count} segments"] = SEGMENTS, in_segments(count)
    for name, contexts in (("matmuls", matmuls_contexts()), ("torchtitan", torchtitan_contexts())):
        runner = in_checkpoint(context_fn=contexts)
        found[f"SAC {name}"] = SAC, each(lambda _, runner=runner: runner)
    return found


def knapsack(profile: Profile, shares: Sequence[float]) -> dict[str, tuple[str, Way]]:
    """Policies for SAC, chosen by the knapsack solvers of torch.compile's partitioner.

    A result is an item if autograd saves it. The item's value is the time of its own operator, as
    in the partitioner.

    Args:
        profile: a profile of a step in which each block is a region.
        shares: budgets: shares of the bytes of all items.
    """
    items, sizes, times = [], [], []
    for call in dict.fromkeys(one.call for one in profile.operators):
        operators = [one for one in profile.operators if one.call == call]
        counts: Counter[str] = Counter()
        for one in operators[:-1]:  # the last result is the next block's input
            counts[one.func_name] += 1
            size = sum(profile.values[value].memory for value in one.outputs)
            if size and any(profile.values[value].saved for value in one.outputs):
                items.append((call, one.func_name.replace("::", "."), counts[one.func_name]))
                sizes.append(size)
                times.append(one.runtime)
    calls = list(dict.fromkeys(one.call for one in profile.operators))
    total = sum(sizes)
    found: dict[str, tuple[str, Way]] = {}
    for name, solve in (("knapsack", dp_knapsack), ("greedy knapsack", greedy_knapsack)):
        for share in shares:
            _, chosen, _ = solve([size / total for size in sizes], times, share)
            saved = {items[place] for place in chosen}
            runners = [
                in_checkpoint(context_fn=saving({one[1:] for one in saved if one[0] == call}))
                for call in calls
            ]
            found[f"{name}, {share:.0%}"] = KNAPSACK, each(runners.__getitem__)
    return found


def compiled(budgets: Sequence[float]) -> dict[str, tuple[str, Way]]:
    """torch.compile with each `activation_memory_budget`. It also fuses kernels."""

    def way_of(budget: float) -> Way:
        def run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
            for block in blocks:
                x = block(x)
            return x

        run.__code__ = run.__code__.replace(co_name=f"run_{budget:.0%}")  # dynamo caches by code
        in_graphs = torch.compile(run, fullgraph=True)

        def way(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
            with functorch_config.patch(activation_memory_budget=budget):
                result: Tensor = in_graphs(blocks, x)
            return result

        return way

    return {f"torch.compile, {budget:.0%}": (COMPILED, way_of(budget)) for budget in budgets}


def saving(saved: set[tuple[str, int]]) -> Callable[[], Any]:
    """A SAC policy that saves the given calls: (operator name, count of its call from 1)."""

    def decide(
        calls: dict[bool, Counter[str]], context: Any, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        name = str(op)
        calls[context.is_recompute][name] += 1
        if (name, calls[context.is_recompute][name]) in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        calls: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        return create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
            functools.partial(decide, calls)
        )

    return contexts
