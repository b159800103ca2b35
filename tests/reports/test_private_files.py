"""Files that ebb writes can be read by their owner only."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

import ebb
from ebb._support.private_files import write_private


@pytest.fixture(autouse=True)
def open_umask():
    """New files are readable and writable by all."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(Path(path).stat().st_mode)


@pytest.fixture(scope="module")
def report():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    with ebb.record_reports(), ebb.apply(model, ebb.policies.recompute_all, ["1"]):
        model(torch.randn(2, 4)).sum().backward()
    return ebb.report()


@pytest.mark.parametrize("suffix", ["txt", "json", "html"])
def test_reports_are_private(report, tmp_path, suffix):
    path = tmp_path / f"report.{suffix}"
    report.save(path)
    assert path.stat().st_size > 100
    assert mode(path) == 0o600


def test_policies_are_private(tmp_path):
    ebb.policies.recompute_all.save(tmp_path / "policy.toml")
    modules = {"0": ebb.policies.recompute_all}
    ebb.ModulePolicies(modules).save(tmp_path / "modules.toml")
    for name in ("policy.toml", "modules.toml"):
        assert mode(tmp_path / name) == 0o600
    assert list(ebb.ModulePolicies.load(tmp_path / "modules.toml").policies) == ["0"]


def test_existing_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("a longer text than what comes")
    path.chmod(0o640)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert mode(path) == 0o640


def test_path_that_cannot_be_written_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_private(tmp_path / "none" / "report.txt", "text")
