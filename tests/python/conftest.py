"""Shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch

import ebb
from ebb._testing import fake_accelerator


def accelerator():
    """A fake one for every test, if EBB_TEST_OFFLOAD says so: its copies run as soon as can be
    ("prompt") or as late ("late")."""
    how = os.environ.get("EBB_TEST_OFFLOAD")
    if how is None:
        return contextlib.nullcontext()
    return fake_accelerator(in_flight_bytes=0 if how == "prompt" else 1 << 40)


@pytest.fixture(autouse=True)
def _same_start_and_no_leak():
    """Every test starts from one seed, on one intra-op thread, and leaves no region open.

    One thread, because the tensors here are tiny and spinning workers on a busy machine are not.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ebb.reset_stats()
    with accelerator():
        yield
    assert ebb.stats()["open_regions"] == 0


@pytest.fixture
def no_objects_left():
    """The test must free every recipe and handle that it made."""
    gc.collect()
    before = ebb.stats()
    yield
    gc.collect()
    after = ebb.stats()
    for count in ("live_recipes", "live_handles"):
        assert after[count] <= before[count], count
