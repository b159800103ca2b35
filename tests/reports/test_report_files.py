"""Reports as files, from variables, at signals, and when memory runs out."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

import ebb
from ebb._report.text import size
from ebb_tests import fork_server
from ebb_tests.exactness import resident_kib
from ebb_tests.one_step_report import blocks, no_reports_yet, recorded, step  # noqa: F401


@pytest.fixture
def a_report():
    return recorded(ebb.policies.save_matmuls)


def test_text_has_layers_and_sums(a_report):
    text = str(a_report)
    assert "recomputed" in text
    assert "0-3.act x4" in text
    assert "silu" in text
    assert "\n... and " in a_report.text(rows=1)


@pytest.mark.parametrize("suffix", ["txt", "json", "html"])
def test_files_have_the_rows(a_report, tmp_path, suffix):
    path = tmp_path / f"report.{suffix}"
    a_report.save(path)
    content = path.read_bytes()
    if suffix == "json":
        found = json.loads(content)
        assert found["totals"] == a_report.totals
        assert sum(row["bytes"] for row in found["rows"]) == sum(found["totals"].values())
    elif suffix == "html":
        page = content.decode()
        assert "http://" not in page.replace("http://www.w3.org", "")
        assert "https://" not in page
        data = page.split('id="data">')[1].split("</script>")[0]
        assert len(json.loads(data)["rows"]) == len(a_report.rows)


def test_names_of_regions_are_escaped_in_the_page(tmp_path):
    with ebb.record_reports():
        with ebb.region(name="</script><script>alert(1)</script>"):
            loss = torch.randn(3, requires_grad=True).sin().exp().sum()
        loss.backward()
    ebb.report().save(tmp_path / "page.html")
    assert "<script>alert" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_as_text(nbytes, text):
    assert size(nbytes) == text


PROGRAM = """
import torch, ebb
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
ebb.apply(net, modules="1")
for _ in range(3):
    net(torch.randn(4, 8)).sum().backward()
"""


def run_program(program=PROGRAM, **environment):
    return fork_server.run(["-c", program], env=os.environ | environment)


@pytest.mark.sweep
def test_variables_write_a_report_and_logs(tmp_path):
    report = tmp_path / "r.json"
    run = run_program(EBB_REPORT=str(report), TORCH_LOGS="+ebb")
    assert run.returncode == 0, run.stderr
    assert "1 (SiLU) is a region" in run.stderr
    assert "left region 1; in this step: {" in run.stderr
    assert "; report: " in run.stderr
    assert json.loads(report.read_text())["number"] == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [("r.pdf", "a report's file name must end in .txt"), ("no/r.txt", "cannot write")],
)
def test_job_goes_on_if_its_report_cannot_be_written(tmp_path, name, message):
    run = run_program(EBB_REPORT=str(tmp_path / name))
    assert run.returncode == 0
    assert message in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_if_no_region_ran(tmp_path):
    run = run_program("import ebb", EBB_REPORT=str(tmp_path / "r.txt"))
    assert run.returncode == 0
    assert "because no region ran" in run.stderr
    assert list(tmp_path.iterdir()) == []


LONGER = """
import os, signal, sys, torch, ebb
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
ebb.apply(net, modules="1")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step():
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def test_change_of_the_working_directory_moves_no_files(tmp_path):
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    variables = {"EBB_REPORT": "r.json"}
    program = f"{PROGRAM}\nimport os\nos.chdir('../after')"

    run = fork_server.run(
        ["-c", program], env=os.environ | variables, cwd=tmp_path / "before", check=True
    )

    assert f"report: {tmp_path}/before/r.json" in run.stderr
    names = sorted(path.name for path in tmp_path.glob("before/**/*.json"))
    assert names == ["r.json"]
    assert list((tmp_path / "after").iterdir()) == []


def test_child_after_a_change_of_the_working_directory_writes_to_the_same_folder(tmp_path):
    program = (
        "import os, subprocess, sys, torch, ebb\nos.chdir('/')\n"
        f"subprocess.run([sys.executable, '-c', {PROGRAM!r}])"
    )

    fork_server.run(
        ["-c", program], env=os.environ | {"EBB_REPORT": "r.json"}, cwd=tmp_path, check=True
    )

    assert (tmp_path / "r.json").exists()


def test_report_is_written_after_each_number_of_optimizer_steps(tmp_path):
    path = tmp_path / "r.json"
    program = LONGER + "for _ in range(7): step()\nos._exit(3)"

    run = run_program(program, EBB_REPORT=f"{path}@3")

    assert (run.returncode, run.stderr) == (3, "")
    assert json.loads(path.read_text())["number"] == 5
    assert list(tmp_path.iterdir()) == [path]


def test_number_of_steps_below_1_is_ignored(tmp_path):
    run = run_program(EBB_REPORT=f"{tmp_path}/r.json@0")
    assert "is ignored: the number of steps after @ must be 1 or more" in run.stderr


def test_sigusr1_writes_the_report_of_a_running_job(tmp_path):
    path = tmp_path / "r.json"
    program = LONGER + (
        "step()\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        "while not os.path.exists(sys.argv[1]): pass\n"
        "print('goes on')\nsys.stdout.flush()\nos._exit(3)"
    )

    run = fork_server.run(
        ["-c", program, path], env=os.environ | {"EBB_REPORT": str(path)}, timeout=120
    )

    assert (run.returncode, run.stdout) == (3, "goes on\n")
    assert json.loads(path.read_text())["number"] == 0


@pytest.mark.parametrize(
    "waits",
    [
        "while True: pass",
        # A main thread that runs no Python, as in a collective.
        "import ctypes\nwhile True: ctypes.CDLL(None).pause()",
    ],
)
def test_terminated_job_writes_its_report_and_ends_by_the_signal(tmp_path, waits):
    path = tmp_path / "r.json"
    program = LONGER + (
        "import threading, time\n"
        "step()\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n" + waits
    )

    run = fork_server.run(["-c", program], env=os.environ | {"EBB_REPORT": str(path)}, timeout=120)

    assert run.returncode == -signal.SIGTERM
    assert json.loads(path.read_text())["number"] == 0
    assert "; report: " in run.stderr


AHEAD = {"EBB_AHEAD": "1"}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"EBB_REPORT": "r.html", "EBB_VERIFY": "1"}, "EBB_REPORT, EBB_VERIFY have no effect"),
        (AHEAD, "EBB_AHEAD has no effect"),
    ],
)
def test_variables_of_a_program_that_does_not_import_ebb_are_named_at_exit(variables, says):
    run = run_program("import torch", **variables)

    (line,) = [line for line in run.stderr.splitlines() if line.startswith("ebb: ")]
    assert f"{says}, because the program did not import ebb. Set EBB=1" in line


@pytest.mark.parametrize(
    ("imports", "variables"),
    [
        ("torch", AHEAD | {"EBB_DISABLE": "1"}),
        ("torch", AHEAD | {"RANK": "1"}),
        ("torch", AHEAD | {"SLURM_PROCID": "1"}),
        ("torch", {"EBB_AHEAD": "0"}),
        ("torch", {}),
        ("torch, ebb", AHEAD),
        ("torch, torch.distributed.launcher.api", AHEAD),
    ],
)
def test_variables_that_have_an_effect_or_need_none_are_not_named(imports, variables):
    assert "ebb: " not in run_program(f"import {imports}", **variables).stderr


def test_disk_full_keeps_earlier_report_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("earlier")
    os.utime(path, (0, 0))
    program = LONGER + (
        "import resource\nstep()\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))"
    )

    run = run_program(program, EBB_REPORT=str(path))

    assert run.returncode == 0
    assert "ebb: could not write the report: OSError: " in run.stderr
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["r.json"]


KILL = "os.kill(os.getpid(), signal.SIGTERM)"
HANDLERS = {  # what runs before ebb is imported, the program, its exit status and output
    "of the program": (
        "",
        "assert signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)) is signal.SIG_DFL\n"
        f"step()\n{KILL}",
        (7, ""),
    ),
    "ignored": (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        f"step()\n{KILL}; print('goes on')",
        (0, "goes on\n"),
    ),
    "in a fork": (
        "",
        "step()\nchild = os.fork()\n"
        "if not child: signal.pause()\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.listdir(sys.argv[1]))",
        (0, f"{-signal.SIGTERM} []\n"),
    ),
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_handlers_of_signals_act_as_without_ebb(tmp_path, handler):
    """The report is written at exit. A fork ends by the signal, and writes none."""
    before, program, expected = HANDLERS[handler]

    run = fork_server.run(
        ["-c", before + LONGER + program, tmp_path],
        env=os.environ | {"EBB_REPORT": f"{tmp_path}/r.json"},
        timeout=120,
    )

    assert (run.returncode, run.stdout) == expected
    assert (tmp_path / "r.json").exists()


OUT_OF_MEMORY = """
import torch, ebb
ebb.record_reports()
x = torch.randn(64, requires_grad=True)
with ebb.region(ebb.policies.save_all, "block"):
    y = x.sin().exp()
    torch.empty(1 << 60, dtype=torch.uint8)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("under_a_with_block", [False, True])
def test_out_of_memory_is_reported_once(under_a_with_block):
    program = OUT_OF_MEMORY
    if under_a_with_block:
        program = program.replace("ebb.record_reports()\n", "")
        program = program.replace("with ebb.region", "with ebb.record_reports(), ebb.region")
    run = run_program(program)
    assert run.returncode == 1
    assert run.stderr.count("ebb: out of memory") == 1
    assert "saved" in run.stderr
    assert "Error" in run.stderr


def test_forwards_without_backward_do_not_accumulate():
    x = torch.randn(8, 8)
    with ebb.record_reports(), torch.no_grad():
        for number in range(3000):
            with ebb.region():
                x.sin().exp().cos()
            if number == 100:
                before = resident_kib()
    assert resident_kib() - before < 4096


@pytest.mark.parametrize("names", [("#", "0"), ("a.07", "a.7"), ("9" * 5000, "1")])
def test_names_of_regions_that_look_like_templates(names):
    x = torch.ones(4, 4, requires_grad=True)
    with ebb.record_reports():
        loss = 0
        for name in names:
            with ebb.region(name=name):
                loss = loss + x.sin().exp().sum()
        loss.backward()
    assert {row.region for row in ebb.report().collapsed()} == set(names)
    assert str(ebb.report())


def region_and_allocation(size):
    with ebb.region():
        torch.ones(3, requires_grad=True).sin().sum().backward()
        torch.empty(size, dtype=torch.uint8)


def test_caught_out_of_memory_is_not_reported_and_the_next_one_is(capsys):
    with ebb.record_reports():
        with pytest.raises(RuntimeError, match="allocate"):
            region_and_allocation(1 << 60)
        region_and_allocation(1)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        with pytest.raises(RuntimeError, match="allocate"), ebb.record_reports():
            region_and_allocation(1 << 60)
        assert capsys.readouterr().err.count("ebb: out of memory") == 1


def test_out_of_memory_that_causes_another_exception_is_reported_once(capsys):
    def job():
        with ebb.record_reports(), ebb.record_reports():
            try:
                region_and_allocation(1 << 60)
            except RuntimeError as error:
                raise KeyError("batch") from error

    with pytest.raises(KeyError):
        job()
    assert capsys.readouterr().err.count("ebb: out of memory") == 1


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_out_of_memory_in_a_child_process_is_reported_once(tmp_path, method):
    path = tmp_path / "job.py"
    body = "".join(f"    {line}\n" for line in OUT_OF_MEMORY.splitlines())
    path.write_text(
        f"def work(rank):\n{body}\n"
        "if __name__ == '__main__':\n"
        "    from torch.multiprocessing import start_processes\n"
        f"    start_processes(work, nprocs=1, start_method='{method}')\n"
    )
    done = fork_server.run([path], timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("ebb: out of memory") == 1


FORKS = """
import os, sys, torch

def spy(name):
    def asked(*_, **__):
        sys.exit(f"{name} was called before CUDA was initialised")
    return asked

# As in a build for CUDA on a machine with a GPU.
torch._C._cuda_getDeviceCount = spy("_cuda_getDeviceCount")
torch.cuda.is_available = spy("is_available")
torch.cuda.mem_get_info = torch.accelerator.get_memory_info = spy("the device's memory")
torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
torch.accelerator.is_available = spy("accelerator.is_available")
import ebb

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
def step():
    with ebb.region():
        loss = net(torch.ones(2, 4)).sum()
    loss.backward()
ebb.record_reports()
step()
ebb.profile(step)
assert torch.cuda._queued_calls == QUEUED, "something waits for CUDA to be initialised"
"""


def test_reports_profiles_and_budgets_do_not_initialize_the_device(tmp_path):
    """A process that has initialized it cannot fork workers that use it."""
    program = FORKS.replace(
        "import os", "import torch\nQUEUED = list(torch.cuda._queued_calls)\nimport os"
    )
    variables = {"EBB_REPORT": "r.txt", "EBB_BUDGET": "auto", "EBB_AHEAD": "1"}
    done = fork_server.run(["-c", program], timeout=120, cwd=tmp_path, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    assert "called before" not in done.stderr
