"""What a mutant is, and where it is in the source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One place of the source that does something else, and the tests that then fail.

    `text` is a statement or some of them (it ends with ";" or "}"), else an expression, as in the
    file, white space aside. It occurs there once, or once in `within`, which does. `instead` stands
    there under the mutant: nothing, of a statement that is left out. `tests` are arguments for
    pytest.

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
        start, end = self._only(self.within or self.text, source)
        if not self.within:
            return start, end
        first, last = self._only(self.text, source[start:end])
        return start + first, start + last

    def _only(self, text: str, source: str) -> tuple[int, int]:
        """The one place of a text, whose white space may be other than the source's."""
        words = re.findall(r"\w+|[^\w\s]", text)
        pattern = re.escape(words[0])
        for before, word in pairwise(words):
            apart = before[0].isidentifier() and word[0].isidentifier()
            pattern += (r"\s+" if apart else r"\s*") + re.escape(word)
        found = [match.span() for match in re.finditer(pattern, source)]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {len(found)} times, not once, in {self.file}:\n{text}")
        return found[0]
