"""Tests on the test device, in processes of their own: see tests/ebb_tests/on_device.py."""

from __future__ import annotations

import gc

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.device_leaves import leaf
from ebb_tests.programs import paged
from ebb_tests.replays import wait_for_replays


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make sweep` runs these, and `make test` does not."""
    for item in items:
        if "accelerator" in item.path.parts and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.sweep)


@pytest.fixture
def device():
    """The first of two. What its detector found after a test is a failure, unless the test took
    it."""
    found = late.load()
    torch.manual_seed(0)
    late.findings()
    yield found
    late.synchronize()
    assert late.findings() == []


@pytest.fixture
def x(device):
    """Random numbers. Tensors of any size are offloaded."""
    gc.collect()
    _testing.drain_offload()
    ebb.config.offload.min_bytes = 1
    return leaf(device)


@pytest.fixture
def stream(device):
    """To capture."""
    _testing.drain_offload()
    ebb.config.offload.min_bytes = 1
    yield torch.Stream(device=device)
    gc.collect()
    late.synchronize()


@pytest.fixture
def fresh_pages(device):
    """No page pools before and after; the device can have some."""
    late.have_pages()
    with paged.fresh():
        yield
    paged.Keep.last = None


@pytest.fixture
def net():
    """For the programs of tests/paging. It is on the default device."""
    return paged.Mlp()


@pytest.fixture
def streams(device):
    return torch.Stream(device=device), torch.Stream(device=device)


@pytest.fixture
def ahead(device):
    """Replays ahead on a device."""
    ebb.config.ahead.regions = 1
    yield
    wait_for_replays()
