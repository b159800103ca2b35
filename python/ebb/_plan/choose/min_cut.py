"""Minimum cuts. In: a graph with capacities. Out: the nodes on the source's side."""

from __future__ import annotations

from collections import deque

_LEAST = 1e-12  # capacities up to this count as 0


class Network:
    """A directed graph with capacities. Nodes are numbers. `cut` is Dinic's method, "Algorithm for
    solution of a problem of maximum flow in a network with power estimation" (1970)."""

    def __init__(self, nodes: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(nodes)]  # edge indices of each node
        self._ends: list[int] = []  # each edge is followed by its reverse edge
        self._left: list[float] = []

    def add(self, begin: int, end: int, capacity: float) -> None:
        for node, other, left in ((begin, end, capacity), (end, begin, 0.0)):
            self._edges[node].append(len(self._ends))
            self._ends.append(other)
            self._left.append(left)

    def cut(self, source: int, sink: int) -> set[int]:
        """Nodes on the source's side of a minimum cut."""
        while True:
            levels = self._levels(source)
            if sink not in levels:
                return set(levels)
            places = dict.fromkeys(levels, 0)
            while self._push(source, sink, levels, places):
                pass

    def _levels(self, source: int) -> dict[int, int]:
        levels = {source: 0}
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                end = self._ends[edge]
                if self._left[edge] > _LEAST and end not in levels:
                    levels[end] = levels[node] + 1
                    waiting.append(end)
        return levels

    def _push(self, source: int, sink: int, levels: dict[int, int], places: dict[int, int]) -> bool:
        """Push as much flow as possible along one path; False if there is no path."""
        path: list[int] = []
        node = source
        while node != sink:
            edges = self._edges[node]
            while places[node] < len(edges):
                edge = edges[places[node]]
                end = self._ends[edge]
                if self._left[edge] > _LEAST and levels.get(end) == levels[node] + 1:
                    path.append(edge)
                    node = end
                    break
                places[node] += 1
            else:
                if not path:
                    return False
                node = self._ends[path.pop() ^ 1]
                places[node] += 1
        least = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= least
            self._left[edge ^ 1] += least
        return True
