"""An installation has a C++ part for each torch release that it fits, and `import ebb` finds it."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import setuptools
import torch
from packaging.requirements import Requirement

import ebb
from ebb._find_native import find

ROOT = Path(__file__).resolve().parents[2]
WHEEL = ("2.9.1", "2.12.1", "2.13.0")


def native_for(folder, releases):
    """Folders as a wheel has them. The modules are empty files."""
    for release in releases:
        (folder / f"torch-{release}").mkdir(parents=True)
        (folder / f"torch-{release}" / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    return folder


@pytest.mark.parametrize(
    ("running", "found"),
    [
        ("2.13.0", "torch-2.13.0"),
        ("2.13.0+cpu", "torch-2.13.0"),
        ("2.13.0+cu130", "torch-2.13.0"),
        ("2.12.1+cpu", "torch-2.12.1"),
    ],
)
def test_cpu_and_cuda_builds_of_a_release_have_the_same_part(tmp_path, running, found):
    assert find(running, native_for(tmp_path, WHEEL)) == tmp_path / found


@pytest.mark.parametrize("running", ["2.12.0", "2.13.1", "2.13.0a0+git1234567", "2.14.0+cpu"])
def test_another_release_raises_and_names_the_releases_that_fit(tmp_path, running):
    with pytest.raises(ImportError) as raised:
        find(running, native_for(tmp_path, WHEEL))

    message = str(raised.value)
    assert f"built against torch 2.9.1, 2.12.1, 2.13.0, but torch {running} is running" in message
    assert "pip install torch==2.13.0." in message
    assert "pip install --no-build-isolation --no-deps --force-reinstall ." in message


def test_unbuilt_checkout_raises(tmp_path):
    with pytest.raises(ImportError, match="not built for this Python"):
        find("2.13.0", tmp_path)


def test_part_for_another_python_does_not_count(tmp_path):
    for module in native_for(tmp_path, WHEEL).rglob("_C*"):
        module.rename(module.with_name("_C.cpython-39-x86_64-linux-gnu.so"))

    with pytest.raises(ImportError, match="not built for this Python"):
        find("2.13.0", tmp_path)


@pytest.mark.sweep
def test_another_torch_raises_before_libraries_are_loaded(tmp_path):
    package = tmp_path / "ebb"
    ignored = shutil.ignore_patterns("_native", "__pycache__")
    shutil.copytree(Path(ebb.__file__).parent, package, ignore=ignored)
    native_for(package / "_native", ["2.1.0"])

    result = subprocess.run(
        [sys.executable, "-c", "import ebb"], cwd=tmp_path, capture_output=True, text=True
    )

    told = f"ImportError: ebb {ebb.__version__} was built against torch 2.1.0, but torch "
    assert told + torch.__version__ in result.stderr
    assert f"(in {Path(torch.__file__).parent})" in result.stderr


@pytest.fixture
def required(tmp_path, monkeypatch):
    """What a wheel requires that is built against these versions of torch."""

    def required(*versions):
        folders = [tmp_path / version for version in versions]
        for folder in folders:
            folder.mkdir()
            (folder / "version.py").write_text(f"__version__ = '{folder.name}'\n")
        monkeypatch.setenv("EBB_TORCH_DIR", os.pathsep.join(map(str, folders)))
        options = {}
        monkeypatch.setattr(setuptools, "setup", lambda **given: options.update(given))
        runpy.run_path(str(ROOT / "setup.py"))
        (requirement,) = options["install_requires"]
        return Requirement(requirement)

    return required


def test_wheel_requires_the_torch_releases_that_it_has_parts_for(required):
    specifier = required("2.13.0+cpu", "2.9.1", "2.11.0+cu130", "2.12.1").specifier

    for inside in ("2.9.1", "2.11.0", "2.11.0+cpu", "2.12.1+cu130", "2.13.0", "2.13.0+cpu"):
        assert inside in specifier
    for other in ("2.8.0", "2.9.0", "2.9.2", "2.10.0", "2.11.1", "2.12.0", "2.13.1", "2.14.0"):
        assert other not in specifier


def test_wheel_for_one_torch_requires_that_one(required):
    assert str(required("2.15.0a0+git1234567")) == "torch==2.15.0a0"
