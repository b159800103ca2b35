"""These tests run on the dry CUDA runtime: `make test-dry-cuda`."""

from __future__ import annotations

import gc

import pytest
import torch

from ebb_tests import dry_cuda

collect_ignore_glob = [] if dry_cuda.is_loaded() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _empty_device():
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
