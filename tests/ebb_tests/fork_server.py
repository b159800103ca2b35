"""Runs Python programs in forks of a process that has imported torch. `run` replaces
`subprocess.run` and takes a tenth of its time.

Each test process has one server, which imports torch and nothing of ebb, and forks for each
program. The program then loads backends as `import torch` does, and imports ebb itself, which
reads ebb's variables. If another variable differs, which Python or torch may read when they start,
`run` starts a new process. It also does so with `is_fresh`, for programs that do something before
they import torch, or never import it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from typing import Any, NoReturn

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# Prefixes of variables that a forked child can change: no code reads them before ebb is imported,
# or the child applies them itself.
MAY_DIFFER = (
    "EBB", "_EBB", AUTOLOAD, "PYTHONPATH", "PYTEST_", "TORCHINDUCTOR_CACHE_DIR",
    "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_RANK", "ROLE_", "MASTER_", "SLURM_", "OMPI_", "PMI_",
)  # fmt: skip

ENVIRONMENT = dict(os.environ)  # conftest.py adds what imports of test modules set


def run(
    arguments: list[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    input: str | None = None,
    timeout: float | None = None,
    check: bool = False,
    is_fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments: a script, or the options -c, -m or -W.

    Args:
        is_fresh: always starts a new process.

    Raises:
        subprocess.TimeoutExpired: the process ran longer than `timeout` seconds and was killed.
        subprocess.CalledProcessError: the process failed, and `check` is set.
    """
    arguments = [os.fspath(argument) for argument in arguments]
    env = dict(os.environ if env is None else env)
    if is_fresh or not is_for_the_server(env):
        done = subprocess.run(
            [sys.executable, *arguments],
            env=env,
            cwd=cwd,
            input=input,
            timeout=timeout,
            capture_output=True,
            text=True,
            errors="surrogateescape",
        )
    else:
        done = server().run(arguments, env, os.fspath(cwd or os.getcwd()), input, timeout)
    if check and done.returncode:
        sys.stderr.write(done.stderr)  # pytest shows it
        done.check_returncode()
    return done


def is_for_the_server(env: Mapping[str, str]) -> bool:
    names = {name for name in {*env, *server().env} if env.get(name) != server().env.get(name)}
    return all(name.startswith(MAY_DIFFER) for name in names)


@functools.cache
def server() -> Server:
    return Server()


class Server:
    def __init__(self) -> None:
        self.env = ENVIRONMENT
        self.socket, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())],
                env=self.env | {AUTOLOAD: "0"},
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # so that sys.stdout is no terminal, as in `subprocess.run`
            )

    def run(
        self,
        arguments: list[str],
        env: dict[str, str],
        cwd: str,
        input: str | None,
        timeout: float | None,
    ) -> subprocess.CompletedProcess[str]:
        request = json.dumps({"arguments": arguments, "env": env, "cwd": cwd}).encode()
        with tempfile.TemporaryFile() as stdin:
            stdin.write((input or "").encode())
            stdin.seek(0)
            (out, child_out), (err, child_err) = os.pipe(), os.pipe()
            self.socket.sendall(len(request).to_bytes(8, "little"))
            socket.send_fds(self.socket, [b"."], [stdin.fileno(), child_out, child_err])
            self.socket.sendall(request)
        os.close(child_out)
        os.close(child_err)
        pid = received(self.socket)
        try:
            texts = read_all([out, err], timeout)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            received(self.socket)
            raise subprocess.TimeoutExpired(arguments, timeout or 0) from None
        status = os.waitstatus_to_exitcode(received(self.socket))
        return subprocess.CompletedProcess(arguments, status, *texts)


def read_all(files: list[int], timeout: float | None) -> list[str]:
    until = None if timeout is None else time.monotonic() + timeout
    seen = {file: bytearray() for file in files}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for file in files:
            stack.callback(os.close, file)
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                seen[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
    return [text.decode(errors="surrogateescape") for text in seen.values()]


def received(channel: socket.socket) -> int:
    data = exactly(channel, 8)
    return int.from_bytes(data, "little")


def exactly(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = channel.recv(count - len(data))
        if not part:
            raise EOFError("the other side has ended")
        data += part
    return data


# In the server


def serve(channel: socket.socket) -> None:
    """Forks a child for each request until the tests end. Returns only in a child."""
    import torch
    import torch._dynamo  # noqa: F401 -- the first optimizer would import it, in a second

    gc.collect()
    gc.freeze()
    base = sys.path[1:]  # without this file's folder
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        with contextlib.suppress(ValueError):
            base.remove(entry)
    while True:
        try:
            length = received(channel)
        except EOFError:
            os._exit(0)
        _, files, _, _ = socket.recv_fds(channel, 1, 3)
        request = json.loads(exactly(channel, length))
        pid = os.fork()
        if pid == 0:
            channel.close()
            become(request, files, base)
            return
        for file in files:
            os.close(file)
        channel.sendall(pid.to_bytes(8, "little"))
        channel.sendall(os.waitpid(pid, 0)[1].to_bytes(8, "little"))


def become(request: dict[str, Any], files: list[int], base: list[str]) -> None:
    """Gives this child the files, folder, variables and arguments of the request."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    path = request["env"].get("PYTHONPATH", "")
    sys.path[:] = [*(entry for entry in path.split(os.pathsep) if entry), *base]
    sys.argv[:] = request["arguments"]


def start() -> None:
    """Runs the program that `sys.argv` names, as Python does."""
    import runpy
    import warnings

    import torch

    while sys.argv[0] == "-W":
        sys.warnoptions.append(sys.argv[1])
        warnings._processoptions(sys.argv[1:2])  # type: ignore[attr-defined]
        del sys.argv[:2]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    try:
        if os.environ.get(AUTOLOAD, "1") == "1":
            torch._import_device_backends()  # type: ignore[no-untyped-call]
        if sys.argv[0] == "-m":
            name = sys.argv[1]
            sys.path.insert(0, os.getcwd())
            del sys.argv[0]
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        elif sys.argv[0] == "-c":
            source = sys.argv.pop(1)
            sys.path.insert(0, "")
            exec(compile(source, "<string>", "exec"), main.__dict__)
        else:
            script = sys.argv[0]
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            main.__dict__["__file__"] = script
            with open(script, "rb") as file:
                code = compile(file.read(), script, "exec")
            exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        fail(error)


def fail(error: BaseException) -> NoReturn:
    """Ends the process as Python does after an exception. Cuts this file from the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    start()
