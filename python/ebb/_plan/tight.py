"""Choices for budgets below the bytes of a region's results. In: a simulated region. Out: choices.

Some values are recomputed each time that something needs them. See Note [Made each time].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ebb._plan.choice import Choice
from ebb._plan.simulate import Simulator

_MOST_CUTS = 16
_MOST_PAIRED = 6


def recomputed_each_time(simulator: Simulator, call: int) -> Iterable[Choice]:
    """Choices that cut the sequence of a region's operators once or twice. A value made before a
    cut stays resident only if an operator after the cut reads it; the others are recomputed each
    time. So backward of the operators after a cut needs no other memory from before it. Values
    before the last cut are recomputed from those that are resident at the cut before.
    """
    count = len(simulator.step.calls[call].operators)
    cuts = _spread(range(1, count + 1), _MOST_CUTS)
    few = _spread(cuts, _MOST_PAIRED)
    for chosen in (*((cut,) for cut in cuts), *itertools.combinations(few, 2)):
        yield Choice(each_time=frozenset(_between(simulator, call, chosen)))


def _spread(cuts: Sequence[int], most: int) -> list[int]:
    """At most `most` of the cuts, evenly spread, with the first and the last."""
    count = min(most, len(cuts))
    if count < 2:
        return list(cuts)
    return [cuts[number * (len(cuts) - 1) // (count - 1)] for number in range(count)]


def _between(simulator: Simulator, call: int, cuts: Sequence[int]) -> Iterable[int]:
    """Operators before the last cut whose results are not read across a cut."""
    step = simulator.step
    operators = step.calls[call].operators
    for index, op in enumerate(operators[: cuts[-1]]):
        if op in step.always_kept:
            continue
        outputs = step.operators[op].outputs
        readers = [reader - operators.start for value in outputs for reader in step.readers[value]]
        last = max(readers, default=index)
        if not any(index < cut <= last for cut in cuts):
            yield index
