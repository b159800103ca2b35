"""Memory of training steps, as torch's own CUDA allocator counts it, on a machine without a GPU.

    PYTHONPATH=tests python -m ebb_tests.dry_cuda benchmarks/cuda_memory.py --output results

The dry CUDA runtime (tests/ebb_tests/dry_cuda) needs a CUDA build of torch. Its kernels do nothing,
so memory and launches are measured, and times are not. Each row is a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import environment
from report import environment_line, table, write_results
from torch import Tensor, nn

import ebb
from ebb_tests import dry_cuda
from ebb_tests.dry_cuda.models import BATCH, LENGTH, WIDTH, Stack

Row = dict[str, Any]
MIB = 1 << 20
STEPS = 8
SHARES = (0.8, 0.6, 0.4, 0.3)
RANKS = (8, 1024)
JOB_STEPS = 14  # of which a budget measures eight


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
            ebb.config.update({f"ahead.{name}": value for name, value in ahead.items()})
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
    "ebb offload_inputs": under(ebb.policies.offload_inputs),
    "ebb offload all": under(OFFLOAD_ALL),
    **{f"ebb plan, {share:.0%}": planned(share) for share in SHARES},
}


# ---- measuring ---------------------------------------------------------------------------------


def measure(model_name: str, way: str) -> Row:
    make, batch, blocks = MODELS[model_name]
    torch.manual_seed(0)
    return measure_steps(make().cuda(), batch(), way, blocks)


def measure_sharded(ranks: int, way: str) -> Row:
    """The first of `ranks` ranks under FSDP2. The other ranks do not exist: collectives of torch's
    fake process group return at once."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = dist.init_device_mesh("cuda", (ranks,))
    torch.manual_seed(0)
    model = Stack("GPT", 24).cuda()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return measure_steps(model, activations(), way, ("layers.*",))


def measure_steps(model: nn.Module, x: Tensor, way: str, blocks: tuple[str, ...]) -> Row:
    torch.backends.cudnn.enabled = False
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
        for _ in range(STEPS):
            step()
        launches = (dry_cuda.launches() - launches) // STEPS
        torch.cuda.synchronize()
        counts = torch.cuda.memory_stats()
    return {
        "allocated": counts["allocated_bytes.all.peak"] - before,
        "active": counts["active_bytes.all.peak"] - before,
        "reserved": counts["reserved_bytes.all.peak"] - before,
        "launches": launches,
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


def last_line(errors: str) -> str:
    return (errors.strip().splitlines() or ["no output"])[-1][:160]


def measure_job(memory: int = 0, **variables: str) -> Row:
    """A job with nothing but environment variables, in its last step.

    Args:
        memory: bytes of the device; 0: enough.
    """
    settings = {"memory": memory} if memory else {}
    done = dry_cuda.run("training_job.py", JOB_STEPS, variables=variables, **settings)
    if done.returncode != 0:
        return {"failed": last_line(done.stderr)}
    rows = json.loads(done.stdout)
    return {"allocated": rows[-1]["allocated_peak"], "reserved": rows[-1]["reserved"]}


JOBS: dict[str, dict[str, str]] = {
    "eager": {},
    "EBB=1": {"EBB": "1"},
    "EBB=offload_inputs": {"EBB": "offload_inputs"},
    **{f"EBB_BUDGET={budget}": {"EBB_BUDGET": budget} for budget in (
        "80%", "60%", "40%", "330MiB", "250MiB", "auto:300MiB",
    )},
}  # fmt: skip
SIZES = range(240, 501, 20)  # MiB of devices


def measure_lead(synchronized: bool, way: str) -> Row:
    """The first and the last peak of a job whose host waits in each step, or never."""
    options = {"policy": way, "steps": 12, "blocks": 24, "synchronize": synchronized}
    done = dry_cuda.run("offload_job.py", json.dumps(options), kernel_us=40, gemm_us=200, gbps=20)
    if done.returncode != 0:
        return {"failed": last_line(done.stderr)}
    peaks = json.loads(done.stdout.splitlines()[-1])["peaks"]
    return {"first": peaks[0], "last": peaks[-1]}


def mib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:,.1f}"


def rows_of(rows: dict[str, Row], columns: tuple[str, ...]) -> list[list[str]]:
    return [
        [name, row["failed"].replace("|", " "), *[""] * (len(columns) - 1)]
        if "failed" in row
        else [name, *(mib(row.get(column)) for column in columns)]
        for name, row in rows.items()
    ]


def step_table(rows: dict[str, Row]) -> str:
    columns = ("predicted", "allocated", "active", "reserved")
    body = rows_of(rows, columns)
    for line, row in zip(body, rows.values(), strict=True):
        line.append(str(row.get("launches", "")))
    return table(["", *columns, "launches"], body)


def page(found: dict[str, Any]) -> str:
    lines = [
        "# Memory as torch's CUDA allocator counts it",
        "",
        f"{environment_line(found['environment'])}. Written by `benchmarks/cuda_memory.py`.",
        "",
        "Measured with torch's own CUDA allocator on a runtime whose kernels do nothing (see "
        "tests/ebb_tests/dry_cuda). Peaks of a step in MiB, above the memory before it, and "
        "kernels launched in a step. cuDNN is off.",
        "",
    ]
    for model, rows in found["models"].items():
        lines += [f"## {model}", "", step_table(rows), ""]
    for ranks, rows in found["sharded"].items():
        title = f"## FSDP2, one of {ranks} ranks: GPT, 24 blocks of width 256"
        lines += [title, "", "torch's fake process group.", "", step_table(rows), ""]
    if found["jobs"]:
        columns = ("allocated", "reserved")
        lines += [
            "## A job with environment variables only: GPT, 8 blocks of width 256, AdamW",
            "",
            "The peak of the whole job, and what is reserved after its last step.",
            "",
            table(["", *columns], rows_of(found["jobs"], columns)),
            "",
        ]
    if found["sizes"]:
        body = [
            [size, *("dies" if "failed" in row else mib(row["reserved"]) for row in rows.values())]
            for size, rows in found["sizes"].items()
        ]
        lines += [
            "## The same job on small devices",
            "",
            "Reserved in the last step, in MiB.",
            "",
            table(["device, MiB", "eager", "EBB=1", "EBB_BUDGET=auto"], body),
            "",
        ]
    if found["leads"]:
        columns = ("first", "last")
        lines += [
            "## The host's lead: GPT, 24 blocks of width 256, in 12 steps",
            "",
            "Peak of allocated bytes in the first and the last step. Kernels take 40 us, products "
            "200 us, copies run at 20 GB/s.",
            "",
            table(["", *columns], rows_of(found["leads"], columns)),
            "",
        ]
    return "\n".join(lines)


def measure_all(
    measure_row: Callable[..., Row], what: Any, ways: list[str], name: str
) -> dict[str, Row]:
    rows = {}
    for way in ways:
        rows[way] = in_a_process(measure_row, what, way)
        print(name, way, rows[way], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for the results; default: none")
    parser.add_argument("--models", default="", help="only models whose name contains this")
    parser.add_argument("--ways", default="", help="only ways whose name contains this")
    parser.add_argument("--only-models", action="store_true", help="no jobs, no FSDP2")
    options = parser.parse_args()
    if not dry_cuda.is_loaded():
        parser.error("run it as the first lines of this file say")
    found: dict[str, Any] = {name: {} for name in ("models", "sharded", "jobs", "sizes", "leads")}
    ways = [name for name in WAYS if options.ways in name or name == "eager"]
    for model in (name for name in MODELS if options.models in name):
        found["models"][model] = measure_all(measure, model, ways, model)
    if not options.only_models:
        without_plans = [name for name in ways if "plan" not in name]
        for ranks in RANKS:
            name = f"{ranks} ranks"
            found["sharded"][ranks] = measure_all(measure_sharded, ranks, without_plans, name)
        for job, variables in JOBS.items():
            found["jobs"][job] = measure_job(**variables)
            print(job, found["jobs"][job], flush=True)
        for size in SIZES:
            found["sizes"][str(size)] = {
                str(variables): measure_job(size * MIB, **variables)
                for variables in ({}, {"EBB": "1"}, {"EBB_BUDGET": "auto"})
            }
            print(size, found["sizes"][str(size)], flush=True)
        for way in ("recompute_all", "offload_inputs", "all"):
            for host in ("synchronised", "free-running"):
                name = f"{way}, host {host}"
                found["leads"][name] = measure_lead(host == "synchronised", way)
                print(name, found["leads"][name], flush=True)
    found["environment"] = environment()  # asks for the device, and this process forks no more
    print(page(found))
    if options.output is not None:
        write_results(options.output / "dry-cuda", found, page(found))


if __name__ == "__main__":
    main()
