"""Compares the predicted time and peak memory of plans with measured ones."""

from __future__ import annotations

import glob
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from environment import device, quick
from planner_models import MODELS, Model, make
from steps import equal
from timing import Trial, interleaved, time_step
from torch import Tensor

import ebb
from ebb._plan.choose.memory_budget import BudgetError
from ebb._plan.measure import measure
from ebb._plan.plan import Plan, plan_of
from ebb._plan.profile.measuring import Measured
from ebb._region.blocks import find_blocks

Row = dict[str, Any]

SHARES = (0.8, 0.6, 0.45, 0.3)  # budgets, as shares of eager's peak
PEAK_ERROR = 0.03
TIME_ERROR = 0.10
LEAST = "least"


def blocks_of(module: torch.nn.Module) -> list[str]:
    return [glob.escape(name) for name in find_blocks(module)]


def least_plan(measured: Measured, plain_peak: int) -> tuple[Plan, float]:
    """The plan for the lowest possible budget, and this budget as a share of eager's peak."""
    try:
        plan_of(measured, 1)
    except BudgetError as error:
        least = error.minimum
    return plan_of(measured, least), (least - measured.base) / plain_peak


def plans_of(measured: Measured, plain_peak: int) -> list[tuple[str, float, Plan]]:
    """For each possible budget: its name, its share of eager's peak, and its plan."""
    found = []
    least, least_share = least_plan(measured, plain_peak)
    for share in SHARES:
        if share > least_share:
            found.append((f"{share:.0%}", share, plan_of(measured, share)))
    return [*found, (LEAST, least_share, least)]


def state_after_step(model: Model) -> list[Tensor | None]:
    """Gradients and buffers after one step. Restores the model's own gradients and buffers."""
    before = [buffer.clone() for buffer in model.module.buffers()]
    held = [parameter.grad for parameter in model.module.parameters()]
    model.clear_gradients()
    model.step()
    found: list[Tensor | None] = [parameter.grad for parameter in model.module.parameters()]
    found += [buffer.clone() for buffer in model.module.buffers()]
    with torch.no_grad():
        for buffer, value in zip(model.module.buffers(), before, strict=True):
            buffer.copy_(value)
    for parameter, gradient in zip(model.module.parameters(), held, strict=True):
        parameter.grad = gradient
    return found


def exactness(model: Model, plans: list[tuple[str, float, Plan]]) -> dict[str, bool]:
    """For each budget, whether gradients and buffers are those of a plain step, bit for bit."""
    expected = state_after_step(model)
    found = {}
    for budget, _, plan in plans:
        with plan.apply(model.module):
            found[budget] = equal(state_after_step(model), expected)
    return found


def measure_model(name: str, seconds: float) -> list[Row]:
    """One row for each budget.

    Args:
        name: the model's name.
        seconds: total time for timing steps.
    """
    model = make(name, quick())
    model.step()  # allocates the gradients, so peaks do not include them
    measured = measure(model.step, model.module, blocks_of(model.module))
    plain_peak = ebb.profile(model.step, steps=1).peak
    plans = plans_of(measured, plain_peak)
    times = interleaved(
        {None: trial(model, None)} | {name: trial(model, plan) for name, _, plan in plans},
        0 if quick() else seconds,
        1 if quick() else 5,
    )
    plain = times[None]["step"]
    exact = exactness(model, plans)
    rows = []
    for budget, share, plan in plans:
        with plan.apply(model.module):
            peak = ebb.profile(model.step, steps=1).peak
        took = times[budget]["step"]
        rows.append(
            {
                "model": name,
                "budget": budget,
                "share": share,
                "plain_peak": plain_peak,
                "plain_milliseconds": plain.least * 1e3,
                "predicted_peak": plan.peak,
                "peak": peak,
                "predicted_ratio": plan.duration / plan.plain_duration,
                "ratio": took.least / plain.least,
                "ratio_of_medians": took.median / plain.median,
                "predicted_milliseconds": plan.duration,
                "milliseconds": took.least * 1e3,
                "steps": took.trials,
                "replays": plan.replays,
                "regions": len(plan.policies),
                "exact": exact[budget],
            }
        )
    return rows


def trial(model: Model, plan: Plan | None) -> Trial:
    def run() -> dict[str, float]:
        applied: AbstractContextManager[object] = nullcontext()
        if plan is not None:
            applied = plan.apply(model.module)
        with applied:
            return time_step(model.step, device())

    return run


def measure_accuracy(only: str, seconds: float) -> list[Row]:
    rows = []
    for name in MODELS:
        if only.lower() in name.lower():
            found = measure_model(name, seconds)
            for row in found:
                print(line(row), flush=True)
            rows += found
    return rows


def line(row: Row) -> str:
    return (
        f"  {row['model']:8s} {row['budget']:>6s}  peak {row['predicted_peak']:12,} "
        f"{peak_error(row):+.2%}  time {row['predicted_ratio']:.3f} measured {row['ratio']:.3f} "
        f"[{row['ratio_of_medians']:.3f}]"
    )


def peak_error(row: Row) -> float:
    return float(row["peak"] / row["predicted_peak"] - 1)


def time_error(row: Row) -> float:
    return float(row["ratio"] / row["predicted_ratio"] - 1)


def goals(rows: list[Row]) -> dict[str, bool]:
    met = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        found = [row for row in rows if row["model"] == name]
        peak = max((peak_error(row) for row in found), key=abs)
        time = max((time_error(row) for row in found), key=abs)
        inside = all(row["peak"] <= row["share"] * row["plain_peak"] for row in found)
        met[f"{name}: peak {peak:+.2%} of the predicted one, at most {PEAK_ERROR:.0%}"] = (
            abs(peak) <= PEAK_ERROR
        )
        met[f"{name}: time {time:+.1%} of the predicted one, at most {TIME_ERROR:.0%}"] = (
            abs(time) <= TIME_ERROR
        )
        met[f"{name}: never above the budget"] = inside
        met[f"{name}: gradients and buffers are plain's, bit for bit"] = all(
            row["exact"] for row in found
        )
    return met


HEAD = (
    "model",
    "budget",
    "predicted peak",
    "measured",
    "off by",
    "predicted time",
    "measured",
    "off by",
    "replays",
)


def cells(row: Row) -> list[str]:
    """Formats a row: peaks in MiB and as shares of eager's, times over eager's."""

    def mib(size: int) -> str:
        return f"{size / 2**20:.1f} ({size / row['plain_peak']:.1%})"

    return [
        row["model"],
        row["budget"] if row["budget"] != LEAST else f"{LEAST} ({row['share']:.1%})",
        mib(row["predicted_peak"]),
        mib(row["peak"]),
        f"{peak_error(row):+.2%}",
        f"{row['predicted_ratio']:.3f}",
        f"{row['ratio']:.3f} [{row['ratio_of_medians']:.3f}]",
        f"{time_error(row):+.1%}",
        str(row["replays"]),
    ]
