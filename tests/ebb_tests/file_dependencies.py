"""Checks dependencies between files: they follow the order of the folders and have no cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

Arrow = tuple[str, str]  # a file, and a file that it needs
Floors = Sequence[Sequence[str]]  # folders, lowest first; folders of one floor are independent


def faults(arrows: Iterable[Arrow], folder_of: Callable[[str], str], floors: Floors) -> list[str]:
    """Messages, one for each dependency or folder that breaks the order."""
    arrows = sorted(set(arrows))
    floor_of = {folder: floor for floor, folders in enumerate(floors) for folder in folders}
    files = sorted({file for arrow in arrows for file in arrow})
    strangers = [file for file in files if folder_of(file) not in floor_of]
    empty = sorted(set(floor_of) - {folder_of(file) for file in files})
    found = [f"{file} is in no folder of the table" for file in strangers]
    found += [f"the table has a folder {folder}, and there is none" for folder in empty]
    for source, target in arrows:
        above, below = folder_of(source), folder_of(target)
        known = {above, below} <= floor_of.keys()
        if known and above != below and floor_of[below] >= floor_of[above]:
            found.append(f"{source} needs {target}: {below} is not below {above}")
    return found + circle(arrows)


def circle(arrows: Iterable[Arrow]) -> list[str]:
    """A message about one dependency cycle; empty if there is none."""
    needed: dict[str, set[str]] = {}
    for source, target in arrows:
        needed.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        return [f"a circle: {' <- '.join(error.args[1])}"]
    return []
