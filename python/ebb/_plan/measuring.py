"""Measures steps for a plan. In: a step, or what a job's steps gave. Out: a `Measured`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ebb import _C, ahead
from ebb._plan.budget import allowed
from ebb._plan.link import measure_link, transfers_of
from ebb._plan.pages import StepsThatRunAgain
from ebb._plan.profile import Profile, from_first_operator, median_of
from ebb._plan.recording import Purpose, run
from ebb._plan.simulate import Measured, Simulator
from ebb._plan.transfers import Link
from ebb._policy.decision import OFFLOAD
from ebb._policy.policy import Policy
from ebb._region.apply import apply
from ebb._support import devices
from ebb._support.shown import shown
from ebb.policies import recompute_all

# Note [Steps that are measured]
# Every block is recomputed in measured steps, except in the offload steps below. The simulator
# computes what other choices would need. Under EBB_BUDGET all measured steps are steps of the job,
# with unchanged results. Such a step counts only if it calls blocks as often as the steps before
# it. If a gradient scaler skips optimizer.step(), two iterations look like one step; ebb then
# measures another step in its place.
#
# On a CPU, torch's profiler reports a free only if it also reported the allocation. Gradients
# allocated in a step that is not recorded would never appear to be freed. So the step before a
# profile is recorded, too.
#
# If values can be offloaded, ebb also runs steps that offload everything that autograd saves,
# unless the predicted peak of such a step is too high. ebb times all of them but the first. The
# time shows how much copies slow computation.
RECOMPUTED = (Purpose.WARM_UP, *[Purpose.PROFILE] * 2, *[Purpose.TIME] * 2)
AWAY = (Purpose.SKIP, Purpose.TIME)
_UNDER_A_PLAN = (Purpose.WARM_UP, Purpose.PROFILE, *[Purpose.TIME] * 3)
offload_all = Policy(default=OFFLOAD)


class Callers:
    """Observes with hooks, until `close`, whether modules run in the forward of the module around
    them. They do not if another module, or a method other than forward, calls them.

    Args:
        pairs: tuples of a module's name, the module, and the module around it.
    """

    def __init__(self, pairs: Iterable[tuple[str, torch.nn.Module, torch.nn.Module]]) -> None:
        self._running: Counter[int] = Counter()  # by id, so that hooks keep no model alive
        self._inside: set[str] = set()
        self._outside: set[str] = set()
        self._hooks: list[Any] = []
        around = set()
        for name, module, outer in pairs:
            self._hooks.append(module.register_forward_pre_hook(self._looking(name, id(outer))))
            around.add(outer)
        for outer in around:
            self._hooks.append(outer.register_forward_pre_hook(self._begins))
            self._hooks.append(outer.register_forward_hook(self._ends, always_call=True))

    def _looking(self, name: str, outer: int) -> Any:
        def look(module: torch.nn.Module, args: object) -> None:
            (self._inside if self._running[outer] else self._outside).add(name)

        return look

    def _begins(self, module: torch.nn.Module, args: object) -> None:
        self._running[id(module)] += 1

    def _ends(self, module: torch.nn.Module, args: object, result: object) -> None:
        self._running[id(module)] -= 1

    def close(self) -> set[str]:
        """Remove the hooks.

        Returns:
            Names of the modules that ran, each time in the forward of the module around them.
        """
        while self._hooks:
            self._hooks.pop().remove()
        return self._inside - self._outside


def measured_of(
    profile: Profile,
    durations: Sequence[float],
    base: int,
    device: torch.device,
    link: Link | None,
    again: StepsThatRunAgain,
) -> Measured:
    """The input of a plan. The lowest duration counts, since other work on the machine only makes
    steps slower. `base`: bytes in use when the last step ended. `again` must be created before
    the steps run.
    """
    profile, freed = from_first_operator(profile)
    return Measured(
        profile,
        min(durations),
        # The step may also free tensors that do not belong to the model, such as the last batch.
        max(0, base - freed),
        freed=freed,
        link=link,
        pager=again.pager(profile, device),
        on_accelerator=device.type != "cpu",
        spread=max(durations) / max(min(durations), 1e-6) - 1,
    )


def measure(
    step: Callable[[], object],
    model: torch.nn.Module,
    modules: Sequence[str],
    budget: int | float = 1.0,
) -> Measured:
    """Run a step about eight times, with regions that recompute everything.

    Args:
        step: runs a forward of the model and its backward.
        model: as in :func:`ebb.plan`.
        modules: globs of modules that become regions.
        budget: the budget to plan for. Steps that offload everything run only if they stay within
            it, or within the peak measured before.

    Raises:
        ValueError: the step has a region already; or as :func:`ebb.apply`.
        RuntimeError: as :func:`ebb.profile`.
    """
    root, device = type(model).__name__, device_of([model])
    with ExitStack() as undo:
        undo.callback(ahead.configure, regions=ahead.configure()["regions"])
        ahead.configure(regions=0)  # replays ahead would hide part of the replay time
        with apply(model, recompute_all, modules) as handle:
            parents = _parents(step, model, [name for name in handle.names if name])
            base = base_bytes([model])  # after a step, so that gradients count
            again = StepsThatRunAgain()
            profiles, durations = run(step, (*RECOMPUTED, Purpose.TIME))
            profile = median_of(profiles)
            _check_regions(profile, {name or root for name in handle.names})
        measured = measured_of(profile, durations, base, device, measure_link(device), again)
        whole = root if "" in handle.names else None
        measured = replace(measured, whole=whole, root=root, parents=parents)
        if (window := window_of_all(measured, budget)) is not None:
            undo.enter_context(transfers_of(in_flight_bytes=window, prefetch_bytes=window))
            with apply(model, offload_all, modules):
                _, durations = run(step, (*AWAY, *[Purpose.TIME] * 2))
            measured = replace(measured, away=min(durations))
    return measured


def window_of_all(measured: Measured, budget: int | float) -> int | None:
    """Bytes in flight in steps that offload all saved tensors; None if such a step would exceed
    both the budget and the measured peak."""
    if measured.link is None:
        return None
    simulator = Simulator(measured)
    most = max(allowed(budget, measured.base, simulator.plain.peak), measured.profile.peak)
    fits = simulator.estimate(simulator.all_offloaded).peak <= most
    return simulator.window if fits else None


def base_bytes(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()
) -> int:
    """Current bytes of models and optimizers: parameters, gradients, buffers, optimizer states.

    On an accelerator: at least all that is allocated on it.
    """
    tensors: list[Any] = []
    for model in models:
        for parameter in model.parameters():
            tensors += [parameter, parameter.grad]
        tensors += model.buffers()
    for optimizer in optimizers:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and _has_storage(tensor)
    }
    return max(sum(sizes.values()), devices.allocated())


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


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


def parent_of(model: torch.nn.Module, name: str) -> str:
    """The name of the nearest module around this one that has a forward, unlike ModuleList and
    ModuleDict."""
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(model.get_submodule(name), torch.nn.ModuleList | torch.nn.ModuleDict):
            break
    return name


def device_of(models: Iterable[torch.nn.Module]) -> torch.device:
    """The device of the first parameter; the CPU if there is none."""
    parameters = (parameter for model in models for parameter in model.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def devices_of(model: torch.nn.Module) -> set[torch.device]:
    """All devices of a model's parameters."""
    devices = {parameter.device for parameter in model.parameters()}
    return {device for device in devices if device.type != "meta"} or {torch.device("cpu")}


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
        profiles, durations = run(step, _UNDER_A_PLAN)
        return from_first_operator(profiles[0])[0], min(durations)
    finally:
        _C.set_reporting(steps)
