"""A wheel from `make wheel` works in an environment with the same torch and without a compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import ebb
from ebb import _testing

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")

PROGRAM = """
import torch
import ebb

def f(x):
    return (x @ x).tanh().sum()

x = torch.randn(8, 8, requires_grad=True)
expected = torch.autograd.grad(f(x), x)[0]
ebb.record_reports(1)
with ebb.region(ebb.policies.save_matmuls):
    y = f(x)
assert torch.equal(torch.autograd.grad(y, x)[0], expected)
ebb.report().save("report.html")
print(ebb.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = (*PIP, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT)
    subprocess.run(command, env=os.environ | {"PATH": path, "EBB_TESTING": "0"}, check=True)
    (found,) = folder.glob("torch_ebb-*.whl")
    return found


def test_it_has_what_the_package_has_and_nothing_that_is_left_of_other_builds(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("ebb/")}
    sources = {str(f.relative_to(ROOT / "python")) for f in (ROOT / "python/ebb").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources | {"ebb/_build_info.py"}
    headers = [f"include/ebb/{file.name}" for file in (ROOT / "include/ebb").iterdir()]
    for there in ("py.typed", "_C.pyi", "libebb.so", "_report/report.html", *headers):
        assert f"ebb/{there}" in names


# Names of what stands in for something in tests, and what looks like them: a type of torch's,
# arguments of recipes, and initialisers, which are named for the folder of the checkout.
FOR_TESTS = re.compile(r"fake|failing|stand.?in|pretend|_testing", re.I)
SOMETHING_ELSE = re.compile(r"getMaybeFakeTypePtr|isStandIn|bytesOfStandIn|_GLOBAL__sub_I_\w+")


def names_for_tests(library):
    named = set()
    for options in ("-C", "-DC"):
        run = subprocess.run(["nm", options, library], capture_output=True, text=True, check=True)
        named |= set(run.stdout.splitlines())
    return sorted(name for name in named if FOR_TESTS.search(SOMETHING_ELSE.sub("", name)))


def test_it_has_nothing_that_only_tests_use(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as packed:
        assert [name for name in packed.namelist() if FOR_TESTS.search(name)] == []
        packed.extractall(tmp_path)
    compiled = list((tmp_path / "ebb").glob("*.so"))

    assert {"libebb.so", Path(ebb._C.__file__).name} <= {library.name for library in compiled}
    assert [name for library in compiled for name in names_for_tests(library)] == []
    assert len(names_for_tests(_testing.__file__)) > 20, "nm shows no names"


def test_it_works_without_a_compiler(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    bare = {"HOME": str(tmp_path), "PATH": str(tmp_path / "env/bin")}
    install = (*PIP, "--python", python, "install", "--no-index", "--no-deps", wheel)
    subprocess.run(install, env=bare, check=True)
    (site,) = (tmp_path / "env/lib").glob("python3*/site-packages")
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))  # and what torch needs

    run = subprocess.run(
        [python, "-c", PROGRAM], env=bare, cwd=tmp_path, capture_output=True, text=True
    )

    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()) == site / "ebb/__init__.py" != Path(ebb.__file__)
    assert (tmp_path / "report.html").stat().st_size > 10_000
