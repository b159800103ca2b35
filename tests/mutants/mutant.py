"""What a mutant is, and where it is in the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One place of the source that does something else, and the tests that then fail.

    `text` is a statement or some of them (it ends with ";" or "}"), else an expression, as in the
    file, where it occurs once; or once in `within`, which does. `instead` stands there under the
    mutant: nothing, of a statement that is left out. `tests` are arguments for pytest.

    `also` names others that are left out with it, since without it each of them still does what it
    is for. `no_test` says why no test can fail; those named then pass.
    """

    name: str
    file: str
    tests: Sequence[str]
    text: str
    instead: str = ""
    within: str = ""
    also: Sequence[str] = ()
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
