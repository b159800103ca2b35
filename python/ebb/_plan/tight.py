"""Choices that lower a region's memory in backward: some values are recomputed each time that
something needs them. See Note [Made each time]."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ebb._plan.choice import Choice
from ebb._plan.simulate import Simulator

_MOST_CUTS = 16
_MOST_PAIRED = 6


def made_each_time(simulator: Simulator, call: int) -> Iterable[Choice]:
    """Choices by cuts of a region's operators. A value made before a cut is held only if an
    operator after the cut reads it, so backward of the operators after the cut holds nothing else
    from before it. Values before the last cut are recomputed from those held at the cut before.

    Args:
        simulator: of the step.
        call: index in ``simulator.step.calls``.
    """
    count = len(simulator.step.calls[call].operators)
    cuts = _spread(range(1, count + 1), _MOST_CUTS)
    few = _spread(cuts, _MOST_PAIRED)
    for chosen in (*((cut,) for cut in cuts), *itertools.combinations(few, 2)):
        yield Choice(each_time=frozenset(_between(simulator, call, chosen)))


def _spread(places: Sequence[int], most: int) -> list[int]:
    """At most `most` of the places, evenly spread, with the first and the last."""
    count = min(most, len(places))
    if count < 2:
        return list(places)
    return [places[number * (len(places) - 1) // (count - 1)] for number in range(count)]


def _between(simulator: Simulator, call: int, cuts: Sequence[int]) -> Iterable[int]:
    """Operators before the last cut whose results are not read across a cut."""
    step = simulator.step
    operators = step.calls[call].operators
    for place in range(cuts[-1]):
        number = operators.start + place
        if number in step.stays or number >= operators.stop:
            continue
        readers = [
            reader - operators.start
            for value in step.operators[number].outputs
            for reader in step.readers[value]
        ]
        last = max(readers, default=place)
        if not any(place < cut <= last for cut in cuts):
            yield place
