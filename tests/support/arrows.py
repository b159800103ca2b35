"""Arrows between files: whether they keep the order of their rooms, and run in no circle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

Arrow = tuple[str, str]  # from a file to one that it needs
Floors = Sequence[Sequence[str]]  # rooms, lowest first; those of one floor do not know each other


def faults(arrows: Iterable[Arrow], room_of: Callable[[str], str], floors: Floors) -> list[str]:
    """What is wrong with them, in words."""
    arrows = sorted(set(arrows))
    floor_of = {room: floor for floor, rooms in enumerate(floors) for room in rooms}
    files = sorted({file for arrow in arrows for file in arrow})
    strangers = [file for file in files if room_of(file) not in floor_of]
    empty = sorted(set(floor_of) - {room_of(file) for file in files})
    found = [f"{file} is in no room of the table" for file in strangers]
    found += [f"the table has a room {room}, and there is none" for room in empty]
    for source, target in arrows:
        above, below = room_of(source), room_of(target)
        known = {above, below} <= floor_of.keys()
        if known and above != below and floor_of[below] >= floor_of[above]:
            found.append(f"{source} needs {target}: {below} is not below {above}")
    return found + circle(arrows)


def circle(arrows: Iterable[Arrow]) -> list[str]:
    """One of the circles in which they run, if there is one."""
    needed: dict[str, set[str]] = {}
    for source, target in arrows:
        needed.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        return [f"a circle: {' <- '.join(error.args[1])}"]
    return []
