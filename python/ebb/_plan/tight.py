"""What a region can do to hold less in backward than all that it made: some of it is made again
each time that something needs it. See Note [Made each time]."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ebb._plan.choice import Choice
from ebb._plan.simulate import Simulator

_MOST_CUTS = 16
_MOST_PAIRED = 6


def made_each_time(simulator: Simulator, call: int) -> Iterable[Choice]:
    """Choices by cuts: what was made before one is held only as far as it is read after it, so
    backward of what comes after it holds nothing else. Before the last cut, what is asked for is
    made from what is held at the cut before.

    Args:
        simulator: of the step.
        call: a place in ``simulator.step.calls``.
    """
    count = len(simulator.step.calls[call].operators)
    cuts = _spread(range(1, count + 1), _MOST_CUTS)
    few = _spread(cuts, _MOST_PAIRED)
    for chosen in (*((cut,) for cut in cuts), *itertools.combinations(few, 2)):
        yield Choice(each_time=frozenset(_between(simulator, call, chosen)))


def _spread(places: Sequence[int], most: int) -> list[int]:
    """Some of them, the first and the last among these."""
    count = min(most, len(places))
    if count < 2:
        return list(places)
    return [places[number * (len(places) - 1) // (count - 1)] for number in range(count)]


def _between(simulator: Simulator, call: int, cuts: Sequence[int]) -> Iterable[int]:
    """Of operators before the last cut, those whose results no cut goes through."""
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
