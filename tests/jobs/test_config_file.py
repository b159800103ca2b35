"""EBB_CONFIG: a file with the settings of OFFLOAD, PAGE and replays ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _ebb_switches import NAMES

import ebb
from ebb._launch import start
from ebb._launch.variables import apply_config

GOOD = """
[offload]
min_bytes = "2MiB"
keep_last = 2
[paging]
headroom = 1.5
[ahead]
limit = "512MiB"
"""


@pytest.fixture
def read(tmp_path, capsys, monkeypatch):
    """Reads a file with this text; gives what is told."""

    def of(text):
        monkeypatch.chdir(tmp_path)
        Path("FILE").write_text(text)
        monkeypatch.setenv("EBB_CONFIG", "FILE")
        apply_config("FILE")
        return capsys.readouterr().err

    return of


def test_settings_of_all_sections(read):
    assert read(GOOD) == ""

    assert ebb.config.offload.min_bytes == 2 << 20
    assert ebb.config.offload.keep_last == 2
    assert ebb.config.paging.headroom == 1.5
    assert ebb.config.ahead.limit == 512 << 20


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[ofload]\n",
            "EBB_CONFIG=FILE is ignored: unknown section [ofload]; did you mean 'offload'?",
        ),
        ("offload = 1\n", "EBB_CONFIG=FILE is ignored: offload must be a section"),
        ("offload\n", "EBB_CONFIG=FILE is ignored: Expected '='"),
        (
            "[paging]\nhedroom = 2",
            "paging.hedroom in EBB_CONFIG=FILE is ignored: ebb.config has no",
        ),
        (
            "[paging]\nheadroom = 'x'",
            "paging.headroom in EBB_CONFIG=FILE is ignored: headroom must be",
        ),
        (
            "[offload]\nmin_bytes = -1",
            "offload.min_bytes in EBB_CONFIG=FILE is ignored: min_bytes must",
        ),
        ("[ahead]\nregions = '1'", "ahead.regions in EBB_CONFIG=FILE is ignored: regions must"),
    ],
)
def test_a_bad_setting_is_told_of(read, text, told, monkeypatch):
    before = ebb.config.to_dict()

    assert told in read(text)

    assert ebb.config.to_dict() == before
    monkeypatch.setenv("EBB_STRICT", "1")
    with pytest.raises(ValueError, match="the job ends, because EBB_STRICT is set"):
        read(text)


def test_other_settings_of_the_file_count(read):
    read("[offload]\nmin_bytes = -1\nkeep_last = 3\n[paging]\nheadroom = 1.5")

    assert ebb.config.offload.keep_last == 3
    assert ebb.config.paging.headroom == 1.5


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("offload.min_bytes=2MiB", {"offload.min_bytes": 2 << 20}),
        (
            " offload.keep_last = 2, paging.headroom=1.5 ,ahead.limit=512Mi",
            {"offload.keep_last": 2, "paging.headroom": 1.5, "ahead.limit": 512 << 20},
        ),
        ("offload.disk=", {"offload.disk": ""}),
        ("paging.overflow=blocking", {"paging.overflow": "blocking"}),
    ],
)
def test_settings_without_a_file(text, found, capsys, monkeypatch):
    monkeypatch.setenv("EBB_CONFIG", text)

    apply_config(text)

    assert capsys.readouterr().err == ""
    assert found.items() <= ebb.config.to_dict().items()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("min_bytes=1", "'min_bytes=1' is no setting such as offload.min_bytes=1MiB"),
        ("offload.min_bytes=1,", "'' is no setting"),
        ("offlod.min_bytes=1", "unknown section [offlod]; did you mean 'offload'?"),
        ("offload.keep_last=1.5", "keep_last must be an int"),
        ("ahead.regions=auto", "regions must be an int"),
        ("ebb.toml", "No such file"),
    ],
)
def test_bad_settings_without_a_file_are_told_of(text, told, capsys, monkeypatch):
    before = ebb.config.to_dict()
    monkeypatch.setenv("EBB_CONFIG", text)

    assert apply_config(text) == {}

    assert told in capsys.readouterr().err
    assert ebb.config.to_dict() == before


def test_EBB_AHEAD_counts_more_than_the_file(tmp_path):
    path = tmp_path / "ebb.toml"
    path.write_text("[offload]\nmin_bytes = 1\n[ahead]\nregions=4")
    env = {k: v for k, v in os.environ.items() if k not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", "import ebb, json; print(json.dumps(ebb.config.to_dict()))"],
        env=env | {"EBB_CONFIG": str(path), "EBB_AHEAD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    found = json.loads(done.stdout)
    assert (found["offload.min_bytes"], found["ahead.regions"]) == (1, 1)
    assert done.stderr == ""


def test_a_setting_is_called_by_all_that_set_it(monkeypatch):
    named = []
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EBB_CONFIG", "ahead.limit=1MiB,offload.keep_last=1")
    monkeypatch.setenv("EBB_AHEAD", "1")
    monkeypatch.setattr(start.unused_settings, "watch", lambda given, *_, **__: named.append(given))

    start.start()

    value = "EBB_CONFIG=ahead.limit=1MiB,offload.keep_last=1"
    assert named == [
        {"ahead": f"[ahead] of {value}, EBB_AHEAD", "offload": f"[offload] of {value}"}
    ]
