"""The commands `make gpu`, `make test-gpu` and `make bench-gpu`, with items that need no GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"GPU": "NVIDIA H100 80GB HBM3", "driver": "580.1", "torch": "2.11.0", "CUDA": "13.0"}

pytestmark = pytest.mark.sweep  # starts many processes, for the commands of a machine with a GPU


@pytest.fixture
def items(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("items")


@pytest.fixture
def on_gpu(items):
    return importlib.import_module("on_gpu")


def python(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def listed(items):
    """What passes, what fails, what hangs, and what is not installed."""

    def item(name, turn, seconds, code, **more):
        return items.Item(name, turn, python(code), seconds, "tests", **more)

    return [
        item("fails", 2, 20, "raise SystemExit('went wrong')"),
        item("hangs", 2, 2, "print('tests/x.py::test_y', flush=True); input_ = 1\n"
                            "import time; time.sleep(600)"),
        item("comes after", 2, 20, "print('still runs')"),
        item("needs a tool", 3, 20, "", program="no-such-tool"),
        item("is refused", 3, 20, "raise SystemExit('Device not supported')",
             refusal="Device not supported"),
        item("passes", 1, 10, "print('fine')"),
        items.Item("build", 0, python("print('built')"), 20),
    ]  # fmt: skip


NAMES = ["build", "passes", "fails", "hangs", "comes after", "needs a tool", "is refused"]
QUICK = {"build", "passes", "needs a tool"}


@pytest.fixture
def run(items, on_gpu, listed, tmp_path, monkeypatch):
    """Runs items as the command does, with results and builds in the test's folder."""
    monkeypatch.setattr(on_gpu, "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules["gpu_machine"], "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for source in sys.modules["gpu_machine"].ALL_OF_EBB:
        (tmp_path / source).mkdir(parents=True)

    def run_command(machine=MACHINE, chosen=listed, output="results", **options):
        return on_gpu.run(chosen, machine, tmp_path / output, **options)

    return run_command


@pytest.fixture
def quick(listed):
    """The items that pass or need a tool."""
    return [item for item in listed if item.name in QUICK]


def results_of(folder, name="nvidia-h100-80gb-hbm3-tests"):
    rows = json.loads((folder / f"{name}.json").read_text())
    return rows, (folder / f"{name}.md").read_text()


def ran(capsys):
    """The names of the items that ran since the last call, in order."""
    return re.findall(r"^--- (.*) \(at most", capsys.readouterr().out, re.M)


def test_it_goes_on_after_a_failure_and_after_what_hangs(run, tmp_path, capsys):
    began = time.monotonic()
    status = run()

    found, page = results_of(tmp_path / "results")
    rows = {row["name"]: row for row in found["items"]}
    assert status == 1
    assert time.monotonic() - began < 60
    assert sorted(rows) == sorted(NAMES)
    results = [rows[name]["result"] for name in NAMES]
    assert results == ["passed", "passed", "FAILED", "TIMED OUT", "passed", *2 * ["not installed"]]
    assert rows["fails"]["detail"] == "exit status 1"
    assert rows["hangs"]["detail"] == "in tests/x.py::test_y"
    assert 2 <= rows["hangs"]["seconds"] < 30
    printed = capsys.readouterr().out
    assert "went wrong" in printed  # the end of the log of what failed
    ending = printed[printed.rindex("\nbuild ") :]
    for name, row in rows.items():
        assert re.search(rf"^{name} +{row['result']} ", ending, re.M)
        assert f"| {name} | {row['result']} |" in page
    assert "Not in these results" not in page
    assert found["machine"] == MACHINE
    assert ", ".join(f"{k} {v}" for k, v in MACHINE.items()) in page


def test_items_run_by_turn_and_are_begun_only_where_their_limit_fits(run, tmp_path, capsys):
    assert run(seconds=12) == 1

    printed = capsys.readouterr().out
    assert re.findall(r"^--- (.*) \(at most", printed, re.M) == ["build", "passes", "hangs"]
    assert "4 items are left for the next such command: fails, comes after, needs" in printed
    _, page = results_of(tmp_path / "results")
    assert "Not in these results: fails, comes after, needs a tool, is refused." in page


@pytest.mark.sweep
def test_the_next_command_goes_on_and_then_tries_again_what_failed(run, tmp_path, capsys):
    run(seconds=12)
    ran(capsys)
    run()

    assert ran(capsys) == ["build", "fails", "comes after", "is refused", "hangs"]
    found, page = results_of(tmp_path / "results")
    assert {row["name"] for row in found["items"]} == set(NAMES)
    assert "Not in these results" not in page
    assert "the same state" not in page


def test_what_was_found_with_another_ebb_is_run_again(run, listed, tmp_path, capsys):
    run(chosen=listed[2:])
    (tmp_path / "src" / "changed.cpp").write_text("int other;")
    ran(capsys)
    run(chosen=listed[2:], seconds=12)

    assert ran(capsys) == ["build", "passes"]
    _, page = results_of(tmp_path / "results")
    assert re.search(r"Not all rows are of the same state of ebb:\n\n\* \w+: build, passes\n", page)


@pytest.mark.parametrize(
    ("lost", "options", "expected"),
    [
        (None, {"again": True}, ["build", "passes"]),
        ("results", {}, ["build"]),  # as on a new machine, which has what git has
        ("build/on_gpu", {}, ["build"]),  # as in a new checkout
        (None, {"machine": MACHINE | {"driver": "599.1"}}, ["build"]),
        (None, {"machine": MACHINE | {"torch": "599.1"}}, ["build", "passes"]),
    ],
    ids=["all again", "results are lost", "the build is lost", "another driver", "another torch"],
)
def test_what_a_second_command_runs(run, quick, tmp_path, capsys, lost, options, expected):
    run(chosen=quick)
    if lost:
        shutil.rmtree(tmp_path / lost)
    ran(capsys)
    run(chosen=quick, **options)

    assert ran(capsys) == expected
    found, _ = results_of(tmp_path / "results")
    assert {row["name"] for row in found["items"]} == QUICK


def test_results_elsewhere_have_the_rows_that_are_committed(run, quick, tmp_path):
    run(chosen=quick, output="benchmarks/results")
    shutil.rmtree(tmp_path / "build")
    run(chosen=quick, output="elsewhere")

    found, _ = results_of(tmp_path / "elsewhere")
    assert {row["name"] for row in found["items"]} == QUICK


def test_nothing_runs_where_the_build_fails_and_earlier_rows_stay(items, run, quick, tmp_path):
    run(chosen=quick)
    broken = [items.Item("build", 0, python("raise SystemExit(3)"), 20), *quick[:2]]

    assert run(chosen=broken, again=True) == 1

    found, _ = results_of(tmp_path / "results")
    assert {row["name"]: (row["result"], row["detail"]) for row in found["items"]} == {
        "build": ("FAILED", "exit status 3"),
        "passes": ("passed", ""),
        "needs a tool": ("not installed", ""),
    }


def test_rows_of_tests_and_of_benchmarks_go_to_files_of_their_own(items, run, tmp_path):
    both = [
        items.Item("build", 0, python("print(1)"), 20),
        items.Item("same name", 2, python("print(1)"), 20, "tests"),
        items.Item("same name", 1, python("raise SystemExit(3)"), 20, "bench"),
    ]

    run(chosen=both)

    for kind, result in (("tests", "passed"), ("bench", "FAILED")):
        found, _ = results_of(tmp_path / "results", f"nvidia-h100-80gb-hbm3-{kind}")
        results = [(row["name"], row["result"]) for row in found["items"]]
        assert results == [("build", "passed"), ("same name", result)]


def test_what_was_built_of_the_same_sources_is_unpacked(on_gpu, run, tmp_path, monkeypatch):
    machine = sys.modules["gpu_machine"]
    folder = tmp_path / "python/ebb/_native/torch-2.11.0"
    folder.mkdir(parents=True)
    built = []

    def setup(command, **_):
        built.append(command)
        (folder / "libebb.so").write_text(f"build {len(built)}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(machine.subprocess, "run", setup)
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "2.11.0+cu130")
    machine.build("90")
    (folder / "libebb.so").unlink()

    machine.build("90")
    assert (folder / "libebb.so").read_text() == "build 1"
    (tmp_path / "src" / "changed.cpp").write_text("int other;")
    machine.build("90")
    assert (folder / "libebb.so").read_text() == "build 2"


def test_what_an_item_has_started_ends_with_it(items, tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )

    items.run_items([items.Item("hangs", 1, python(code), 3)], 60, tmp_path / "work")

    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    for _ in range(100):
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child goes on")


def test_reports_of_pytest_are_read(items, run, tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert open('/some/where/a.txt') == 2\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_skipped(n): pytest.skip('fewer than two CUDA devices')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["--junitxml={folder}/junit.xml", "-c", os.devnull, "test_some.py"]

    assert run(chosen=[items.Item("some", 1, command, 60, "tests")]) == 1

    found, page = results_of(tmp_path / "results")
    row = found["items"][0]
    assert row["detail"] == "1 passed, 1 failed, 2 skipped"
    assert list(row["failed"]) == ["test_some::test_fails"]
    assert "a.txt" in row["failed"]["test_some::test_fails"]
    assert "* 2 from `test_some::test_skipped[1]`: fewer than two CUDA devices" in page
    assert "/some/where" not in page + json.dumps(found)


def test_pages_and_figures_are_taken_over_without_the_processor(items, run, tmp_path):
    code = (
        "import json, sys\n"
        "found = {'environment': {'processor': 'a processor'}, 'seconds': 2}\n"
        "json.dump(found, open(sys.argv[1] + '/figures.json', 'w'))\n"
        "lines = ['# Title', '', 'NVIDIA H100 80GB HBM3, threads: 1.', '', '## Part', '', 'text']\n"
        "open(sys.argv[1] + '/page.md', 'w').write('\\n'.join(lines))"
    )

    command = [*python(code), "{folder}"]
    assert run(chosen=[items.Item("bench", 1, command, 60, "tests")]) == 0

    found, page = results_of(tmp_path / "results")
    assert found["items"][0]["figures"] == {"figures": {"seconds": 2}}
    assert page.endswith("## bench\n\n### Part\n\ntext\n")
    assert "threads" not in page


def test_the_build_and_the_first_turn_fit_into_one_command(on_gpu):
    chosen = [on_gpu.build("90"), *(item for item in on_gpu.items_of("all") if item.turn == 1)]

    assert sum(item.seconds for item in chosen) <= on_gpu.TURN_SECONDS


def commands(on_gpu):
    return [part for item in on_gpu.items_of("all") for part in item.command]


@pytest.mark.parametrize("what", ["tests", "bench"])
def test_items_name_what_exists(on_gpu, what):
    found = on_gpu.items_of(what)
    paths = [p for item in found for p in item.command if re.match(r"(tests|benchmarks)/", p)]

    assert len(paths) >= 7
    assert all((ROOT / path).exists() for path in paths)
    assert len({item.name for item in found}) == len(found)


def test_every_test_for_gpus_is_in_the_list(on_gpu):
    named = commands(on_gpu)

    assert {str(file.relative_to(ROOT)) for file in (ROOT / "tests/gpu").glob("*.py")} <= {*named}
    for file in (ROOT / "tests").rglob("test_*.py"):
        if "pytest.mark.needs_cuda" in file.read_text() and file != Path(__file__):
            assert str(file.relative_to(ROOT)) in named, file


def make(*arguments):
    command = ["make", "--no-print-directory", *arguments, f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["gpu", "test-gpu", "bench-gpu"])
def test_without_a_gpu_it_says_so_and_ends(on_gpu, target):
    if "error" not in on_gpu.ask_torch():
        pytest.skip("there is a GPU")

    done = make(target, "SECONDS=60")

    assert done.returncode != 0
    assert re.search(
        rf"make {target}: torch \S+ (is not built for CUDA|finds no NVIDIA GPU)", done.stderr
    )
    assert done.stdout == ""


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_what_would_run_can_be_shown_anywhere(target):
    done = make(target, "LIST=1")

    assert done.returncode == 0, done.stderr
    turns = re.findall(r"^turn (\d): at most \d+ s$", done.stdout, re.M)
    assert turns == ["0", "1", "2", "3"]


def test_what_is_missing_is_named(on_gpu, monkeypatch):
    machine = sys.modules["gpu_machine"]
    monkeypatch.setattr(machine, "is_installed", lambda module: module != "hypothesis")
    monkeypatch.setattr(machine, "nvcc", lambda: None)

    told = machine.missing(tests=True)

    assert any(re.search(r"hypothesis is not installed: .*pip install hypothesis", t) for t in told)
    assert any("nvcc" in t for t in told)
    assert not any("hypothesis" in t for t in machine.missing(tests=False))


ENDED = """
import sys, pathlib
work, benchmarks = pathlib.Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, benchmarks)
import on_gpu
from items import Item
sleep = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
item = Item("sleeps", 1, [sys.executable, "-c", sleep, str(work / "pid")], 300)
on_gpu.ROOT = work
on_gpu.LISTS["tests"] = lambda: [item]
on_gpu.build = lambda capability: Item("build", 0, [sys.executable, "-c", ""], 20)
on_gpu.ask_torch = lambda: MACHINE | {"capability": "90"}
on_gpu.missing = lambda tests: []
sys.argv[1:] = ["tests", "--output", str(work / "results")]
sys.exit(on_gpu.main())
"""


def test_what_runs_is_ended_with_the_command(tmp_path):
    code = ENDED.replace("MACHINE", repr(MACHINE))
    process = subprocess.Popen([*python(code), str(tmp_path), str(ROOT / "benchmarks")])
    pid = tmp_path / "pid"
    for _ in range(300):
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.1)

    process.send_signal(signal.SIGTERM)

    assert process.wait(30) == 143
    status = Path("/proc", pid.read_text(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text()
