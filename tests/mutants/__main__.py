"""Shows which waits, records and guards have a test that fails without them.

A mutant is one of them left out, or changed; lists of them are in `areas`. They are all compiled
into one copy of the source, each behind a switch that the environment sets (MUTANT=its name).
First all tests must pass there without any; then one of each mutant's should fail.

    PYTHONPATH=tests python -m mutants --area offload
    PYTHONPATH=tests python -m mutants --area offload --only out-waits-packed-on --search
"""

from __future__ import annotations

import argparse
import sys

from mutants import table
from mutants.areas import AREAS, Area
from mutants.mutant import ROOT
from mutants.rewriting import write_tree
from mutants.running import build, first_failure, preload

TREE = ROOT / "build" / "mutants"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--area", choices=AREAS, help="default: all")
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", help="these alone; no table is written"
    )
    parser.add_argument(
        "--search", action="store_true", help="run all tests of the area, not those named"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds for each mutant's tests")
    return parser.parse_args()


def check_without(area: Area) -> None:
    """What fails anyway says nothing."""
    tests = dict.fromkeys(test for mutant in area.mutants for test in mutant.tests)
    if failed := first_failure(tests, "", 1200):
        sys.exit(f"without any mutant: {failed}")


def run(area: Area, options: argparse.Namespace) -> dict[str, str | None]:
    """What caught each."""
    found = {}
    for mutant in area.mutants:
        if options.only and mutant.name not in options.only:
            continue
        tests = area.search if options.search else mutant.tests
        caught_by = first_failure(tests, ",".join((mutant.name, *mutant.also)), options.limit)
        found[mutant.name] = caught_by
        print(f"{mutant.name}: {caught_by or mutant.no_test or 'NOT CAUGHT'}", flush=True)
    return found


def main() -> int:
    options = arguments()
    chosen = {options.area: AREAS[options.area]} if options.area else AREAS
    write_tree(TREE, [mutant for area in AREAS.values() for mutant in area.mutants])
    build(TREE)
    preload(TREE)
    missed = 0
    for name, area in chosen.items():
        if not options.only and not options.search:
            check_without(area)
        found = run(area, options)
        if not options.only and not options.search:
            print(table.write(name, area.mutants, found))
        missed += sum(
            found[mutant.name] is None and not mutant.no_test
            for mutant in area.mutants
            if mutant.name in found
        )
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
