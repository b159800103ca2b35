"""Import, version, docstrings, and the native libraries of an installation."""

from __future__ import annotations

import doctest
import importlib
import inspect
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ebb
from ebb.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def test_version_from_the_command_line(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ebb {ebb.__version__}\n"
    declared = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared is not None
    assert declared.group(1) == ebb.__version__


def described(capsys):
    """The lines of --version --verbose, by their first words."""
    assert main(["--version", "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return dict(line.rsplit(" ", 1) if "kernels" in line else line.split(" ", 1) for line in lines)


def test_verbose_version_names_all_parts(capsys, monkeypatch, tmp_path):
    found = described(capsys)

    assert found["ebb"] == ebb.__version__
    assert found["torch"] == f"{torch.__version__} (built against {ebb._C.torch_release})"
    assert found["python"].startswith(platform.python_version())
    assert found["cuda"] == (torch.version.cuda or "no")
    assert found["plug-ins"] == ebb._C.plugins
    assert found["compiler"] == ebb._C.compiler
    assert re.fullmatch("[0-9a-f]{7,}(-dirty)?|unknown", found["commit"])

    monkeypatch.setattr(ebb._C, "__file__", str(tmp_path / "_C.so"))
    assert described(capsys)["page kernels for cuda"] == "no"
    (tmp_path / "libebb_cuda.so").touch()
    (tmp_path / "commit.txt").write_text("0123456789ab-dirty\n")
    found = described(capsys)
    assert found["page kernels for cuda"] == "yes"
    assert found["commit"] == "0123456789ab-dirty"


@pytest.mark.parametrize("program", ["-c import ebb", "-mebb --version"])
def test_dynamo_is_not_imported(program):
    """It takes torch a second of CPU time, in each process."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *program.split(" ", 1)], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert "ebb._C" in done.stderr
    assert "torch._dynamo" not in done.stderr


def test_core_does_not_use_python():
    libraries = subprocess.run(
        ["ldd", str(Path(ebb._C.__file__).with_name("libebb.so"))], capture_output=True, text=True
    )
    assert not re.search(r"libpython|libtorch_python", libraries.stdout)
    for source in (ROOT / "src").rglob("*.[ch]*"):
        if "bindings" not in source.parts:
            text = source.read_text()
            assert "pybind11" not in text, source
            assert "Python.h" not in text, source
            assert "torch/extension.h" not in text, source
            assert "ATen/ATen.h" not in text, source


class Docstrings(doctest.DocTestFinder):
    """Also those of classes that name the package as their module, not the file that has them."""

    def _from_module(self, module, object):
        if inspect.isclass(object) and object.__module__ == "ebb":
            return True  # of its methods those count that are written in the module
        return super()._from_module(module, object)


def test_public_docstrings_run():
    package = Path(ebb.__file__).parent
    files = [file.relative_to(package.parent) for file in package.rglob("*.py")]
    modules = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    libraries = ("transformers", "lightning", "torchtitan")
    missing = {f"ebb.integrations.{name}" for name in libraries if find_spec(name) is None}
    run = set()
    for module in {*modules, "ebb_tests.stand_ins"} - {"ebb.__main__"} - missing:
        found = Docstrings().find(
            importlib.import_module(module), extraglobs={"ebb": ebb, "torch": torch}
        )
        for test in found:
            result = doctest.DocTestRunner().run(test)
            assert result.failed == 0, test.name
            run |= {test.name} if result.attempted else set()
    assert run >= {
        "ebb",
        "ebb._policy.policy.Policy.explain",
        "ebb._region.region.region",
        "ebb_tests.stand_ins.failing_policy",
    }


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc to compile them")
def test_kernels_are_compiled_where_there_is_nvcc():
    """They need no CUDA runtime of the machine's: it is linked statically."""
    library = Path(ebb._C.__file__).with_name("libebb_cuda.so")
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert "cudart" not in needed.stdout
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    assert "ebbCudaPageMover" in symbols.stdout
