"""Values of environment variables and of EBB_CONFIG: whatever they are, nothing in start-up raises,
unless EBB_STRICT is set.
"""

from __future__ import annotations

import contextlib
import json
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
from ebb._launch.variables import apply_config
from ebb._report import files
from ebb._support.job import _TOLD, rank
from ebb_tests.programs_apart import run_program
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
def test_start_up_raises_nothing_and_tells_of_each_value_in_one_line(folder, capsys, variables):
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
def test_strict_job_ends_where_another_is_told(folder, capsys, name, data):
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


def test_job_with_invalid_values_only_runs():
    done = run_program("-c", IN_A_REGION, EBB="1", **BAD)

    assert done.stdout == "done\n"
    lines = done.stderr.splitlines()
    assert len(lines) == len(BAD)
    for name in BAD:
        assert sum(name in line for line in lines) == (2 if name == "EBB_MODULES" else 1)


@pytest.mark.parametrize("options", ["error", "ignore"])
def test_invalid_values_are_told_of_whatever_python_does_with_warnings(options):
    variables = BAD | {"EBB": "mm:keep", "PYTHONWARNINGS": options}
    done = run_program("-c", "import torch; print('done')", **variables)

    assert done.stdout == "done\n"
    assert "ebb: EBB=mm:keep is ignored, so the job runs without ebb" in done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("without_stderr", "variables"),
    [
        ("import os, sys; os.close(2)", {"EBB": "mm:keep"}),
        ("import sys; sys.stderr = None", {"EBB": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    ],
)
def test_job_without_stderr_runs(without_stderr, variables):
    program = f"{without_stderr}; exec({IN_A_REGION!r})"
    assert run_program("-c", program, is_fresh=True, **BAD | variables).stdout == "done\n"


@pytest.mark.parametrize(
    "name",
    [
        "EBB",
        "EBB_MODULS",
        *(pytest.param(n, marks=pytest.mark.sweep) for n in ("RANK", "EBB_BUDGET", "EBB_CONFIG")),
    ],
)
def test_one_invalid_value_ends_a_strict_job(name):
    variables = {"EBB": "1", "EBB_STRICT": "1", name: BAD.get(name, "mm:keep")}
    done = run_program("-c", "import torch; print('done')", check=False, **variables)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ebb")
    assert name in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "is ignored" not in done.stderr
    assert "runs without ebb" not in done.stderr
    variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    by_hand = run_program("-c", "import ebb", check=False, **variables)
    assert by_hand.returncode == 1
    assert by_hand.stderr.splitlines()[-1] == f"ValueError: {done.stderr.strip()}"


@pytest.mark.sweep
def test_strict_job_with_valid_values_runs():
    values = {"EBB": "mm:save", "EBB_VERIFY": "1", "EBB_MODULES": "layers.*", "RANK": "1"}
    done = run_program("-c", IN_A_REGION, EBB_STRICT="1", **values)
    assert (done.stdout, done.stderr) == ("done\n", "")


# EBB_CONFIG: settings, or a file of settings ------------------------------------------------------


@pytest.fixture
def configure(tmp_path, capsys, monkeypatch):
    """Applies a file FILE with this text, or these settings; gives what is told."""

    def apply(text, is_file=True):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "FILE").write_text(text)
        value = "FILE" if is_file else text
        monkeypatch.setenv("EBB_CONFIG", value)
        apply_config(value)
        return capsys.readouterr().err

    return apply


FILE = """
[offload]
min_bytes = "2MiB"
keep_last = 2
[paging]
headroom = 1.5
[ahead]
limit = "512MiB"
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            FILE,
            {
                "offload.min_bytes": 2 << 20,
                "offload.keep_last": 2,
                "paging.headroom": 1.5,
                "ahead.limit": 512 << 20,
            },
        ),
        ("offload.min_bytes=2MiB", {"offload.min_bytes": 2 << 20}),
        (
            " offload.keep_last = 2, paging.headroom=1.5 ,ahead.limit=512Mi",
            {"offload.keep_last": 2, "paging.headroom": 1.5, "ahead.limit": 512 << 20},
        ),
        ("offload.disk=", {"offload.disk": ""}),
        ("paging.overflow=blocking", {"paging.overflow": "blocking"}),
    ],
)
def test_valid_settings_are_applied(configure, text, found):
    assert configure(text, is_file=text is FILE) == ""

    assert found.items() <= ebb.config.to_dict().items()


IGNORED = "EBB_CONFIG=FILE is ignored: "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[ofload]\n", f"{IGNORED}unknown section [ofload]; did you mean 'offload'?"),
        ("offload = 1\n", f"{IGNORED}offload must be a section"),
        ("offload\n", f"{IGNORED}Expected '='"),
        ("[paging]\nhedroom = 2", f"paging.hedroom in {IGNORED}ebb.config has no"),
        ("[paging]\nheadroom = 'x'", f"paging.headroom in {IGNORED}headroom must be"),
        ("[offload]\nmin_bytes = -1", f"offload.min_bytes in {IGNORED}min_bytes must"),
        ("[ahead]\nregions = '1'", f"ahead.regions in {IGNORED}regions must"),
        # without a file
        ("min_bytes=1", "'min_bytes=1' is no setting such as offload.min_bytes=1MiB"),
        ("offload.min_bytes=1,", "'' is no setting"),
        ("offlod.min_bytes=1", "unknown section [offlod]; did you mean 'offload'?"),
        ("offload.keep_last=1.5", "keep_last must be an int"),
        ("ahead.regions=auto", "regions must be an int"),
        ("ebb.toml", "No such file"),
    ],
)
def test_invalid_setting_is_ignored_and_told_of_and_ends_a_strict_job(
    configure, text, told, monkeypatch
):
    is_file = "FILE" in told
    before = ebb.config.to_dict()

    assert told in configure(text, is_file)

    assert ebb.config.to_dict() == before
    monkeypatch.setenv("EBB_STRICT", "1")
    with pytest.raises(ValueError, match="the job ends, because EBB_STRICT is set"):
        configure(text, is_file)


def test_valid_settings_of_a_file_count_beside_an_invalid_one(configure):
    configure("[offload]\nmin_bytes = -1\nkeep_last = 3\n[paging]\nheadroom = 1.5")

    assert ebb.config.offload.keep_last == 3
    assert ebb.config.paging.headroom == 1.5


def test_variable_takes_precedence_over_the_file(tmp_path):
    path = tmp_path / "ebb.toml"
    path.write_text("[offload]\nmin_bytes = 1\n[ahead]\nregions=4")
    program = "import ebb, json; print(json.dumps(ebb.config.to_dict()))"
    done = run_program("-c", program, EBB_CONFIG=str(path), EBB_AHEAD="1")

    found = json.loads(done.stdout)
    assert (found["offload.min_bytes"], found["ahead.regions"]) == (1, 1)
    assert done.stderr == ""


def test_setting_is_called_by_all_that_set_it(monkeypatch):
    named = []
    value = "ahead.limit=1MiB,offload.keep_last=1"
    watch = "ebb._launch.start.unused_settings.watch"
    monkeypatch.setattr(watch, lambda given, *_, **__: named.append(given))
    with environment({"EBB_CONFIG": value, "EBB_AHEAD": "1"}):
        start()

    value = f"EBB_CONFIG={value}"
    assert named == [
        {"ahead": f"[ahead] of {value}, EBB_AHEAD", "offload": f"[offload] of {value}"}
    ]
