"""A wheel from `make wheel` works in an environment with the same torch and without a compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests.new_environment import PROGRAM

pytestmark = pytest.mark.slow  # builds a wheel: two minutes of CPU time


ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")

RELEASE = torch.__version__.split("+")[0]
ON_X86 = platform.machine() == "x86_64"
NATIVE = f"_native/torch-{RELEASE}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = (*PIP, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT)
    options = {"EBB_TESTING": "0", "EBB_MANYLINUX": str(int(ON_X86))}  # as `make wheel` does
    subprocess.run(command, env=os.environ | {"PATH": path} | options, check=True)
    (found,) = folder.glob("torch_ebb-*.whl")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(unpacked):
    (path,) = unpacked.glob("*.dist-info/METADATA")
    return path.read_text()


def test_wheel_has_the_package_and_nothing_left_of_other_builds(unpacked):
    names = {str(path.relative_to(unpacked)) for path in (unpacked / "ebb").rglob("*")}
    sources = {str(f.relative_to(ROOT / "python")) for f in (ROOT / "python/ebb").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    headers = [f"{NATIVE}/include/ebb/{file.name}" for file in (ROOT / "include/ebb").iterdir()]
    for there in ("py.typed", "_C.pyi", f"{NATIVE}/libebb.so", "_report/report.html", *headers):
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


def test_wheel_has_nothing_that_only_tests_use(unpacked):
    files = [str(path.relative_to(unpacked)) for path in unpacked.rglob("*")]
    assert [name for name in files if FOR_TESTS.search(name)] == []
    compiled = list((unpacked / "ebb" / NATIVE).glob("*.so"))

    assert {"libebb.so", Path(ebb._C.__file__).name} <= {library.name for library in compiled}
    assert [name for library in compiled for name in names_for_tests(library)] == []
    assert len(names_for_tests(_testing.__file__)) > 20, "nm shows no names"


# The newest that RHEL 8 has, which manylinux_2_28 stands for.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8,)}


@pytest.mark.skipif(not ON_X86, reason="EBB_MANYLINUX is for x86-64")
def test_libraries_load_on_systems_as_old_as_those_of_torchs_wheels(unpacked):
    libraries = list(unpacked.rglob("*.so"))
    assert len(libraries) >= 2
    for library in libraries:
        used = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
        needed = re.findall(r"(\S+)@([A-Z]+)_([\d.]+)$", used.stdout, re.M)
        assert len(needed) > 20
        for symbol, kind, version in needed:
            assert tuple(map(int, version.split("."))) <= NEWEST[kind], (library.name, symbol)
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True)
        assert "libpthread.so.0" in dynamic.stdout  # has these functions on such systems


def test_wheel_names_its_license_torch_and_commit(unpacked, metadata):
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata
    assert "\nLicense: " not in metadata
    assert "\nClassifier: License ::" not in metadata
    assert f"Requires-Dist: torch=={RELEASE}\n" in metadata
    assert list(unpacked.glob("*.dist-info/licenses/LICENSE"))
    commit = (unpacked / f"ebb/{NATIVE}/commit.txt").read_text().strip()
    assert re.fullmatch("[0-9a-f]{12}(-dirty)?|unknown", commit)


def test_wheel_names_no_folder_of_the_machine_that_built_it(unpacked):
    files = [path for path in unpacked.rglob("*") if path.is_file()]
    for folder in (ROOT, Path(torch.__file__).parent):
        assert [path for path in files if bytes(folder) in path.read_bytes()] == []


def test_cmake_package_of_a_wheel_finds_the_torch_beside_it(unpacked, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(unpacked, site)
    (site / "torch").symlink_to(Path(torch.__file__).parent)
    command = ["cmake", "-S", ROOT / "examples/cpp", "-B", tmp_path / "build"]
    command += [f"-Debb_DIR={site}/ebb/{NATIVE}/cmake"]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True, capture_output=True)
    subprocess.run([tmp_path / "build/train_mlp"], check=True, capture_output=True)


def test_wheel_works_without_a_compiler(wheel, tmp_path):
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
    assert Path(run.stdout.split()[1]) == site / "ebb/__init__.py" != Path(ebb.__file__)
    assert (tmp_path / "report.html").stat().st_size > 10_000
