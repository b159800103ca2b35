"""Jobs of several processes: each writes files of its own, and one of them prints the lines."""

from __future__ import annotations

import os

import _ebb_switches
import pytest
from _ebb_switches import NAMES

from ebb._support import job
from ebb_tests import fork_server

_RANKS = ("RANK", *_ebb_switches._RANKS)
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


def launch(*command, program=None, **environment):
    """Runs Python; returns its lines on stderr that are ebb's."""
    env = {k: v for k, v in os.environ.items() if k not in (*NAMES, *_RANKS, job._TOLD)}
    done = fork_server.run(
        [*map(str, command)],
        env=env | {"OMP_NUM_THREADS": "1"} | environment,
        input=program,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stderr.splitlines() if line.startswith("ebb")]


def test_programs_of_tests_do_not_need_new_processes():
    assert fork_server.is_for_the_server(os.environ)


@pytest.fixture
def script(tmp_path):
    def write(*parts):
        path = tmp_path / "train.py"
        path.write_text("".join(parts))
        return path

    return write


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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
def test_what_launchers_say(monkeypatch, environment, rank):
    monkeypatch.setattr(job._Known, "rank", None)  # of a group of an earlier test
    for name in _RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert job.rank() == rank
    assert job.label() == (f"rank{rank}" if rank else "")
    assert job.is_first() == (rank == 0)


@pytest.mark.sweep
def test_spawned_processes_write_files_of_their_own(script, out):
    path = script(TRAIN, SPAWN)

    lines = launch(path, "", EBB_REPORT=f"{out}/r.txt", EBB="1")

    assert names(out) == ["r.process1.txt", "r.process2.txt"]
    assert lines == [f"ebb: the reports are in {out}: r.process1.txt, r.process2.txt"]


@pytest.mark.sweep
def test_spawned_ranks_know_their_number_from_the_process_group(script, out, tmp_path):
    path = script(CHECKPOINTS, SPAWN)

    store = tmp_path / "store"
    lines = launch(path, store, EBB_REPORT=f"{out}/r.json", EBB="1")

    assert names(out) == ["r.rank0.json", "r.rank1.json"]
    assert sum("EBB_DISABLE=1 turns ebb off" in line for line in lines) == 1
    assert sum("; report: " in line for line in lines) == 1


def torchrun(path, **environment):
    return launch(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, path, **environment
    )


@pytest.mark.sweep
def test_a_launcher_has_nothing_to_report(script, out):
    path = script(TRAIN, "train()")

    lines = torchrun(path, EBB="1", EBB_REPORT=f"{out}/r.txt")

    assert names(out) == ["r.rank1.txt", "r.txt"]
    assert len(lines) == 3
    assert sum("EBB=1 has no effect so far" in line for line in lines) == 2  # both find no blocks
    assert sum("; report: " in line for line in lines) == 1


def test_a_launcher_does_not_say_what_was_verified(script):
    lines = torchrun(script(CHECKPOINTS, "train()"), EBB="1", EBB_VERIFY="1")

    (line,) = (line for line in lines if "EBB_VERIFY: " in line)
    assert "recomputed tensors that backward read, 0 differed" in line


@pytest.mark.sweep
def test_that_no_region_was_entered_is_said_once(script, out):
    lines = torchrun(script("import torch"), EBB="1", EBB_REPORT=f"{out}/r.txt")

    assert len(lines) == 1
    assert "no region ran" in lines[0]
    assert names(out) == []


@pytest.mark.sweep
def test_settings_that_make_no_sense_are_told_once_in_a_job(script):
    mistakes = {"EBB": "2", "EBB_MODULS": "x", "EBB_REPORT": "/nowhere/r.txt"}

    lines = torchrun(script("import torch"), **mistakes)

    assert [line[:25] for line in lines] == [
        "ebb: unknown environment ",
        "ebb: EBB_REPORT=/nowhere/",
        "ebb: EBB=2 is ignored, so",
    ]


@pytest.mark.sweep
def test_modules_without_EBB_are_told_of_once_in_a_job(script):
    lines = torchrun(script("import torch, ebb"), EBB_MODULES="*")

    assert lines == [
        "ebb: EBB_MODULES=* has no effect without EBB: set EBB=1 to recompute these modules"
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("environment", [{"EBB": "0"}, {"EBB_DISABLE": "1"}])
def test_modules_of_an_ebb_that_is_switched_off_are_no_mistake(environment):
    assert launch("-c", "import torch", EBB_MODULES="*", **environment) == []


@pytest.mark.sweep
def test_a_rank_of_Lightnings_prints_nothing(script):
    assert launch(script(CHECKPOINTS, "train()"), EBB="1", LOCAL_RANK="1") == []


@pytest.mark.sweep
def test_a_program_that_a_job_starts_does_not_take_its_files(script, out):
    path = script(
        TRAIN,
        "import subprocess, sys\n",
        "train()\n",
        "if 'child' not in sys.argv: subprocess.run([sys.executable, __file__, 'child'])\n",
    )

    launch(path, EBB_REPORT=f"{out}/r.txt", EBB="1")

    assert len(names(out)) == 2


@pytest.mark.sweep
def test_the_files_of_an_earlier_job_are_replaced(script, out):
    path = script(TRAIN, "train()")
    for _ in range(2):
        launch(path, EBB_REPORT=f"{out}/r.txt", EBB="1")

    assert names(out) == ["r.txt"]


@pytest.mark.sweep
def test_a_fork_does_not_write_its_parents_report(script, out):
    path = script(
        TRAIN,
        "train()\nimport os, sys\nchild = os.fork()\n",
        "if not child: sys.exit()\nos.waitpid(child, 0)\n",
    )

    lines = launch(path, EBB_REPORT=f"{out}/r.txt")

    assert names(out) == ["r.txt"]
    assert len(lines) == 1
