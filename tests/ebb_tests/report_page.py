"""Runs the script of a report's page with node, if installed, and reads the shown elements."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ebb

can_be_shown = pytest.mark.skipif(
    shutil.which("node") is None, reason="the script of a page is run by node, which is not here"
)


@dataclass
class Shown:
    """What one element of a page shows.

    Attributes:
        html: its inner HTML.
        text: its text.
        hidden: True if it is not shown.
        moved: the tooltip for the mouse at its centre.
    """

    html: str
    text: str
    hidden: bool
    moved: str = ""

    def line(self, name: str) -> list[tuple[float, float]]:
        """The points of the path with the attribute `data-line` `name`."""
        (path,) = re.findall(rf'<path data-line="{name}" d="([^"]+)"', self.html)
        return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.e]+),([-\d.e]+)", path)]


def shown(report: ebb.Report, folder: Path, budget: int | None = None) -> dict[str, Shown]:
    """The elements of a report's page that its script fills.

    Args:
        folder: receives the page.
        budget: index of the budget to select in the plan's curve.
    """
    page = folder / "page.html"
    report.save(page)
    script = Path(__file__).with_name("report_page.js")
    choice = [] if budget is None else [str(budget)]
    run = subprocess.run(
        ["node", str(script), str(page), *choice], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return {name: Shown(**one) for name, one in json.loads(run.stdout).items()}


def data_of(page: Path) -> dict[str, Any]:
    """The JSON data in a page."""
    text = page.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found
