"""Reports saved as JSON are loaded, and rendered as if they had just been recorded."""

from __future__ import annotations

import json

import pytest

import ebb
from ebb.__main__ import main
from ebb_tests.one_step_report import no_reports_yet, recorded, under_a_plan  # noqa: F401


@pytest.fixture(params=["plan", "variable"])
def a_report(request, monkeypatch):
    if request.param == "plan":
        return under_a_plan()[2]
    monkeypatch.setenv("EBB", "save_matmuls")
    return recorded(ebb.policies.save_matmuls)


def test_saved_report_is_loaded(a_report, tmp_path):
    a_report.save(tmp_path / "r.json")

    found = ebb.Report.load(tmp_path / "r.json")

    assert found == a_report
    assert found.policy == a_report.policy
    assert found.to_dict() == a_report.to_dict()
    assert found.advice == a_report.advice
    assert found.text(rows=1000) == a_report.text(rows=1000)
    assert (found.plan is None) == (a_report.plan is None) == bool(found.advice)
    for name in ("saved.html", "loaded.html"):
        (a_report if name == "saved.html" else found).save(tmp_path / name)
    assert (tmp_path / "saved.html").read_text() == (tmp_path / "loaded.html").read_text()


def test_command_renders_a_saved_report(a_report, tmp_path, capsys):
    a_report.save(tmp_path / "run.json")
    a_report.save(tmp_path / "expected.html")

    assert main(["report", str(tmp_path / "run.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.html'}\n"
    assert (tmp_path / "run.html").read_bytes() == (tmp_path / "expected.html").read_bytes()

    assert main(["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "b.txt")]) == 0
    assert (tmp_path / "b.txt").read_text() == f"{a_report}\n"

    capsys.readouterr()
    assert main(["report", "--text", str(tmp_path / "run.json")]) == 0
    assert capsys.readouterr().out == f"{a_report}\n"


def changed(document, *path, to):
    *path, last = path
    inner = document
    for key in path:
        inner = inner[key]
    inner[last] = to


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 9, "its format version is 9, expected 2; use the release of ebb"),
        (("rows", 0, "fate"), "<img src=x>", "unknown fate '<img src=x>'"),
        (("rows", 0, "bytes"), "<img src=x>", "bytes of a row is '<img src=x>'"),
        (("rows", 0, "stack"), 999, "list index out of range"),
        (("rows", 0, "region"), 3, "region of a row is 3"),
        (("ahead",), [], "has no attribute 'items'"),
        (("policy",), {"text": "1"}, "missing 1 required positional argument"),
    ],
)
def test_invalid_report_raises_and_writes_nothing(tmp_path, capsys, path, value, message):
    document = json.loads(json.dumps(recorded(ebb.policies.save_matmuls).to_dict()))
    changed(document, *path, to=value)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(document))

    with pytest.raises(ValueError, match="is not a report that ebb saved as JSON"):
        ebb.Report.load(file)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(file)])

    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("ebb: ")
    assert message in error
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "path", [("budget",), ("predicted", "peak"), ("points", 0, "cuts", 0, "count")]
)
def test_plan_without_numbers_raises(tmp_path, path):
    document = json.loads(json.dumps(under_a_plan()[2].to_dict()))
    changed(document["plan"], *path, to="<img src=x>")
    (tmp_path / "run.json").write_text(json.dumps(document))

    with pytest.raises(ValueError, match=f"{path[-1]} of a plan is '<img src=x>'"):
        ebb.Report.load(tmp_path / "run.json")


@pytest.mark.parametrize("text", ["", "<!doctype html>", "[]", "{}", '{"step": 1', "\udcff"])
def test_other_file_raises(tmp_path, capsys, text):
    file = tmp_path / "run.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(SystemExit):
        main(["report", str(file)])

    assert "is not a report that ebb saved as JSON: " in capsys.readouterr().err


def test_file_that_cannot_be_read_or_written_raises(tmp_path, capsys):
    recorded(ebb.policies.save_matmuls).save(tmp_path / "run.json")
    for arguments, message in (
        ([str(tmp_path / "none.json")], "No such file"),
        ([str(tmp_path / "run.json"), "-o", str(tmp_path / "no" / "b.html")], "No such file"),
        ([str(tmp_path / "run.json"), "-o", str(tmp_path / "b.pdf")], "must end in .txt"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["report", *arguments])
        assert ended.value.code == 1
        assert message in capsys.readouterr().err
