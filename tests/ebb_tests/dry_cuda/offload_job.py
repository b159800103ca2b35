"""A job that trains a GPT-like model in its process and prints a line of JSON.

python offload_job.py '{"policy": "offload_inputs", "steps": 12, "blocks": 24}'
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

import ebb
from ebb_tests import dry_cuda

OFFLOAD_ALL = ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))


def model_and_data(blocks, width, batch, tokens):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(width) for _ in range(blocks)))
    data = torch.randn(batch, tokens, width)
    return model.cuda(), data.cuda()


def apply(model, policy):
    if policy == "all":
        ebb.apply(model, OFFLOAD_ALL, "?*")
    elif policy != "eager":
        ebb.apply(model, getattr(ebb.policies, policy), "?*")


def train(model, data, steps, synchronize):
    """The peak of allocated bytes in each step, as torch's allocator counts it; and milliseconds of
    the device. The gradients are there all the time."""
    peaks = []
    model(data).square().mean().backward()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad(set_to_none=False)
        model(data).square().mean().backward()
        if synchronize:
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    end.record()
    torch.cuda.synchronize()
    return peaks, begin.elapsed_time(end)


def digest(model):
    gradients = [parameter.grad.cpu() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(g.numpy().tobytes() for g in gradients)).hexdigest()


def main(policy, steps, blocks, width=256, batch=16, tokens=512, synchronize=False):
    if dry_cuda.gives_values():
        dry_cuda.give_values()
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    model, data = model_and_data(blocks, width, batch, tokens)
    apply(model, policy)
    peaks, milliseconds = train(model, data, steps, synchronize)
    found = {
        "peaks": peaks,
        "input": data.nbytes,
        "milliseconds": milliseconds,
        "gradients": digest(model),
    }
    print(json.dumps(found | ebb.stats()["offload"]))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
