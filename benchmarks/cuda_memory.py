"""Memory of training steps, as torch's own CUDA allocator counts it, on a machine without a GPU.

    PYTHONPATH=tests/support python -m dry_cuda benchmarks/cuda_memory.py --output results

The dry CUDA runtime (tests/support/dry_cuda) needs a CUDA build of torch. Its kernels do nothing,
so memory, launches and the host's time are measured, and the times of kernels are not. Each row is
a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import dry_cuda
import torch
import torch.nn.functional as F
from dry_cuda.models import BATCH, LENGTH, WIDTH, Stack
from environment import environment
from torch import Tensor, nn

import ebb
from report import environment_line, table, write_results

Row = dict[str, Any]
MIB = 1 << 20
STEPS = 8
SHARES = (0.8, 0.6, 0.4, 0.3)


# ---- models ------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outputs) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norms[0](self.first(x)))
        return F.silu(self.norms[1](self.second(x)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (32, 64, 128)
        self.down = nn.ModuleList(
            Convolutions(inputs, outputs)
            for inputs, outputs in zip((8, *sizes), sizes, strict=False)
        )
        self.up = nn.ModuleList(
            Convolutions(inputs + outputs, outputs)
            for inputs, outputs in zip(sizes[:0:-1], sizes[-2::-1], strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        x = skipped.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skipped.pop()], 1))
        return x.square().mean()


class Experts(nn.Module):
    """A mixture of eight experts, two for each token, as padded batches."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        count = len(self.up)
        room = tokens.shape[0] * 2 // count
        order = chosen.flatten().argsort()[: count * room]
        gathered = tokens[order // 2].view(count, room, WIDTH)
        y = torch.bmm(F.silu(torch.bmm(gathered, self.up)), self.down).flatten(0, 1)
        y = y * weights.flatten()[order].unsqueeze(1)
        return x + torch.zeros_like(tokens).index_add(0, order // 2, y).view_as(x)


class MoE(nn.Module):
    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=12,
            num_attention_heads=8, num_key_value_heads=8, use_cache=False,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config)
        self.layers = self.model.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def activations() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, device="cuda")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[str, ...]]] = {
    "GPT, 24 blocks of width 256": (lambda: Stack("GPT", 24), activations, ("layers.*",)),
    "Llama of transformers, 12 layers of width 512": (
        Llama,
        lambda: torch.randint(8192, (4, 512), device="cuda"),
        ("model.model.layers.*",),
    ),
    "U-Net": (UNet, lambda: torch.randn(4, 8, 128, 128, device="cuda"), ("down.*", "up.*")),
    "MoE, 8 layers of 8 experts": (MoE, activations, ("layers.*",)),
}


# ---- ways to run a step ------------------------------------------------------------------------

Way = Callable[[nn.Module, Callable[[], None], tuple[str, ...]], AbstractContextManager[Any]]


def plainly(*_: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def by(make: Callable[[Any], Callable[..., Any]]) -> Way:
    """Each block is run by a function that `make` makes from the module `systems`. To import that
    module asks for the device, and this process could not fork then."""

    def wrap(model: nn.Module, step: Callable[[], None], blocks: tuple[str, ...]) -> Any:
        import systems

        run = make(systems)
        with ebb.apply(model, ebb.policies.save_all, blocks) as handle:
            names = [name for name in handle.names if name]
        for name in names:
            block = model.get_submodule(name)
            block.forward = functools.partial(run, block.forward)
        return nullcontext()

    return wrap


def under(policy: ebb.Policy, **ahead: Any) -> Way:
    @contextmanager
    def apply(
        model: nn.Module, step: Callable[[], None], blocks: tuple[str, ...]
    ) -> Iterator[None]:
        if ahead:
            ebb.ahead.configure(**ahead)
        with ebb.apply(model, policy, blocks):
            yield

    return apply


def planned(share: float) -> Way:
    def plan(model: nn.Module, step: Callable[[], None], blocks: tuple[str, ...]) -> Any:
        made = ebb.plan(model, step, share)
        predicted["peak"] = made.peak
        return made.apply(model)

    return plan


predicted: dict[str, int] = {}
OFFLOAD_ALL = ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD)
WAYS: dict[str, Way] = {
    "eager": plainly,
    "AC, reentrant": by(lambda of: of.in_checkpoint(reentrant=True)),
    "AC": by(lambda of: of.in_checkpoint()),
    "SAC matmuls": by(lambda of: of.in_checkpoint(context_fn=of.matmuls_contexts())),
    "SAC torchtitan": by(lambda of: of.in_checkpoint(context_fn=of.torchtitan_contexts())),
    "save_on_cpu": by(lambda of: of.saved_on_cpu),
    "ebb save_all": under(ebb.policies.save_all),
    "ebb save_matmuls": under(ebb.policies.save_matmuls),
    "ebb torchtitan": under(ebb.policies.torchtitan),
    "ebb recompute_all": under(ebb.policies.recompute_all),
    "ebb recompute_all, ahead": under(ebb.policies.recompute_all, regions=1, limit="4GiB"),
    "ebb recompute_all, ahead, side stream": under(
        ebb.policies.recompute_all, regions=1, limit="4GiB", side_stream=True
    ),
    "ebb offload_inputs": under(ebb.policies.offload_inputs),
    "ebb offload all": under(OFFLOAD_ALL),
    **{f"ebb plan, {share:.0%}": planned(share) for share in SHARES},
}


# ---- measuring ---------------------------------------------------------------------------------


def measure(model_name: str, way: str) -> Row:
    make, batch, blocks = MODELS[model_name]
    torch.backends.cudnn.enabled = False
    torch.manual_seed(0)
    model = make().cuda()
    x = batch()
    x.requires_grad_(x.is_floating_point())  # reentrant checkpointing needs that

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward()

    with WAYS[way](model, step, blocks):
        for _ in range(3):
            step()
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        launches = dry_cuda.launches()
        times = []
        for _ in range(STEPS):
            begin = time.process_time()
            step()
            times.append(time.process_time() - begin)
        launches = (dry_cuda.launches() - launches) // STEPS
        torch.cuda.synchronize()
        counts = torch.cuda.memory_stats()
    return {
        "allocated": counts["allocated_bytes.all.peak"] - before,
        "active": counts["active_bytes.all.peak"] - before,
        "reserved": counts["reserved_bytes.all.peak"] - before,
        "launches": launches,
        "host_ms": min(times) * 1e3,
    } | ({"predicted": predicted["peak"]} if predicted else {})


def in_a_process(function: Callable[..., Row], *arguments: Any) -> Row:
    """Runs a function in a fork, before this process uses CUDA."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            found = function(*arguments)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"failed": "the process has ended"}


def mib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:,.1f}"


def page(found: dict[str, Any]) -> str:
    lines = [
        "# Memory as torch's CUDA allocator counts it",
        "",
        f"{environment_line(found['environment'])}. Written by `benchmarks/cuda_memory.py`.",
        "",
        "Measured with torch's own CUDA allocator on a runtime whose kernels do nothing (see "
        "tests/support/dry_cuda). Peaks of a step in MiB, above the memory before it; kernels "
        "launched in a step; the host's time for a step, as a ratio to eager's. Times of kernels "
        "are not measured. cuDNN is off.",
        "",
    ]
    head = ["", "predicted", "allocated", "active", "reserved", "launches", "host time"]
    for model, rows in found["models"].items():
        eager = rows["eager"].get("host_ms", 1.0)
        body = []
        for way, row in rows.items():
            if "failed" in row:
                body.append([way, row["failed"].replace("|", " "), *[""] * 5])
                continue
            numbers = (mib(row.get(k)) for k in ("predicted", "allocated", "active", "reserved"))
            body.append([way, *numbers, str(row["launches"]), f"{row['host_ms'] / eager:.2f}"])
        lines += [f"## {model}", "", table(head, body), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for the results; default: none")
    parser.add_argument("--models", default="", help="only models whose name contains this")
    parser.add_argument("--ways", default="", help="only ways whose name contains this")
    options = parser.parse_args()
    if not dry_cuda.is_loaded():
        parser.error("run it as the first lines of this file say")
    models: dict[str, dict[str, Row]] = {}
    for model in (name for name in MODELS if options.models in name):
        rows = models.setdefault(model, {})
        for way in (name for name in WAYS if options.ways in name or name == "eager"):
            rows[way] = in_a_process(measure, model, way)
            print(model, way, rows[way], flush=True)
    found = {"environment": environment(), "models": models}
    print(page(found))
    if options.output is not None:
        write_results(options.output / "dry-cuda", found, page(found))


if __name__ == "__main__":
    main()
