"""Attention in which keys and values go from rank to rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ebb_tests.ranks.collectives import peer


class RingAttention(torch.autograd.Function):
    """Keys and values go around; what comes is received while this rank computes."""

    @staticmethod
    def rotate(tensors):
        received = [torch.empty_like(t) for t in tensors]
        works = []
        for tensor, buffer in zip(tensors, received, strict=True):
            works += dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, tensor, peer()), dist.P2POp(dist.irecv, buffer, peer())]
            )
        return received, works

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        parts = []
        ours = [k.contiguous(), v.contiguous()]
        for step in range(2):
            received, works = RingAttention.rotate(ours) if step == 0 else (ours, [])
            parts.append((q @ ours[0].t(), ours[1]))
            for work in works:
                work.wait()
            ours = received
        scores = torch.cat([part for part, _ in parts], -1).softmax(-1)
        return scores @ torch.cat([value for _, value in parts])

    @staticmethod
    def backward(ctx, gradient):
        q, k, v = ctx.saved_tensors
        received, works = RingAttention.rotate([k.contiguous(), v.contiguous()])
        for work in works:
            work.wait()
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            keys = torch.cat([leaves[1], received[0]])
            values = torch.cat([leaves[2], received[1]])
            y = (leaves[0] @ keys.t()).softmax(-1) @ values
        return torch.autograd.grad(y, leaves, gradient)
