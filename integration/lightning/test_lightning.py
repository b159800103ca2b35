"""Runs an unchanged script, with ebb enabled only by environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebb_tests.frameworks.unchanged_script import check

pytest.importorskip("lightning")


SCRIPT = Path(__file__).with_name("train.py")


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_unchanged_script():
    check(SCRIPT, "--checkpoint")


SPAWNED = """
import torch
from PACKAGE import LightningModule, Trainer

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).sin()

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(Block(), Block())

    def training_step(self, x):
        return self.layers(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    trainer = Trainer(
        max_steps=3, accelerator="cpu", devices=1, strategy="ddp_spawn", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=8))
"""


@pytest.mark.sweep
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_process_that_lightning_spawns_gets_the_callback(package, tmp_path):
    pytest.importorskip(package)
    script = tmp_path / "train.py"
    script.write_text(SPAWNED.replace("PACKAGE", package))

    done = subprocess.run(
        [sys.executable, script], env=os.environ | {"EBB": "1"}, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "ebb: 2 modules are regions: layers.0-1" in done.stderr


@pytest.mark.sweep
def test_of_two_processes_one_prints_and_each_writes(tmp_path):
    """Lightning starts the second process itself, without setting RANK."""
    settings = {"EBB": "1", "EBB_MODULES": "*layers.*", "EBB_REPORT": f"{tmp_path}/r.txt"}

    done = subprocess.run(
        [sys.executable, SCRIPT, "--ddp"], env=os.environ | settings, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("ebb")]
    assert len(lines) == 3
    assert "EBB_DISABLE=1 turns ebb off" in lines[0]
    assert lines[1] == "ebb: 6 modules are regions: layers.0-5"
    assert "; report: " in lines[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.rank1.txt", "r.txt"]
