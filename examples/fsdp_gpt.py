"""Train the small GPT of train_gpt.py on several ranks, with its blocks sharded by FSDP2.

Plain, torch's activation checkpointing and two of ebb's policies take turns: at each step all see
the same batch and dropout, and losses and gradients must equal the plain ones bit for bit. Each
rank prints a table: the bytes alive between forward and backward (held), the most at any
time (peak), and the shortest step as a multiple of the shortest plain one.

    torchrun --nproc-per-node 2 examples/fsdp_gpt.py

With a GPU for each rank it uses NCCL, else gloo on the CPU. The exit status is 1 if anything
differed.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import train_gpt
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from train_gpt import GPT, Variant, draw_batches, find_difference, now

import ebb

HEADING = f"rank  {'policy':<18} {'held MiB':>9} {'peak MiB':>9} {'time':>6}  identical\n"
NAMES = ("plain", "torch AC", "ebb recompute_all", "ebb save_matmuls")


def make_variant(name: str, arguments: argparse.Namespace) -> Variant:
    torch.manual_seed(0)  # all ranks and variants have the same weights
    model = GPT(arguments.dim, arguments.layers, arguments.length).to(train_gpt.DEVICE)
    if name == "torch AC":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    # Each block is an FSDP unit and a region. Before or after fully_shard makes no difference.
    if name.startswith("ebb"):
        ebb.apply(model, getattr(ebb.policies, name.split()[1]), "blocks.*")
    return Variant(name, model, torch.optim.AdamW(model.parameters(), lr=2e-3), regions_ahead=0)


def forward_and_backward(variant: Variant, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss, and this rank's shards of the gradients."""
    variant.optimizer.zero_grad()
    loss = variant.model(batch)
    loss.backward()
    gradients = (parameter.grad.to_local() for parameter in variant.model.parameters())
    return {"the loss": loss.detach()} | {f"gradient {i}": g for i, g in enumerate(gradients)}


def train(variants: list[Variant], batches: list[torch.Tensor]) -> None:
    for step, batch in enumerate(batches):
        expected: dict[str, torch.Tensor] = {}
        for variant in variants:
            torch.manual_seed(1000 * step + dist.get_rank())
            dist.barrier()
            started = now()
            seen = forward_and_backward(variant, batch)
            variant.optimizer.step()
            variant.seconds.append(now() - started)
            expected = expected or seen  # the plain variant comes first
            name = find_difference(expected, seen)
            if name is not None and variant.first_difference is None:
                variant.first_difference = f"step {step}: {name}"


def row_of(variant: Variant, plain: Variant, batch: torch.Tensor) -> str:
    variant.optimizer.zero_grad()
    is_on_gpu = train_gpt.DEVICE.type == "cuda"
    measure = train_gpt.measure_cuda_step if is_on_gpu else train_gpt.measure_cpu_step
    held, peak = measure(variant.model, batch)
    difference = variant.first_difference
    identical = "yes" if difference is None else f"NO, first at {difference}"
    ratio = min(variant.seconds) / min(plain.seconds)
    sizes = f"{held / 2**20:9.1f} {peak / 2**20:9.1f}"
    return f"{dist.get_rank():>4}  {variant.name:<18} {sizes} {ratio:5.2f}x  {identical}"


def main() -> int:
    arguments = train_gpt.parser_of(__doc__, steps=8, batch=4).parse_args()
    if train_gpt.DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl" if train_gpt.DEVICE.type == "cuda" else "gloo")
    arguments.seed = dist.get_rank()  # each rank has other batches
    *batches, last_batch = draw_batches(arguments)
    variants = [make_variant(name, arguments) for name in NAMES]
    train(variants, batches)
    rows = [row_of(variant, variants[0], last_batch) for variant in variants]

    print(HEADING + "\n".join(rows), flush=True)
    dist.destroy_process_group()
    return int(any(variant.first_difference is not None for variant in variants))


if __name__ == "__main__":
    sys.exit(main())
