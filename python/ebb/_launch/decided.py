"""The result of planning for a budget: a plan, or recomputation of all blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebb import _C
from ebb._plan.apply.module_policies import ModulePolicies
from ebb._plan.plan import Plan, plan_of
from ebb._plan.profile.measuring import Measured
from ebb._report.planned import ReportedPlan
from ebb._report.text import size
from ebb._support.log import log
from ebb._support.names import in_ranges
from ebb.policies import recompute_all

# Fields of `Decided` that files and other ranks get as they are.
_FIGURES = ("summary", "peak", "plain_peak", "too_small")


@dataclass(frozen=True)
class Decided:
    regions: ModulePolicies  # blocks by their names; other blocks run as in eager
    summary: str  # the plan in words
    peak: int  # predicted peak bytes that a step allocates
    plain_peak: int  # the same without regions
    too_small: str  # why the budget is too small; empty if the plan stays within it
    reported: ReportedPlan | None  # the plan as reports show it; None: reports do not know it

    def figures(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIGURES}

    @staticmethod
    def of(
        regions: ModulePolicies, figures: Mapping[str, Any], reported: ReportedPlan | None
    ) -> Decided:
        """The decision whose `figures` returned `figures`."""
        return Decided(regions, **{name: figures[name] for name in _FIGURES}, reported=reported)

    def to_json(self) -> dict[str, Any]:
        """The decision as values of JSON, which other ranks read by `from_json`."""
        reported = None if self.reported is None else self.reported.to_dict()
        return {"policies": self.regions._to_toml(), **self.figures(), "reported": reported}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Decided:
        """Raises KeyError, TypeError or ValueError if another version of ebb wrote the values."""
        regions = ModulePolicies._parse(values["policies"], "the plan of another rank")
        reported = values["reported"]
        reported = None if reported is None else ReportedPlan.from_dict(reported)
        return Decided.of(regions, values, reported)


def decided_by(plan: Plan, too_small: str = "") -> Decided:
    summary = plan.summary().removeprefix("ebb: ")
    return Decided(plan._regions, summary, plan.peak, plan.plain_peak, too_small, _reported(plan))


def least_of(measured: Measured, budget: int | float, why: str) -> Decided:
    """The plan with the lowest predicted peak, or recomputation of all blocks, if its measured peak
    is lower. `why` the budget is too small."""
    plan = plan_of(measured, budget, at_least=True)
    peak = measured.profile.peak
    if plan.peak < peak:
        return decided_by(plan, why)
    names = dict.fromkeys(operator.region for operator in measured.profile.operators)
    summary = (
        f"{len(names)} regions ({', '.join(in_ranges(names))}) that recompute everything; a "
        f"profiled step of this kind allocated {size(peak)}"
    )
    regions = ModulePolicies(dict.fromkeys(names, recompute_all), ahead=False)
    too_small = why if peak > plan.budget else ""
    reported = _reported(plan, measured)
    return Decided(regions, summary, peak, plan.plain_peak, too_small, reported)


def _reported(plan: Plan, measured: Measured | None = None) -> ReportedPlan | None:
    """The plan as reports show it, without the measurements, which would stay in memory."""
    try:
        reported = plan._for_reports(measured)
        reported.keep_points(_C.is_reporting())
        return reported
    except Exception:  # an error in reports must not end the plan
        log.info("could not prepare the plan for reports; they will not show it", exc_info=True)
        return None
