"""Tests the wheel in dist in a new environment with one torch release and without a compiler.

``python tests/ebb_tests/new_environment.py 2.13.0`` installs torch and the wheel, trains, compares
with eager and makes a report. `make test-wheel` does this for each release that the wheel has.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DIST = Path(__file__).resolve().parents[2] / "dist"

# Trains a model with dropout, eager and with regions, and prints the ebb and torch in use.
PROGRAM = """
import torch
import ebb

def train():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2, 8, 16)
    gradients = []
    for _ in range(3):
        optimizer.zero_grad()
        yield model
        model(x).square().mean().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    yield gradients

eager = list(train())[-1]
ebb.record_reports(1)
with_ebb = train()
ebb.apply(next(with_ebb), ebb.policies.save_matmuls)
assert all(map(torch.equal, list(with_ebb)[-1], eager))
assert ebb.stats()["total"]["ops_replayed"] > 0
ebb.report().save("report.html")
print(torch.__version__, ebb.__file__)
"""


def main(release: str) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = max(DIST.glob(f"torch_ebb-*-{tag}-*.whl"), key=os.path.getmtime)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/env"], check=True)
        environment = os.environ | {"PATH": f"{folder}/env/bin", "PYTHONPATH": ""}

        def run(*command: str | Path) -> str:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            return done.stdout.strip()

        python = Path(folder, "env/bin/python")
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
        begin = time.monotonic()
        run(*pip, "install", f"torch=={release}")
        torch_installed = time.monotonic()
        run(*pip, "install", wheel)
        ebb_installed = time.monotonic()
        torch, package = run(python, "-c", PROGRAM).split(" ", 1)
        reported = time.monotonic()

        run(*pip, "check")
        assert package.startswith(folder), package
        assert Path(folder, "report.html").stat().st_size > 10_000
        print(
            f"torch {torch}: gradients identical. torch took {torch_installed - begin:.0f} s to "
            f"install, the wheel {ebb_installed - torch_installed:.0f} s; the program and its "
            f"report {reported - ebb_installed:.0f} s"
        )


if __name__ == "__main__":
    main(sys.argv[1])
