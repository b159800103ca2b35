"""The folders of src: what a file may include."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebb_tests.file_dependencies import faults

ROOT = Path(__file__).resolve().parents[2]

TABLE = ROOT / "docs/design/index.md"


def table():
    """What each folder may include, lowest first: the table of docs/design/index.md."""
    return {folder: used for folder, _, used in rows()}


def rows():
    """Each folder of the table, its purpose, and what it may include."""
    _, section = TABLE.read_text().split("\n## Folders\n")
    found = re.findall(
        r"^\| \[?(\w+)(?:\]\(\S+\))? \| (.*?) \|(.*)\|$", section.split("\n## ")[0], re.M
    )
    return [
        (folder, purpose, {name.strip() for name in names.split(",")} - {""})
        for folder, purpose, names in found
        if folder != "folder"
    ]


def arrows_of(root):
    """Includes in quotes; those of torch and of the system have angle brackets."""
    for folder in (root / "src", root / "include"):
        for file in folder.rglob("*"):
            if file.suffix not in (".h", ".cpp", ".cu"):
                continue
            for included in re.findall(r'^\s*#\s*include "(.+?)"', file.read_text(), re.M):
                core = (root / "src/core" / included).parent.exists()
                inside = "include" if included.startswith("ebb/") else "src/core" if core else "src"
                yield str(file.relative_to(root)), f"{inside}/{included}"


def folder_of(file):
    """Of src, src/core or src/plugins."""
    top, folder, *more = file.split("/")
    return top if top == "include" else more[0] if folder in ("core", "plugins") else folder


def test_includes_keep_the_order_of_the_folders():
    arrows = list(arrows_of(ROOT))

    assert len(arrows) > 100
    assert all((ROOT / target).exists() for _, target in arrows)
    assert faults(arrows, folder_of, [("include",), *((folder,) for folder in table())]) == []


def test_no_two_headers_have_one_name():
    names = [file.name for folder in ("src", "include") for file in (ROOT / folder).rglob("*.h")]
    assert sorted(names) == sorted({*names})


def test_folders_include_what_the_table_allows_and_no_less():
    used = {folder: set() for folder in table()}
    for source, target in arrows_of(ROOT):
        if folder_of(source) != "include":
            used[folder_of(source)] |= {folder_of(target)} - {folder_of(source), "include"}
    assert used == table()


def test_one_header_includes_the_whole_interface():
    every = {f"include/ebb/{file.name}" for file in (ROOT / "include/ebb").iterdir()}
    own = {source: set() for source in every}
    for source, target in arrows_of(ROOT):
        own.get(source, set()).add(target)
    whole = own["include/ebb/ebb.h"]

    assert whole.union(*(own[header] for header in whole)) == every - {"include/ebb/ebb.h"}


def test_each_folder_has_a_purpose_and_a_header_to_begin_with():
    folders = [
        path for inside in ("src", "src/core", "src/plugins") for path in (ROOT / inside).iterdir()
    ]
    headers = {path.name: {header.name for header in path.glob("*.h")} for path in folders}

    assert {*table()} == {*headers} - {"core", "plugins"}
    for folder, purpose, _ in rows():
        first = re.fullmatch(r"(?:\S+ )+?`(\w+\.h)`", purpose)
        assert first, folder
        assert first[1] in headers[folder], folder


def test_no_folder_of_the_core_or_the_door_may_include_a_plugin():
    """Only the bindings may, and no plug-in includes another."""
    plugins = {path.name for path in (ROOT / "src/plugins").iterdir()}
    using = {folder for folder, used in table().items() if used & plugins}

    assert len(plugins) > 5
    assert using == {"bindings"}
    assert table()["hooks"] == set()


def test_each_plugin_that_follows_regions_uses_the_door():
    plugins = {path.name for path in (ROOT / "src/plugins").iterdir()}

    assert {name for name in plugins if "hooks" not in table()[name]} == {"placeholder"}


GOOD = {
    "include/ebb/ebb.h": "",
    "src/low/a.h": '#include "ebb/ebb.h"\n#include <torch/high.h>\n',
    "src/high/b.cpp": '#include "low/a.h"\n',
}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"src/low/back.cpp": '#include "high/c.h"\n', "src/high/c.h": ""},
            "src/low/back.cpp needs src/high/c.h: high is not below low",
        ),
        (
            {"src/low/c.h": '#include "low/d.h"\n', "src/low/d.h": '#include "low/c.h"\n'},
            "a circle: src/low/",
        ),
        ({"src/new/c.cpp": '#include "low/a.h"\n'}, "src/new/c.cpp is in no folder of the table"),
    ],
    ids=["upwards", "circle", "unknown folder"],
)
def test_wrong_includes_are_found(tmp_path, files, message):
    floors = (("include",), ("low",), ("high",))

    def found(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return faults(arrows_of(tmp_path), folder_of, floors)

    assert found(GOOD) == []
    (fault,) = found(files)
    assert fault.startswith(message)


def test_a_folder_that_is_gone_is_found():
    assert faults([], folder_of, (("low",),)) == ["the table has a folder low, and there is none"]
