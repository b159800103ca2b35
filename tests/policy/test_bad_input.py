"""Any text, file or number for a policy or setting is read, or raises a short error of ebb soon."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ebb
from ebb._support.shown import shown
from ebb._support.sizes import number_of_bytes
from ebb_tests.time_limits import at_most


class Unprintable:
    def __repr__(self):
        raise ZeroDivisionError


LONG = "a" * 100_000
TEXTS = st.one_of(
    st.text(max_size=30),
    st.text("mgeluasvroct:*?[].,_ \n", max_size=60),
    st.lists(
        st.sampled_from(
            ["mm", "aten::mm", "*", "a" * 600, "default", "inputs", "\ud800", "\0", ":", ""]
        ),
        max_size=6,
    ).map(":save,".join),
    st.sampled_from(
        [
            LONG,
            LONG + ":save",
            "*" * 100_000,
            "?a*" * 30_000 + ":save",
            "mm:" + LONG,
            ":" * 100_000,
            "mm:save," * 100_000,
            "," * 100_000,
            "[" * 100_000 + ":save",
            "save_all" * 9000,
            "mm:save," * 70,
            "\ud800:save",
            "mm\0:save",
            "mm:\udfff",
            "default:\ud800",
        ]
    ),
)
NUMBERS = st.one_of(
    st.integers(),
    st.integers(0, 2**70),
    st.floats(),
    st.sampled_from(
        [10**5000, -(10**5000), 1 << 63, 2**32, True, None, Unprintable(), "1", b"1", [1]]
    ),
)
SIZES = st.one_of(
    NUMBERS,
    TEXTS,
    st.from_regex(r"\d+(\.\d+)? ?[KMGT]?i?B?", fullmatch=True),
    st.sampled_from(
        [
            "9" * 400 + ".5",
            "9" * 5000,
            "9" * 5000 + "GiB",
            "1" + " " * 100_000 + "!",
            "٣",
            "½",
            "1e5",
            "-1",
            ".5",
        ]
    ),
)


@contextlib.contextmanager
def errors_of_ebb(allowed=(ValueError, TypeError), seconds=3.0):
    """Errors inside are of an allowed type, and their message is ebb's and short."""
    message = "ebb"
    try:
        with at_most(seconds):
            yield
    except allowed as error:
        message = str(error)
    assert message.startswith("ebb")
    assert len(message) < 3000
    assert "incompatible function arguments" not in message


fuzzed = settings(max_examples=60, suppress_health_check=list(HealthCheck))


@fuzzed
@given(TEXTS)
def test_any_line_is_a_policy_or_raises(text):
    with errors_of_ebb(ValueError):
        ebb.Policy.parse(text)


def toml(value):
    return json.dumps(value)


TOML_VALUES = st.one_of(
    TEXTS.filter(str.isprintable).map(toml),
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(str),
    st.sampled_from(
        [
            "true",
            "[]",
            "[1]",
            "{}",
            "nan",
            "inf",
            "1979-05-27",
            "9" * 5000,
            "0x" + "f" * 9000,
            "-" + "9" * 4000,
            "[" * 5000,
            "'" + "9" * 400 + ".5'",
            '"mm"',
            '"save"',
            '"1MiB"',
            "'''x",
            '"\\ud800"',
        ]
    ),
)
NAMES = (
    "op decision every nth per_module module name min_bytes max_bytes dtype force "
    "default inputs preset rules"
)
KEYS = st.sampled_from([*NAMES.split(), "a" * 5000, '"\\u0000"'])
LINES = st.one_of(
    st.tuples(KEYS, TOML_VALUES).map(" = ".join),
    st.sampled_from(
        [
            "[[rules]]",
            "[rules]",
            "op = 'mm'",
            "decision = 'save'",
            "]",
            "=",
            "a." * 5000,
        ]
    ),
)


@fuzzed
@given(
    st.one_of(st.lists(LINES, max_size=8).map("\n".join).map(str.encode), st.binary(max_size=60))
)
def test_any_file_is_a_policy_or_raises(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_bytes(text)
    with errors_of_ebb(ValueError):
        ebb.Policy.load(path)


RULE = st.fixed_dictionaries(
    {"op": st.one_of(TEXTS, NUMBERS, st.just("aten::mm"))},
    optional={
        "decision": st.one_of(NUMBERS, st.just(ebb.SAVE)),
        "every": NUMBERS,
        "nth": NUMBERS,
        "module": st.one_of(TEXTS, NUMBERS),
        "name": st.one_of(TEXTS, NUMBERS),
        "min_bytes": SIZES,
        "max_bytes": SIZES,
        "dtype": st.one_of(TEXTS, NUMBERS),
        "force": NUMBERS,
        "per_module": NUMBERS,
    },
)


@fuzzed
@given(RULE)
def test_any_arguments_are_a_rule_or_raise(arguments):
    arguments = {"decision": ebb.SAVE} | arguments
    with errors_of_ebb((ValueError, TypeError, NotImplementedError)):
        policy = ebb.Policy([ebb.Rule(**arguments)])
        assert eval(repr(policy), {"ebb": ebb, "torch": torch}) == policy


@pytest.mark.sweep
@fuzzed
@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_any_module_and_name_is_saved_and_loaded(tmp_path_factory, module, name):
    policy = ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, module=module, name=name)])
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    policy.save(path)
    assert ebb.Policy.load(path) == policy


@fuzzed
@given(SIZES)
def test_any_size_is_a_number_or_raises(value):
    with errors_of_ebb():
        assert 0 <= number_of_bytes("min_bytes", value) < 2**63


@pytest.mark.parametrize(
    "text",
    ["9" * 400 + ".5", "9" * 5000, "9" * 99 + "TiB", "1" + " " * 100_000 + "!", "\ud800"],
    ids=list("abcde"),
)
def test_invalid_size_raises(text):
    with pytest.raises(ValueError, match=r"^ebb: pinned_limit must be .*; got '?[91\\]"):
        ebb.config.offload.pinned_limit = text


SETTINGS = {
    ebb.config.offload: (
        "min_bytes pinned_limit in_flight_bytes prefetch_bytes disk_limit keep_last"
    ),
    ebb.config.paging: "page_rows headroom host_headroom device_limit overflow dead_rows prefetch",
}


@fuzzed
@given(st.data())
def test_any_setting_is_taken_or_raises(data):
    module = data.draw(st.sampled_from(list(SETTINGS)))
    name = data.draw(st.sampled_from(SETTINGS[module].split()))
    offload, paging = ebb._C.offload_settings(), ebb._C.paging_settings()
    try:
        with errors_of_ebb():
            setattr(module, name, data.draw(SIZES))
    finally:
        ebb._C.configure_offload(offload)
        ebb._C.configure_paging(paging)


@pytest.mark.parametrize("path", ["\ud800", "a\0b", 5, b"disk", "\n"])
def test_invalid_folder_raises(path):
    with pytest.raises((ValueError, TypeError), match=r"^ebb: disk must be a path"):
        ebb.config.offload.disk = path


@pytest.mark.parametrize(
    "call",
    [
        lambda: ebb.Policy(5),
        lambda: ebb.Policy([5]),
        lambda: ebb.Policy([Unprintable()]),
        lambda: ebb.Policy({Unprintable(): ebb.SAVE}),
        lambda: ebb.Policy(default=Unprintable()),
        lambda: ebb.Policy.load(5),
        lambda: ebb.Policy.load("a\0b"),
        lambda: ebb.Policy.parse(b"mm:save"),
        lambda: ebb.policies.recompute_all.explain("\ud800"),
        lambda: ebb.policies.recompute_all.explain(LONG),
        lambda: ebb.policies.megatron([]),
        lambda: ebb.policies.megatron(LONG),
        lambda: ebb.apply(torch.nn.ReLU(), modules="[" * 100_000),
        lambda: ebb.region(Unprintable()),
        lambda: ebb.region(escapes=LONG),
        lambda: ebb.verify(LONG),
        lambda: ebb.record_reports(10**5000),
        lambda: ebb.checkpoint_name(torch.ones(1), Unprintable()),
    ],
)
def test_invalid_argument_raises(call):
    with at_most(seconds=3), pytest.raises((ValueError, TypeError), match=r"^ebb") as caught:
        call()
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "😀", LONG], ids=list("abcd"))
def test_any_name_works(name):
    net = torch.nn.Sequential()
    net.add_module(name, torch.nn.Linear(2, 2))
    policy = ebb.Policy([ebb.Rule("aten::addmm", ebb.SAVE, module="?*")])
    x = torch.ones(1, 2, requires_grad=True)
    with ebb.apply(net, policy, "?*"), ebb.region(policy, name):
        ebb.checkpoint_name(net(x).sin(), name).sum().backward()


# Number of rules


def conditional(count):
    return [ebb.Rule("aten::mm", ebb.SAVE, nth=i + 1) for i in range(count)]


def run(policy):
    with ebb.region(policy):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("rules", "fits"),
    [
        (conditional(63), True),
        (conditional(64), False),
        ([*conditional(63), ebb.Rule("aten::mm", ebb.SAVE)], True),
        ([*conditional(64), ebb.Rule("aten::mm", ebb.SAVE)], False),
        ([ebb.Rule("aten::mm", ebb.SAVE)] * 100, True),  # the first decides
        ([ebb.Rule("aten::m?", ebb.SAVE, name=str(i)) for i in range(64)], False),
        ([ebb.Rule("*", ebb.SAVE, min_bytes=i + 1) for i in range(64)], False),
        ([ebb.Rule("aten::mm.default", ebb.SAVE, max_bytes=i) for i in range(64)], False),
        ([ebb.Rule("aten::mm", ebb.SAVE, dtype="float")] * 64, False),
        ([ebb.Rule("aten::mm", ebb.SAVE, module="x")] * 64, False),
        ([ebb.Rule("aten::sin", ebb.SAVE, every=i + 2) for i in range(63)] + conditional(63), True),
    ],
)
def test_too_many_rules_of_one_operator_raise(rules, fits):
    if fits:
        run(ebb.Policy(rules))
        return
    with pytest.raises(ValueError, match=r"^ebb: more than 64 rules match \w+::"):
        ebb.Policy(rules)


def test_too_many_rules_in_a_file_or_line_raise(tmp_path):
    path = tmp_path / "policy.toml"
    rule = '[[rules]]\nop = "mm"\ndecision = "save"\nname = "a"\n'
    path.write_text(rule * 64)
    with pytest.raises(ValueError, match=r"policy.toml: more than 64 rules"):
        ebb.Policy.load(path)
    with pytest.raises(ValueError, match=r"^ebb: policy 'mm:save.*at most 5,000 rules"):
        ebb.Policy.parse("mm:save," * 5001)


@pytest.mark.parametrize(
    "value", ["short", LONG, 10**5000, Unprintable(), "\ud800", None], ids=list("abcdef")
)
def test_shown_values_are_short(value):
    assert len(shown(value)) < 600
