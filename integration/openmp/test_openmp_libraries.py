"""Imports ebb together with libraries whose OpenMP runtime needs static TLS, as ebb does."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

LIBRARIES = ["sklearn.linear_model", "xgboost", "faiss"]
# Loading the libraries may fail; which functions run afterwards does not matter.
STEP = "x = torch.ones(3, requires_grad=True)\nwith ebb.region(): y = x.sin().sum()\ny.backward()"


pytestmark = pytest.mark.sweep  # imports large libraries


def is_here(library):
    return importlib.util.find_spec(library.split(".")[0]) is not None


def imports(*names):
    """Imports the packages in this order in a new process, and trains a step."""
    program = "\n".join([*(f"import {name}" for name in names), STEP])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "order",
    [("torch", "ebb", None), (None, "torch", "ebb"), ("torch", None, "ebb")],
    ids=["after ebb", "before torch", "between torch and ebb"],
)
def test_the_library_can_be_imported(library, order):
    if not is_here(library):
        pytest.skip(f"needs {library}")
    imports(*(name or library for name in order))


def test_all_of_them_together():
    here = [library for library in LIBRARIES if is_here(library)]
    if len(here) < 2:
        pytest.skip("needs two of " + ", ".join(LIBRARIES))
    imports("torch", "ebb", *here)
    imports(*here, "torch", "ebb")
