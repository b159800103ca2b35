"""How much memory a job may use, as `EBB_BUDGET=auto` reads it."""

from __future__ import annotations

import pytest
import torch

from ebb._plan.memory_limit import limit_of, there_is

MACHINES = (
    int(
        next(line for line in open("/proc/meminfo") if line.startswith("MemTotal")).split()[1]  # noqa: SIM115
    )
    * 1024
)


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_it_is_given():
    assert limit_of("auto:20GiB") == 20 * 2**30
    assert limit_of(" AUTO : 1MiB") == 2**20


@pytest.mark.parametrize("text", ["", "40%", "20GiB", "automatic", "0.4"])
def test_other_budgets_are_none(text):
    assert limit_of(text) is None


@pytest.mark.parametrize("text", ["auto:", "auto:0", "auto:banana", "auto:-3", "auto:40%"])
def test_nonsense(text):
    with pytest.raises(ValueError, match="ebb: "):
        limit_of(text)


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_control_groups_limit_counts(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{2**30}\n")
    assert there_is(str(tmp_path)) == 2**30


@pytest.mark.parametrize("text", ["max\n", f"{2**63 - 4096}\n", "", "0\n"])
def test_without_one_it_is_the_machines(tmp_path, text):
    (tmp_path / "memory.max").write_text(text)
    assert there_is(str(tmp_path)) == MACHINES


def test_some_is_left_free():
    assert limit_of("auto") == int(0.9 * there_is())
