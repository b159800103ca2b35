"""Jobs of several processes: each writes files of its own. Each tells of its own settings that it
cannot use; one process prints the other lines.
"""

from __future__ import annotations

import os

import pytest
from _ebb_switches import _RANKS

from ebb._support import job
from ebb_tests import fork_server
from ebb_tests.budget_jobs import Job
from ebb_tests.programs_apart import ebb_lines, run_program

TRAIN = """
import torch
def train():
    import ebb
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
    ebb.apply(net, modules="1")
    for _ in range(3):
        net(torch.randn(4, 8)).sum().backward()
"""
CHECKPOINTS = """
import torch
from torch.utils.checkpoint import checkpoint
def train():
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum().backward()
"""
SPAWN = """
def work(rank, grouped):
    import torch.distributed as dist
    if grouped:
        dist.init_process_group("gloo", init_method=f"file://{grouped}", rank=rank, world_size=2)
    train()
    if grouped:
        dist.destroy_process_group()
if __name__ == "__main__":
    import sys, torch.multiprocessing as mp
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""
CHILD = """
import subprocess, sys
train()
if 'child' not in sys.argv: subprocess.run([sys.executable, __file__, 'child'])
"""
FORK = """
train()
import os, sys
child = os.fork()
if not child: sys.exit()
os.waitpid(child, 0)
"""
BLOCKS = """
import torch
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 3)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.ones(2, 4, 16)).sum().backward()
    optimizer.step()
"""
STARTS_HELPER = """
import os, multiprocessing, torch
if __name__ == "__main__":
    os.environ.update(EBB="1", EBB_REPORT="/nope/x.html")
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


@pytest.fixture
def run(tmp_path):
    """Runs a script, with folder `out`; gives ebb's lines and the names of the files in there."""
    (tmp_path / "out").mkdir()

    def run(program, *arguments, launcher=(), **variables):
        (tmp_path / "train.py").write_text(program)
        command = (*launcher, tmp_path / "train.py", *arguments)
        done = run_program(*command, cwd=tmp_path, OMP_NUM_THREADS="1", **variables)
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        return ebb_lines(done.stderr), names

    return run


def told(program, is_fresh=False, **variables):
    return run_program("-c", program, is_fresh=is_fresh, **variables).stderr.splitlines()


def test_programs_of_tests_do_not_need_new_processes():
    assert fork_server.is_for_the_server(os.environ)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"RANK": "0", "LOCAL_RANK": "1"}, 0),
        ({"LOCAL_RANK": "1"}, 1),  # Lightning's
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, 1),
        ({"SLURM_PROCID": "2"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "5"}, 5),
        ({"RANK": "²"}, 0),
        ({"RANK": "-1"}, 0),
        ({"RANK": ""}, 0),
    ],
)
def test_rank_that_launchers_give(monkeypatch, environment, rank):
    monkeypatch.setattr(job._Known, "rank", None)  # of a group of an earlier test
    for name in ("RANK", *_RANKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert job.rank() == rank
    assert job.label() == (f"rank{rank}" if rank else "")
    assert job.is_first() == (rank == 0)


# Files --------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_spawned_processes_write_files_of_their_own(run, tmp_path):
    lines, names = run(TRAIN + SPAWN, "", EBB_REPORT="out/r.txt", EBB="1")

    assert names == ["r.process1.txt", "r.process2.txt"]
    assert lines == [f"ebb: the reports are in {tmp_path}/out: r.process1.txt, r.process2.txt"]


@pytest.mark.sweep
def test_spawned_ranks_know_their_number_from_the_process_group(run, tmp_path):
    lines, names = run(CHECKPOINTS + SPAWN, tmp_path / "store", EBB_REPORT="out/r.json", EBB="1")

    assert names == ["r.rank0.json", "r.rank1.json"]
    assert sum("EBB_DISABLE=1 turns ebb off" in line for line in lines) == 1
    assert sum("; report: " in line for line in lines) == 1


@pytest.mark.sweep
def test_program_that_a_job_starts_does_not_take_its_files(run):
    _, names = run(TRAIN + CHILD, EBB_REPORT="out/r.txt", EBB="1")

    assert len(names) == 2


@pytest.mark.sweep
def test_files_of_an_earlier_job_are_replaced(run):
    for _ in range(2):
        _, names = run(TRAIN + "train()", EBB_REPORT="out/r.txt", EBB="1")

    assert names == ["r.txt"]


@pytest.mark.sweep
def test_fork_does_not_write_its_parents_report(run):
    lines, names = run(TRAIN + FORK, EBB_REPORT="out/r.txt")

    assert names == ["r.txt"]
    assert len(lines) == 1


# Lines --------------------------------------------------------------------------------------------


JOBS = {
    "regions": (
        TRAIN + "train()",
        {"EBB": "1", "EBB_REPORT": "out/r.txt"},
        ["EBB=1 has no effect so far"] * 2 + ["; report: "],  # both find no blocks
        ["r.rank1.txt", "r.txt"],
    ),
    "no regions": ("import torch", {"EBB": "1", "EBB_REPORT": "out/r.txt"}, ["no region ran"], []),
    "invalid settings": (
        "import torch",
        {"EBB": "2", "EBB_MODULS": "x", "EBB_REPORT": "/nowhere/r.txt"},
        ["unknown environment ", "EBB_REPORT=/nowhere/", "EBB=2 is ignored, so"],
        [],
    ),
    "modules without EBB": (
        "import torch, ebb",
        {"EBB_MODULES": "*"},
        ["EBB_MODULES=* has no effect without EBB: set EBB=1 to recompute these modules"],
        [],
    ),
    "verify": (
        CHECKPOINTS + "train()",
        {"EBB": "1", "EBB_VERIFY": "1"},
        ["EBB_DISABLE=1 turns ebb off", "recomputed tensors that backward read, 0 differed"],
        [],
    ),
}


@pytest.mark.parametrize(
    ("program", "variables", "expected", "files"),
    [
        pytest.param(*case, id=name, marks=() if name == "verify" else pytest.mark.sweep)
        for name, case in JOBS.items()
    ],
)
def test_job_of_torchrun_tells_once(run, program, variables, expected, files):
    """The launcher itself tells nothing, and writes no file."""
    lines, names = run(program, launcher=TORCHRUN, **variables)

    assert len(lines) == len(expected), lines
    for part in expected:
        assert sum(part in line for line in lines) == expected.count(part), lines
    assert names == files


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "variables"),
    [
        ("import torch", {"EBB_MODULES": "*", "EBB": "0"}),
        ("import torch", {"EBB_MODULES": "*", "EBB_DISABLE": "1"}),
        (CHECKPOINTS + "train()", {"EBB": "1", "LOCAL_RANK": "1"}),  # a rank of Lightning's
    ],
)
def test_process_that_tells_nothing(program, variables):
    assert told(program, **variables) == []


def test_each_rank_tells_of_settings_that_it_ignores():
    mistakes = {"EBB": "recompute_al", "EBB_REPORT": "/nope/x.html", "EBB_MODULS": "x"}

    first, third = (told(BLOCKS, RANK=rank, **mistakes) for rank in "03")

    assert len(first) == 3
    assert third == [line.replace("ebb: ", "ebb: rank 3: ", 1) for line in first]


def test_each_rank_tells_of_globs_that_match_nothing():
    (line,) = told(BLOCKS, RANK="3", EBB="1", EBB_MODULES="*blokcs.*")

    assert line.startswith("ebb: rank 3: no module matches EBB_MODULES=*blokcs.*, so none becomes")


def test_rank_0_alone_tells_of_regions():
    assert len(told(BLOCKS, RANK="0", EBB="1")) == 1
    assert told(BLOCKS, RANK="3", EBB="1") == []


@pytest.fixture
def broken(tmp_path):
    """A path where an ebb lies that cannot be imported."""
    (tmp_path / "ebb.py").write_text("raise ImportError('no such symbol')")
    return os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])


def test_helper_processes_tell_nothing(tmp_path, broken):
    path = tmp_path / "train.py"
    path.write_text(STARTS_HELPER)
    program = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"

    assert told(program, RANK="3") == []
    assert told(program, RANK="3", is_fresh=True, PYTHONPATH=broken) == []


def test_each_rank_tells_that_ebb_cannot_be_imported(broken):
    program = "import torch; print('done')"

    lines = [told(program, RANK=rank, EBB="1", PYTHONPATH=broken) for rank in "03"]

    why = "could not be imported, so the job runs without ebb: ImportError('no such symbol')"
    assert lines == [[f"ebb: {why}"], [f"ebb: rank 3: {why}"]]


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
