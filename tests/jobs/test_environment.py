"""Environment variables, `python -m ebb`, and what becomes of them in other processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _ebb_switches import NAMES, meant_by

import ebb
from ebb_tests import fork_server

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
from torch.utils.checkpoint import checkpoint  # before anything of ebb, if that is there at all
import json, sys, torch

torch.manual_seed(0)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(8, 8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return (x @ self.w).sin().cos()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if "checkpoint" in sys.argv else layer(x)
        return x

model, losses = Model(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(4, 8)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
found = {"losses": losses, "calls": model.layers[0].calls, "ebb": "ebb" in sys.modules}
if "ebb" in sys.modules:
    import ebb
    found["regions"] = sorted(ebb.stats()["regions"])
    found["saved"] = ebb.stats()["total"]["bytes_saved"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*command, is_fresh=False, cwd=None, **environment):
    env = {key: value for key, value in os.environ.items() if key not in NAMES}
    done = fork_server.run(
        [*map(str, command)],
        env=env | environment,
        cwd=cwd,
        is_fresh=is_fresh,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def job(*command, **environment):
    done = run(*command, **environment)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.sweep
def test_without_the_variable_nothing_of_ebb_is_imported(script):
    for environment in ({}, {"EBB": "1", "EBB_DISABLE": "1"}):
        found, errors = job(script, "checkpoint", is_fresh=True, **environment)
        assert not found["ebb"]
        assert found["calls"] == 6
        assert errors == ""
    program = (
        "import os, sys, _ebb_autoload\n"
        "for value in ('', '0', 'off', 'No', ' false '):\n"
        "    os.environ['EBB'] = value\n"
        "    _ebb_autoload.start()\n"
        "print('torch' in sys.modules, 'ebb' in sys.modules)"
    )
    done = run("-c", program, is_fresh=True)
    assert (done.stdout, done.stderr) == ("False False\n", "")


@pytest.mark.parametrize("is_fresh", [True, False])
def test_checkpoints_become_regions(script, is_fresh):
    expected, _ = job(script, is_fresh=is_fresh)
    found, errors = job(script, "checkpoint", is_fresh=is_fresh, EBB="1")
    assert found == expected | {"ebb": True, "regions": ["Block"], "saved": 0}
    assert errors.splitlines() == [
        "ebb: calls of torch.utils.checkpoint are regions (EBB=1); EBB_DISABLE=1 turns ebb off"
    ]


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        ("mm:save,default:recompute", 3 * 128),
        pytest.param("default:save", 6 * 128, marks=pytest.mark.sweep),
    ],
)
def test_policies(script, policy, saved):
    found, _ = job(script, "checkpoint", EBB=policy)
    assert found["saved"] == saved


@pytest.mark.sweep
def test_a_file(script, tmp_path):
    path = tmp_path / "policy.toml"
    ebb.Policy({"aten::mm": ebb.SAVE}).save(path)
    found, _ = job(script, "checkpoint", EBB=str(path))
    assert found["saved"] == 3 * 128


@pytest.mark.parametrize("policy", ["1", "save_matmuls", "mm:save"])
def test_a_name_takes_precedence_over_a_file_of_that_name(script, tmp_path, policy):
    (tmp_path / policy).write_text("error: out of memory\n")

    found, errors = job(script, "checkpoint", cwd=tmp_path, EBB=policy, EBB_STRICT="1")

    assert found["calls"] == 3
    assert errors.startswith("ebb: calls of torch.utils.checkpoint are regions")


@pytest.mark.parametrize("policy", ["./1", "matmuls"])
def test_a_file_needs_no_suffix_if_its_path_is_no_name(script, tmp_path, policy):
    ebb.Policy({"aten::mm": ebb.SAVE}).save(tmp_path / policy)

    found, _ = job(script, "checkpoint", cwd=tmp_path, EBB=policy)

    assert found["saved"] == 3 * 128


@pytest.mark.sweep
def test_a_file_of_modules(script, tmp_path):
    path = tmp_path / "plan.toml"
    save = ebb.Policy({"aten::mm": ebb.SAVE})
    policies = {"layers.0": save, "layers.2": ebb.policies.recompute_all}
    ebb.ModulePolicies(policies).save(path)
    expected, _ = job(script)

    found, errors = job(script, EBB=str(path))

    assert found == expected | {"ebb": True, "regions": ["layers.0", "layers.2"], "saved": 128}
    assert "2 modules are regions: layers.0,2" in errors


@pytest.mark.sweep
def test_a_file_of_modules_that_are_not_there(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # messages clip long paths
    ebb.ModulePolicies({"blocks.0": ebb.policies.recompute_all}).save("plan.toml")

    found, errors = job(script, EBB="plan.toml", EBB_MODULES="*")

    assert found["regions"] == []
    assert "no module matches EBB=plan.toml" in errors
    assert "EBB_MODULES=* is ignored" in errors


@pytest.mark.sweep
def test_modules(script):
    expected, _ = job(script)
    found, errors = job(script, EBB="recompute_all", EBB_MODULES="*layers.?, other")
    names = ["layers.0", "layers.1", "layers.2"]
    assert found == expected | {"ebb": True, "regions": names, "saved": 0}
    assert "modules that match *layers.?,other (EBB=recompute_all)" in errors


@pytest.fixture(scope="module")
def longer(script):
    """With steps enough to be measured."""
    path = script.with_name("longer.py")
    path.write_text(SCRIPT.replace("range(3):\n    loss", "range(15):\n    loss"))
    return path


def test_a_budget(longer):
    expected, _ = job(longer)
    found, errors = job(longer, EBB_BUDGET="90%", EBB_STRICT="1")
    told = [line for line in errors.splitlines() if line.startswith("ebb")]

    assert found["losses"] == expected["losses"]
    assert len(found["losses"]) == 15
    assert told[0] == (
        "ebb: EBB_BUDGET=90%: ebb profiles 6 steps, then chooses what each of these blocks saves "
        "and recomputes: layers.0-2; EBB_DISABLE=1 turns ebb off"
    )
    assert len(told) == 2
    assert told[1].startswith("ebb: EBB_BUDGET=90%: ")


@pytest.mark.sweep
def test_a_budget_by_the_command_line(longer):
    expected, _ = job(longer)
    found, errors = job("-m", "ebb", "--budget", "1GiB", longer)

    assert found["losses"] == expected["losses"]
    assert "ebb: EBB_BUDGET=1GiB: the step fits as it is" in errors
    assert "EBB=1" not in errors


@pytest.mark.sweep
def test_a_budget_that_makes_no_sense(longer):
    for value in ("banana", "200%"):
        found, errors = job(longer, EBB_BUDGET=value)
        assert len(errors.splitlines()) == 1
        assert errors.startswith(f"ebb: EBB_BUDGET={value} is ignored: ")
        assert found.get("regions", []) == []
    done = subprocess.run(
        [sys.executable, "-m", "ebb", "--budget", "banana", longer], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--budget banana: ebb: a budget must be" in done.stderr


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("2", "without ebb: policy '2': '2' is neither a preset"),
        ("missing.toml", "No such file or directory: 'missing.toml'"),
        ("mm:keep", "unknown decision 'keep'"),
    ],
)
def test_a_value_that_makes_no_sense_turns_ebb_off(script, policy, message):
    found, errors = job(script, "checkpoint", EBB=policy)
    assert found["calls"] == 6
    assert len(errors.splitlines()) == 1
    assert " is ignored, so the job runs without ebb: " in errors
    assert message in errors


@pytest.mark.sweep
def test_a_bad_setting_of_another_variable_does_not_break_torch(script):
    found, errors = job(script, "checkpoint", EBB="1", EBB_CONFIG="offload.min_bytes=1 mile")
    assert found["calls"] == 3
    assert (
        "ebb: offload.min_bytes in EBB_CONFIG=offload.min_bytes=1 mile is ignored: min_bytes must"
        in errors
    )


@pytest.mark.sweep
def test_unknown_variables_warn():
    done = run("-c", "import ebb", EBB_MODULS="x", EBB_TEST_ANYTHING="1", EBB_BUILD_DIR="x")
    assert "unknown environment variable EBB_MODULS: did you mean EBB_MODULES?" in done.stderr
    assert "EBB_TEST" not in done.stderr
    assert "EBB_BUILD" not in done.stderr


@pytest.mark.sweep
def test_a_misspelt_variable_alone_warns(script):
    found, errors = job(script, EBB_BUGDET="40%")
    assert found["calls"] == 3
    assert errors.count("unknown environment variable EBB_BUGDET: did you mean EBB_BUDGET?") == 1


def test_a_variable_of_another_program_is_no_mistake(script):
    """`TEAM` and `AHEAD` share letters, `EBB_TEAM` and `EBB_AHEAD` many more."""
    others = {"EBB_TEAM": "x", "EBB_VERSION": "2", "EBB_MODEL": "llama"}

    found, errors = job(script, EBB_STRICT="1", **others)

    assert not found["ebb"]
    assert errors == ""
    _, errors = job(script, EBB="1", **others)
    for name in others:
        assert f"unknown environment variable {name}: docs/reference/environment.md has" in errors


@pytest.mark.parametrize(
    ("name", "known"),
    [("EBB_BUGDET", "EBB_BUDGET"), ("EBB_MODULE", "EBB_MODULES"), ("EBB_report", "EBB_REPORT"),
     ("EBB_AHAED", "EBB_AHEAD"), ("EBB_STRICKT", "EBB_STRICT"), ("EBB_VERFIY", "EBB_VERIFY"),
     ("EBB_", ""), ("EBB_EBB", ""), ("EBB_RANK", ""), ("EBB_" + "X" * 100_000, "")],
)  # fmt: skip
def test_the_name_that_is_meant(name, known):
    assert meant_by(name) == known


@pytest.mark.sweep
def test_variables_that_ask_for_nothing_alone_import_nothing(script):
    found, errors = job(
        script, EBB_CONFIG="offload.min_bytes=1MiB", EBB_TEST_ANYTHING="1", EBB_DISABLE="1"
    )
    assert not found["ebb"]
    assert errors == ""


@pytest.mark.sweep
def test_where_torch_does_not_load_backends_ebb_is_imported_by_hand(script):
    text = "import ebb\n" + SCRIPT
    path = script.with_name("by_hand.py")
    path.write_text(text)
    found, _ = job(path, "checkpoint", EBB="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found["calls"] == 3
    found, _ = job(path, "checkpoint", EBB="1")
    assert found["calls"] == 3


@pytest.mark.sweep
def test_launcher(script):
    expected, _ = job(script, EBB="save_matmuls", EBB_MODULES="layers.?")
    assert expected["saved"] == 3 * 128
    options = ["--policy", "save_matmuls", "--modules", "layers.?"]
    assert job("-m", "ebb", *options, script)[0] == expected
    assert (
        job("-m", "ebb", "--verify", "raise", *options, script)[0]["losses"] == expected["losses"]
    )
    assert job("-m", "ebb", script, "checkpoint")[0]["calls"] == 3
    done = run("-m", "ebb", "-m", "json.tool", "--help")
    assert "json.tool" in done.stdout


@pytest.mark.sweep
def test_modules_are_listed(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)\n"
        "model = torch.nn.TransformerEncoder(layer, 3)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for step in range(5):\n"
        "    print('step', step)\n"
        "    model(torch.ones(2, 4, 16)).sum().backward()\n"
        "    optimizer.step()\n"
    )

    done = run("-m", "ebb", "--list-modules", path)

    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "step 0",
        "step 1",
        "ebb: TransformerEncoder: autograd saves 29.6 KiB of activations",
    ]
    assert [line.split() for line in lines[3:]] == [
        ["modules", "saved", "bytes", "names"],
        ["3", "29.6", "KiB", "layers.0-2", "(the", "regions", "under", "EBB=1)"],
        ["1", "29.6", "KiB", "the", "model"],
    ]


@pytest.mark.sweep
def test_model_without_blocks_is_listed(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "from torch.nn import Linear, ReLU, Sequential\n"
        "model = Sequential(Linear(4, 4), ReLU(), Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for step in range(5):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )

    done = run("-m", "ebb", "--list-modules", path)

    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].split()[-2:] == ["the", "model"]


@pytest.mark.sweep
def test_spawned_workers_inherit_it(script):
    path = script.with_name("spawns.py")
    path.write_text(
        "import torch.multiprocessing as mp, subprocess, sys\n"
        "def work(rank, script):\n"
        "    import runpy\n"
        "    sys.argv = [script, 'checkpoint']\n"
        "    runpy.run_path(script)\n"
        "if __name__ == '__main__':\n"
        f"    mp.spawn(work, ({str(script)!r},), nprocs=2)\n"
    )
    done = run(path, EBB="1")
    found = done.stdout.replace("}{", "}\n{").split("\n")  # both write to one pipe
    assert [json.loads(line)["calls"] for line in found if line] == [3, 3]
    assert "ebb:" not in done.stderr


@pytest.mark.sweep
def test_torchrun(script):
    for launcher in (["-m", "ebb", script], [script]):
        done = run(
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python",
            sys.executable, *launcher, "checkpoint", EBB="1", OMP_NUM_THREADS="1",
        )  # fmt: skip
        found = done.stdout.replace("}{", "}\n{").splitlines()  # both write to one pipe
        lines = [json.loads(line) for line in found if line.startswith("{")]
        assert [line["calls"] for line in lines] == [3, 3]
        assert done.stderr.count("EBB_DISABLE=1 turns ebb off") == 1


def test_what_it_costs_not_to_use_it():
    """What torch imports and calls, in each process: two small modules, and a few functions that
    open no file, three for each variable that there is; goal: 1 ms.
    """
    program = (
        "import json, os, sys, torch\n"
        "modules, calls, opened = set(sys.modules), [], []\n"
        "import _ebb_autoload\n"
        "sys.addaudithook(lambda event, what: event == 'open' and opened.append(what[0]))\n"
        "sys.setprofile(lambda frame, event, _: event == 'call' and calls.append(frame.f_code))\n"
        "_ebb_autoload.start()\n"
        "sys.setprofile(None)\n"
        "calls = len(calls) - 3 * len(os.environ)\n"
        "print(json.dumps([sorted(set(sys.modules) - modules), calls, opened]))"
    )
    done = run("-c", program, is_fresh=True, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    modules, calls, opened = json.loads(done.stdout)
    assert modules == ["_ebb_autoload", "_ebb_switches"]
    assert calls < 30
    assert opened == []


def test_the_page_of_variables_is_true():
    text = (ROOT / "docs/reference/environment.md").read_text()
    rows = re.findall(r"^\| `(EBB\w*)` \| (.+) \|$", text.partition("\n## ")[0], re.M)
    assert sorted(name for name, _ in rows) == sorted(NAMES)
    settings = re.findall(r"^\* `(\w+\.\w+)` \(", text.partition("\n## Settings\n")[2], re.M)
    assert sorted(settings) == sorted(ebb.config.to_dict())


def test_every_variable_that_is_read_is_known():
    sources = [*(ROOT / "src").rglob("*.cpp"), *(ROOT / "python").rglob("*.py")]
    read = set()
    for source in sources:
        read |= set(
            re.findall(
                r'(?:getenv\(|environ\.get\(|environ\[|_is_set\()"(EBB\w*)"', source.read_text()
            )
        )
    assert read
    assert read <= NAMES
