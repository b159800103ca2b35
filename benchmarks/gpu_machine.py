"""Describes the machine of on_gpu.py, checks its software, and builds ebb for its GPU.

This process does not import torch, so it uses no memory of the device.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CPP = (
    "src",
    "include",
    "tests/native",
    "cmake",
    "CMakeLists.txt",
    "setup.py",
    "pyproject.toml",
)
ALL_OF_EBB = (*CPP, "python")
SOURCES = (".cpp", ".h", ".cu", ".py", ".html", ".in")

ASK_TORCH = """
import json
try:
    import torch
except ImportError as error:
    found = {"error": f"torch cannot be imported: {error}"}
else:
    found = {"torch": torch.__version__, "CUDA": torch.version.cuda}
    if torch.version.cuda is None:
        found["error"] = f"torch {torch.__version__} is not built for CUDA"
    elif not torch.cuda.is_available():
        found["error"] = f"torch {torch.__version__} finds no NVIDIA GPU that it can use"
    else:
        found["GPU"] = torch.cuda.get_device_name(0)
        found["devices"] = torch.cuda.device_count()
        found["capability"] = "".join(map(str, torch.cuda.get_device_capability(0)))
print(json.dumps(found))
"""


def ask_torch() -> dict[str, Any]:
    """What torch says of itself and of the first GPU; ``error`` if there is none to use."""
    done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        found = {"error": f"torch does not start: {last}"}
    return found


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]


def described(found: dict[str, Any]) -> dict[str, Any]:
    """The fields that identify the machine in results."""
    return {
        "GPU": found["GPU"],
        "driver": driver(),
        "torch": found["torch"],
        "CUDA": found["CUDA"],
    }


def slug(name: str) -> str:
    """The name as part of a file name: lower case, words joined by hyphens."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def nvcc() -> str | None:
    """CUDA's compiler: on the path, or where CUDA_HOME or the usual place has it."""
    places = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places += [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    return next((place for place in places if place and shutil.which(place)), None)


def variables() -> dict[str, str]:
    """Environment variables for all commands: paths of this ebb, Python's tools and nvcc."""
    folders = [str(Path(sys.executable).parent)]
    compiler = nvcc()
    if compiler is not None:
        folders.append(str(Path(compiler).parent))
    return {
        "PATH": os.pathsep.join([*folders, os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")])
        ),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # cuBLAS gives the same bits each time.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def missing(tests: bool) -> list[str]:
    """Messages, one for each missing requirement. `tests`: include those of the tests."""
    path = variables()["PATH"]
    found = [
        f"{name} is not on the path"
        for name in ("cmake", "ninja")
        if not shutil.which(name, path=path)
    ]
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(compiler and shutil.which(compiler) for compiler in compilers):
        found.append("there is no C++ compiler on the path")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        found.append("Python's headers are not installed (python3-dev)")
    if nvcc() is None:
        found.append("CUDA's compiler nvcc is neither on the path nor in CUDA_HOME")
    modules = ["setuptools", *(("pytest", "hypothesis") if tests else ())]
    found += [
        f"{module} is not installed: {sys.executable} -m pip install {module}"
        for module in modules
        if not is_installed(module)
    ]
    return found


def digest(places: Iterable[str]) -> str:
    """A hash of the sources in these files and folders, without files that a build copies."""
    found = hashlib.sha256()
    for place in places:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            name = str(file.relative_to(ROOT))
            made = name.startswith("python/ebb/_native/")
            if file == path or (file.suffix in SOURCES and not made):
                found.update(name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def torch_release() -> str:
    return importlib.metadata.version("torch").partition("+")[0]


def package(capability: str) -> Path:
    """The archive of a build of these sources for this Python and torch and this kind of GPU."""
    python = sys.implementation.cache_tag
    name = f"ebb-{digest(CPP)}-torch-{torch_release()}-{python}-sm{capability}.tar.gz"
    return ROOT / "build" / "on_gpu" / name


def pack(archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as packed:
        built = ROOT / "python" / "ebb" / "_native" / f"torch-{torch_release()}"
        packed.add(built, built.relative_to(ROOT))


def build(capability: str) -> int:
    """Builds in place: nothing is installed, and the network is not needed. An archive of an
    earlier build of the same sources is unpacked instead."""
    archive = package(capability)
    if archive.exists():
        print(f"unpacking {archive.name}")
        shutil.unpack_archive(archive, ROOT)
        return 0
    arguments = [os.environ.get("EBB_CMAKE_ARGS", ""), f"-DCMAKE_CUDA_ARCHITECTURES={capability}"]
    environment = (
        os.environ
        | variables()
        | {
            "EBB_CUDA": "1",
            "EBB_TESTING": "1",
            "EBB_CMAKE_ARGS": " ".join(filter(None, arguments)),
        }
    )
    compiler = nvcc()
    if compiler is not None:
        environment.setdefault("CUDACXX", compiler)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if status == 0:
        pack(archive)
    return status


if __name__ == "__main__":
    sys.exit(build(sys.argv[1]))
