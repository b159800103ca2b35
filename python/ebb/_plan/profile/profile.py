"""Profile. In: the record of one step, from C++. Out: operators, values and memory."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from typing import Any

from ebb._support.shown import shown


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
        reads_rows: True if the valid rows of an input are known (``mark_rows``).
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
        node: number of the backward node that unpacked it then; values of one node have the same.
        again: when it had been recomputed or fetched; -1: never.
        again_address: address of its bytes at that time.
        ended: when nothing referred to it any more; -1: not before the step's end.
        rows: rows of the storage, if its valid rows are known (``mark_rows``); else 0.
        live_rows: how many of them are valid; at least one.
        rows_mixed: True if autograd saved it for an operator that may mix its rows.
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
    node: int = 0


@dataclass(frozen=True)
class Profile:
    """A record of one step: see ``ebb.profile``. Times are in milliseconds since its begin.

    Fields with the meaning of a field of ``torch.distributed._tools.sac_estimator.SACStats`` have
    its name.

    Attributes:
        duration: duration of the step.
        operators: calls in regions, in order: an ``Operator`` each.
        replays: operators recomputed for backward: tuples of name, start and host time.
        values: inputs and outputs of the operators: a ``Value`` each.
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
        """The peak of the bytes that the step allocated, counted as ``Plan.peak``: above those in
        use when it began, except older memory that it freed before its first region, such as
        gradients (``zero_grad()``). Without regions: before memory began to grow to its peak."""
        return max(_levels(from_first_operator(self)[0]))


def profile_of(fields: dict[str, Any]) -> Profile:
    """Build a profile from the dictionary that C++ gives."""
    converted = {
        "operators": tuple(
            Operator(**op | {"inputs": tuple(op["inputs"]), "outputs": tuple(op["outputs"])})
            for op in fields["operators"]
        ),
        "replays": tuple((name, start, took) for name, start, took in fields["replays"]),
        "values": tuple(Value(**v | {"shape": tuple(v["shape"])}) for v in fields["values"]),
        "allocations": tuple((time, at, size) for time, at, size in fields["allocations"]),
    }
    return Profile(**fields | converted)


# Note [Where a step begins]
# A step's bytes count above a base. Many loops call zero_grad() first, so the bytes in use when the
# last step ended include gradients that this step frees at once. If these gradients
# belonged to the base, activations in their place would not count. So the base is the bytes in use
# when the last step ended, minus older memory that this step frees before its first region runs.


def from_first_operator(profile: Profile) -> tuple[Profile, int]:
    """The profile without the frees, before its first operator, of memory older than the step; and
    the bytes of these frees. See Note [Where a step begins]."""
    first = _first_start(profile)
    known: set[int] = set()
    kept, freed = [], 0
    for event in profile.allocations:
        time, address, nbytes = event
        if nbytes < 0 and time < first and address not in known:
            freed -= nbytes
        else:
            kept.append(event)
        known.add(address)
    return replace(profile, allocations=tuple(kept)), freed


def without_evaluation(profile: Profile) -> Profile:
    """The profile without memory that was allocated and freed before its first operator."""
    first = _first_start(profile)
    began: dict[int, int] = {}  # by address: index of the last allocation
    dropped: set[int] = set()
    for n, (time, address, nbytes) in enumerate(profile.allocations):
        if nbytes > 0:
            began[address] = n
        elif time < first and address in began:
            dropped |= {began.pop(address), n}
    kept = tuple(event for n, event in enumerate(profile.allocations) if n not in dropped)
    return replace(profile, allocations=kept)


def _first_start(profile: Profile) -> float:
    """When the first operator of a region began. Without regions: the first allocation after the
    lowest level before the peak."""
    if profile.operators or not profile.allocations:
        return min((operator.start for operator in profile.operators), default=0.0)
    levels = _levels(profile)
    peak = max(range(len(levels)), key=lambda n: (levels[n], n))
    lowest = min(range(peak + 1), key=lambda n: (levels[n], -n))
    return profile.allocations[lowest][0]


def _levels(profile: Profile) -> list[int]:
    """Bytes in use above those when the step began, before and after each event."""
    return list(accumulate((nbytes for _, _, nbytes in profile.allocations), initial=0))


def median_of(profiles: list[Profile]) -> Profile:
    """Combine profiles of the same step. Raises a RuntimeError if their operators differ."""
    _check_same([profile.operators for profile in profiles])
    middle = statistics.median_low(profile.duration for profile in profiles)
    chosen = next(profile for profile in profiles if profile.duration == middle)
    operators = tuple(
        replace(calls[0], runtime=statistics.median(call.runtime for call in calls[1:]))
        for calls in zip(
            chosen.operators, *(profile.operators for profile in profiles), strict=True
        )
    )
    return replace(chosen, operators=operators, values=_with_most_rows(chosen, profiles))


def _with_most_rows(chosen: Profile, profiles: list[Profile]) -> tuple[Value, ...]:
    """The values of `chosen`, each with the most valid rows of all profiles."""
    if not any(value.rows for value in chosen.values) or any(
        [value.rows for value in profile.values] != [value.rows for value in chosen.values]
        for profile in profiles
    ):
        return chosen.values
    return tuple(
        replace(values[0], live_rows=max(value.live_rows for value in values))
        for values in zip(chosen.values, *(profile.values for profile in profiles), strict=True)
    )


def _check_same(steps: list[tuple[Operator, ...]]) -> None:
    first, *others = ([replace(op, start=0.0, runtime=0.0) for op in step] for step in steps)
    for number, operators in enumerate(others, 2):
        for index, (expected, seen) in enumerate(zip_longest(first, operators)):
            if expected != seen:
                op, other = (
                    shown(call.func_name) if call else "no operator" for call in (seen, expected)
                )
                how = "with other inputs or outputs" if op == other else f"instead of {other}"
                raise RuntimeError(
                    f"ebb: step {number} differs from step 1 at operator {index}: {op} {how}. "
                    "All steps must run the same operators on the same shapes"
                )
