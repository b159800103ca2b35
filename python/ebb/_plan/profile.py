"""Profiles: what one step did, operator by operator, and how long each took."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ebb import _C
from ebb._support import devices
from ebb._support.shown import shown

_FORMAT = 2  # of the file


@dataclass(frozen=True)
class Operator:
    """One call of an operator in a forward.

    Attributes:
        func_name: such as ``"aten::mm.default"``.
        region: the innermost region.
        module: the innermost module; empty if no rule and no report asked for modules.
        call: of an outermost region, to which it belongs: how many had been entered before.
        start: when it was called.
        runtime: of its kernel: on the device if it ran on one, else on the host.
        inputs: places in ``Profile.values`` of what it read.
        outputs: likewise, of what it made or wrote.
        random: whether it drew from a generator.
        inplace: whether it wrote an argument.
        replayable: whether it can be run again.
        reads_rows: whether of what it reads it is known which rows live (:func:`ebb.mark_rows`).
    """

    func_name: str
    region: str
    module: str
    call: int
    start: float
    runtime: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    random: bool
    inplace: bool
    replayable: bool
    reads_rows: bool = False


@dataclass(frozen=True)
class Value:
    """A storage between two writes.

    Attributes:
        memory: its bytes.
        shape: of the tensor that was made.
        dtype: likewise, such as ``"float32"``.
        fate: a key of ``ebb.Report.FATES``.
        reason: why it cannot be recomputed; else empty.
        saved: whether autograd saved it.
        address: of its bytes when they were made, as in ``Profile.allocations``.
        made: when.
        let_go: when the program was found not to hold it any more, of what came from outside of the
            region; -1: never.
        asked: when backward first unpacked it; -1: never.
        again: when it had been made again, or fetched; -1: never.
        again_address: of its bytes then.
        ended: when nothing knew it any more; -1: not before the end.
        rows: of the storage, if it is known which of them live (:func:`ebb.mark_rows`); else 0.
        live_rows: of these, those that live, one at least.
        rows_mixed: whether an operator that may mix its rows saved it.
    """

    memory: int
    shape: tuple[int, ...]
    dtype: str
    fate: str
    reason: str
    saved: bool
    address: int
    made: float
    let_go: float
    asked: float
    again: float
    again_address: int
    ended: float
    rows: int = 0
    live_rows: int = 0
    rows_mixed: bool = False


@dataclass(frozen=True)
class Profile:
    """What one step did. Times are in milliseconds since it began. See :func:`ebb.profile`.

    Names are those of ``torch.distributed._tools.sac_estimator.SACStats`` where they mean the same.

    Attributes:
        duration: of the step.
        operators: calls in regions, in order: an :class:`Operator` each.
        replays: operators that ran again for backward: tuples of name, start and time of the host.
        values: what those read and made: a :class:`Value` each.
        allocations: tuples of time, address, and bytes that were taken, or given back (then less
            than 0), on the thread of the step, and where autograd takes it.
    """

    duration: float
    operators: tuple[Operator, ...]
    replays: tuple[tuple[str, float, float], ...] = field(repr=False)
    values: tuple[Value, ...]
    allocations: tuple[tuple[float, int, int], ...] = field(repr=False)

    @property
    def peak(self) -> int:
        """The most bytes at a time, of those that the step allocated."""
        now = most = 0
        for _, _, taken in self.allocations:
            now += taken
            most = max(most, now)
        return most

    def save(self, path: str | Path) -> None:
        """Write it as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        document = {"format": _FORMAT, **asdict(self)}
        Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read what :meth:`save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no profile, or one of another format.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if document.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            return profile_of(document)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"ebb: {shown(str(path))} is no profile: {error}") from error


def profile_of(found: dict[str, Any]) -> Profile:
    """From what C++ gives, or a file has."""
    operators = tuple(
        Operator(**one | {"inputs": tuple(one["inputs"]), "outputs": tuple(one["outputs"])})
        for one in found.pop("operators")
    )
    values = tuple(Value(**one | {"shape": tuple(one["shape"])}) for one in found.pop("values"))
    replays = tuple((name, start, runtime) for name, start, runtime in found.pop("replays"))
    allocations = tuple((time, place, taken) for time, place, taken in found.pop("allocations"))
    return Profile(
        operators=operators, replays=replays, values=values, allocations=allocations, **found
    )


def profile(step: Callable[[], object], *, steps: int = 3, warmup: int = 1) -> Profile:
    """Run a step some times, and record all of its operators.

    Times of operators are medians over the steps; all else is of the step whose duration is the
    median. Meanwhile replays do not run ahead, and torch's profiler, of which this takes the place,
    cannot be started.

    Args:
        step: runs a forward, with regions in it, and its backward. Each call must do the same.
        steps: how often it is recorded.
        warmup: how often it is run before, since first calls take longer.

    Raises:
        TypeError: ``steps`` or ``warmup`` is no int.
        ValueError: ``steps`` is less than 1, or ``warmup`` than 0.
        RuntimeError: the calls of ``step`` did not run the same operators; or a profile is being
            recorded already; or torch's profiler runs.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> x = torch.ones(2, 8)
        >>> def step():
        ...     with ebb.region(ebb.policies.save_all):
        ...         loss = net(x).sum()
        ...     loss.backward()
        >>> [one.func_name for one in ebb.profile(step).operators][:2]
        ['aten::addmm.default', 'aten::gelu.default']
    """
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"ebb: {name} must be an int; got {type(value).__name__}")
        if value < least:
            raise ValueError(f"ebb: {name} must be {least} or more; got {value}")
    for _ in range(warmup):  # recorded: the CPU's allocator tells sizes of what was taken then
        _recorded(step)
    return median_of([_recorded(step) for _ in range(steps)])


def _recorded(step: Callable[[], object]) -> Profile:
    devices.wait()
    _C.begin_profile()
    try:
        step()
        devices.wait()
    finally:
        found = _C.end_profile()
    return profile_of(found)


def median_of(profiles: list[Profile]) -> Profile:
    """One of several of the same step.

    Raises:
        RuntimeError: the steps did not run the same operators.
    """
    _check_same([one.operators for one in profiles])
    middle = statistics.median_low(one.duration for one in profiles)
    chosen = next(one for one in profiles if one.duration == middle)
    runtimes = [
        statistics.median(calls)
        for calls in zip(*([o.runtime for o in one.operators] for one in profiles), strict=True)
    ]
    operators = tuple(
        replace(operator, runtime=runtime)
        for operator, runtime in zip(chosen.operators, runtimes, strict=True)
    )
    return replace(chosen, operators=operators, values=_with_most_rows(chosen, profiles))


def _with_most_rows(chosen: Profile, profiles: list[Profile]) -> tuple[Value, ...]:
    """Its values, each with the most rows that lived in any of several steps."""
    if not any(value.rows for value in chosen.values) or any(
        [value.rows for value in one.values] != [value.rows for value in chosen.values]
        for one in profiles
    ):
        return chosen.values
    return tuple(
        replace(values[0], live_rows=max(value.live_rows for value in values))
        for values in zip(chosen.values, *(one.values for one in profiles), strict=True)
    )


def _check_same(steps: list[tuple[Operator, ...]]) -> None:
    what = [f.name for f in fields(Operator) if f.name not in ("start", "runtime")]

    def known(operators: Iterable[Operator]) -> list[tuple[Any, ...]]:
        return [tuple(getattr(one, name) for name in what) for one in operators]

    first = known(steps[0])
    for number, operators in enumerate(steps[1:], 2):
        for place, (one, other) in enumerate(zip(first, known(operators), strict=False)):
            if one != other:
                raise RuntimeError(
                    f"ebb: step {number} is not like step 1: operator {place} is "
                    f"{shown(str(other[0]))}, not {shown(str(one[0]))}, or reads or makes other "
                    "values"
                )
        if len(first) != len(operators):
            raise RuntimeError(
                f"ebb: step {number} is not like step 1: it ran {len(operators)} operators in "
                f"regions, not {len(first)}"
            )
