"""What was found, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from mutants.mutant import Mutant

RESULTS = Path(__file__).parent / "results"
NOTHING, NOT_RUN, NO_TEST = "**nothing**", "not run", "no test: "


def code(text: str, most: int = 90) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`{line if len(line) <= most else line[: most - 4] + ' ...'}`"


def row(mutant: Mutant, found: Mapping[str, str | None]) -> str:
    changed = code(mutant.text) + (f" is {code(mutant.instead)}" if mutant.instead else "")
    caught_by = found.get(mutant.name)
    by = NO_TEST + mutant.no_test if mutant.no_test else NOTHING
    if caught_by:
        by = f"`{caught_by}`".replace("|", "\\|")
        by += "".join(f", without {other} too" for other in mutant.also)
    elif mutant.name not in found:
        by = NOT_RUN
    return f"| {mutant.name} | {Path(mutant.file).name} | {changed} | {by} |"


def head(area: str, rows: Iterable[str]) -> str:
    """How many there are of each kind, by the last column."""
    counts = Counter(kind(last) for last in map(by, rows))
    return (
        f"{counts.total()} mutants: {counts['caught']} caught, {counts[NO_TEST]} that no test can "
        f"catch, {counts[NOTHING]} that none caught, {counts[NOT_RUN]} that were not run. "
        f"`make mutants AREA={area}` writes this anew."
    )


def kind(last: str) -> str:
    """Of what stands in the last column."""
    known = (NOTHING, NOT_RUN, NO_TEST)
    return next((start for start in known if last.startswith(start)), "caught")


def by(row: str) -> str:
    return row.removesuffix(" |").rpartition(" | ")[2]


def write(area: str, mutants: Iterable[Mutant], found: Mapping[str, str | None]) -> Path:
    """`found`: the test that caught each that was run, None for those that nothing caught."""
    rows = [row(mutant, found) for mutant in mutants]
    lines = [
        f"# Mutants of {area}",
        "",
        head(area, rows),
        "",
        "| mutant | file | left out, or changed | caught by |",
        "|---|---|---|---|",
        *rows,
    ]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{area}.md"
    path.write_text("\n".join(lines) + "\n")
    return path
