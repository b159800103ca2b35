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
from ebb._launch.start import _SECTIONS
from ebb._launch.variables import configure_from_file

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
        configure_from_file("FILE", _SECTIONS)
        return capsys.readouterr().err

    return of


def test_settings_of_all_sections(read):
    assert read(GOOD) == ""

    assert ebb.offload.configure()["min_bytes"] == 2 << 20
    assert ebb.offload.configure()["keep_last"] == 2
    assert ebb.paging.configure()["headroom"] == 1.5
    assert ebb.ahead.configure()["limit"] == 512 << 20


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[ofload]\n",
            "EBB_CONFIG=FILE is ignored: unknown section [ofload]; did you mean 'offload'?",
        ),
        ("offload = 1\n", "EBB_CONFIG=FILE is ignored: offload must be a section"),
        ("offload\n", "EBB_CONFIG=FILE is ignored: Expected '='"),
        ("[paging]\nhedroom = 2", "hedroom in [paging] of FILE is ignored: unknown setting"),
        ("[paging]\nheadroom = 'x'", "headroom in [paging] of FILE is ignored: headroom must be"),
        ("[offload]\nmin_bytes = -1", "min_bytes in [offload] of FILE is ignored: min_bytes must"),
        ("[ahead]\nregions = '1'", "regions in [ahead] of FILE is ignored: regions must"),
    ],
)
def test_a_bad_setting_is_told_of(read, text, told, monkeypatch):
    before = ebb.offload.configure(), ebb.paging.configure(), ebb.ahead.configure()

    assert told in read(text)

    assert (ebb.offload.configure(), ebb.paging.configure(), ebb.ahead.configure()) == before
    monkeypatch.setenv("EBB_STRICT", "1")
    with pytest.raises(ValueError, match="the job ends, because EBB_STRICT is set"):
        read(text)


def test_other_settings_of_the_file_count(read):
    read("[offload]\nmin_bytes = -1\nkeep_last = 3\n[paging]\nheadroom = 1.5")

    assert ebb.offload.configure()["keep_last"] == 3
    assert ebb.paging.configure()["headroom"] == 1.5


def job(**variables):
    script = "import ebb, json; print(json.dumps([ebb.offload.configure(), ebb.ahead.configure()]))"
    env = {k: v for k, v in os.environ.items() if k not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return *json.loads(done.stdout), done.stderr


def test_variables_count_more_than_the_file(tmp_path):
    path = tmp_path / "ebb.toml"
    path.write_text("[offload]\nmin_bytes = 1\npinned_limit = 2\nkeep_last = 3\n[ahead]\nregions=4")

    offload, ahead, told = job(EBB_CONFIG=str(path), EBB_OFFLOAD_MIN_BYTES="7", EBB_AHEAD="1")

    assert (offload["min_bytes"], offload["pinned_limit"], offload["keep_last"]) == (7, 2, 3)
    assert ahead["regions"] == 1
    assert told == ""
