"""The input of most tests of OFFLOAD."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def x():
    return torch.randn(4, requires_grad=True)
