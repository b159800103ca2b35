"""The command ``python -m ebb report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ebb._report import files
from ebb._report.report import Report


def render(arguments: list[str]) -> int:
    """Renders a report that was saved as JSON, as a page or as text. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ebb report",
        description="Render a report that was saved as JSON, such as that of EBB_REPORT=run.json.",
    )
    parser.add_argument("file", help="the report, a .json file")
    parser.add_argument(
        "-o", "--output", help="file to write, .html or .txt; default: the report's name with .html"
    )
    parser.add_argument("--text", action="store_true", help="print text, and write no file")
    options = parser.parse_args(arguments)
    files.stop()  # this process has nothing to report
    try:
        report = Report.load(options.file)
        if options.text:
            print(report)
            return 0
        output = Path(options.output or Path(options.file).with_suffix(".html"))
        report.save(output)
    except (OSError, ValueError) as error:
        parser.exit(1, f"ebb: {str(error).removeprefix('ebb: ')}\n")
    print(output)
    return 0
