"""Policies as TOML and as one line."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb._policy.compiled import PRESETS

FULL = """
default = "save"
inputs = "offload"

[[rules]]
op = "mm"
decision = "recompute"
module = "*.mlp.*"
every = 2
per_module = true

[[rules]]
op = "aten::addmm.default"
decision = "OFFLOAD"
min_bytes = "1MiB"
max_bytes = 4194304
dtype = "bfloat16"

[[rules]]
op = "*"
decision = "save"
name = "attn_out"

[[rules]]
op = "aten::gelu"
decision = "save"
nth = 3
"""


def write(folder, text):
    path = folder / "policy.toml"
    path.write_text(text)
    return path


def test_file_with_all_keys(tmp_path):
    assert ebb.Policy.load(write(tmp_path, FULL)) == ebb.Policy(
        [
            ebb.Rule("aten::mm", ebb.RECOMPUTE, every=2, module="*.mlp.*", per_module=True),
            ebb.Rule(
                "aten::addmm.default",
                ebb.OFFLOAD,
                min_bytes=1 << 20,
                max_bytes=1 << 22,
                dtype=torch.bfloat16,
            ),
            ebb.Rule("*", ebb.SAVE, name="attn_out"),
            ebb.Rule("aten::gelu", ebb.SAVE, nth=3),
        ],
        default=ebb.SAVE,
        inputs=ebb.OFFLOAD,
    )


ODD_NAME = 'a "b" \\ ü \n'


@pytest.mark.parametrize(
    "policy",
    [
        *[getattr(ebb.policies, name) for name in PRESETS],
        ebb.Policy([ebb.Rule("_c10d_functional::*", ebb.SAVE, name=ODD_NAME)]),
        ebb.Policy([ebb.Rule("aten::mm", ebb.RECOMPUTE, force=True, every=3)]),
        ebb.policies.megatron("moe_act", "mlp"),
    ],
)
def test_policies_are_saved_and_loaded(tmp_path, policy):
    path = tmp_path / "policy.toml"
    policy.save(path)
    text = path.read_text()
    assert text == policy.to_toml()
    assert ebb.Policy.load(path) == policy


def test_rules_of_a_file_come_before_those_of_its_preset(tmp_path):
    text = 'preset = "torchtitan"\nrules = [{op = "gelu", decision = "offload"}]\n'
    policy = ebb.Policy.load(write(tmp_path, text))
    assert policy.rules == (ebb.Rule("aten::gelu", ebb.OFFLOAD), *ebb.policies.torchtitan.rules)
    inputs = ebb.Policy.load(write(tmp_path, 'preset = "offload_inputs"'))
    assert inputs == ebb.policies.offload_inputs


RULE = '[[rules]]\nop = "mm"\ndecision = "save"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default = save", r"policy\.toml: Invalid value \(at line 1, column 11\)"),
        ("defualt = 'save'", r"policy\.toml: defualt: unknown key; did you mean 'default'\?"),
        (
            "default = 'safe'",
            r"policy\.toml: default: unknown decision 'safe'; did you mean 'save'\?",
        ),
        ("default = 3", r"policy\.toml: default: unknown decision 3"),
        ("inputs = 'recompute'", r"policy\.toml: inputs: inputs of a region cannot be"),
        ("rules = 3", r"policy\.toml: rules: must be an array of tables; got 3"),
        ("rules = [3]", r"policy\.toml: rules\[0\]: must be a table; got 3"),
        (
            "preset = 'tochtitan'",
            r"policy\.toml: preset: unknown preset 'tochtitan'; did you mean 'torch",
        ),
        ("preset = 'torchtitan'\ndefault = 'save'", "'preset' cannot be combined with"),
        (RULE + "[[rules]]\ndecision = 'save'", r"policy\.toml: rules\[1\]: 'op' is missing"),
        (RULE + "[[rules]]\nop = 'mm'", r"policy\.toml: rules\[1\]: 'decision' is missing"),
        (RULE + "moduel = '*'", r"rules\[0\]\.moduel: unknown key; did you mean 'module'\?"),
        (RULE + "nth = 'two'", r"policy\.toml: rules\[0\]: nth must be an int; got 'two'"),
        (RULE + "min_bytes = '1 mile'", r"rules\[0\]: min_bytes must be a number of bytes"),
        (RULE + "dtype = 'bf16'", r"rules\[0\]: unknown dtype 'bf16'"),
        ("[[rules]]\nop = 'mn'\ndecision = 'save'", r"rules\[0\]: the rule 'aten::mn' matches no"),
        ("[[rules]]\nop = 3\ndecision = 'save'", r"rules\[0\]\.op: must be a string; got 3"),
        ("[[either]]", "either: unknown key"),
    ],
)
def test_invalid_file_raises_and_names_the_place(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        ebb.Policy.load(write(tmp_path, text))


def test_unreadable_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        ebb.Policy.load(tmp_path / "missing.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.toml: .*decode"):
        ebb.Policy.load(path)


def test_lines_are_policies():
    assert ebb.Policy.parse("save_matmuls") == ebb.policies.save_matmuls
    assert ebb.Policy.parse(" mm:save, gelu:Recompute,linear:offload ,") == ebb.Policy(
        {"aten::mm": ebb.SAVE, "aten::gelu": ebb.RECOMPUTE, "aten::linear": ebb.OFFLOAD}
    )
    assert ebb.Policy.parse("mm:page,inputs:page") == ebb.Policy(
        {"aten::mm": ebb.PAGE}, inputs=ebb.PAGE
    )
    assert ebb.Policy.parse("aten::mm.default:save,default:save,inputs:offload") == ebb.Policy(
        {"aten::mm.default": ebb.SAVE}, default=ebb.SAVE, inputs=ebb.OFFLOAD
    )
    assert ebb.Policy.parse("default:offload") == ebb.Policy(default=ebb.OFFLOAD)
    assert ebb.Policy.parse("aten.mm:save") == ebb.Policy({"aten::mm": ebb.SAVE})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; write for example 'mm:save"),
        (",", "is empty"),
        ("mm", "'mm' is neither a preset .* nor a rule"),
        ("save_matmul", "did you mean 'save_matmuls'\\?"),
        ("aten::mm", "nor a rule such as 'mm:save'"),
        ("mm:keep", "unknown decision 'keep'; valid names: 'save'"),
        ("mn:save", "'aten::mn' matches no registered operator"),
        ("inputs:recompute", "inputs of a region cannot be recomputed"),
    ],
)
def test_invalid_line_raises(text, message):
    with pytest.raises(ValueError, match=message):
        ebb.Policy.parse(text)
