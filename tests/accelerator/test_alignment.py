"""Memory of a device that is not aligned as its allocator aligns: see Note [Alignment]."""

from __future__ import annotations

import pytest
import torch

import ebb

N = 64


@pytest.fixture
def address(device):
    """An operator whose result depends on where its argument is, as a vectorised kernel's does."""
    library = torch.library.Library("ebb_test", "FRAGMENT")
    library.define("add_address(Tensor x) -> Tensor")
    library.impl("add_address", lambda x: x + x.data_ptr() % 256, "PrivateUse1")
    yield torch.ops.ebb_test.add_address
    library._destroy()


def unaligned(device, distance):
    """A tensor whose storage begins so many bytes behind an aligned address."""
    whole = torch.randn(N + distance).to(device)
    storage = whole.untyped_storage()[distance:][: 4 * N]
    return torch.empty(0, device=device).set_(storage, 0, (N,))


@pytest.mark.parametrize("distance", [4, 16, 64, 128])
def test_a_copy_on_write_has_the_distance_of_the_original(distance, address, device):
    buffer = unaligned(device, distance)
    w = torch.randn(N).to(device).requires_grad_()

    def forward(region):
        with region:
            loss = (w * address(buffer)).sum()
            buffer.mul_(1)  # ebb copies the bytes before the write
        return torch.autograd.grad(loss, w)[0].cpu()

    assert buffer.data_ptr() % 256 == distance
    recomputed = ebb.Policy({"ebb_test::add_address": ebb.RECOMPUTE})
    assert torch.equal(forward(ebb.region(recomputed)), forward(ebb.region(ebb.policies.save_all)))
