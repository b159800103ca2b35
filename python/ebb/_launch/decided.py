"""The result of planning for a budget: a plan, or recomputation of all blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebb import _C
from ebb._plan.measured import Measured
from ebb._plan.plan import Plan, plan_of
from ebb._plan.process_settings import ProcessSettings
from ebb._policy.policy import Policy
from ebb._report.planned import ReportedPlan
from ebb._report.text import size
from ebb._support.log import log
from ebb._support.names import in_ranges
from ebb.policies import recompute_all


@dataclass(frozen=True)
class Decided:
    """The result of planning.

    Attributes:
        policies: of blocks, by their names; all other blocks run as in eager.
        summary: the plan in words.
        peak: predicted peak bytes that a step allocates.
        plain_peak: the same without regions.
        too_small: why the budget is too small; empty if the plan stays within it.
        settings: process-wide settings that the policies need.
        reported: the plan as reports show it; None: reports do not know the plan.
    """

    policies: Mapping[str, Policy]
    summary: str
    peak: int
    plain_peak: int
    too_small: str = ""
    settings: ProcessSettings = field(default_factory=ProcessSettings)
    reported: ReportedPlan | None = None


def decided_by(plan: Plan, too_small: str = "") -> Decided:
    summary = plan.summary().removeprefix("ebb: ")
    return Decided(
        plan.policies,
        summary,
        plan.peak,
        plan.plain_peak,
        too_small,
        plan.settings,
        _reported(plan),
    )


def least_of(measured: Measured, budget: int | float, why: str) -> Decided:
    """The option with the lowest peak: a plan, or all blocks recomputed as measured, whose peak is
    not estimated.
    """
    plan = plan_of(measured, budget, at_least=True)
    peak = measured.profile.peak
    if plan.peak < peak:
        return decided_by(plan, why)
    names = dict.fromkeys(one.region for one in measured.profile.operators)
    summary = (
        f"{len(names)} regions ({', '.join(in_ranges(names))}), where all is recomputed; such a "
        f"step allocated {size(peak)}"
    )
    return Decided(
        dict.fromkeys(names, recompute_all),
        summary,
        peak,
        plan.plain_peak,
        why if peak > plan.budget else "",
        ProcessSettings(ahead=False),
        reported=_reported(plan, measured),
    )


def _reported(plan: Plan, measured: Measured | None = None) -> ReportedPlan | None:
    """The plan as reports show it, without the measurements, which would stay in memory."""
    try:
        found = plan._for_reports(measured)
        found.keep_points(_C.is_reporting())
        return found
    except Exception:  # an error in reports must not end the plan
        log.info("reports do not know the plan", exc_info=True)
        return None
