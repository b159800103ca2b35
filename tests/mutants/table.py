"""What was found, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mutant import Mutant

RESULTS = Path(__file__).parent / "results"


def code(text: str, most: int = 90) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`{line if len(line) <= most else line[: most - 4] + ' ...'}`"


def row(mutant: Mutant, caught_by: str | None) -> str:
    changed = code(mutant.text) + (f" is {code(mutant.instead)}" if mutant.instead else "")
    by = f"`{caught_by}`".replace("|", "\\|") if caught_by else "**nothing**"
    return f"| {mutant.name} | {Path(mutant.file).name} | {changed} | {by} |"


def write(area: str, mutants: Iterable[Mutant], found: Mapping[str, str | None]) -> Path:
    rows = [row(mutant, found[mutant.name]) for mutant in mutants]
    missed = sum(caught_by is None for caught_by in found.values())
    lines = [
        f"# Mutants of {area}",
        "",
        f"Written by `make mutants AREA={area}`: {len(rows)} mutants, {missed} of them not caught.",
        "",
        "| mutant | file | left out, or changed | caught by |",
        "|---|---|---|---|",
        *rows,
    ]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{area}.md"
    path.write_text("\n".join(lines) + "\n")
    return path
