"""What a mutant is, and where it is in the source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One place of the source that does something else, and the tests that then fail.

    `text` is a statement or some of them (it ends with ";" or "}"), else an expression, as in the
    file, where it occurs once; or once in `within`, which does. `instead` stands there under the
    mutant: nothing, of a statement that is left out. `tests` are arguments for pytest, and
    `environment` are variables for them; tests/accelerator has the one it needs without being told.

    `also` names others that are left out with it, since without it each of them still does what it
    is for. `no_test` says why no test can fail; those named then pass.
    """

    name: str
    file: str
    text: str
    tests: tuple[str, ...]
    instead: str = ""
    within: str = ""
    environment: Mapping[str, str] | None = None
    also: tuple[str, ...] = ()
    no_test: str = ""

    @property
    def is_statement(self) -> bool:
        return self.text.endswith((";", "}"))

    def span(self, source: str) -> tuple[int, int]:
        """Where it begins and ends in the text of its file."""
        around = self.within or self.text
        for text, inside in ((around, source), (self.text, around)):
            if inside.count(text) != 1:
                raise ValueError(
                    f"{self.name}: {inside.count(text)} times, not once, in {self.file}:\n{text}"
                )
        start = source.index(around) + around.index(self.text)
        return start, start + len(self.text)


# By file: (tests, name, text, instead, within, also, no_test), the last four as far as needed.
Places = Mapping[str, Iterable[tuple[Any, ...]]]


def mutants_at(places: Places) -> Iterator[Mutant]:
    for file, rows in places.items():
        for tests, name, text, *more in rows:
            given = dict(zip(("instead", "within", "also", "no_test"), more, strict=False))
            yield Mutant(name, file, text, tests, **given)
