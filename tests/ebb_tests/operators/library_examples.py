"""Calls of operators of torch's domain libraries, where those are installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

LIBRARIES = ("torchvision", "torchaudio")


def r(*shape: int) -> torch.Tensor:
    return torch.rand(shape).requires_grad_()


def of_torchvision() -> list[Callable[[], Any]]:
    ops = importlib.import_module("torchvision.ops")
    boxes = torch.tensor([[0, 1.0, 1.0, 9.0, 9.0], [1, 2.0, 2.0, 8.0, 12.0]])
    return [
        lambda: ops.roi_align(r(2, 3, 16, 16), boxes, (3, 3)),
        lambda: ops.roi_pool(r(2, 3, 16, 16), boxes, (3, 3)),
        lambda: ops.ps_roi_align(r(2, 12, 16, 16), boxes, 2),
        lambda: ops.ps_roi_pool(r(2, 12, 16, 16), boxes, 2),
        lambda: ops.nms(boxes[:, 1:], torch.rand(2), 0.5),
        lambda: ops.deform_conv2d(
            r(2, 3, 16, 16), r(2, 18, 14, 14), r(4, 3, 3, 3), mask=r(2, 9, 14, 14)
        ),
    ]


def of_torchaudio() -> list[Callable[[], Any]]:
    functions = importlib.import_module("torchaudio.functional")
    some = torch.tensor([[1, 2]], dtype=torch.int32)
    lengths = torch.tensor([4], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    return [
        lambda: functions.lfilter(r(2, 50), r(3), r(3)),
        lambda: functions.overdrive(torch.rand(2, 50)),
        lambda: functions.rnnt_loss(r(1, 4, 3, 5).log_softmax(-1), some, *lengths),
        lambda: functions.forced_align(torch.rand(1, 6, 5).log_softmax(-1), some),
    ]


def programs() -> list[Callable[[], Any]]:
    """The calls of all installed libraries. Imports these, which registers their operators."""
    found: list[Callable[[], Any]] = []
    for name, make in zip(LIBRARIES, (of_torchvision, of_torchaudio), strict=True):
        with contextlib.suppress(
            ImportError, OSError, RuntimeError
        ):  # not installed, or built for another torch
            importlib.import_module(name)
            found += make()
    return found
