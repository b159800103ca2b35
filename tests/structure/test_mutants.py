"""The lists of mutants (tests/mutants) fit the source and the tests."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from mutants.areas import AREAS
from mutants.rewriting import HEADER, rewritten
from mutants.table import RESULTS, head

ROOT = Path(__file__).parents[2]
MUTANTS = [mutant for area in AREAS.values() for mutant in area.mutants]


def spans_by_file():
    spans = defaultdict(list)
    for mutant in MUTANTS:
        spans[mutant.file].append(mutant.span((ROOT / mutant.file).read_text()))
    return spans


def test_each_has_a_name_of_its_own():
    assert [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []


@pytest.mark.parametrize("area", AREAS)
def test_each_is_in_the_source_and_has_tests(area):
    names = {mutant.name for mutant in MUTANTS}
    for mutant in AREAS[area].mutants:
        start, end = mutant.span((ROOT / mutant.file).read_text())

        assert start < end, mutant.name
        assert mutant.is_statement or mutant.instead, f"{mutant.name}: an expression needs a value"
        assert mutant.tests, mutant.name
        assert {*mutant.also} <= names, mutant.name
        assert not (mutant.also and mutant.no_test), mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            name = function.partition("[")[0]
            found = re.search(rf"^ *def {name}\(", (ROOT / file).read_text(), re.M)
            assert found or not name, test


@pytest.mark.parametrize("area", AREAS)
def test_nothing_of_its_kind_is_missing(area):
    spans = spans_by_file()
    missing = []
    for pattern, globs in AREAS[area].each.items():
        for path in sorted(path for files in globs for path in ROOT.glob(files)):
            file = str(path.relative_to(ROOT))
            for found in re.finditer(pattern, path.read_text()):
                if not any(start <= found.start() < end for start, end in spans[file]):
                    missing.append(f"{file}: {found[0]}")

    assert missing == []


@pytest.mark.parametrize("area", AREAS)
def test_the_results_are_of_these_and_counted(area):
    lines = (RESULTS / f"{area}.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]

    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [
        mutant.name for mutant in AREAS[area].mutants
    ]
    assert head(area, rows) in lines


def test_one_may_lie_within_another():
    class Fake:
        def __init__(self, name, text, instead=""):
            self.name, self.text, self.instead = name, text, instead
            self.is_statement = text.endswith(";")

        def span(self, source):
            start = source.index(self.text)
            return start, start + len(self.text)

    inner, outer = Fake("inner", "b", "c"), Fake("outer", "f(b);")

    assert rewritten("a; f(b); d;", [outer, inner]) == (
        '#include "mutant.h"\n'
        'a; if (!mutant("outer")) { f((mutant("inner") ? (c) : (b))); } else {  } d;'
    )


def test_another_one_may_be_chosen_in_a_process_that_has_asked(tmp_path):
    (tmp_path / "mutant.h").write_text(HEADER)
    program = tmp_path / "program.cpp"
    program.write_text(
        '#include "mutant.h"\n'
        "int main() {\n"
        '  if (mutant("one")) return 1;\n'
        '  setenv("MUTANT", "one", 1);\n'
        '  if (!mutant("one") || mutant("other")) return 2;\n'
        '  setenv("MUTANT", "one,other", 1);\n'
        '  return mutant("one") && mutant("other") && !mutant("oth") ? 0 : 3;\n'
        "}\n"
    )
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-std=c++20", program, "-o", tmp_path / "program"], check=True)

    assert subprocess.run([tmp_path / "program"], check=False).returncode == 0
