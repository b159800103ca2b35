"""OFFLOAD to disk, behind the pinned memory of a device whose copies are late."""

from __future__ import annotations

import torch
from device_leaves import assert_gradient, leaf
from offloading import SINES, overwritten

import ebb
from ebb import _testing


def test_what_a_write_made_leave_goes_to_disk_after_its_copy(tmp_path, device):
    """It has left for the device, which waits for the copy; the host has not."""

    def program(x):
        return (overwritten(x).sin().cos() * 2).sum()

    _testing.drain_offload()
    x = leaf(device)
    ebb.offload.configure(min_bytes=1, disk=tmp_path, pinned_limit=x.nbytes)
    with ebb.region(SINES):
        y = program(x)

    assert_gradient(torch.autograd.grad(y, x)[0], program, x)
