"""Runs Python on the dry CUDA runtime:

PYTHONPATH=tests python -m ebb_tests.dry_cuda [VALUES=1 MEMORY=..] -m pytest ..
"""

from __future__ import annotations

import os
import sys

from . import build, environment

# A program for python -c: makes kernels compute values, then runs what its arguments name, in the
# way that Python runs it: -c code, -m module or a file, with arguments.
WITH_VALUES = """
import runpy, sys
from ebb_tests import dry_cuda
dry_cuda.give_values()
del sys.argv[0]
if sys.argv[0] == "-c":
    exec(sys.argv.pop(1))
elif sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

build()
arguments = sys.argv[1:]
settings = {}
while arguments and "=" in arguments[0]:
    name, value = arguments.pop(0).split("=")
    settings[name] = value
if settings.get("VALUES") == "1":
    arguments = ["-c", WITH_VALUES, *arguments]
os.execve(sys.executable, [sys.executable, *arguments], os.environ | environment(**settings))
