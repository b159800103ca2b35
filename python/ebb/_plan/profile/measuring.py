"""Measures steps for a plan. In: durations and profiles of steps. Out: a `Measured`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ebb._plan.profile.copies import (
    Link,
    Pager,
    counts_of_steps,
    may_send,
    measure_link,
    pager_of,
    transfers_of,
)
from ebb._plan.profile.profile import Profile, from_first_operator, median_of
from ebb._plan.profile.recording import Purpose
from ebb._policy.decision import OFFLOAD
from ebb._policy.policy import Policy
from ebb._support import devices
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
_OFFLOAD_STEPS = (Purpose.SKIP, Purpose.TIME)
_offload_all = Policy(default=OFFLOAD)
_SPREAD, _SLACK = 1.02, 4096  # peaks within this factor and these bytes count as equal


@dataclass(frozen=True)
class Measured:
    """Measurements of a step in which each block is a region under `recompute_all`."""

    profile: Profile
    duration: float  # milliseconds of such a step, without recording
    # Bytes in use when a step begins, such as parameters and optimizer states. See Note [Where a
    # step begins].
    base: int
    freed: int = 0  # bytes of older memory that a step frees before its first region
    whole: str | None = None  # name of the region that is the model itself; None: there is none
    root: str = ""  # name that such a region would have
    # By region name: the name of the module whose forward calls the region; "" means the model. A
    # region without an entry has an unknown caller.
    parents: Mapping[str, str] = field(default_factory=dict)
    link: Link | None = None  # None: values cannot be offloaded
    offload_all_ms: float | None = None  # duration of a step that offloads all saved tensors
    pager: Pager | None = None  # None: no rows, or no paging
    on_accelerator: bool = False  # True if operators run asynchronously to the host
    spread: float = 0.0  # relative difference between the slowest and the fastest timed step


class MeasureSequence:
    """The steps that a plan needs, in order. The caller runs steps of the kind that `purpose`,
    `policy` and `transfers` give, and passes the result of each step to `record`. See Note [Steps
    that are measured].

    Attributes:
        base: bytes in use when a recorded step begins. The caller sets it.
        window: bytes in flight in steps that offload everything; None before these steps.

    Args:
        window_of: returns `window`, or None if steps that offload everything need too much memory.
        in_job: True if the steps belong to a job. Fewer of them are then timed, and recorded steps
            may run different operators: the last one counts.
    """

    def __init__(
        self, device: torch.device, window_of: Callable[[Measured], int | None], in_job: bool
    ) -> None:
        self._device, self._window_of, self._in_job = device, window_of, in_job
        self._link = measure_link(device)
        self._counts = counts_of_steps()
        self.restart()

    def restart(self) -> None:
        """Drop all results, and begin with the first step."""
        self.base = 0
        self.window: int | None = None
        self._todo = [*RECOMPUTED, *[Purpose.TIME] * (0 if self._in_job else 1)]
        self._profiles: list[tuple[int, Profile]] = []  # with the peaks of their steps
        self._times: list[tuple[int, float]] = []
        self._offload_times: list[float] = []

    @property
    def purpose(self) -> Purpose | None:
        """The purpose of the next step; None: all steps have been measured."""
        return self._todo[0] if self._todo else None

    @property
    def policy(self) -> Policy:
        """The policy of all blocks in the next step."""
        return recompute_all if self.window is None else _offload_all

    @property
    def peak(self) -> int:
        """Peak bytes of the largest recorded step."""
        return max(peak for peak, _ in self._profiles)

    def transfers(self) -> AbstractContextManager[None]:
        """The settings of OFFLOAD in the next step."""
        if self.window is None:
            return nullcontext()
        return transfers_of(self.window)

    def purposes(self) -> Iterator[Purpose]:
        """Purposes of the next steps, until the policy changes."""
        window = self.window
        while self._todo and self.window == window:
            yield self._todo[0]

    def record(self, duration: float, profile: Profile | None, peak: int = 0) -> None:
        """Record the result of a step. `peak`: bytes that it allocated; 0: unknown."""
        purpose = self._todo.pop(0)
        if profile is not None:
            self._profiles.append((peak, profile))
        elif purpose is Purpose.TIME and self.window is not None:
            self._offload_times.append(duration)
        elif purpose is Purpose.TIME:
            self._times.append((peak, duration))
        if not self._todo and self.window is None:
            self.window = self._window_of(self.measured())
            if self.window is not None:
                self._todo = [*_OFFLOAD_STEPS, *[Purpose.TIME] * (0 if self._in_job else 2)]

    def measured(self) -> Measured:
        """The measurements so far. The lowest duration counts, since other work on the machine only
        makes steps slower."""
        size = self.peak
        profiles = [profile for peak, profile in self._profiles if are_alike(peak, size)]
        try:
            profile = median_of(profiles)
        except RuntimeError:
            if not self._in_job:
                raise
            profile = profiles[-1]
        profile, freed = from_first_operator(profile)
        # Durations are scaled by the sizes of their steps.
        times = [took * size / peak if peak else took for peak, took in self._times]
        return Measured(
            profile,
            min(times),
            # The step may also free tensors outside of the model, such as the last batch.
            max(0, self.base - freed),
            freed=freed,
            link=self._link,
            offload_all_ms=min(self._offload_times, default=None),
            pager=pager_of(profile, self._device, self._counts),
            on_accelerator=self._device.type != "cpu",
            spread=max(times) / max(min(times), 1e-6) - 1,
        )


def offload_steps(device: torch.device) -> int:
    """How many steps offload everything, if the device can offload."""
    return len(_OFFLOAD_STEPS) if may_send(device) else 0


def are_alike(peak: int, other_peak: int) -> bool:
    """True if two peaks count as equal."""
    return max(peak, other_peak) <= _SPREAD * min(peak, other_peak) + _SLACK


def base_bytes(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()
) -> int:
    """Current bytes of models and optimizers: parameters, gradients, buffers, optimizer states. On
    an accelerator: at least all that is allocated on it."""
    tensors: list[Any] = []
    for model in models:
        for parameter in model.parameters():
            tensors += [parameter, parameter.grad]
        tensors += model.buffers()
    for optimizer in optimizers:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    sizes = {
        storage._cdata: storage.nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and (storage := _storage_of(tensor)) is not None
    }
    return max(sum(sizes.values()), devices.allocated())


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # such as of a sparse tensor
        return None


def device_of(models: Iterable[torch.nn.Module]) -> torch.device:
    """The device of the first parameter; the CPU if there is none."""
    found = (parameter.device for model in models for parameter in model.parameters())
    return next(found, torch.device("cpu"))


def devices_of(model: torch.nn.Module) -> set[torch.device]:
    """All devices of a model's parameters."""
    devices = {parameter.device for parameter in model.parameters()}
    return {device for device in devices if device.type != "meta"} or {torch.device("cpu")}
