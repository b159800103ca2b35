"""Time and peak memory of a transformer under plans and under other tools."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from environment import device, quick
from host_memory import most_allocated
from planner_peers import COMPILED, Transformer, checkpointing, compiled, in_turn, knapsack
from steps import equal
from systems import replays_ahead
from timing import Trial, interleaved, time_step

import ebb
from ebb._plan.choose.memory_budget import BudgetError, in_all
from ebb._plan.measure import measure
from ebb._plan.plan import Plan, plan_of
from ebb._plan.profile.measuring import Measured
from ebb._region.blocks import find_blocks

Row = dict[str, Any]

EAGER, PLANS, AHEAD = "eager", "ebb.plan", "ebb.plan, ahead"
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.17, 0.14)
BUDGETS_AHEAD = (0.8, 0.6, 0.45, 0.3)
KNAPSACKS = (0.25, 0.5, 0.75)
COMPILED_BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
NO_PEERS = (EAGER, PLANS, AHEAD, COMPILED)  # no peers of plans; COMPILED has faster kernels
NOISE = 0.02  # relative difference between times of the same program
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


@dataclass
class Entry:
    """One way to run the transformer, to be measured.

    Attributes:
        name, family: shown in the results.
        during: makes the context in which a step runs; entering it is not timed.
        predicted: for a plan, its predicted peak in bytes and its predicted time over eager's.
        budget: for a plan, its budget as a share of eager's peak.
    """

    name: str
    family: str
    during: Callable[[], AbstractContextManager[object]]
    predicted: tuple[int, float] | None = None
    budget: float | None = None


class Curves:
    """Measures all ways to run one transformer.

    Args:
        width, depth: size of the transformer.
    """

    def __init__(self, width: int, depth: int) -> None:
        torch.manual_seed(0)
        self.module = Transformer(width, depth)
        self.x = torch.randn(2, 128 if width > 100 else 16, width)
        self.step()  # allocates the gradients, so peaks do not include them
        self.measured = measure(self.step, self.module, blocks_of(self.module))
        self.plain_peak = ebb.profile(self.step, steps=1).peak
        self.entries = [Entry(EAGER, EAGER, nullcontext)]

    def step(self) -> None:
        self.module(self.x).backward()

    def add_peers(self) -> None:
        ways = checkpointing(len(self.module.blocks))
        ways |= knapsack(self.measured.profile, KNAPSACKS)
        if not quick():  # compiling takes a minute
            ways |= compiled(COMPILED_BUDGETS)
        for name, (family, way) in ways.items():
            self.entries.append(Entry(name, family, lambda way=way: self._by(way)))

    @contextmanager
    def _by(self, way: Any) -> Iterator[None]:
        self.module.way = way
        try:
            yield
        finally:
            self.module.way = in_turn

    def add_plans(self, peaks: dict[str, int]) -> None:
        """Adds plans for the fixed budgets and for each peer's peak as a budget.

        A budget that is too small is left out.

        Args:
            peaks: peak bytes of each peer by name.
        """
        self._add_plans(PLANS, nullcontext, BUDGETS, peaks)
        with replays_ahead():
            self._add_plans(AHEAD, replays_ahead, BUDGETS_AHEAD, {})

    def _add_plans(
        self,
        family: str,
        around: Callable[[], AbstractContextManager[object]],
        budgets: Sequence[float],
        peaks: dict[str, int],
    ) -> None:
        plans: list[tuple[str, float, Plan]] = []
        for share in budgets:
            self._try(plans, f"{share:.0%}", share, share)
        plan, share = least_plan(self.measured, self.plain_peak)
        plans.append((LEAST, share, plan))
        for peer, peak in peaks.items():
            budget = in_all(self.measured.base, peak)
            self._try(plans, f"as {peer}", budget, peak / self.plain_peak)
        for name, share, plan in plans:
            self.entries.append(
                Entry(
                    f"{family}, {name}",
                    family,
                    lambda plan=plan: self._in_plan(plan, around),
                    (plan.peak, plan.duration / plan.plain_duration),
                    share,
                )
            )

    def _try(
        self, plans: list[tuple[str, float, Plan]], name: str, budget: float, share: float
    ) -> None:
        with suppress(BudgetError):
            plan = plan_of(self.measured, budget)
            if not any(plan.policies == other.policies for _, _, other in plans):
                plans.append((name, share, plan))

    @contextmanager
    def _in_plan(
        self, plan: Plan, around: Callable[[], AbstractContextManager[object]]
    ) -> Iterator[None]:
        with around(), plan.apply(self.module):
            yield

    def peak(self, entry: Entry) -> int:
        """The peak of the bytes that a step allocates."""
        with entry.during():
            if entry.family == AHEAD:  # a profile records only one of the two threads
                self.step()
                return most_allocated(self.step)
            return ebb.profile(self.step, steps=1).peak

    def gradients(self, entry: Entry) -> list[torch.Tensor | None]:
        parameters = list(self.module.parameters())
        before = [one.grad for one in parameters]
        self.module.zero_grad(set_to_none=True)
        with entry.during():
            self.step()
        found = [one.grad for one in parameters]
        for one, gradient in zip(parameters, before, strict=True):
            one.grad = gradient
        return found

    def trial(self, entry: Entry) -> Trial:
        def run() -> dict[str, float]:
            with entry.during():
                return time_step(self.step, device())

        return run


def measure_curves(seconds: float) -> list[Row]:
    """Measures all entries; one row for each, eager first."""
    curves = Curves(*((64, 4) if quick() else (512, 12)))
    curves.add_peers()
    peaks = {one.name: curves.peak(one) for one in curves.entries}
    curves.add_plans({name: peak for name, peak in peaks.items() if name != EAGER})
    expected = curves.gradients(curves.entries[0])
    exact = {one.name: equal(curves.gradients(one), expected) for one in curves.entries}
    peaks |= {one.name: curves.peak(one) for one in curves.entries if one.name not in peaks}
    times = interleaved(
        {one.name: curves.trial(one) for one in curves.entries},
        0 if quick() else seconds,
        1 if quick() else 10,
    )
    eager = times[EAGER]["step"]
    return [
        {
            "name": one.name,
            "family": one.family,
            "budget": one.budget,
            "peak": peaks[one.name],
            "share": peaks[one.name] / peaks[EAGER],
            "ratio": times[one.name]["step"].least / eager.least,
            "ratio_of_medians": times[one.name]["step"].median / eager.median,
            "milliseconds": times[one.name]["step"].least * 1e3,
            "steps": times[one.name]["step"].trials,
            "predicted_peak": one.predicted and one.predicted[0],
            "predicted_ratio": one.predicted and one.predicted[1],
            "exact": exact[one.name],
        }
        for one in curves.entries
    ]


def beaten(rows: list[Row], family: str) -> list[tuple[Row, Row]]:
    """Pairs of a plan and a peer that beats it: no more memory, and less time by over NOISE."""
    peers = [row for row in rows if row["family"] not in NO_PEERS]
    return [
        (ours, peer)
        for ours in rows
        if ours["family"] == family
        for peer in peers
        if peer["peak"] <= ours["peak"] and peer["ratio"] < ours["ratio"] * (1 - NOISE)
    ]


def not_matched(rows: list[Row]) -> list[Row]:
    """Peers without an equal plan: one with at most their peak, and at most NOISE slower."""
    ours = [row for row in rows if row["family"] == PLANS]
    peers = [row for row in rows if row["family"] not in NO_PEERS]
    return [
        peer
        for peer in peers
        if not any(
            row["peak"] <= peer["peak"] and row["ratio"] * (1 - NOISE) <= peer["ratio"]
            for row in ours
        )
    ]
