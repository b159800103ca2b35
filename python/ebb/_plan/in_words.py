"""Describes plans in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ebb._plan.choose import Chooser, Chosen
from ebb._plan.cuts import cuts_of
from ebb._plan.process_settings import ProcessSettings
from ebb._policy.policy import Policy
from ebb._report.planned import Cut
from ebb._report.text import size
from ebb._support.names import in_ranges

_EQUAL, _UNKNOWN = 0.01, 0.3  # spread of times: exact below the first, unknown above the second


class Plan(Protocol):
    """The part of an ``ebb.Plan`` that is described."""

    policies: dict[str, Policy]
    settings: ProcessSettings
    budget: int
    peak: int
    duration: float
    plain_peak: int
    plain_duration: float
    spread: float


def summary(plan: Plan) -> str:
    """Describe a plan in one line."""
    if not plan.policies:
        return (
            f"ebb: the step fits as it is ({size(plan.plain_peak)} of {size(plan.budget)}): "
            "nothing is recomputed, and no module is a region"
        )
    share = plan.peak / max(1, plan.plain_peak)
    regions = ", ".join(in_ranges(name or "the model" for name in plan.policies))
    many = "region" if len(plan.policies) == 1 else "regions"
    ahead = "" if plan.settings.ahead else ", without replays ahead of backward"
    return (
        f"ebb: {len(plan.policies)} {many} ({regions}); the step will allocate {size(plan.peak)}, "
        f"{share:.0%} of {size(plan.plain_peak)}, and take {_more_time(plan)}{ahead}"
    )


def _more_time(plan: Plan) -> str:
    """Additional time, as precise as the measured times, which differed by ``plan.spread``."""
    ratio = plan.duration / plan.plain_duration
    if plan.spread < _EQUAL:
        return f"{ratio - 1:.1%} more time"
    if plan.spread > _UNKNOWN:
        return "more time (unknown: the times of profiled steps differ too much)"
    least = max(0.0, ratio / (1 + plan.spread) - 1)
    return f"{least:.0%} to {ratio * (1 + plan.spread) - 1:.0%} more time"


def explained(plan: Plan, chooser: Chooser, chosen: Chosen) -> str:
    """One paragraph for each kind of region."""
    lines = [summary(plan).removeprefix("ebb: "), ""]
    for cut in cuts_of(chooser, chosen):
        lines += _paragraph(cut)
    return "\n".join(lines)


def _paragraph(cut: Cut) -> list[str]:
    if not cut.is_region:
        return [f"{cut.modules}: no region; each saves {size(cut.held)}, as in eager"]
    lines = [f"{cut.modules}: each saves {size(cut.held)} and takes {cut.added:.2f} ms more"]
    if cut.kept:
        lines.append("  saved: " + _sizes(cut.kept))
    if cut.away:
        lines.append("  offloaded: " + _sizes(cut.away))
    if cut.paged:
        lines.append("  paged: " + _sizes(cut.paged))
    if cut.again:
        lines.append(
            "  recomputed: "
            + ", ".join(
                f"{op} ({size(given_up)} freed, {time:.2f} ms)"
                for op, (given_up, time) in cut.again.items()
            )
        )
    if cut.often:
        parts = [f"{op} ({count} times)" for op, count in cut.often.items() if count > 1]
        lines.append("  of these, recomputed several times: " + ", ".join(parts))
    return lines


def _sizes(operators: Mapping[str, int]) -> str:
    return ", ".join(f"{op} ({size(nbytes)})" for op, nbytes in operators.items())


def least_explained(
    budget: int | float,
    base: int,
    plain_peak: int,
    peak: int,
    minimum: int,
    chooser: Chooser,
    chosen: Chosen,
) -> str:
    """Explain why a budget is too small."""
    if isinstance(budget, float):
        share = min(1.0, peak / max(1, plain_peak) + 0.0051)
        asked, least = f"{budget:.1%}", f"{share:.0%}, or {size(minimum)} in total"
    else:
        asked, least = size(budget), size(minimum)
    makers = chooser.who_holds(chosen)
    parts = ", ".join(f"{size(held)} {who}" for who, held in makers[:4])
    return (
        f"ebb: a budget of {asked} is too small: the lowest possible budget is {least}. "
        f"{size(base)} exist when the step begins, and the step adds {size(peak)} with everything "
        f"recomputed: {parts}. Use a smaller batch, or move parameters or optimizer states "
        "elsewhere"
    )
