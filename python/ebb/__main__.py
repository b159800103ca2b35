"""``python -m ebb --version [--verbose]``"""

from __future__ import annotations

import argparse
import platform
import sys

import torch

import ebb
from ebb import _C


def describe() -> str:
    """What a bug report should hold."""
    features = ["SAVE", "RECOMPUTE"]
    return "\n".join(
        [
            f"ebb {ebb.__version__}",
            f"torch {torch.__version__} (built against {_C.torch_release})",
            f"compiler {_C.compiler}",
            f"python {platform.python_version()} on {platform.machine()}",
            f"cuda {torch.version.cuda or 'no'}",
            f"features {', '.join(features)}",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ebb", description=ebb.__doc__.splitlines()[0])
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--verbose", action="store_true", help="... and torch, compiler, features")
    options = parser.parse_args(arguments)
    if not options.version:
        parser.print_help()
        return 2
    print(describe() if options.verbose else f"ebb {ebb.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
