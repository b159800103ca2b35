"""Runs Python on the dry CUDA runtime: ``python -m dry_cuda [VALUES=1 MEMORY=..] -m pytest ..``."""

from __future__ import annotations

import os
import sys

from . import build, environment

build()
arguments = sys.argv[1:]
settings = {}
while arguments and "=" in arguments[0]:
    name, value = arguments.pop(0).split("=")
    settings[name] = value
os.execve(sys.executable, [sys.executable, *arguments], os.environ | environment(**settings))
