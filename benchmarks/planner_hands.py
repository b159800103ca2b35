"""Compares plans with random policies, such as a user might write, at the same peak memory."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from environment import device, quick
from planner_accuracy import blocks_of, exactness
from planner_models import make
from timing import Trial, interleaved, time_step

import ebb
from ebb._plan.choose.memory_budget import BudgetError, in_all
from ebb._plan.measure import measure
from ebb._plan.plan import Plan, plan_of
from ebb._plan.profile.measuring import Measured

Row = dict[str, Any]

MODELS = ("GPT", "MoE", "U-Net")
SEEDS = range(10)  # one random policy for each seed and model
NOISE = 0.02


class Hand:
    """A random policy for the first blocks: for each operator name it saves all results or
    recomputes all of them."""

    def __init__(self, seed: int, measured: Measured, blocks: list[str]) -> None:
        draw = random.Random(seed)
        names = sorted({one.func_name for one in measured.profile.operators})
        rules = {name: ebb.SAVE for name in names if draw.random() < draw.choice((0.15, 0.5))}
        self.policy = ebb.Policy(rules, default=ebb.RECOMPUTE)
        self.blocks = blocks[: max(1, round(len(blocks) * draw.choice((0.5, 0.75, 1.0))))]

    def apply(self, module: Any) -> AbstractContextManager[object]:
        return ebb.apply(module, self.policy, self.blocks)


def measure_model(name: str, seconds: float) -> list[Row]:
    """One row for each seed.

    Args:
        name: the model's name.
        seconds: total time for timing steps.
    """
    model = make(name, quick())
    model.step()  # allocates the gradients, so peaks do not include them
    blocks = blocks_of(model.module)
    measured = measure(model.step, model.module, blocks)
    ways: dict[str, Hand | Plan | None] = {"plain": None}
    for seed in SEEDS:
        hand = Hand(seed, measured, blocks)
        with hand.apply(model.module):
            model.step()
            peak = ebb.profile(model.step, steps=1).peak
        ways[f"hand {seed}"] = hand
        try:
            ways[f"plan {seed}"] = plan_of(measured, in_all(measured.base, peak))
        except BudgetError:
            continue

    def trial(way: Hand | Plan | None) -> Trial:
        def run() -> dict[str, float]:
            with nullcontext() if way is None else way.apply(model.module):
                return time_step(model.step, device())

        return run

    trials = {name: trial(way) for name, way in ways.items()}
    times = interleaved(trials, 0 if quick() else seconds, 1 if quick() else 8)
    plans = [(name, 0.0, way) for name, way in ways.items() if isinstance(way, Plan)]
    exact = exactness(model, plans)
    plain = times["plain"]["step"].least
    rows = []
    for seed in SEEDS:
        found: Row = {"model": name, "seed": seed, "exact": exact.get(f"plan {seed}", True)}
        for kind in ("hand", "plan"):
            way = ways.get(f"{kind} {seed}")
            peak = ratio = None
            if way is not None:
                with way.apply(model.module):
                    peak = ebb.profile(model.step, steps=1).peak
                ratio = times[f"{kind} {seed}"]["step"].least / plain
            found |= {f"{kind}_peak": peak, f"{kind}_ratio": ratio}
        rows.append(found)
    return rows


def measure_hands(only: str, seconds: float) -> list[Row]:
    return [
        row
        for name in MODELS
        if only.lower() in name.lower()
        for row in measure_model(name, seconds)
    ]


def is_beaten(row: Row) -> bool:
    """True if the random policy beats the plan: no more memory, less time by over NOISE."""
    return row["plan_ratio"] is None or (
        row["hand_ratio"] < row["plan_ratio"] * (1 - NOISE) and row["hand_peak"] <= row["plan_peak"]
    )


def goals(rows: list[Row]) -> dict[str, bool]:
    met = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        found = [row for row in rows if row["model"] == name]
        beaten = [row["seed"] for row in found if is_beaten(row)]
        text = f"{name}: none of {len(found)} policies by hand beats a plan by {NOISE:.0%}"
        met[text + "".join(f"; seed {seed} does" for seed in beaten)] = not beaten
        met[f"{name}: under these plans gradients and buffers are plain's, bit for bit"] = all(
            row["exact"] for row in found
        )
    return met


HEAD = ("model", "seed", "by hand: peak, MiB", "time", "plan: peak", "time")


def cells(row: Row) -> list[str]:
    def mib(size: int | None) -> str:
        return "none" if size is None else f"{size / 2**20:.1f}"

    def times(ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio:.3f}"

    hand = mib(row["hand_peak"]), times(row["hand_ratio"])
    return [row["model"], str(row["seed"]), *hand, mib(row["plan_peak"]), times(row["plan_ratio"])]
