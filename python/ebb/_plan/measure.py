"""Measures the steps of `ebb.plan`. In: a function that runs a step. Out: a `Measured`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from ebb import _C
from ebb._config import config
from ebb._plan.choose.memory_budget import allowed
from ebb._plan.profile.callers import Callers, parent_of
from ebb._plan.profile.measuring import (
    OFFLOAD_STEPS,
    RECOMPUTED,
    Measured,
    MeasureSequence,
    base_bytes,
    device_of,
)
from ebb._plan.profile.profile import Profile, from_first_operator
from ebb._plan.profile.recording import Purpose, run
from ebb._plan.simulate.simulator import Simulator
from ebb._region.apply import apply
from ebb._support.shown import shown
from ebb.policies import recompute_all

_UNDER_A_PLAN = (Purpose.WARM_UP, Purpose.PROFILE, *[Purpose.TIME] * 3)


def measure(
    step: Callable[[], object],
    model: torch.nn.Module,
    modules: Sequence[str],
    budget: int | float = 1.0,
) -> Measured:
    """Run a step of :func:`ebb.plan` about eight times, with regions that recompute everything.
    `budget`: as in `window_of_all`.

    Raises:
        ValueError: the step has a region already; or as :func:`ebb.apply`.
        RuntimeError: as :func:`ebb.profile`.
    """
    root = type(model).__name__
    with ExitStack() as undo:
        # Replays ahead would hide part of the replay time.
        undo.enter_context(config.patch(ahead_regions=0))
        with apply(model, recompute_all, modules) as handle:
            parents = _parents(step, model, [name for name in handle.names if name])
            sequence = MeasureSequence(
                device_of([model]),
                lambda measured: window_of_all(measured, budget),
                (*RECOMPUTED, Purpose.TIME),
                (*OFFLOAD_STEPS, *[Purpose.TIME] * 2),
            )
            sequence.base = base_bytes([model])  # after a step, so that gradients count
            for duration, profile in run(step, sequence.purposes()):
                if profile is not None:
                    _check_regions(profile, {name or root for name in handle.names})
                sequence.record(duration, profile)
        if sequence.window is not None:
            with sequence.transfers(), apply(model, sequence.policy, modules):
                for ended in run(step, sequence.purposes()):
                    sequence.record(*ended)
    whole = root if "" in handle.names else None
    return replace(sequence.measured(), parents=parents, root=root, whole=whole)


def window_of_all(measured: Measured, budget: int | float) -> int | None:
    """Bytes in flight in steps that offload all saved tensors; None if such a step would exceed
    both the budget and the measured peak."""
    if measured.link is None:
        return None
    simulator = Simulator(measured)
    most = max(allowed(budget, measured.base, simulator.plain.peak), measured.profile.peak)
    fits = simulator.estimate(simulator.all_offloaded).peak <= most
    return simulator.window if fits else None


def _parents(
    step: Callable[[], object], model: torch.nn.Module, names: Iterable[str]
) -> dict[str, str]:
    """By module name, the name of the module whose forward calls it."""
    parents = {name: parent_of(model, name) for name in names}
    get = model.get_submodule
    callers = Callers((name, get(name), get(parent)) for name, parent in parents.items())
    try:
        step()
    finally:
        inside = callers.close()
    return {name: parent for name, parent in parents.items() if name in inside}


def _check_regions(profile: Profile, known: set[str]) -> None:
    others = {operator.region for operator in profile.operators} - known
    if others:
        raise ValueError(
            f"ebb: the step already runs a region, {shown(min(others))}. ebb.plan chooses the "
            "regions itself: remove that ebb.apply, ebb.region or checkpoint call first"
        )


def measure_again(step: Callable[[], object]) -> tuple[Profile, float]:
    """Profile and time a step under the plan in place. The time is without recording."""
    steps = _C.set_reporting(0)
    try:
        (_, _), (_, profile), *timed = run(step, _UNDER_A_PLAN)
        assert profile is not None
        return from_first_operator(profile)[0], min(duration for duration, _ in timed)
    finally:
        _C.set_reporting(steps)
