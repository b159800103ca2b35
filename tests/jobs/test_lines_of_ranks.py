"""Lines about settings that cannot be used come from each rank; other lines come from rank 0."""

from __future__ import annotations

import os

import pytest
from _ebb_switches import _RANKS, NAMES

from ebb._support import job
from ebb_tests import fork_server
from ebb_tests.budget_jobs import Job

TRAIN = """
import torch
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 3)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.ones(2, 4, 16)).sum().backward()
    optimizer.step()
"""


def lines(program, is_fresh=False, **environment):
    env = {k: v for k, v in os.environ.items() if k not in (*NAMES, *_RANKS, "RANK", job._TOLD)}
    done = fork_server.run(["-c", program], env=env | environment, is_fresh=is_fresh)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_each_rank_tells_of_settings_that_it_ignores():
    mistakes = {"EBB": "recompute_al", "EBB_REPORT": "/nope/x.html", "EBB_MODULS": "x"}

    first, third = (lines(TRAIN, RANK=rank, **mistakes) for rank in "03")

    assert len(first) == 3
    assert third == [line.replace("ebb: ", "ebb: rank 3: ", 1) for line in first]


def test_each_rank_tells_of_globs_that_match_nothing():
    (line,) = lines(TRAIN, RANK="3", EBB="1", EBB_MODULES="*blokcs.*")

    assert line.startswith("ebb: rank 3: no module matches EBB_MODULES=*blokcs.*, so none becomes")


def test_other_lines_come_from_rank_0():
    assert len(lines(TRAIN, RANK="0", EBB="1")) == 1
    assert lines(TRAIN, RANK="3", EBB="1") == []


SPAWN = """
import os, multiprocessing, torch
if __name__ == "__main__":
    os.environ.update(EBB="1", EBB_REPORT="/nope/x.html")
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
"""


@pytest.fixture
def broken(tmp_path):
    """A path where an ebb lies that cannot be imported."""
    (tmp_path / "ebb.py").write_text("raise ImportError('no such symbol')")
    return os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])


def test_helper_processes_tell_nothing(tmp_path, broken):
    path = tmp_path / "train.py"
    path.write_text(SPAWN)
    program = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"

    assert lines(program, RANK="3") == []
    assert lines(program, RANK="3", is_fresh=True, PYTHONPATH=broken) == []


def test_each_rank_tells_that_ebb_cannot_be_imported(broken):
    program = "import torch; print('done')"

    told = [lines(program, RANK=rank, EBB="1", PYTHONPATH=broken) for rank in "03"]

    why = "could not be imported, so the job runs without ebb: ImportError('no such symbol')"
    assert told == [[f"ebb: {why}"], [f"ebb: rank 3: {why}"]]


def test_each_rank_tells_that_its_plan_cannot_be_written(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job._Known, "rank", 3)
    start(path=tmp_path / "none" / "plan.toml")

    Job().train()

    (line,) = capsys.readouterr().err.splitlines()
    begin = "ebb: rank 3: EBB_BUDGET=60%: the plan could not be written to "
    assert line.startswith(f"{begin}{tmp_path}/none/plan.rank3.toml: ")


def test_each_rank_tells_that_it_has_no_plan(start, monkeypatch, capsys):
    monkeypatch.setattr(job._Known, "rank", 3)
    monkeypatch.setattr("ebb._launch.budget.devices.why_uncounted", lambda: "bytes are unknown")
    start()

    Job().train(1)

    assert capsys.readouterr().err.splitlines() == [
        "ebb: rank 3: EBB_BUDGET=60%: no plan: bytes are unknown; all blocks are recomputed"
    ]
