"""What `make test-gpu` and `make bench-gpu` do, with items that need no GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"GPU": "NVIDIA H100 80GB HBM3", "driver": "580.1", "torch": "2.11.0", "CUDA": "13.0"}


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
    """In three parts: what passes, what fails, what hangs, and what is not installed."""
    return [
        items.Item("build", 0, python("print('built')"), 20),
        items.Item("passes", 1, python("print('fine')"), 20),
        items.Item("fails", 2, python("raise SystemExit('went wrong')"), 20),
        items.Item("hangs", 2, python("print('tests/x.py::test_y', flush=True); input_ = 1\n"
                                      "import time; time.sleep(600)"), 2),
        items.Item("comes after", 2, python("print('still runs')"), 20),
        items.Item("needs a tool", 3, ["no-such-tool"], 20, program="no-such-tool"),
        items.Item("is refused", 3, python("raise SystemExit('Device not supported')"), 20,
                   refusal="Device not supported"),
    ]  # fmt: skip


@pytest.fixture
def run(items, on_gpu, listed, tmp_path, monkeypatch):
    """Runs parts as the command does, with results and builds in the test's folder."""
    monkeypatch.setattr(on_gpu, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)

    def run_parts(*parts, machine=MACHINE, chosen=listed):
        return on_gpu.run("tests", chosen, list(parts), machine, tmp_path / "results")

    return run_parts


def results_of(folder, name="nvidia-h100-80gb-hbm3-tests"):
    rows = json.loads((folder / "results" / f"{name}.json").read_text())
    return rows, (folder / "results" / f"{name}.md").read_text()


def test_it_goes_on_after_a_failure_and_after_what_hangs(run, tmp_path, capsys):
    began = time.monotonic()
    status = run(2)

    found, page = results_of(tmp_path)
    rows = {row["name"]: row for row in found["items"]}
    assert status == 1
    assert time.monotonic() - began < 60
    assert [row["result"] for row in rows.values()] == ["passed", "FAILED", "TIMED OUT", "passed"]
    assert rows["fails"]["detail"] == "exit status 1"
    assert rows["hangs"]["detail"] == "in tests/x.py::test_y"
    assert 2 <= rows["hangs"]["seconds"] < 30
    printed = capsys.readouterr().out
    assert "went wrong" in printed  # the end of the log of what failed
    ending = printed[printed.rindex("\nbuild ") :]
    for name, row in rows.items():
        assert re.search(rf"^{name} +{row['result']} ", ending, re.M)
        assert f"| {name} | {row['result']} |" in page
    assert "Not in these results: passes, needs a tool, is refused." in page


def test_parts_are_merged_into_one_file(run, tmp_path):
    assert run(1) == 0
    assert run(3) == 0
    assert run(2) == 1

    found, page = results_of(tmp_path)
    assert [row["name"] for row in found["items"]] == [
        "build", "passes", "fails", "hangs", "comes after", "needs a tool", "is refused",
    ]  # fmt: skip
    assert [row["result"] for row in found["items"]][-2:] == ["not installed", "not installed"]
    assert "Not in these results" not in page
    assert found["machine"] == MACHINE
    assert ", ".join(f"{k} {v}" for k, v in MACHINE.items()) in page


def test_parts_are_merged_where_the_results_were_taken_away_in_between(run, tmp_path):
    """A checkout that is made anew keeps what git ignores: builds, and what parts found."""
    run(1)
    for file in (tmp_path / "results").iterdir():
        file.unlink()
    run(3)

    found, _ = results_of(tmp_path)
    assert {row["name"] for row in found["items"]} == {
        "build", "passes", "needs a tool", "is refused",
    }  # fmt: skip


def test_results_of_another_torch_are_not_mixed_in(run, tmp_path):
    run(1)
    run(3, machine=MACHINE | {"torch": "2.13.0"})

    found, _ = results_of(tmp_path)
    assert "passes" not in {row["name"] for row in found["items"]}


def test_nothing_runs_where_the_build_fails(items, run, tmp_path):
    chosen = [
        items.Item("build", 0, python("raise SystemExit(3)"), 20),
        items.Item("would pass", 1, python("print(1)"), 20),
    ]

    assert run(1, chosen=chosen) == 1

    found, _ = results_of(tmp_path)
    assert [(row["result"], row["detail"]) for row in found["items"]] == [
        ("FAILED", "exit status 3"),
        ("NOT RUN", "build: FAILED"),
    ]


def test_a_part_ends_when_its_time_is_over(items, tmp_path):
    chosen = [
        items.Item("sleeps", 1, python("import time; time.sleep(60)"), 60),
        items.Item("comes too late", 1, python("print(1)"), 60),
    ]

    rows = items.run_part(chosen, 2.5, tmp_path)

    assert [row["result"] for row in rows] == ["TIMED OUT", "NOT RUN"]
    assert rows[0]["seconds"] < 30
    assert items.exit_status(rows) == 1


def test_what_an_item_has_started_ends_with_it(items, tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )

    items.run_part([items.Item("hangs", 1, python(code), 3)], 60, tmp_path / "work")

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

    assert run(1, chosen=[items.Item("some", 1, command, 60)]) == 1

    found, page = results_of(tmp_path)
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

    assert run(1, chosen=[items.Item("bench", 1, [*python(code), "{folder}"], 60)]) == 0

    found, page = results_of(tmp_path)
    assert found["items"][0]["figures"] == {"figures": {"seconds": 2}}
    assert page.endswith("## bench\n\n### Part\n\ntext\n")
    assert "threads" not in page


@pytest.mark.parametrize("what", ["tests", "bench"])
def test_parts_take_at_most_nine_minutes_and_all_of_them_25(on_gpu, what):
    listed = on_gpu.LISTS[what]("90")
    parts = {item.part for item in listed} - {0}

    for part in parts:
        limits = [item.seconds for item in listed if item.part in (0, part)]
        assert sum(limits) <= on_gpu.PART_SECONDS <= 9 * 60  # no item eats another's time
    assert len(parts) * on_gpu.PART_SECONDS <= 25 * 60
    assert len({item.name for item in listed}) == len(listed)


@pytest.mark.parametrize("what", ["tests", "bench"])
def test_items_name_what_exists(on_gpu, what):
    paths = [
        part
        for item in on_gpu.LISTS[what]("90")
        for part in item.command
        if re.match(r"(tests|benchmarks)/", part)
    ]

    assert len(paths) >= 7
    assert all((ROOT / path).exists() for path in paths)


def test_every_file_for_gpus_is_in_the_list(on_gpu):
    named = {part for item in on_gpu.tests("90") for part in item.command}

    assert {str(file.relative_to(ROOT)) for file in (ROOT / "tests/gpu").glob("*.py")} <= named


def test_every_test_that_needs_cuda_is_in_the_list(on_gpu):
    named = {part for item in on_gpu.tests("90") for part in item.command}

    for file in (ROOT / "tests").rglob("test_*.py"):
        if "pytest.mark.needs_cuda" in file.read_text() and file != Path(__file__):
            assert str(file.relative_to(ROOT)) in named, file


def make(*arguments):
    """Whether make runs these tests too or not."""
    command = ["make", "--no-print-directory", *arguments, f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_without_a_gpu_it_says_so_and_ends(on_gpu, target):
    if "error" not in on_gpu.ask_torch():
        pytest.skip("there is a GPU")

    done = make(target, "PART=1")

    assert done.returncode != 0
    assert re.search(
        rf"make {target}: torch \S+ (is not built for CUDA|finds no NVIDIA GPU)", done.stderr
    )
    assert done.stdout == ""


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_what_would_run_can_be_shown_anywhere(target):
    done = make(target, "LIST=1")

    assert done.returncode == 0, done.stderr
    assert re.findall(r"^part (\d): at most \d+ s$", done.stdout, re.M) == ["1", "2", "3"]


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
on_gpu.LISTS["tests"] = lambda capability: [item]
on_gpu.ask_torch = lambda: MACHINE
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
