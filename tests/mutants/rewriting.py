"""A copy of the source tree in which each mutant is behind a switch."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from mutants.mutant import ROOT, Mutant

HEADER = """\
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string_view>

// Whether it is one that MUTANT names, "one,other": asked anew each time, since tests run in
// forks of a process that may have been here before.
inline bool mutant(std::string_view name) {
  const char* const environment = std::getenv("MUTANT");
  for (std::string_view chosen = environment == nullptr ? "" : environment; !chosen.empty();) {
    const size_t end = std::min(chosen.find(','), chosen.size());
    if (chosen.substr(0, end) == name) {
      return true;
    }
    chosen.remove_prefix(std::min(end + 1, chosen.size()));
  }
  return false;
}
"""


def around(mutant: Mutant) -> tuple[str, str]:
    """What comes before and behind its text."""
    asked = f'mutant("{mutant.name}")'
    if mutant.is_statement:
        return f"if (!{asked}) {{ ", f" }} else {{ {mutant.instead} }}"
    return f"({asked} ? ({mutant.instead}) : (", "))"


def rewritten(source: str, mutants: Iterable[Mutant]) -> str:
    """With a switch around each; one may lie within another."""
    inserted = []
    for number, mutant in enumerate(mutants):
        start, end = mutant.span(source)
        before, behind = around(mutant)
        inserted.append((start, 1, start - end, number, before))  # the longer one first
        inserted.append((end, 0, end - start, -number, behind))  # and last
    for place, _, _, _, text in sorted(inserted, reverse=True):
        source = source[:place] + text + source[place:]
    return '#include "mutant.h"\n' + source


def write_if_changed(path: Path, content: bytes) -> None:
    """What has not changed is not compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def files_of_tree() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def remove_others(tree: Path, files: set[Path]) -> None:
    """Of the source only: what was built stays."""
    for folder in ("src", "tests/native"):
        for path in (tree / folder).rglob("*"):
            if path.is_file() and path.relative_to(tree) not in files:
                path.unlink()


def write_tree(tree: Path, mutants: Iterable[Mutant]) -> None:
    by_file = defaultdict(list)
    for mutant in mutants:
        by_file[Path(mutant.file)].append(mutant)
    files = files_of_tree()
    for file in files:
        content = (ROOT / file).read_bytes()
        if file in by_file:
            content = rewritten(content.decode(), by_file[file]).encode()
        write_if_changed(tree / file, content)
    header = Path("src/mutant.h")
    write_if_changed(tree / header, HEADER.encode())
    remove_others(tree, {*files, header})
