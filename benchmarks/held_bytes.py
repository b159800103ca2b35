"""Bytes held between forward and backward, and peak bytes, of every system."""

from __future__ import annotations

import torch
from measure import environment, held_and_peak_bytes, quick, write_results
from systems import systems
from workloads import PreNormBlock

BATCH, LENGTH, WIDTH, BLOCKS = 2, 96, 512, 4
UNIT = BATCH * LENGTH * WIDTH * 4  # one activation of the residual stream


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [PreNormBlock(WIDTH) for _ in range(BLOCKS)]
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    print(environment())
    print(f"{BLOCKS} pre-LN blocks of width {WIDTH}; unit: batch x length x width x 4 bytes")
    print(f"{'':30s} {'held KiB':>10s} {'per block':>10s} {'peak KiB':>10s}")
    rows = []
    for name, run in systems().items():

        def forward(run=run) -> torch.Tensor:  # type: ignore[no-untyped-def]
            h = x
            for block in blocks:
                h = run(block, h)
            return h.square().mean()

        held, peak = held_and_peak_bytes(forward)
        # Each block's output is held by the next one, or the loss, whatever the system.
        units = held / UNIT / BLOCKS - 1
        print(f"{name:30s} {held / 1024:10.0f} {units:10.2f} {peak / 1024:10.0f}")
        rows.append({"system": name, "held": held, "peak": peak, "units_per_block": units})
    if not quick():
        print(f"written to {write_results('held-bytes', rows)}")


if __name__ == "__main__":
    main()
