"""The lists of fields in include/ebb: documents and settings name the same fields."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import ebb
from ebb import _testing
from ebb._plan.profile.profile import Operator, Value
from ebb._report.advice import Advice
from ebb._report.planned import BudgetPoint, Course, Cut, ReportedPlan
from ebb._report.rows import Row

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
FIELDS = {struct: set(names) for struct, names in _testing.fields().items()}
# What the user reads as one dictionary, or as the dictionaries inside of it.
ENGINES = {
    "ahead": FIELDS["AheadStats"],
    "offload": FIELDS["OffloadStats"],
    "paging": FIELDS["PagingStats"],
}
STATISTICS = {
    "ebb.stats()": FIELDS["Stats"] | FIELDS["RegionCounters"] | FIELDS["TransferCounters"],
    'ebb.stats()["ahead"]': ENGINES["ahead"],
    'ebb.stats()["offload"]': ENGINES["offload"],
    'ebb.stats()["paging"]': ENGINES["paging"] | FIELDS["PagePoolStats"],
}
SETTINGS = {
    ebb.config.ahead: FIELDS["AheadSettings"],
    ebb.config.offload: FIELDS["OffloadSettings"],
    ebb.config.paging: FIELDS["PagingSettings"],
}


def entries(documented, section):
    """The names that a section of a docstring explains."""
    text = inspect.getdoc(documented).partition(f"{section}:\n")[2].partition("\n\n")[0]
    return set(re.findall(r"^    (\w+):", text, re.M))


def test_every_table_is_held_here():
    headers = "\n".join(path.read_text() for path in (ROOT / "include/ebb").glob("*.h"))
    structs = re.findall(r"^struct (\w+) \{\n(.*?)^\};", headers, re.M | re.S)

    assert {name for name, body in structs if "EBB_FIELDS(" in body} == FIELDS.keys()


def test_dictionaries_have_the_keys_of_their_tables():
    with ebb.region():
        pass
    stats = ebb.stats()

    assert stats.keys() == FIELDS["Stats"] | ENGINES.keys()
    assert stats["total"].keys() == FIELDS["RegionCounters"]
    for name, keys in ENGINES.items():
        assert stats[name].keys() == keys
    settings = [f"{section._name}.{name}" for section in SETTINGS for name in SETTINGS[section]]
    assert ebb.config.to_dict().keys() == set(settings)


@pytest.mark.parametrize("section", SETTINGS, ids=lambda section: section._name)
def test_settings_have_a_docstring(section):
    assert entries(section, "Attributes") == SETTINGS[section]
    listed = inspect.getdoc(ebb.config).partition(f"    {section._name}: ")[2]
    assert all(f"``{name}``" in listed for name in SETTINGS[section])


def test_rows_and_reports_have_the_fields_of_their_tables():
    for kind, fields in (
        (Row, FIELDS["ReportRow"] | {"layers"}),
        (ebb.Report, FIELDS["Report"] | {"plan", "policy"}),
        (ebb.Profile, FIELDS["Profile"]),
        (Operator, FIELDS["ProfileOperator"]),
        (Value, FIELDS["ProfileValue"]),
    ):
        assert {field.name for field in dataclasses.fields(kind)} == fields
        assert entries(kind, "Attributes") == fields


def sections(level):
    """The sections of the page with headings of this level, by heading."""
    text, mark = (REFERENCE / "fields.md").read_text(), "#" * level
    found = re.findall(rf"^{mark} (.+?)\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.M | re.S)
    return {heading.strip("`"): section for heading, section in found}


def explained(section):
    """The names that begin the entries of a list."""
    entries = re.findall(r"^\* (`.+?`):", section, re.M)
    return set(re.findall(r"`(\w+)`", " ".join(entries)))


def test_the_page_of_fields_has_all_figures():
    found = {name: text for name, text in sections(2).items() if name.startswith("ebb.stats()")}
    assert found.keys() == STATISTICS.keys()
    for name, section in found.items():
        pools = FIELDS["PagePoolStats"] if name.endswith('["paging"]') else set()
        keys = explained(section)
        assert keys | pools == STATISTICS[name] | (
            ENGINES.keys() if name == "ebb.stats()" else set()
        )
        assert pools <= set(re.findall(r"`(\w+)`", section))


def test_the_page_of_fields_has_all_metrics():
    ebb.metrics()
    with ebb.region():
        pass
    section = sections(2)["ebb.metrics()"]
    summed = {f"ebb/{name}" for name in FIELDS["RegionCounters"]}

    keys = set(re.findall(r"`(ebb/\w+)`", section))

    assert ebb.metrics().keys() - summed <= keys
    assert {"ebb/eager_peak_bytes", "ebb/budget_bytes", "ebb/plan_age"} <= keys


def test_the_page_of_fields_has_all_fields_of_reports():
    found = sections(3)
    assert explained(found["Fates"]) == set(ebb.Report.FATES)
    assert explained(found["Rows"]) == FIELDS["ReportRow"] | {"layers"}
    assert FIELDS["Report"] | {"plan", "policy"} <= explained(found["Fields of a report"])
    properties = {"advice", "eager", "held", "notes", "totals"}
    assert properties <= explained(found["Fields of a report"])
    assert {field.name for field in dataclasses.fields(Advice)} == explained(found["Advice"])


def test_the_page_of_fields_has_all_fields_of_a_plan():
    section = sections(3)["The plan"]
    fields = {f.name for kind in (Course, BudgetPoint, Cut) for f in dataclasses.fields(kind)}
    plan = ReportedPlan(1, Course(1, 1.0), Course(1, 1.0), (), tuple).to_dict()

    assert fields | plan.keys() <= set(re.findall(r"`(\w+)`", section))


POOL = """
#include <ebb/fields.h>
struct Pool {{
  int pages = 0;
  int rows = 0;
  EBB_FIELDS(Pool, {})
}};
int main() {{
  ebb::forEachField<Pool>([](auto field) {{ static_cast<void>(field); }});
}}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="c++ is not on PATH")
@pytest.mark.parametrize(
    ("listed", "compiles"),
    [("pages, rows", True), ("rows, pages", True), ("pages, pages", False), ("pages", False)],
)
def test_a_list_that_does_not_name_each_member_once_does_not_compile(listed, compiles, tmp_path):
    (tmp_path / "pool.cpp").write_text(POOL.format(listed))
    command = ["c++", "-std=c++20", "-fsyntax-only", "-I", str(ROOT / "include"), "pool.cpp"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert (done.returncode == 0) == compiles, done.stderr
    assert compiles or "the list must name each member once" in done.stderr
