"""Reads the lists of mutants: a TOML file for each area, in the folder `areas`.

search = ["tests/a_file.py", ...]       the tests of `--search`; else the files named below

[each]                                  what must be in a mutant's text:
'a pattern' = ["src/*/files.cpp"]       a regular expression, and globs of files

[also]                                  mutants that are left out with another
name = ["another-name"]

[no_test]
name = 'why no test can fail'

["src/a/file.cpp"."tests/a_file.py::test_that_fails tests/another_file.py"]
name = 'text;'
name = ['text', 'instead', 'within']    the last one if needed; see mutant.py
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from mutants.mutant import Mutant

FOLDER = Path(__file__).with_name("areas")


@dataclass(frozen=True)
class Area:
    mutants: list[Mutant]
    search: list[str]
    each: dict[str, list[str]]


def read(path: Path) -> Area:
    content = tomllib.loads(path.read_text())
    search, each, also, no_test = (
        content.pop(key, {}) for key in ("search", "each", "also", "no_test")
    )
    mutants = [
        Mutant(
            name,
            file,
            tests.split(),
            *([texts] if isinstance(texts, str) else texts),
            also=also.get(name, []),
            no_test=no_test.get(name, ""),
        )
        for file, by_tests in content.items()
        for tests, by_name in by_tests.items()
        for name, texts in by_name.items()
    ]
    assert {*also, *no_test} <= {mutant.name for mutant in mutants}, path
    files = {test.partition("::")[0] for mutant in mutants for test in mutant.tests}
    return Area(mutants, search or sorted(files), each)


AREAS = {path.stem: read(path) for path in sorted(FOLDER.glob("*.toml"))}
