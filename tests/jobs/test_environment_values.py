"""Whatever environment variables hold, nothing in start-up raises, unless EBB_STRICT is set."""

from __future__ import annotations

import contextlib
import os
import re
import warnings

import _ebb_switches
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ebb
from ebb import _C
from ebb._launch import takeover, unused_settings
from ebb._launch.start import start
from ebb._report import files
from ebb._support.job import _TOLD, rank
from ebb_tests import fork_server
from ebb_tests.time_limits import at_most

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")
WORDS = (
    "0 1 -1 2 true off nan inf -inf 1e400 0x1 1_0 +1 ² ٣ ½ , ,,, : = * [ 😀 {} {0!r} %s / . .. "
    "~ a/b/c /dev/null /dev/full/x x.toml .html /proc/x.html report.html no/report.json "
    "recompute_all save_matmuls mm:save mm:keep default:save 1MiB 40% 0.4 200% -3 % 64 1.5 "
    "demote layers.* blocking assert zero"
)
NASTY = [
    *WORDS.split(),
    "",
    " ",
    "\n",
    "[" * 3000,
    "*" * 3000,
    "?" * 3000,
    "9" * 5000,
    "9" * 400 + ".5",
    "-" + "9" * 400,
    "1" + " " * 3000 + "x",
    "a" * 100_000,
    "mm:save," * 2000,
    "\udc80",
    "mm\udcff:save",
    "é" * 600,
    "1 mile",
]
VALUES = st.one_of(
    st.sampled_from(NASTY),
    st.integers().map(str),
    st.floats().map(str),
    st.binary(max_size=40).map(lambda text: os.fsdecode(text.replace(b"\0", b""))),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
)
NAMES = sorted(_ebb_switches.NAMES - {"EBB_STRICT"})
VALUES_OF = dict.fromkeys((*NAMES, *RANKS), VALUES)
ENVIRONMENTS = st.fixed_dictionaries({}, optional=VALUES_OF | {"EBB_" + "X" * 3000: VALUES})


@contextlib.contextmanager
def environment(variables):
    """These variables of ours and no others; what they set up is undone."""
    before, offload, paging = dict(os.environ), _C.offload_settings(), _C.paging_settings()
    for name in before:
        if name.startswith("EBB") or name in RANKS:
            del os.environ[name]
    os.environ.update(variables)
    os.environ.pop(_TOLD, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        takeover.remove()
        _C.configure_offload(offload)
        _C.configure_paging(paging)
        ebb.verify("off")
        ebb.record_reports(0)
        files.stop()
        unused_settings.stop()
        _C.disable_everywhere(False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(ENVIRONMENTS)
def test_start_up_raises_nothing_and_tells_in_one_line_each(folder, capsys, variables):
    capsys.readouterr()
    with environment(variables), warnings.catch_warnings(action="error"):
        start()
        start()

        assert rank() >= 0

    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("ebb") and len(line) < 700 for line in lines)
    assert len(lines) == len(set(lines)) <= len(variables) + 2


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.sampled_from([*NAMES, "RANK"]), st.data())
def test_a_strict_job_ends_where_another_is_told(folder, capsys, name, data):
    value = data.draw(VALUES_OF[name])
    variables = {name: value} if name == "EBB" else {name: value, "EBB": "1"}
    capsys.readouterr()
    with environment(variables):
        start()
    told = capsys.readouterr().err

    with environment(variables | {"EBB_STRICT": "1"}):
        if told:
            with pytest.raises(ValueError, match=f"^ebb.*{name}") as caught:
                start()
            outcome = " is ignored(, so the job runs without ebb)?(?=: )"
            expected = re.sub(outcome, "", told.splitlines()[0], count=1)
            assert expected in str(caught.value).splitlines()[0]
        else:
            start()


@pytest.mark.not_sanitized  # sanitizers make it four times as slow
@pytest.mark.parametrize("value", NASTY, ids=range(len(NASTY)))
def test_no_value_takes_long(folder, value):
    for name in (*NAMES, "RANK"):
        with at_most(seconds=2), environment({"EBB": "1", name: value}):
            start()


def job(program, is_fresh=False, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith("EBB") and k not in RANKS}
    return fork_server.run(
        ["-c", program],
        env=env | variables,
        is_fresh=is_fresh,
    )


IN_A_REGION = (
    "import torch, ebb\n"
    "with ebb.region(): y = torch.ones(2, requires_grad=True).exp().sum()\n"
    "y.backward(); print('done')"
)
BAD = {
    "RANK": "²",
    "EBB_VERIFY": "2",
    "EBB_BUDGET": "200%",
    "EBB_AHEAD": "nan",
    "EBB_REPORT": "report.doc",
    "EBB_MODULES": "*" * 1000,
    "EBB_MODULS": "x",
    "EBB_CONFIG": "/dev/null/ebb.toml",
}


def test_a_job_with_nothing_but_bad_values_runs():
    done = job(IN_A_REGION, EBB="1", **BAD)

    assert (done.returncode, done.stdout) == (0, "done\n")
    lines = done.stderr.splitlines()
    assert len(lines) == len(BAD)
    for name in BAD:
        assert sum(name in line for line in lines) == (2 if name == "EBB_MODULES" else 1)


@pytest.mark.parametrize("options", ["error", "ignore"])
def test_what_python_does_with_warnings_does_not_matter(options):
    done = job("import torch; print('done')", EBB="mm:keep", PYTHONWARNINGS=options, **BAD)

    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "ebb: EBB=mm:keep is ignored, so the job runs without ebb" in done.stderr


@pytest.mark.sweep
def test_a_job_without_stderr_runs():
    program = f"import os, sys; os.close(2); exec({IN_A_REGION!r})"
    assert job(program, is_fresh=True, EBB="mm:keep", **BAD).stdout == "done\n"
    program = f"import sys; sys.stderr = None; exec({IN_A_REGION!r})"
    variables = BAD | {"EBB": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert job(program, is_fresh=True, **variables).stdout == "done\n"


@pytest.mark.parametrize(
    "name",
    [
        "EBB",
        "EBB_MODULS",
        *(pytest.param(n, marks=pytest.mark.sweep) for n in ("RANK", "EBB_BUDGET", "EBB_CONFIG")),
    ],
)
def test_one_bad_value_ends_a_strict_job(name):
    variables = {"EBB": "1", "EBB_STRICT": "1", name: BAD.get(name, "mm:keep")}
    done = job("import torch; print('done')", **variables)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ebb")
    assert name in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "is ignored" not in done.stderr
    assert "runs without ebb" not in done.stderr
    by_hand = job("import ebb", TORCH_DEVICE_BACKEND_AUTOLOAD="0", **variables)
    assert by_hand.returncode == 1
    assert by_hand.stderr.splitlines()[-1] == f"ValueError: {done.stderr.strip()}"


@pytest.mark.sweep
def test_a_strict_job_with_good_values_runs():
    done = job(
        IN_A_REGION, EBB="mm:save", EBB_STRICT="1", EBB_VERIFY="1", EBB_MODULES="layers.*", RANK="1"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
