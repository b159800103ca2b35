"""Minimum cuts, compared with all cuts of a small graph."""

from __future__ import annotations

import itertools
import math

from hypothesis import example, given
from hypothesis import strategies as st

from ebb._plan.choose.min_cut import Network

SOURCE, SINK = 0, 1


def cut(nodes, edges):
    network = Network(nodes)
    for edge in edges:
        network.add(*edge)
    return network.cut(SOURCE, SINK)


def price(side, edges):
    """The capacity of edges from the source's side to the other one."""
    return sum(c for begin, end, c in edges if begin in side and end not in side)


def first_minimum(nodes, edges):
    """The smallest source's side of a minimum cut, and the price. All capacities are exact."""
    others = [node for node in range(nodes) if node not in (SOURCE, SINK)]
    sides = (
        {SOURCE, *chosen}
        for count in range(len(others) + 1)
        for chosen in itertools.combinations(others, count)
    )
    return min(((price(side, edges), side) for side in sides), key=lambda one: one[0])


# The shortest path takes 2 to 3, and flow has to go back there.
DETOUR = (
    8,
    [
        (a, b, 1)
        for a, b in ((0, 2), (2, 3), (3, 1), (0, 4), (4, 5), (5, 3), (2, 6), (6, 7), (7, 1))
    ],
)


@st.composite
def graphs(draw):
    nodes = draw(st.integers(2, 7))
    node = st.integers(0, nodes - 1)
    capacity = st.one_of(st.integers(0, 6), st.sampled_from([0.25, 2**-10, math.inf]))
    edges = draw(st.lists(st.tuples(node, node, capacity), max_size=16))
    # As in a choice: no path of infinite capacity leads from source to sink.
    return nodes, [
        (b, e, c) for b, e, c in edges if b != e and not (c == math.inf and SINK in (b, e))
    ]


@given(graphs())
@example((4, [(0, 2, 5), (3, 1, 5)]))  # source and sink are not connected
@example(DETOUR)
@example((3, [(0, 2, 1.5), (0, 2, 2.0), (2, 1, 3.0)]))  # parallel edges
@example((3, [(0, 2, 1), (2, 1, 1)]))  # two minimum cuts
def test_cut_is_the_first_minimum_of_all_cuts(graph):
    nodes, edges = graph

    assert cut(nodes, edges) == first_minimum(nodes, edges)[1]


def test_tiny_capacity_counts_as_zero():
    assert cut(3, [(0, 2, 1e-13), (2, 1, 1.0)]) == {0}


def test_chain_is_longer_than_the_stack_of_python():
    count = 3000
    nodes = [SOURCE, *range(2, count + 1), SINK]
    edges = [(a, b, 1.0 if place == 1500 else 5.0)
             for place, (a, b) in enumerate(itertools.pairwise(nodes))]  # fmt: skip

    assert cut(count + 1, edges) == {SOURCE, *range(2, 1502)}
