"""The command `make gpu`, with items that need no GPU."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"GPU": "NVIDIA H100", "torch": "2.11.0", "CUDA": "13.0", "capability": "90"}

pytestmark = pytest.mark.sweep  # starts many processes, for the commands of a machine with a GPU


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("on_gpu")


@pytest.fixture
def run(on_gpu, tmp_path, monkeypatch, capsys):
    """Runs items as the command does; returns its status, its rows by name, and what it printed."""
    monkeypatch.setattr(on_gpu, "ROOT", tmp_path)

    def run_command(*listed, seconds=60):
        items = [on_gpu.Item(n, [sys.executable, "-c", c], 1, 30, **m) for n, c, m in listed]
        status = on_gpu.run(items, MACHINE, tmp_path / "results", seconds)
        found = json.loads((tmp_path / "build" / "on_gpu" / "results.json").read_text())
        assert sorted(file.name for file in (tmp_path / "results").iterdir()) == [
            "logs.tgz",
            "nvidia-h100-gpu.md",
        ]
        return status, {row["name"]: row for row in found["items"]}, capsys.readouterr().out

    return run_command


FAILS = ("fails", "print('one'); raise SystemExit('went wrong')", {})
PASSES = ("passes", "", {})


def test_it_continues_after_a_failure_and_tells_the_last_line_of_the_error(run, tmp_path):
    status, rows, printed = run(FAILS, PASSES)

    assert status == 1
    assert {name: row["result"] for name, row in rows.items()} == {
        "fails": "FAILED",
        "passes": "passed",
    }
    assert "fails: went wrong" in printed
    with tarfile.open(tmp_path / "results" / "logs.tgz") as packed:
        assert "logs/fails/log" in packed.getnames()


def test_a_program_that_is_not_there_is_no_failure(on_gpu, tmp_path):
    rows = []
    on_gpu.run_items([on_gpu.Item("tool", ["no-such-tool"], 1, 9)], 60, tmp_path, rows.append)
    assert [row["result"] for row in rows] == ["not installed"]


def test_an_item_without_a_test_fails(run, tmp_path):
    (tmp_path / "test_none.py").touch()
    nothing = f"import pytest; raise SystemExit(pytest.main([{str(tmp_path)!r}]))"
    _, rows, _ = run(("nothing", nothing, {}))

    assert rows["nothing"]["result"] == "FAILED"


def test_a_rehearsal_runs_each_program_on_the_dry_runtime(on_gpu):
    for item in on_gpu.items():
        found = on_gpu.rehearsed(item).command
        assert item.not_dry or item.command[0] == sys.executable
        assert list(found) == [sys.executable, *on_gpu.DRY, *item.command[1:]]


def test_an_item_is_ended_where_the_time_ends(run):
    began = time.monotonic()
    _, rows, _ = run(("hangs", "import time; time.sleep(600)", {}), seconds=3)

    assert rows["hangs"]["result"] == "TIMED OUT"
    assert time.monotonic() - began < 20


def test_an_item_that_is_expected_to_take_longer_does_not_start(on_gpu, tmp_path):
    item = on_gpu.Item("long", [sys.executable, "-c", ""], 50, 90)
    assert on_gpu.run_items([item], 10, tmp_path, lambda row: None) == [item]


def test_the_same_command_runs_only_what_failed(run):
    run(FAILS, PASSES)
    _, rows, printed = run(FAILS, PASSES)

    assert "passes" not in printed
    assert "fails" in printed
    assert set(rows) == {"fails", "passes"}


MEETS = """
import pathlib, sys, time
folder = pathlib.Path({folder!r})
(folder / {me!r}).touch()
until = time.monotonic() + 20
while not (folder / {other!r}).exists():
    assert time.monotonic() < until
    time.sleep(0.02)
"""


def test_items_run_together_unless_they_measure_time(run, tmp_path):
    a, b = (MEETS.format(folder=str(tmp_path), me=me, other=o) for me, o in ("ab", "ba"))
    alone = f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'c').touch()"
    status, rows, _ = run(("a", a, {}), ("b", b, {}), ("c", alone, {"alone": True}))

    assert status == 0
    assert list(rows) == ["a", "b", "c"]


def test_failed_tests_are_named_with_the_first_line_of_their_error(on_gpu, tmp_path):
    (tmp_path / "test_x.py").write_text("def test_y():\n    raise ValueError('first\\nlast')\n")
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(tmp_path)]
    subprocess.run(command, capture_output=True, cwd=tmp_path)

    assert on_gpu.tests_of(report)["failed"] == {"test_x::test_y": "ValueError: first"}


def test_what_tests_record_is_in_the_results(on_gpu, tmp_path):
    program = "def test_y(record_property):\n    record_property('bytes', [1, 2])\n"
    (tmp_path / "test_x.py").write_text(program)
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(tmp_path)]
    subprocess.run(command, capture_output=True, cwd=tmp_path)

    assert on_gpu.tests_of(report)["recorded"] == {"test_x::test_y": {"bytes": "[1, 2]"}}


def test_page_has_what_tests_record_and_the_pages_of_benchmarks(on_gpu):
    row = {"name": "a", "result": "passed", "seconds": 1.0}
    recorded = {"test_x::test_y": {"bytes": "[1, 2]", "differs": "[]"}}
    rows = [row | {"recorded": recorded}, row | {"name": "b", "pages": ["# T\n\n## U\n\n| 1 |\n"]}]

    lines = on_gpu.page({"machine": MACHINE, "items": rows}).splitlines()

    assert "* test_x::test_y: bytes [1, 2]" in lines
    assert not any("differs" in line for line in lines)
    assert lines[-5:] == ["## b", "", "### U", "", "| 1 |"]


def test_every_gpu_test_file_is_in_the_list(on_gpu):
    named = {part for item in on_gpu.items() for part in item.command if part.endswith(".py")}
    assert {str(file.relative_to(ROOT)) for file in ROOT.glob("tests/gpu/test_*.py")} <= named
    assert all((ROOT / name).exists() for name in named)


def test_names_of_items_are_unique(on_gpu):
    names = [item.file_name for item in on_gpu.items()]
    assert len(names) == len(set(names))


def test_an_archive_of_other_sources_is_not_used(on_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "ROOT", tmp_path)
    built = []
    monkeypatch.setattr(on_gpu, "build", built.append)
    made = tmp_path / on_gpu.native() / "stamp.json"
    made.parent.mkdir(parents=True)
    made.write_text(on_gpu.stamp("90"))
    (tmp_path / on_gpu.ARCHIVE).parent.mkdir(parents=True)
    with tarfile.open(tmp_path / on_gpu.ARCHIVE, "w:gz") as packed:
        packed.add(made, on_gpu.native() / "stamp.json")
    made.unlink()

    on_gpu.prepare("90")
    assert built == []
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "other.cpp").touch()
    on_gpu.prepare("90")
    assert built == ["90"]


ENDED = """
import sys
sys.path.insert(0, sys.argv[2])
import on_gpu
from pathlib import Path
work = Path(sys.argv[1])
sleep = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
item = on_gpu.Item("sleeps", [sys.executable, "-c", sleep, str(work / "pid")], 1, 300)
on_gpu.ROOT = work
on_gpu.items = lambda: [item]
on_gpu.prepare = lambda capability: None
on_gpu.ask_torch = lambda: MACHINE
sys.argv[1:] = ["--output", str(work / "results")]
sys.exit(on_gpu.main())
"""


def test_a_command_that_is_ended_ends_what_runs_and_packs_its_logs(tmp_path):
    code = ENDED.replace("MACHINE", repr(MACHINE))
    command = [sys.executable, "-c", code, str(tmp_path), str(ROOT / "benchmarks")]
    process = subprocess.Popen(command)
    pid = tmp_path / "pid"
    until = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < until:
        time.sleep(0.1)

    process.send_signal(signal.SIGTERM)

    assert process.wait(30) == 143
    status = Path("/proc", pid.read_text(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text()
    assert (tmp_path / "results" / "logs.tgz").exists()
