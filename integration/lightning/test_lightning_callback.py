"""`EbbCallback`: Lightning logs ebb's metrics with its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch

lightning = pytest.importorskip("lightning")

from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402
from lightning.pytorch.loggers.logger import Logger  # noqa: E402

import ebb  # noqa: E402
from ebb.integrations.lightning import EbbCallback  # noqa: E402
from ebb_tests.frameworks.logged import events  # noqa: E402

LAYERS, STEPS = 3, 6


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(LAYERS))
        )

    def training_step(self, x):
        return self.layers(x).square().mean()

    def validation_step(self, x):
        self.log("validation", self.layers(x).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(Model):
    """Steps by hand, the second optimizer every second batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, x, index):
        first, second = self.optimizers()
        for optimizer in (first, second)[: 1 + index % 2]:
            optimizer.zero_grad()
            self.manual_backward(self.layers(x).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class Observer(lightning.Callback):
    """Notes what ebb's callback has after each step, and what it has logged."""

    def __init__(self, callback):
        self.callback, self.own, self.kept = callback, {}, {}

    def on_train_batch_end(self, trainer, *_):
        self.own[trainer.global_step] = self.callback.metrics
        self.kept[trainer.global_step] = dict(trainer.callback_metrics)


class Offline(Logger):
    """Records calls, as a logger of Weights & Biases in offline mode does."""

    name = version = "offline"

    def __init__(self):
        super().__init__()
        self.logged = []

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))


def trained(model, logger, callback=None, **settings):
    callback = EbbCallback() if callback is None else callback
    observer = Observer(callback)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=logger,
        callbacks=[callback, observer],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"log_every_n_steps": 1, "val_check_interval": 2} | settings,
    )
    data = torch.utils.data.DataLoader(torch.randn(16 * 64, 64), batch_size=16)
    with ebb.apply(model, ebb.policies.recompute_all, "layers.*"):
        trainer.fit(model, data, data if settings.get("limit_val_batches", 1) else None)
    return trainer, observer


def test_event_files_have_what_metrics_gives(tmp_path):
    _, observer = trained(
        Model(),
        TensorBoardLogger(tmp_path),
        accumulate_grad_batches=2,
        log_every_n_steps=2,
        limit_val_batches=2,
    )

    found = events(tmp_path)
    assert set(observer.own) == {0, 1, 2, 3, 4, 5, 6}
    steps = found["ebb/passes"].keys()
    assert len(steps) == STEPS // 2
    for step in steps:
        own = observer.own[step + 1]  # Lightning counts from 0
        assert own["ebb/passes"] == 2
        assert own["ebb/entered"] == 2 * LAYERS
        assert own["ebb/replay_ms"] > 0 < own["ebb/peak_bytes"]
        for name, value in own.items():
            logged = torch.tensor(found[name][step])
            assert torch.equal(logged, torch.tensor(value, dtype=torch.float32)), name


def test_a_logger_gets_each_byte():
    logger = Offline()
    large = 3 * 2**40 + 1  # more bytes than float32 has digits

    class Large(EbbCallback):
        def on_train_batch_end(self, *arguments):
            read = self._measured.read
            self._measured.read = lambda: {**read(), "ebb/peak_bytes": large}
            super().on_train_batch_end(*arguments)
            self._measured.read = read

    trained(Model(), logger, Large())
    found = [entry["ebb/peak_bytes"] for _, entry in logger.logged if "ebb/peak_bytes" in entry]
    assert found == [large] * STEPS


def test_several_optimizers_stepped_by_hand():
    logger = Offline()
    _, observer = trained(TwoOptimizers(), logger, limit_val_batches=0, val_check_interval=None)
    assert {step: own["ebb/passes"] for step, own in observer.own.items()} == {
        1: 1,
        3: 2,
        4: 1,
        6: 2,
    }
    assert [entry["ebb/passes"] for _, entry in logger.logged if "ebb/passes" in entry] == [
        1, 2, 1, 2
    ]  # fmt: skip


def test_steps_that_are_not_logged_cost_no_call_of_log():
    logger, callback, calls = Offline(), EbbCallback(), []

    class Counts(Model):
        def log_dict(self, found, **settings):
            calls.append(self.trainer.global_step)
            super().log_dict(found, **settings)

    trained(Counts(), logger, callback, log_every_n_steps=3)
    assert calls == [3, 6]
    assert [step for step, entry in logger.logged if "ebb/passes" in entry] == [2, 5]


def test_without_a_logger():
    trainer, observer = trained(Model(), False)
    assert trainer.logged_metrics["ebb/passes"] == 1
    assert observer.own[STEPS]["ebb/passes"] == 1


def test_a_callback_can_be_pickled():
    _, observer = trained(Model(), False)
    again = pickle.loads(pickle.dumps(observer.callback))
    assert again.metrics == observer.callback.metrics != {}
    trained(Model(), False, again)
    assert again.metrics["ebb/passes"] == 1


SPAWNED = """
import pathlib, sys
import lightning, torch
from ebb.integrations.lightning import EbbCallback

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).sin()

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(Block(), Block())

    def training_step(self, x):
        return self.layers(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class WritesPasses(lightning.Callback):
    def on_train_end(self, trainer, module):
        passes = int(trainer.logged_metrics["ebb/passes"])
        pathlib.Path(sys.argv[1], f"rank{trainer.global_rank}").write_text(str(passes))

if __name__ == "__main__":
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False,
        callbacks=[EbbCallback(), WritesPasses()], log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(48, 8), batch_size=8))
"""


@pytest.mark.sweep
def test_two_processes_that_lightning_spawns(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)

    done = subprocess.run(
        [sys.executable, script, tmp_path],
        env=os.environ | {"EBB": "1"},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    passes = {file.name: file.read_text() for file in tmp_path.glob("rank*")}
    assert passes == {"rank0": "1", "rank1": "1"}
