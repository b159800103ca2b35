"""OFFLOAD to disk, behind the pinned memory of a device whose copies are late."""

from __future__ import annotations

import accelerator
import torch

import ebb
from ebb import _testing

SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})


def test_what_a_write_made_leave_goes_to_disk_after_its_copy(tmp_path, device):
    """It has left for the device, which waits for the copy; the host has not."""

    def program(x):
        h = x.sin()
        h.cos()  # saves h, which so is sent; nothing comes of it
        y = (h * 2).exp()  # saves its result; `h * 2` reads h
        with torch.no_grad():
            h.zero_()
        return (y.sin().cos() * 2).sum()

    _testing.drain_offload()
    x = torch.randn(8, 32).to(device).requires_grad_()
    ebb.offload.configure(min_bytes=1, disk=tmp_path, pinned_limit=x.nbytes)
    accelerator.synchronize()
    with ebb.region(SINES):
        y = program(x)
    found = torch.autograd.grad(y, x)[0]
    accelerator.synchronize()

    cpu = x.detach().cpu().requires_grad_()
    assert torch.equal(found.cpu(), torch.autograd.grad(program(cpu), cpu)[0])
