"""A build of the core alone: regions work, and what a plug-in does raises a clear error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch, ebb

assert ebb._C.plugins == ""

def step(x, around):
    with around:
        y = torch.nn.functional.gelu(x @ x).sin_().cumsum(0)
    y.square().sum().backward()
    gradient, x.grad = x.grad, None
    return gradient

import contextlib
torch.manual_seed(0)
x = torch.randn(32, 32, requires_grad=True)
expected = step(x, contextlib.nullcontext())
for policy in (ebb.policies.save_all, ebb.policies.save_matmuls, ebb.policies.recompute_all):
    assert torch.equal(step(x, ebb.region(policy)), expected)
assert ebb.stats()["total"]["ops_replayed"] == 3

def under_hooks():
    with torch.autograd.graph.save_on_cpu():
        ebb.checkpoint(torch.sin, x)

def discard():
    with ebb.region():
        ebb.experimental.discardable(x.sin())

for needs in (
    lambda: ebb.record_reports().__enter__(),
    lambda: ebb.verify().__enter__(),
    lambda: ebb.config.update(ahead_regions=1),
    lambda: ebb.config.update(offload_in_flight_bytes="1MiB"),
    lambda: ebb.experimental.mark_rows(x, torch.tensor(1)),
    lambda: ebb.region(escapes="placeholder"),
    under_hooks,
    discard,
):
    try:
        needs()
    except AttributeError as error:
        print(error)

for stored, plugin in (("OFFLOAD", "offload"), ("PAGE", "paging")):
    try:
        with ebb.region(ebb.Policy([], default=getattr(ebb, stored))):
            pass
    except ValueError as error:
        assert f"cannot {stored}: it has no plug-in '{plugin}'" in str(error), error
    else:
        raise AssertionError(f"{stored} is accepted")
assert ebb.stats()["open_regions"] == 0
assert torch.equal(step(x, ebb.region(ebb.policies.recompute_all)), expected)
"""


def test_unknown_plugin_is_named(tmp_path):
    folder = Path(torch.__file__).parent
    options = [f"-DEBB_TORCH_DIR={folder}", "-DEBB_PLUGINS=report;reprot", "-DEBB_CUDA=0"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = subprocess.run(
        ["cmake", "-S", ROOT, "-B", tmp_path / "build", *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path},
    )

    assert found.returncode != 0
    assert "EBB_PLUGINS names 'reprot'" in found.stderr


@pytest.mark.sweep
def test_build_without_plugins(tmp_path):
    """Two minutes on two cores: all of the core is compiled."""
    environment = os.environ | {
        "EBB_BUILD_DIR": str(tmp_path / "build"),
        "EBB_CUDA": "0",
        "EBB_TESTING": "0",
        "EBB_CMAKE_ARGS": "-DEBB_LTO=OFF -DEBB_PLUGINS= -DCMAKE_BUILD_TYPE=MinSizeRel",
    }
    pip = [sys.executable, "-m", "pip", "-q", "install", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [*pip, "--target", tmp_path / "package", ROOT], env=environment, check=True, timeout=1500
    )

    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"PYTHONPATH": str(tmp_path / "package")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stderr
    errors = run.stdout.splitlines()
    assert len(errors) == 8
    assert all("ebb was built with these plug-ins: none (-DEBB_PLUGINS)" in e for e in errors)
