"""Profiles: a record of one step, with each operator and its time."""

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

_FORMAT = 2  # version of the file format


@dataclass(frozen=True)
class Operator:
    """One call of an operator in a forward.

    Attributes:
        func_name: the operator's name, such as ``"aten::mm.default"``.
        region: name of the innermost region.
        module: name of the innermost module; empty if no rule and no report asked for modules.
        call: index of the operator's outermost region, in the order of entry.
        start: when the operator was called.
        runtime: time of its kernel, on the device if it ran on one, else on the host.
        inputs: indices in ``Profile.values`` of the values that it read.
        outputs: indices of the values that it made or wrote.
        random: True if it used a random generator.
        inplace: True if it wrote to an argument.
        replayable: True if it can be recomputed.
        reads_rows: True if the valid rows of an input are known (:func:`ebb.mark_rows`).
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
    """The contents of a storage between two writes.

    Attributes:
        memory: size in bytes.
        shape: shape of the tensor that was made.
        dtype: its dtype, such as ``"float32"``.
        fate: a key of ``ebb.Report.FATES``.
        reason: why the value cannot be recomputed; else empty.
        saved: True if autograd saved it.
        address: of its bytes when they were made, as in ``Profile.allocations``.
        made: when it was made.
        let_go: for values from outside the region, when ebb found that the program no longer holds
            them; -1: never.
        asked: when backward first unpacked it; -1: never.
        again: when it had been recomputed or fetched; -1: never.
        again_address: address of its bytes at that time.
        ended: when nothing referred to it any more; -1: not before the step's end.
        rows: rows of the storage, if its valid rows are known (:func:`ebb.mark_rows`); else 0.
        live_rows: how many of them are valid; at least one.
        rows_mixed: True if an operator that may mix its rows saved it.
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
    """A record of one step. Times are in milliseconds since it began. See :func:`ebb.profile`.

    Names are those of ``torch.distributed._tools.sac_estimator.SACStats`` where they mean the same.

    Attributes:
        duration: of the step.
        operators: calls in regions, in order: an :class:`Operator` each.
        replays: operators recomputed for backward: tuples of name, start and host time.
        values: inputs and outputs of the operators: a :class:`Value` each.
        allocations: tuples of time, address, and bytes that were allocated, or freed (less than
            0), on the step's thread and on threads where autograd runs.
    """

    duration: float
    operators: tuple[Operator, ...]
    replays: tuple[tuple[str, float, float], ...] = field(repr=False)
    values: tuple[Value, ...]
    allocations: tuple[tuple[float, int, int], ...] = field(repr=False)

    @property
    def peak(self) -> int:
        """The peak of the bytes that the step allocated."""
        now = most = 0
        for _, _, taken in self.allocations:
            now += taken
            most = max(most, now)
        return most

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        document = {"format": _FORMAT, **asdict(self)}
        Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a file that :meth:`save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no profile, or has another format.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if document.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            return profile_of(document)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"ebb: {shown(str(path))} is no profile: {error}") from error


def profile_of(found: dict[str, Any]) -> Profile:
    """Build a profile from the dictionary that C++ or a file gives."""
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
    """Run a step several times, and record all operators in its regions.

    Operator times are medians over the steps; everything else is from the step whose duration is
    the median. During the recording replays do not run ahead of backward, and torch's profiler
    cannot be started, since ebb uses it.

    Args:
        step: runs a forward with regions, and its backward. Each call must do the same.
        steps: how many steps are recorded.
        warmup: how many steps run before them, since first steps take longer.

    Raises:
        TypeError: ``steps`` or ``warmup`` is no int.
        ValueError: ``steps`` is less than 1, or ``warmup`` is less than 0.
        RuntimeError: the calls of ``step`` ran different operators; or a profile is being recorded
            already; or torch's profiler runs.

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
    # Warm-up is recorded too: the CPU's allocator knows the sizes only of recorded allocations.
    for _ in range(warmup):
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
    """Combine profiles of the same step.

    Raises:
        RuntimeError: the steps ran different operators.
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
    """The values of `chosen`, each with the most valid rows of all profiles."""
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
