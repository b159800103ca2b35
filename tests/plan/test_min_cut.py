"""The cheapest cut of a small graph is that which looking at all cuts finds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebb._plan.choose.min_cut import Network

SOURCE, SINK = 0, 1


def network(nodes, edges):
    found = Network(nodes)
    for begin, end, capacity in edges:
        found.add(begin, end, capacity)
    return found


def price(side, edges):
    """What a cut costs; what crosses it backwards costs nothing."""
    return sum(c for begin, end, c in edges if begin in side and end not in side)


def cheapest(nodes, edges):
    others = [node for node in range(nodes) if node not in (SOURCE, SINK)]
    sides = (
        {SOURCE, *chosen}
        for count in range(len(others) + 1)
        for chosen in itertools.combinations(others, count)
    )
    return min(price(side, edges) for side in sides)


@st.composite
def graphs(draw):
    nodes = draw(st.integers(2, 7))
    node = st.integers(0, nodes - 1)
    capacity = st.one_of(st.integers(0, 6), st.sampled_from([0.25, 1e-3, math.inf]))
    edges = draw(st.lists(st.tuples(node, node, capacity), max_size=16))
    # As in a choice: what may not be cut never leads all the way.
    return nodes, [
        (b, e, c) for b, e, c in edges if b != e and not (c == math.inf and SINK in (b, e))
    ]


@given(graphs())
def test_no_other_cut_is_cheaper(graph):
    nodes, edges = graph

    side = network(nodes, edges).cut(SOURCE, SINK)

    assert SOURCE in side
    assert SINK not in side
    assert price(side, edges) == pytest.approx(cheapest(nodes, edges), abs=1e-9)


def test_what_is_not_connected_needs_no_cut():
    assert network(4, [(0, 2, 5.0), (3, 1, 5.0)]).cut(SOURCE, SINK) == {0, 2}


def test_a_flow_goes_back_where_it_must():
    """The first path found blocks both of the best ones."""
    edges = [(0, 2, 1), (0, 3, 1), (2, 3, 1), (2, 1, 1), (3, 1, 1)]

    side = network(4, edges).cut(SOURCE, SINK)

    assert price(side, edges) == 2


def test_edges_beside_each_other_add_up():
    edges = [(0, 2, 1.5), (0, 2, 2.0), (2, 1, 3.0)]

    assert network(3, edges).cut(SOURCE, SINK) == {0, 2}


def test_of_equal_cuts_the_one_by_the_source():
    assert network(3, [(0, 2, 1.0), (2, 1, 1.0)]).cut(SOURCE, SINK) == {0}


def test_what_is_next_to_nothing_is_nothing():
    assert network(3, [(0, 2, 1e-13), (2, 1, 1.0)]).cut(SOURCE, SINK) == {0}


def test_a_long_chain():
    """Deeper than Python's stack."""
    count = 3000
    edges = [(SOURCE, 2, 5.0)] + [(node, node + 1, 5.0) for node in range(2, count)]
    edges += [(count, SINK, 5.0)]
    edges[1500] = (*edges[1500][:2], 1.0)

    side = network(count + 1, edges).cut(SOURCE, SINK)

    assert price(side, edges) == 1.0
    assert len(side) == 1501
