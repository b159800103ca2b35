"""The best choices for a region, by SciPy's integer programs, for comparison with fronts.

For each operator the program decides whether it is recomputed. An operator's results are available
if it is recomputed or if they are kept. Recomputed operators, and autograd, need their inputs to be
available. The time of recomputed operators is minimal; the kept bytes are within a budget.
"""

from __future__ import annotations

from collections.abc import Iterable

from scipy import optimize, sparse

from ebb._plan.choose.region_pareto import Choices
from ebb._plan.simulate.choice import Operators

_MOST_SECONDS = 10.0  # time limit for one budget


def optima(choices: Choices, points: int = 20) -> list[Operators]:
    """The best choices for budgets from the fewest bytes to the most.

    Args:
        choices: the region's operators and their costs.
        points: number of budgets.
    """
    corners = choices.corners
    least, most = choices.cost(corners[0])[0], choices.cost(corners[-1])[0]
    budgets = dict.fromkeys(
        least + (most - least) * place // max(1, points - 1) for place in range(points)
    )
    return [found for budget in budgets if (found := optimum(choices, budget)) is not None]


def optimum(choices: Choices, budget: int) -> Operators | None:
    """The values to save for the least time of recomputation; None if no choice fits.

    Args:
        choices: the region's operators and their costs.
        budget: bytes of the saved values, at most.
    """
    costs = choices.costs
    operators = [one for one in range(len(costs)) if not costs[one].free]
    if not operators:
        return frozenset()
    places = {one: place for place, one in enumerate(operators)}
    count = len(operators)
    # Variables: for each operator "recomputed", then for each operator "available".
    rows: list[dict[int, float]] = []
    for one, place in places.items():
        rows.append({count + place: 1.0, place: -1.0})  # a recomputed result is available
        for maker in costs[one].reads:
            if maker in places:
                rows.append({count + places[maker]: 1.0, place: -1.0})
    scale = max(1, max(cost.size for cost in costs))  # similar size as the times
    kept = {place: -costs[one].size / scale for one, place in places.items()}
    kept |= {count + place: costs[one].size / scale for one, place in places.items()}
    least = [0.0] * count + [float(costs[one].needed) for one in operators]
    fixed = [count + place for one, place in places.items() if not costs[one].lasting]
    rows += [{place - count: 1.0, place: -1.0} for place in fixed]  # overwritten later
    found = optimize.milp(
        c=[costs[one].time for one in operators] + [0.0] * count,
        integrality=[1] * count + [0] * count,
        bounds=optimize.Bounds(least, [1.0] * (2 * count)),
        constraints=[
            optimize.LinearConstraint(_matrix(rows, 2 * count), 0.0),
            optimize.LinearConstraint(_matrix([kept], 2 * count), -float("inf"), budget / scale),
        ],
        options={"time_limit": _MOST_SECONDS},
    )
    if found.x is None:
        return None
    again = {one for one, place in places.items() if found.x[place] > 0.5}
    return _kept(choices, again)


def _kept(choices: Choices, again: set[int]) -> Operators:
    """The operators whose results must be saved if those of `again` are recomputed."""
    costs = choices.costs
    wanted = {one for one, cost in enumerate(costs) if cost.needed}
    for one in again:
        wanted.update(costs[one].reads)
    return frozenset(one for one in wanted - again if not costs[one].free)


def _matrix(rows: Iterable[dict[int, float]], width: int) -> sparse.csr_array:
    entries = [(r, c, value) for r, row in enumerate(rows) for c, value in row.items()]
    lines, columns, values = zip(*entries, strict=True)
    return sparse.csr_array((values, (lines, columns)), shape=(max(lines) + 1, width))
