"""Environment variables, `python -m ebb`, and what becomes of them in other processes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from _ebb_switches import NAMES, meant_by

import ebb
from ebb_tests.programs_apart import ebb_lines, run_program

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


def job(*command, **environment):
    done = run_program(*command, **environment)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.sweep
def test_nothing_of_ebb_is_imported_unless_a_variable_asks_for_it(script):
    settings = {"EBB_CONFIG": "offload.min_bytes=1MiB", "EBB_TEST_ANYTHING": "1"}
    for environment in ({}, {"EBB": "1", "EBB_DISABLE": "1"}, {"EBB_DISABLE": "1", **settings}):
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
    done = run_program("-c", program, is_fresh=True)
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
    ("policy", "saved_results"),
    [
        ("mm:save,default:recompute", 3),
        pytest.param("default:save", 6, marks=pytest.mark.sweep),
        pytest.param("policy.toml", 3, marks=pytest.mark.sweep),
        ("matmuls", 3),
        ("./1", 3),
        # a name takes precedence over a file of that name
        ("1", 0),
        ("save_matmuls", 3),
        ("mm:save", 3),
    ],
)
def test_policy_is_a_name_rules_or_a_file(script, tmp_path, policy, saved_results):
    for name in ("policy.toml", "matmuls", "1"):
        ebb.Policy({"aten::mm": ebb.SAVE}).save(tmp_path / name)
    for name in ("save_matmuls", "mm:save"):
        (tmp_path / name).write_text("error: out of memory\n")

    found, errors = job(script, "checkpoint", cwd=tmp_path, EBB=policy, EBB_STRICT="1")

    assert (found["calls"], found["saved"]) == (3, saved_results * 128)
    assert errors.startswith("ebb: calls of torch.utils.checkpoint are regions")


@pytest.mark.sweep
def test_file_of_modules(script, tmp_path):
    save = ebb.Policy({"aten::mm": ebb.SAVE})
    policies = {"layers.0": save, "layers.2": ebb.policies.recompute_all}
    ebb.ModulePolicies(policies).save(tmp_path / "plan.toml")
    expected, _ = job(script)

    found, errors = job(script, cwd=tmp_path, EBB="plan.toml")

    assert found == expected | {"ebb": True, "regions": ["layers.0", "layers.2"], "saved": 128}
    assert "2 modules are regions: layers.0,2" in errors


@pytest.mark.sweep
def test_file_of_modules_that_do_not_exist_is_reported(script, tmp_path):
    ebb.ModulePolicies({"blocks.0": ebb.policies.recompute_all}).save(tmp_path / "plan.toml")

    found, errors = job(script, cwd=tmp_path, EBB="plan.toml", EBB_MODULES="*")

    assert found["regions"] == []
    assert "no module matches EBB=plan.toml" in errors
    assert "EBB_MODULES=* is ignored" in errors


@pytest.mark.sweep
def test_modules_become_regions_by_name(script):
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


def test_budget_plans_after_profiled_steps(longer):
    expected, _ = job(longer)
    found, errors = job(longer, EBB_BUDGET="90%", EBB_STRICT="1")

    assert found["losses"] == expected["losses"]
    first, second = ebb_lines(errors)
    assert first == (
        "ebb: EBB_BUDGET=90%: ebb profiles 6 steps, then chooses what each of these blocks saves "
        "and recomputes: layers.0-2; EBB_DISABLE=1 turns ebb off"
    )
    assert second.startswith("ebb: EBB_BUDGET=90%: ")


@pytest.mark.sweep
def test_budget_on_the_command_line(longer):
    expected, _ = job(longer)
    found, errors = job("-m", "ebb", "--budget", "1GiB", longer)

    assert found["losses"] == expected["losses"]
    assert "ebb: EBB_BUDGET=1GiB: the step fits as it is" in errors
    assert "EBB=1" not in errors

    done = run_program("-m", "ebb", "--budget", "banana", longer, is_fresh=True, check=False)
    assert done.returncode == 2
    assert "--budget banana: ebb: a budget must be" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("EBB", "2", "so the job runs without ebb: policy '2': '2' is neither a preset"),
        ("EBB", "missing.toml", "No such file or directory: 'missing.toml'"),
        ("EBB", "mm:keep", "unknown decision 'keep'"),
        pytest.param("EBB_BUDGET", "banana", "a budget must be", marks=pytest.mark.sweep),
        pytest.param("EBB_BUDGET", "200%", "", marks=pytest.mark.sweep),
    ],
)
def test_invalid_value_turns_ebb_off(script, name, value, message):
    found, errors = job(script, "checkpoint", **{name: value})
    assert found["calls"] == 6
    assert len(errors.splitlines()) == 1
    assert f"{name}={value} is ignored" in errors
    assert message in errors


@pytest.mark.sweep
def test_misspelt_variable_alone_is_reported_and_those_of_tests_and_builds_are_not(script):
    others = {"EBB_TEST_ANYTHING": "1", "EBB_BUILD_DIR": "x"}
    found, errors = job(script, EBB_BUGDET="40%", **others)
    assert found["calls"] == 3
    assert len(errors.splitlines()) == 1
    assert "unknown environment variable EBB_BUGDET: did you mean EBB_BUDGET?" in errors


def test_variable_of_another_program_is_no_mistake(script):
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
def test_variable_that_is_meant(name, known):
    assert meant_by(name) == known


@pytest.mark.sweep
@pytest.mark.parametrize("environment", [{"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, {}])
def test_job_that_imports_ebb_itself(script, environment):
    path = script.with_name("by_hand.py")
    path.write_text("import ebb\n" + SCRIPT)
    found, _ = job(path, "checkpoint", EBB="1", **environment)
    assert found["calls"] == 3


@pytest.mark.sweep
def test_command_line_does_what_variables_do(script):
    expected, _ = job(script, EBB="save_matmuls", EBB_MODULES="layers.?")
    assert expected["saved"] == 3 * 128
    options = ["--policy", "save_matmuls", "--modules", "layers.?"]
    assert job("-m", "ebb", *options, script)[0] == expected
    verified, _ = job("-m", "ebb", "--verify", "raise", *options, script)
    assert verified["losses"] == expected["losses"]
    assert job("-m", "ebb", script, "checkpoint")[0]["calls"] == 3
    assert "json.tool" in run_program("-m", "ebb", "-m", "json.tool", "--help").stdout


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "batch", "rows"),
    [
        (
            "nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)",
            (2, 4, 16),
            [
                "ebb: TransformerEncoder: autograd saves 29.6 KiB of activations",
                "modules saved bytes names",
                "3 29.6 KiB layers.0-2 (the regions under EBB=1)",
                "1 29.6 KiB the model",
            ],
        ),
        (
            "nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))",
            (2, 4),
            [
                "ebb: Sequential: autograd saves 32 B of activations",
                "modules saved bytes names",
                "1 32 B the model",
            ],
        ),
    ],
)
def test_modules_are_listed(tmp_path, model, batch, rows):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        f"model = {model}\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for step in range(5):\n"
        "    print('step', step)\n"
        f"    model(torch.ones{batch}).sum().backward()\n"
        "    optimizer.step()\n"
    )

    done = run_program("-m", "ebb", "--list-modules", path)

    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines == ["step 0", "step 1", *rows]
    assert done.stderr == ""


@pytest.mark.sweep
def test_command_line_under_torchrun(script):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (*launcher, "--no-python", sys.executable, "-m", "ebb", script, "checkpoint")
    done = run_program(*command, EBB="1", OMP_NUM_THREADS="1")
    found = done.stdout.replace("}{", "}\n{").splitlines()  # both write to one pipe
    lines = [json.loads(line) for line in found if line.startswith("{")]
    assert [line["calls"] for line in lines] == [3, 3]
    assert done.stderr.count("EBB_DISABLE=1 turns ebb off") == 1


def test_process_without_ebb_pays_less_than_a_millisecond():
    """Each `import torch` imports two small modules, and calls a few functions that open no file,
    three for each variable that there is.
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
    done = run_program("-c", program, is_fresh=True, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    modules, calls, opened = json.loads(done.stdout)
    assert modules == ["_ebb_autoload", "_ebb_switches"]
    assert calls < 30
    assert opened == []


def test_page_of_variables_has_each_one():
    text = (ROOT / "docs/reference/environment.md").read_text()
    rows = re.findall(r"^\| `(EBB\w*)` \| (.+) \|$", text.partition("\n## ")[0], re.M)
    assert sorted(name for name, _ in rows) == sorted(NAMES)
    settings = re.findall(r"^\* `(\w+\.\w+)` \(", text.partition("\n## Settings\n")[2], re.M)
    assert sorted(settings) == sorted(ebb.config.to_dict())


def test_every_variable_that_is_read_is_known():
    read = re.compile(r'(?:getenv\(|environ\.get\(|environ\[|_is_set\()"(EBB\w*)"')
    sources = [*(ROOT / "src").rglob("*.cpp"), *(ROOT / "python").rglob("*.py")]
    found = {name for source in sources for name in read.findall(source.read_text())}
    assert found
    assert found <= NAMES
