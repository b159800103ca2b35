"""Runs the benchmarks: python benchmarks/run.py --help"""

from __future__ import annotations

import argparse

import torch
from steps import time_steps
from systems import all_systems
from workloads import WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--seconds", type=float, default=25, help="per workload")
    options = parser.parse_args()
    torch.set_num_threads(1)
    systems = all_systems()
    for name, make in WORKLOADS.items():
        if options.only not in name:
            continue
        rows = time_steps(make, systems, options.seconds, rounds=5)
        print(f"\n{name}: eager {rows[0]['seconds'] * 1e6:.0f} us, {rows[0]['steps']} steps")
        for row in rows:
            print(
                f"  {row['system']:30s} {row['ratio']:6.3f} [{row['ratio_of_medians']:6.3f}]"
                f"  {row['note']}"
            )


if __name__ == "__main__":
    main()
