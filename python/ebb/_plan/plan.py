"""Plans: what to keep so that a step stays in a budget of memory, and what that costs."""

from __future__ import annotations

import glob
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from ebb import ahead
from ebb._plan.budget import BudgetError, NothingToPlanError, allowed, in_all, read_budget
from ebb._plan.choice import PLAIN
from ebb._plan.choose import Chooser, Chosen
from ebb._plan.for_reports import measured_course, reported, reported_as_measured
from ebb._plan.in_words import explained, least_explained, summary
from ebb._plan.measured import Measured
from ebb._plan.measuring import measure, measure_again
from ebb._plan.module_policies import ModulePolicies
from ebb._plan.pareto import Pareto, ParetoPoint
from ebb._plan.process_settings import ProcessSettings
from ebb._plan.profile import Profile
from ebb._plan.rules import policy_of
from ebb._plan.simulate import Estimate, Simulator
from ebb._plan.stacks import Stacked, find_stacks
from ebb._policy.policy import Policy
from ebb._region.blocks import block_candidates
from ebb._report import planned
from ebb._report.text import size
from ebb._support.names import in_ranges
from ebb._support.shown import clipped, shown


class Plan(ModulePolicies):
    """What :func:`ebb.plan` decided: which modules become regions, and what each keeps.

    Attributes:
        policies: by the module's fully qualified name. Modules without one stay as they are.
        budget: bytes that the step was allowed to allocate above what is there when it begins.
        peak: what it will allocate at most, in bytes.
        duration: what it will take, in milliseconds.
        plain_peak, plain_duration: what it would allocate and take without regions.
        spread: by how much of the least the slowest of the measured steps took longer: ``duration``
            is no more certain than that.
        replays: how many operators run again.
        pool_bytes: of ``peak``, what page pools take, in bytes.
    """

    def __init__(
        self,
        chooser: Chooser,
        measured: Measured,
        budget: int,
        chosen: Chosen,
        stacked: Stacked | None = None,
    ) -> None:
        policies = _policies(chooser, chosen, measured.whole, stacked)
        super().__init__(policies)
        found = chooser.estimate(chosen)
        self.budget = budget
        self.peak, self.duration, self.replays = found.peak, found.duration, found.replays
        plain = chooser.simulator.plain
        self.plain_duration = plain.duration
        self.plain_peak = plain.peak
        self.spread = measured.spread
        self.pool_bytes = chooser.pool_bytes(chosen)
        self.settings = ProcessSettings(
            _transfers(chooser, chosen),
            ahead=chooser.simulator.ahead or not (policies and ahead_is_on()),
            pages=self.pool_bytes > 0,
        )
        self._chooser, self._chosen = chooser, chosen
        self._reported: planned.ReportedPlan | None = None  # of the last apply()

    def _is_applied(self, model: torch.nn.Module, undo: ExitStack) -> None:
        self._reported = self._for_reports()
        planned.begins(self._reported)
        undo.callback(planned.ends, self._reported)
        weakref.finalize(model, planned.forget, self._reported)

    def _for_reports(self, measured: Measured | None = None) -> planned.ReportedPlan:
        """What reports tell of it.

        Args:
            measured: all is recomputed, as it was in that step, in place of what was chosen.
        """
        if measured is not None:
            return reported_as_measured(self, Chooser(Simulator(measured)), measured)
        return reported(self, self._chooser, self._chosen)

    def measure(self, step: Callable[[], object]) -> Profile:
        """Run a step five times under this plan, so that reports of steps under it have what was
        measured beside what was predicted.

        Args:
            step: what was planned. The plan is applied.

        Returns:
            One of the steps, for :meth:`plot`. It takes longer since it is recorded.

        Raises:
            RuntimeError: the plan is not applied; or as :func:`ebb.profile`.
        """
        if self._reported is None or not planned.is_in_place(self._reported):
            raise RuntimeError("ebb: a step under a plan is measured: call apply(model) first")
        found, duration = measure_again(step)
        self._reported.measured = measured_course(found, duration)
        return found

    @classmethod
    def load(cls, path: str | Path) -> NoReturn:
        """A plan's file has its policies alone: ``ebb.ModulePolicies.load(path)`` reads them.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "ebb: a file has the policies of a plan, and not what was measured for it: "
            f"ebb.ModulePolicies.load({str(path)!r}) reads them"
        )

    def summary(self) -> str:
        """What was decided, in one line."""
        return summary(self)

    def __repr__(self) -> str:
        return f"<ebb.Plan: {self.summary().removeprefix('ebb: ')}>"

    def explain(self) -> str:
        """What each region keeps and makes again, and what that costs, in words."""
        return explained(self, self._chooser, self._chosen)

    def pareto(self, points: int = 20) -> Pareto:
        """What other budgets would cost.

        Args:
            points: how many, from the least budget to one at which nothing is given up.

        Raises:
            TypeError: ``points`` is no int.
            ValueError: it is less than 2.
        """
        if isinstance(points, bool) or not isinstance(points, int):
            raise TypeError(f"ebb: points must be an int; got {shown(points)}")
        if points < 2:
            raise ValueError(f"ebb: points must be 2 or more; got {points}")
        least = self._chooser.estimate(self._chooser.least())
        plain = self._chooser.estimate(self._chooser.plain())
        budgets = [
            least.peak + (plain.peak - least.peak) * place // (points - 1)
            for place in range(points)
        ]
        found = [self._estimate(budget) for budget in dict.fromkeys(budgets)]
        return Pareto(
            [ParetoPoint(budget, one.peak, one.duration, one.replays) for budget, one in found],
            self.plain_peak,
            self.plain_duration,
            self.budget,
        )

    def _estimate(self, budget: int) -> tuple[int, Estimate]:
        chosen = self._chooser.choose(budget)
        return budget, self._chooser.estimate(chosen or self._chooser.least())


def _policies(
    chooser: Chooser, chosen: Chosen, whole: str | None, stacked: Stacked | None
) -> dict[str, Policy]:
    made: dict[tuple[int, object], Policy] = {}
    policies: dict[str, Policy] = {}
    step = chooser.simulator.step
    for region, point in chosen.items():
        if point.choice is PLAIN:
            continue
        of_stack = stacked and stacked.policies(region, point.choice)
        if of_stack:
            policies |= of_stack
            continue
        key = chooser.alike[region], point.choice
        if key not in made:
            made[key] = policy_of(point.choice, step.names_of(chooser.calls[region][0]))
        policies["" if region == whole else region] = made[key]
    return policies


def _transfers(chooser: Chooser, chosen: Chosen) -> dict[str, int]:
    """Of OFFLOAD, with which copies are as they were simulated; none if nothing leaves."""
    if not any(point.sends for point in chosen.values()):
        return {}
    window, least = chooser.simulator.window, chooser.simulator.link.least
    return {
        "min_bytes": least,
        "in_flight_bytes": window,
        "prefetch_bytes": window,
        "keep_last": 0,
    }


def plan_of(
    measured: Measured,
    budget: int | float,
    *,
    at_least: bool = False,
) -> Plan:
    """The plan for a step that was measured.

    Args:
        measured: the step.
        budget: bytes, all told, or a share, see :func:`ebb.plan`.
        at_least: if the budget is too small, give the plan that needs the least.

    Raises:
        BudgetError: the budget is too small.
        ValueError: no region ran forward and backward.
    """
    alone = replace(measured, link=None, pager=None)
    chooser = Chooser(Simulator(alone))
    simulator = chooser.simulator
    if not any(call.asked for call in simulator.step.calls):
        raise NothingToPlanError(
            "ebb: there is nothing to plan: no module that could be a region ran forward and "
            "backward in the step"
        )
    plain = simulator.plain.peak
    bytes_allowed = allowed(budget, measured.base, plain)
    if isinstance(budget, float) and budget == 1.0:
        bytes_allowed = plain  # a margin would take some of what the step needs
    ways = list(_with_more_ways(measured))
    choosers = []
    if ahead_is_on():
        choosers = [Chooser(Simulator(one, ahead=True)) for one in (alone, *ways)]
    choosers += [chooser, *(Chooser(Simulator(one)) for one in ways)]
    stacked = None
    if chooser.estimate(chooser.least_made_once()).peak > bytes_allowed:
        stacked = _stacked(measured, simulator)
    if stacked is not None:
        choosers.append(Chooser(stacked.simulator, given=stacked.choices))
    found = _fastest(choosers, bytes_allowed)
    if found is None:
        chooser, chosen = min(
            ((one, one.least()) for one in choosers),
            key=lambda pair: pair[0].estimate(pair[1]).peak,
        )
        peak = chooser.estimate(chosen).peak
        found = _fastest([chooser], peak) or (chooser, chosen)
        if not at_least:
            minimum = in_all(measured.base, peak)
            message = least_explained(budget, measured.base, plain, peak, minimum, chooser, chosen)
            raise BudgetError(message, minimum)
    return Plan(found[0], measured, bytes_allowed, found[1], stacked)


def _with_more_ways(measured: Measured) -> Iterable[Measured]:
    """Where values can leave, or rows go to pools: with one of them, and with both."""
    if measured.pager is not None and measured.link is not None:
        yield replace(measured, link=None)
        yield replace(measured, pager=None)
    if measured.pager is not None or measured.link is not None:
        yield measured


def ahead_is_on() -> bool:
    return int(ahead.configure()["regions"]) > 0


def _stacked(measured: Measured, simulator: Simulator) -> Stacked | None:
    """With several blocks in one region."""
    stacks = find_stacks(simulator.step, measured.parents)
    return Stacked(measured, simulator, stacks) if stacks else None


def _fastest(choosers: Iterable[Chooser], budget: int) -> tuple[Chooser, Chosen] | None:
    """With and without copies: where those are the bottleneck, fewer of them are not tried by the
    one that makes some."""
    found = [(one, chosen) for one in choosers if (chosen := one.choose(budget)) is not None]
    return min(found, key=lambda pair: pair[0].estimate(pair[1]).duration, default=None)


def plan(
    model: torch.nn.Module,
    step: Callable[[], object],
    budget: int | float | str,
    *,
    modules: str | Iterable[str] | None = None,
) -> Plan:
    """Decide what to keep so that a step stays in a budget of memory and takes the least time.

    Runs the step about eight times, with every block a region that recomputes everything. Then
    decides for each saved tensor whether to keep or to recompute it, whichever costs less. Blocks
    that run the same operators get the same decisions where the budget allows it. The model is not
    changed: ``plan.apply(model)`` does that.

    Args:
        model: no region may be in it yet.
        step: runs a forward of the model and its backward, and whatever else belongs to a step. It
            must do the same each time.
        budget: bytes, an int or text such as ``"24GiB"``: weights and whatever else is there
            when the step begins included. On the CPU that is the model's parameters, their
            gradients and buffers; on an accelerator all that is allocated there. Or a share, a
            float or text such as ``"40%"``, of what the step allocates at most without regions.
        modules: globs of modules that may become regions, as for :func:`ebb.apply`. Default:
            the repeated blocks of the model; if the budget is too small for these, which leave
            what is between them as it is, the model's parts, or the model as one region.

    Returns:
        A :class:`Plan`. If the step fits as it is, no module becomes a region.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument makes no sense; or no module that may be a region runs in the step;
            or the step has a region already.
        BudgetError: the budget is too small. The message names the least, and what makes it.
        RuntimeError: the step did not do the same each time.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 64),
        ...     torch.nn.GELU(), torch.nn.Linear(64, 32)) for _ in range(4)))
        >>> x = torch.ones(16, 32)
        >>> plan = ebb.plan(model, lambda: model(x).sum().backward(), budget=0.8)
        >>> plan.peak < plan.plain_peak
        True
        >>> handle = plan.apply(model)
    """
    if isinstance(step, torch.nn.Module) and not isinstance(model, torch.nn.Module):
        warnings.warn(
            "ebb: ebb.plan takes the model first: ebb.plan(model, step, budget). The next release "
            "does not take it second.",
            FutureWarning,
            stacklevel=2,
        )
        model, step = step, model
    if not callable(step):
        raise TypeError(f"ebb: step must be a function; got {type(step).__name__}")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"ebb: model must be a torch.nn.Module; got {type(model).__name__}")
    given = read_budget(budget)
    if modules is not None:
        return plan_of(measure(step, model, _globs(modules), given), given)
    tried: list[tuple[BudgetError, str]] = []
    for names in block_candidates(model):
        measured = measure(step, model, [glob.escape(name) for name in names], given)
        try:
            return plan_of(measured, given)
        except BudgetError as error:
            tried.append((error, ", ".join(in_ranges(name or "the model" for name in names))))
    least, _ = min(tried, key=lambda one: one[0].minimum)
    ways = "; ".join(f"{size(error.minimum)} with {clipped(what, 100)}" for error, what in tried)
    raise BudgetError(
        f"{least}. The lowest budgets of all regions that were tried: {ways}", least.minimum
    )


def _globs(modules: str | Iterable[str]) -> Sequence[str]:
    if not isinstance(modules, Iterable):
        raise TypeError(f"ebb: modules must be a string or several; got {shown(modules)}")
    return [modules] if isinstance(modules, str) else list(modules)
