"""`EbbCallback`: the Trainer logs ebb's metrics with its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

import ebb  # noqa: E402
from ebb._report.metrics import Metrics  # noqa: E402
from ebb.integrations.transformers import EbbCallback  # noqa: E402
from ebb_tests.frameworks.logged import events, wandb_stand_in  # noqa: E402

STEPS, LOGGED = 6, (2, 4, 6)


class Observer(transformers.TrainerCallback):
    """Measures each step too, and notes what ebb's callback has."""

    def __init__(self):
        self.measured, self.found, self.own = Metrics(), {}, {}

    def on_step_begin(self, *_, **__):
        self.measured.begin()

    def on_step_end(self, args, state, control, **_):
        self.found[state.global_step] = self.measured.read()
        for callback in callbacks_of(self.trainer):
            self.own[state.global_step] = callback.metrics


def callbacks_of(trainer):
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, EbbCallback)]


def trained(folder, report_to, *callbacks, **arguments):
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
        )
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 16))]
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    observer = Observer()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(folder, report_to=report_to, **settings | arguments),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[*callbacks, observer],
    )
    observer.trainer = trainer
    with ebb.apply(model, ebb.policies.save_matmuls, "model.layers.*"):
        trainer.train()
    return trainer, observer


def test_event_files_have_what_metrics_gives(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    _, observer = trained(tmp_path, ["tensorboard"], EbbCallback())

    found = events(tmp_path)
    assert set(observer.own) == set(range(1, STEPS + 1))
    for step in LOGGED:
        own = observer.own[step]
        counts = {name: value for name, value in own.items() if name[-3:] != "_ms"}
        assert counts.items() <= observer.found[step].items()
        assert own["ebb/passes"] == 2
        assert own["ebb/entered"] == 2 * 3
        assert own["ebb/replay_ms"] > 0 < own["ebb/peak_bytes"]
        for name, value in own.items():
            logged = torch.tensor(found[f"train/{name}"][step])
            assert torch.equal(logged, torch.tensor(value, dtype=torch.float32)), name
    assert tuple(found["train/ebb/passes"]) == LOGGED
    assert not [name for name in found if name.startswith("eval") and "ebb" in name]


def test_wandb_and_the_history_have_the_same_numbers(tmp_path, monkeypatch):
    wandb = wandb_stand_in(monkeypatch)
    trainer, observer = trained(tmp_path, ["wandb"], EbbCallback())

    logged = [entry for entry in wandb.logged if "train/loss" in entry]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == len(history) == len(LOGGED)
    for step, entry, kept in zip(LOGGED, logged, history, strict=True):
        own = observer.own[step]
        assert entry["train/global_step"] == kept["step"] == step
        assert {f"train/{name}": value for name, value in own.items()}.items() <= entry.items()
        assert own.items() <= kept.items()
    assert not [e for e in trainer.state.log_history if "loss" not in e and "ebb/passes" in e]


@pytest.mark.parametrize("names", [["ebb", "tensorboard"], ["tensorboard", "ebb"]])
def test_report_to_finds_it(names, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    _, observer = trained(tmp_path, names)

    found = events(tmp_path)["train/ebb/peak_bytes"]
    expected = {step: observer.own[step]["ebb/peak_bytes"] for step in LOGGED}
    assert found.keys() == expected.keys()
    assert all(abs(found[step] - expected[step]) <= 1e-6 * expected[step] for step in LOGGED)


def test_the_last_step_of_an_epoch_is_logged(tmp_path):
    trainer, observer = trained(
        tmp_path, [], EbbCallback(), logging_strategy="epoch", max_steps=-1, num_train_epochs=2
    )
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in history] == [8, 16]
    for entry in history:
        assert observer.own[entry["step"]].items() <= entry.items()


def test_without_the_callback_nothing_is_added(tmp_path):
    """Also in a process in which another Trainer has it."""
    trained(tmp_path, [], EbbCallback())
    trainer, _ = trained(tmp_path, [])
    assert len(trainer.state.log_history) > STEPS
    assert not any("ebb/passes" in entry for entry in trainer.state.log_history)


def test_a_callback_can_be_pickled(tmp_path):
    _, observer = trained(tmp_path, [], EbbCallback())
    (callback,) = callbacks_of(observer.trainer)
    again = pickle.loads(pickle.dumps(callback))
    assert again.metrics == callback.metrics != {}


ORDERS = {
    "transformers first": "import transformers, transformers.trainer; import ebb",
    "ebb first": "import ebb; import transformers",
    "by variable": "import transformers",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_name_is_known_whatever_is_imported_first(order):
    program = (
        f"{ORDERS[order]}\nimport sys\n"
        "from transformers.integrations import get_reporting_integration_callbacks as of\n"
        "print([one.__name__ for one in of(['ebb'])])\n"
    )
    variables = {"EBB": "1"} if order == "by variable" else {}
    start = "import _ebb_autoload; _ebb_autoload.start()\n" if variables else ""
    done = subprocess.run(
        [sys.executable, "-c", start + program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['EbbCallback']\n", done.stderr


def test_importing_ebb_imports_no_framework():
    program = (
        "import sys, ebb\n"
        "print([n for n in ('transformers', 'lightning', 'ebb.integrations', 'tensorboard') "
        "if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("name", ["transformers", "lightning", "torchtitan"])
def test_a_missing_package_is_named(name):
    program = (
        f"import sys; sys.modules[{name!r}] = sys.modules['pytorch_lightning'] = None\n"
        f"import ebb.integrations.{name}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"ImportError: ebb: this integration needs the package '{name}'" in done.stderr
    assert f"pip install {name}" in done.stderr
