"""A mixture of experts that drops no token: only the rows that live are kept for backward.

One rank of an expert-parallel job holds some of the experts. How many tokens come to them varies
from layer to layer and from step to step, from none to all, and only the device knows. So each
layer's buffers have rows for all, padded, and what backward needs of them is paged:

    policy = ebb.Policy({"aten::_grouped_mm": ebb.PAGE}, inputs=ebb.PAGE)
    with ebb.region(policy):
        y = experts(ebb.experimental.mark_rows(x, tokens_per_expert), ...)

The same training runs plainly and paged, step by step. Printed are how many rows lived in the
layers of each step, what backward's rows take padded, alive, and in pools, what pools waste over
rows that live, and whether loss, gradients and parameters are those of plain eager (identical). The
exit status is 1 if any is not.

    python examples/moe_paged.py
    python examples/moe_paged.py --capacity-factor 8 --skew 2 --steps 20 --json figures.json

It runs on the CUDA device where there is one, else on the CPU, in seconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ebb

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS = 4  # on this rank
TOP_K = 2
# Matrix products are paged, and so is what a layer's experts read; all between is recomputed.
POLICY = ebb.Policy({"aten::_grouped_mm": ebb.PAGE}, inputs=ebb.PAGE)


class Experts(nn.Module):
    """SwiGLU experts on rows that are sorted by expert, with padding behind."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, dim, 2 * hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, dim) * hidden**-0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).int()  # no row behind the last is read
        gate, value = F.grouped_mm(x, self.up, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * value, self.down, offs=ends)


class Layer(nn.Module):
    """Routes each token to its best experts, of which this rank computes its own."""

    def __init__(self, dim: int, hidden: int, all_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, all_experts, bias=False)
        self.experts = Experts(dim, hidden)

    def forward(self, x: Tensor, bias: Tensor, paged: bool) -> Tensor:
        rows = self.norm(x)
        weights, chosen = (self.router(rows) + bias).softmax(-1).topk(TOP_K)
        # Assignments to experts of this rank come first, sorted by expert; the host counts none.
        expert = chosen.flatten().clamp(max=EXPERTS)
        order = expert.argsort(stable=True)
        counts = torch.zeros(EXPERTS + 1, dtype=torch.long, device=x.device)
        counts = counts.index_add_(0, expert, torch.ones_like(expert))[:EXPERTS]
        token = order // TOP_K
        lives = (torch.arange(len(order), device=x.device) < counts.sum()).unsqueeze(1)
        # Products leave dead rows as memory happens to be, and their gradients too: hence masks.
        padded = torch.where(lives, rows.index_select(0, token), 0)
        if paged:
            with ebb.region(POLICY, "experts"):
                made = self.experts(ebb.experimental.mark_rows(padded, counts), counts)
        else:
            made = self.experts(padded, counts)
        self.load = counts.sum()
        weighted = torch.where(lives, made, 0) * weights.flatten().index_select(0, order)[:, None]
        return x + torch.zeros_like(x).index_add(0, token, weighted)


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        everywhere = int(EXPERTS * options.capacity_factor)  # experts of all ranks
        self.layers = nn.ModuleList(
            Layer(options.dim, options.hidden, everywhere) for _ in range(options.layers)
        )

    def forward(self, x: Tensor, bias: Tensor, paged: bool = False) -> Tensor:
        for layer, shift in zip(self.layers, bias, strict=True):
            x = layer(x, shift, paged)
        return x.square().mean()


def train_step(model: Model, optimizer: torch.optim.Optimizer, batch: Any, paged: bool) -> Tensor:
    def forward_and_backward() -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch, paged)
        loss.backward()
        return loss.detach()

    # If a pool had too little room the step runs once more, unpaged.
    loss = (
        ebb.experimental.paging.run_step(forward_and_backward, fixed_order=True)
        if paged
        else forward_and_backward()
    )
    optimizer.step()
    return loss


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument(
        "--capacity-factor",
        type=float,
        default=4.0,
        help="padded rows for each live one, at 0 skew",
    )
    parser.add_argument("--skew", type=float, default=0.15, help="how much loads vary; 0: little")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def step_figures(step: int, same: bool, model: Model, tokens: int) -> dict[str, Any]:
    stats = ebb.stats()["paging"]
    loads = [int(layer.load) / (TOP_K * tokens) for layer in model.layers]
    pages = sum(p["device_pages"] * p["page_rows"] * p["row_bytes"] for p in stats["pools"])
    padded, live = stats["padded_bytes"], stats["live_bytes"]
    return {
        "step": step,
        "least": min(loads),
        "most": max(loads),
        "padded_bytes": padded,
        "live_bytes": live,
        "pool_bytes": pages,
        "of_padded": pages / max(padded, 1),
        "waste": pages / max(live, 1) - 1,
        "identical": same,
    }


def line(row: dict[str, Any]) -> str:
    padded, live, pools = (row[f"{name}_bytes"] / 2**20 for name in ("padded", "live", "pool"))
    return (
        f"{row['step']:4}  {row['least']:5.0%} to {row['most']:3.0%}  {padded:10.1f}  {live:8.2f}"
        f"  {pools:9.2f}  {row['of_padded']:9.2f}  {row['waste']:5.0%}"
        f"  {'yes' if row['identical'] else 'NO'}"
    )


def main() -> int:
    options = parse()
    torch.manual_seed(0)
    plain = Model(options).to(DEVICE)
    paged = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (plain, paged)]
    width = plain.layers[0].router.out_features
    print("step  rows that live  padded MiB  live MiB  pools MiB  of padded  waste  identical")
    rows = []
    for step in range(options.steps):
        shift = options.skew * torch.randn(options.layers, 1, 1, device=DEVICE)
        bias = torch.zeros(options.layers, 1, width, device=DEVICE)
        bias[:, :, :EXPERTS] += shift - shift.mean()  # this rank's experts are wanted more, or less
        batch = torch.randn(options.tokens, options.dim, device=DEVICE), bias
        losses = [
            train_step(model, optimizer, batch, model is paged)
            for model, optimizer in zip((plain, paged), optimizers, strict=True)
        ]
        same = torch.equal(*losses) and all(
            torch.equal(a, b) and torch.equal(a.grad, b.grad)
            for a, b in zip(plain.parameters(), paged.parameters(), strict=True)
        )
        rows.append(step_figures(step, same, paged, options.tokens))
        print(line(rows[-1]), flush=True)
    stats = ebb.stats()["paging"]
    print(
        f"\n{stats['recorded_steps']} of {stats['steps']} runs of a step were unpaged, to size the "
        f"pools; {stats['overflows']} found too little room, and the step ran again."
    )
    if options.json:
        del stats["pools"]  # dtypes are no JSON
        options.json.write_text(json.dumps({"steps": rows, "paging": stats}, indent=1))
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
