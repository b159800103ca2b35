"""Measures a job's own steps: what a plan is made from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import torch

from ebb import _C, ahead
from ebb._launch.budgeted import SPREAD, Blocks, Seen
from ebb._plan.link import may_send, measure_link, transfers_of
from ebb._plan.measured import Measured, base_bytes
from ebb._plan.measuring import device_of, fits
from ebb._plan.pages import StepsThatRunAgain
from ebb._plan.profile import Profile, median_of, profile_of
from ebb._plan.simulate import Simulator
from ebb._plan.transfers import Link
from ebb._policy.decision import OFFLOAD
from ebb._policy.policy import Policy
from ebb._support import devices
from ebb.policies import recompute_all, save_all

offload_all = Policy(default=OFFLOAD)


class Do(Enum):
    """What is done with a step beside running it."""

    NOTHING = auto()  # the first step of a kind takes longer, and allocates what stays
    LISTEN = auto()  # likewise, before a profile
    TIME = auto()
    PROFILE = auto()


_RECORDED = (Do.LISTEN, Do.PROFILE)


# Note [Steps that are measured]
# All are steps of the job, with the bits of any other. Steps in which all is recomputed come first,
# and are enough for a plan: the others, which need more memory, are run if they fit. A step counts
# only if it calls blocks as often as those before: not if an evaluation came between, or a scaler
# skipped the optimizer, so that it is two. It is then done once more.
#
# torch tells on the CPU that memory is given back only if it told that it was taken: gradients of a
# step that is not recorded would seem to stay. So the step before a profile is recorded, too.
#
# Where values can leave memory, a step in which all that autograd keeps does so shows how much
# copies slow the work that goes on.
_ORDER = (
    ("dropped", recompute_all, (Do.LISTEN, Do.PROFILE, Do.PROFILE, Do.TIME, Do.TIME)),
    ("away", offload_all, (Do.NOTHING, Do.TIME)),
    ("kept", save_all, (Do.NOTHING, Do.TIME, Do.TIME)),
    ("plain", None, (Do.LISTEN, Do.PROFILE, Do.TIME, Do.TIME)),
)
_MOST_AGAIN = 20  # steps that did not count, before there is no plan
_LEAST = 1.005  # of what takes more time, over what takes less


def number_of_steps(models: Iterable[torch.nn.Module]) -> int:
    """How many are measured, with the one that runs already."""
    sends = may_send(device_of(models))
    return 1 + sum(len(done) for name, _, done in _ORDER if sends or name != "away")


class NoPlanError(Exception):
    """There can be no plan; the message says why."""


@dataclass
class Way:
    """What was measured of one kind of step.

    Attributes:
        profiles, times: with the sizes that blocks were given.
        base: bytes that were there when one of its steps began.
    """

    profiles: list[tuple[int, Profile]] = field(default_factory=list)
    times: list[tuple[int, float]] = field(default_factory=list)
    base: int = 0


@dataclass(frozen=True)
class Outcome:
    """What all steps together gave.

    Attributes:
        measured: for a plan.
        seen: what blocks do in a step.
        varies: whether the sizes of batches change.
        growth: how much larger the largest step was than the one that was recorded.
    """

    measured: Measured
    seen: Seen
    varies: bool
    growth: float


class Measuring:
    """Goes through the steps that are measured, one at each boundary.

    Args:
        blocks: whose policies it sets.
        optimizers: those of the job, when asked.
        most: bytes, with what is there when a step begins, that one may take in which all is kept;
            else none is measured. None: what the device has.
    """

    def __init__(
        self,
        blocks: Blocks,
        optimizers: Callable[[], list[Any]],
        most: int | None = None,
    ) -> None:
        self._blocks = blocks
        self._optimizers = optimizers
        self._most = most
        self._recording = Recording()
        self._link: Link | None = None
        self._device = torch.device("cpu")
        self._again_if_need_be = StepsThatRunAgain()
        self._transfers = ExitStack()  # of how values leave in a step that shows it
        self._begin_anew()
        self._again = 0  # steps that did not count
        self._ahead = 0  # regions that are replayed ahead otherwise

    def _begin_anew(self) -> None:
        self._todo = [
            (name, policy, do)
            for name, policy, all_of in _ORDER
            for do in all_of
            if self._link is not None or name != "away"
        ]
        self._ways = {name: Way() for name, _, _ in _ORDER}
        self._like: Seen | None = None  # what a step calls
        self._unlike: Seen | None = None  # the last step that was not like that
        self._sizes: list[Seen] = []

    def begin(self) -> None:
        """A step begins, the first that is measured."""
        self._blocks.forget_sizes()
        self._ahead = ahead.settings()["regions"]
        ahead.configure(regions=0)  # what a replay takes is measured, not what is left to be seen
        self._device = device_of(self._blocks.roots())
        self._link = measure_link(self._device)
        self._again_if_need_be = StepsThatRunAgain()
        self._begin_anew()
        self._blocks.watch_callers()
        self._prepare()

    def step_ended(self, seen: Seen) -> Outcome | None:
        """And another begins.

        Returns:
            What was found, if that was the last one.

        Raises:
            NoPlanError: the steps differ too much.
        """
        ended = self._recording.end()
        self._blocks.callers_seen()
        if self._counts(seen) and ended is not None:
            self._note(seen, *ended)
            done, *_ = self._todo.pop(0)
            if done == "dropped" and self._todo[0][0] != done:
                too_large = self._too_large()
                self._todo = [one for one in self._todo if one[0] not in too_large]
        else:
            self._again += 1
            if self._again > _MOST_AGAIN:
                raise NoPlanError(_why(seen, ended is not None))
        if self._todo:
            self._prepare()
            return None
        self.stop()
        return self._outcome()

    def stop(self) -> None:
        """Nothing is measured any more."""
        self._recording.end()
        self._blocks.callers_seen()
        self._transfers.close()
        if ahead.settings()["regions"] == 0:  # nobody has said anything else meanwhile
            ahead.configure(regions=self._ahead)

    def _prepare(self) -> None:
        name, policy, do = self._todo[0]
        self._blocks.put(policy)
        self._transfers.close()
        if name == "away":
            window = Simulator(self._outcome().measured).window
            self._transfers.enter_context(
                transfers_of(in_flight_bytes=window, prefetch_bytes=window)
            )
        if do is Do.PROFILE:
            self._ways[name].base = base_bytes(self._blocks.roots(), self._optimizers())
        self._recording.begin(do)

    def _counts(self, seen: Seen) -> bool:
        """Whether a step is like those before. Of two that are not, the second is the measure."""
        if seen.calls == 0:
            return False
        if self._like is None or (seen.calls, seen.others) == (self._like.calls, self._like.others):
            self._like, self._unlike = seen, None
            return True
        before, self._unlike = self._unlike, seen
        if before is not None and (before.calls, before.others) == (seen.calls, seen.others):
            self._begin_anew()
            self._like = seen
        return False

    def _note(self, seen: Seen, duration: float, profile: Profile | None) -> None:
        name, _, do = self._todo[0]
        self._sizes.append(seen)
        if profile is not None:
            self._ways[name].profiles.append((seen.size, profile))
        elif do is Do.TIME:
            self._ways[name].times.append((seen.size, duration))

    def _too_large(self) -> set[str]:
        """Steps that cannot be tried."""
        measured = self._outcome().measured
        simulator = Simulator(measured)
        peaks = {"kept": simulator.plain.peak, "plain": simulator.plain.peak}
        if self._link is not None:
            peaks["away"] = simulator.estimate(simulator.all_away).peak
        most = math.inf if self._most is None else self._most - measured.base
        return {
            name for name, peak in peaks.items() if peak > most or not fits(peak, measured.base)
        }

    def _outcome(self) -> Outcome:
        dropped, plain = self._ways["dropped"], self._ways["plain"]
        largest = max(self._sizes, key=lambda seen: seen.size)
        varies = largest.size > SPREAD * min(seen.size for seen in self._sizes)
        size = max(size for size, _ in dropped.profiles)
        profile = _together([one for own, one in dropped.profiles if own == size])
        peaks = [_of_size(one.peak, own, size) for own, one in plain.profiles]
        measured = Measured(
            profile=profile,
            duration=_duration(dropped, size),
            base=dropped.base,
            link=self._link,
            parents=self._blocks.parents(),
            pager=self._again_if_need_be.pager(profile, self._device),
        )
        if self._ways["away"].times:
            measured = replace(measured, away=_duration(self._ways["away"], size))
        if plain.times:
            took, kept, duration = _times(self._ways, size)
            measured = replace(
                measured, plain_peak=round(max(peaks)), plain=took, kept=kept, duration=duration
            )
        most = max(seen.most for seen in self._sizes)
        growth = largest.size / size if size else 1.0
        return Outcome(measured, largest._replace(most=most), varies, growth)


def _why(seen: Seen, was_recorded: bool) -> str:
    if not was_recorded:
        return "steps could not be recorded, since torch's profiler runs"
    if seen.calls == 0:
        return "no block has a backward; what torch.compile has compiled is none"
    return "steps call blocks now more, now less often"


def _together(profiles: list[Profile]) -> Profile:
    try:
        return median_of(profiles)
    except RuntimeError:  # they ran other operators: a plan is made for one of them
        return profiles[-1]


def _duration(way: Way, size: int) -> float:
    """Milliseconds of a step of this size. What else the machine does only makes one longer."""
    return min(_of_size(duration, own, size) for own, duration in way.times)


def _times(ways: dict[str, Way], size: int) -> tuple[float, float, float]:
    """Of steps that are plain, kept and dropped: each does more than the one before, whatever the
    clock says.
    """
    plain = _duration(ways["plain"], size)
    kept = max(_duration(ways["kept"], size), _LEAST * plain)
    return plain, kept, max(_duration(ways["dropped"], size), _LEAST * kept)


def _of_size(quantity: float, own: int, size: int) -> float:
    return quantity * size / own if own else quantity


class Recording:
    """One step: how long it takes, and, if that is asked for, its profile."""

    def __init__(self) -> None:
        self._do = Do.TIME
        self._began = 0.0
        self._undo = ExitStack()  # of what is in place while a profile is recorded
        self._failed = False

    def begin(self, do: Do) -> None:
        self._do, self._failed = do, False
        devices.wait()
        if do in _RECORDED:
            try:
                _C.begin_profile()
            except RuntimeError:  # torch's profiler runs
                self._failed = True
            else:
                self._undo.callback(self._end_profile)
                _make_way_for_torchs_profiler(self._give_up, self._undo)
        self._began = time.perf_counter()

    def end(self) -> tuple[float, Profile | None] | None:
        """Milliseconds, and a profile if there was to be one; None if there is none."""
        devices.wait()
        duration = (time.perf_counter() - self._began) * 1e3
        self._found: dict[str, Any] | None = None
        self._undo.close()
        if self._do not in _RECORDED:
            return duration, None
        if self._failed or self._found is None:
            return None
        return duration, profile_of(self._found) if self._do is Do.PROFILE else None

    def _end_profile(self) -> None:
        try:
            self._found = _C.end_profile()
        except RuntimeError:  # it began on another thread
            self._failed = True

    def _give_up(self) -> None:
        self._undo.close()
        self._failed = True


def _make_way_for_torchs_profiler(give_up: Callable[[], None], undo: ExitStack) -> None:
    """A profile of ours ends if the job starts torch's profiler, which cannot run beside it."""
    module = torch.autograd.profiler
    for name in ("_prepare_profiler", "_enable_profiler"):
        torchs = getattr(module, name)

        def starting(*args: Any, torchs: Any = torchs, **kwargs: Any) -> Any:
            give_up()
            return torchs(*args, **kwargs)

        setattr(module, name, starting)
        undo.callback(setattr, module, name, torchs)
