"""Plans in words."""

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

_EQUAL, _UNKNOWN = 0.01, 0.3  # of measured times: differences that are told of, and too large


class Plan(Protocol):
    """What is told of an ``ebb.Plan``."""

    policies: dict[str, Policy]
    settings: ProcessSettings
    budget: int
    peak: int
    duration: float
    plain_peak: int
    plain_duration: float
    spread: float


def summary(plan: Plan) -> str:
    """One line."""
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
    """As precise as the measured times: they differed by ``plan.spread``."""
    ratio = plan.duration / plan.plain_duration
    if plan.spread < _EQUAL:
        return f"{ratio - 1:.1%} more time"
    if plan.spread > _UNKNOWN:
        return "more time: how much is unknown, since the times of measured steps differ too much"
    least = max(0.0, ratio / (1 + plan.spread) - 1)
    return f"{least:.0%} to {ratio * (1 + plan.spread) - 1:.0%} more time"


def explained(plan: Plan, chooser: Chooser, chosen: Chosen) -> str:
    """A paragraph for each kind of region."""
    lines = [summary(plan).removeprefix("ebb: "), ""]
    for cut in cuts_of(chooser, chosen):
        lines += _paragraph(cut)
    return "\n".join(lines)


def _paragraph(cut: Cut) -> list[str]:
    if not cut.is_region:
        return [f"{cut.modules}: no region; {size(cut.held)} each are kept, as in plain eager"]
    lines = [f"{cut.modules}: {size(cut.held)} each are kept, {cut.added:.2f} ms each are added"]
    if cut.kept:
        lines.append("  kept: " + _sizes(cut.kept))
    if cut.away:
        lines.append("  moved to the host, and back: " + _sizes(cut.away))
    if cut.paged:
        lines.append("  rows that live go to page pools, and back: " + _sizes(cut.paged))
    if cut.again:
        lines.append(
            "  made again: "
            + ", ".join(
                f"{op} ({size(given_up)} given up, {time:.2f} ms)"
                for op, (given_up, time) in cut.again.items()
            )
        )
    if cut.often:
        parts = [f"{op} ({count} times)" for op, count in cut.often.items() if count > 1]
        lines.append("  of these, each time that something is made of them: " + ", ".join(parts))
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
    """Why a budget is too small."""
    if isinstance(budget, float):
        share = min(1.0, peak / max(1, plain_peak) + 0.0051)
        asked, least = f"{budget:.1%}", f"{share:.0%}, or {size(minimum)} all told"
    else:
        asked, least = size(budget), size(minimum)
    makers = chooser.who_holds(chosen)
    parts = ", ".join(f"{size(held)} {who}" for who, held in makers[:4])
    return (
        f"ebb: a budget of {asked} is too small: the least is {least}. "
        f"{size(base)} are there when the step begins; with all recomputed it takes "
        f"{size(peak)} more: {parts}. A smaller batch, or parameters and states elsewhere, would "
        "make room"
    )
