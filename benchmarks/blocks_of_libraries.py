"""Finds the blocks of many libraries' models with `ebb.apply`, and measures the memory it saves.

    OMP_NUM_THREADS=1 python benchmarks/blocks_of_libraries.py
    OMP_NUM_THREADS=1 python benchmarks/blocks_of_libraries.py --only "timm*" "*resnet*"

Each model runs two steps: eager, with the library's own checkpointing, and with
`ebb.apply(model, ebb.policies.recompute_all)`. A model passes if loss, gradients and buffers have
eager's bits, and if ebb frees at least as many bytes as the library's checkpointing. If the library
has no checkpointing, ebb must free 40 % of the bytes that eager holds. The exit status is 1 if a
model fails and its case in `library_models` gives no reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import random
import sys
import time
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from environment import environment, slug, version
from held_bytes import held_and_peak_of
from library_models import CASES, MODULES, Case
from report import environment_line, table, write_results
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ebb
from ebb._support.names import in_ranges
from ebb._support.shown import clipped

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.4  # share of eager's held bytes to free, if a library has no checkpointing
Row = dict[str, Any]
Bits = dict[str, Tensor]


def loss_of(output: Any) -> Tensor:
    """The model's loss. If the model returns none, a loss that depends on all its outputs."""
    if getattr(output, "loss", None) is not None:
        return output.loss  # type: ignore[no-any-return]
    leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((one.square().mean() for one in floats), torch.zeros(()))


def bits_of(model: nn.Module, loss: Tensor) -> Bits:
    found = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.clone()
    found |= {f"buffer {name}": one.clone() for name, one in model.named_buffers()}
    return found


def difference(ours: list[Bits], eagers: list[Bits]) -> str:
    """The first value whose bits differ from eager's; empty if all are equal."""
    for step, (one, other) in enumerate(zip(ours, eagers, strict=True)):
        if one.keys() != other.keys():
            return f"step {step}: {sorted(one.keys() ^ other.keys())[0]} is missing or new"
        for name, tensor in one.items():
            if not torch.equal(tensor.nan_to_num(), other[name].nan_to_num()):
                return f"step {step}: {name}"
    return ""


def train(model: nn.Module, case: Case) -> tuple[dict[str, int], list[Bits], float]:
    """Runs two steps: bytes of the second, results of both, and seconds of the first."""
    torch.manual_seed(1)
    random.seed(1)
    batch = case.batch()
    arguments, keywords = ((), batch) if isinstance(batch, dict) else (batch, {})
    losses: list[Tensor] = []

    def forward() -> Tensor:
        loss = loss_of(model(*arguments, **keywords))
        losses.append(loss.detach().clone())
        return loss

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    start = time.perf_counter()
    forward().backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - start
    bits = [bits_of(model, losses[-1])]
    optimizer.step()
    gc.collect()
    found = held_and_peak_of(forward)
    return found, [*bits, bits_of(model, losses[-1])], seconds


def run(case: Case) -> Row:
    row: Row = {"library": case.library, "model": case.name, "why": case.why}
    if find_spec(MODULES.get(case.library, case.library).split(".")[0]) is None:
        return row | {"verdict": "not installed"}
    try:
        eager, eagers, row["seconds"] = train(case.build(with_own=False), case)
    except Exception:
        return row | {"verdict": f"eager: {traceback.format_exc(limit=-1).strip()}"}
    row["eager"] = eager
    if case.own is not None:
        try:
            row["own"], bits, _ = train(case.build(with_own=True), case)
            row["own_differs"] = difference(bits, eagers)
        except Exception:
            row["own_error"] = traceback.format_exc(limit=-1).strip().splitlines()[-1]
    try:
        model = case.build(with_own=False)
        handle = ebb.apply(model, ebb.policies.recompute_all)
        row["blocks"] = list(handle.names)
        row["ebb"], bits, _ = train(model, case)
    except Exception:
        return row | {"verdict": f"ebb: {traceback.format_exc(limit=-3).strip()}"}
    row["verdict"] = verdict_of(row)
    if case.why and row["verdict"] != "pass":
        row["verdict"] += ", explained below"
    if differs := difference(bits, eagers):
        again = difference(train(case.build(with_own=False), case)[1], eagers)
        row["verdict"] = f"other bits: {differs}" + (" (eager's, too)" if again else "")
    return row


def saved(row: Row, way: str) -> float:
    """The share of eager's held bytes that `way` ("ebb" or "own") frees."""
    return 1 - row[way]["held_bytes"] / row["eager"]["held_bytes"]


def verdict_of(row: Row) -> str:
    ours, own = row["ebb"], row.get("own")
    if own is None:
        return "pass" if saved(row, "ebb") >= GOAL else f"saves less than {GOAL:.0%}"
    if ours["held_bytes"] <= own["held_bytes"]:
        return "pass"
    return "saves less than the library"


def of_eager(row: Row, way: str) -> str:
    """The held bytes that `way` frees, and its peak, as shares of eager's."""
    peak = row[way]["peak_bytes"] / row["eager"]["peak_bytes"]
    return f"{saved(row, way):.1%}, {peak:.0%}"


HEAD = [
    "library",
    "model",
    "blocks",
    "eager holds",
    "ebb: saved, peak",
    "its own: saved, peak",
    "",
]


def cells(row: Row) -> list[str]:
    if "ebb" not in row:
        return [row["library"], row["model"], *[""] * 4, row["verdict"].splitlines()[-1]]
    own = of_eager(row, "own") if "own" in row else row.get("own_error", "none")[:60]
    names = in_ranges(row["blocks"])
    return [
        row["library"],
        row["model"],
        clipped(", ".join(names), 100) if names != [""] else "the model",
        f"{row['eager']['held_bytes']:,}",
        of_eager(row, "ebb"),
        f"{own}, other bits" if row.get("own_differs") else own,
        row["verdict"],
    ]


def passed(rows: list[Row]) -> int:
    return sum(row["verdict"] == "pass" for row in rows)


def page(found: Row) -> str:
    rows = found["rows"]
    whys = [
        f"* {row['library']}, {row['model']}: {row['why'] or row['verdict']}"
        for row in rows
        if row["verdict"] != "pass"
    ]
    lines = [
        "# Blocks in models of libraries",
        "",
        f"{environment_line(found['environment'])}. "
        "Written by `benchmarks/blocks_of_libraries.py`.",
        "",
        "Bytes that eager holds at the end of forward; then, for "
        "`ebb.apply(model, ebb.policies.recompute_all)` and for the library's own checkpointing, "
        "the share of them that is saved, and the step's peak in % of eager's. Loss, gradients and "
        "buffers of two steps are compared with eager's.",
        "",
        table(HEAD, map(cells, rows)),
        "",
        f"{passed(rows)} of {len(rows)} models of "
        f"{len({row['library'] for row in rows})} libraries pass. The others:",
        *(["", *whys] if whys else []),
        "",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in found["versions"].items()) + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help='globs over "library model"')
    parser.add_argument("--output", type=Path, help="the folder to write results to")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        name = f"{case.library} {case.name}"
        if any(fnmatch.fnmatchcase(name, glob) for glob in options.only):
            rows.append(run(case))
            print(" | ".join(cells(rows[-1])), flush=True)
            if "\n" in rows[-1]["verdict"]:
                print(rows[-1]["verdict"], flush=True)
    libraries = dict.fromkeys(row["library"] for row in rows)
    versions = {one: version(one) for one in libraries if one != "torch" and version(one)}
    found = {"environment": environment(), "versions": versions, "rows": rows}
    if options.output:
        write_results(
            options.output / f"{slug(found['environment'])}-libraries", found, page(found)
        )
    print(f"{passed(rows)} of {len(rows)} models pass")
    explained = sum(row["verdict"].endswith("explained below") for row in rows)
    return 0 if rows and passed(rows) + explained == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
