"""Operators that write to an argument without a word in the schema, found by running them all.

Every operator of torch's dispatcher is called, with samples of torch's own database and with
arguments made from its schema, and the bytes of all arguments are compared before and after.
hidden_writes.toml says what is known: which operators write unsaid, and which could not be run. The
operators of torchvision and torchaudio are called too, where those are installed.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections import Counter
from typing import Any

import pytest
import torch

import ebb
from ebb_tests import TESTS
from ebb_tests.exactness import run_process
from ebb_tests.operators.compared import INPUTS, Call, compare
from ebb_tests.operators.inputs import overload, runs_on_the_cpu, schemas, writes
from ebb_tests.stand_ins import operator_facts

TABLE = tomllib.loads((TESTS / "ebb_tests/operators/hidden_writes.toml").read_text())
NAMED = {*TABLE["writes"], *(name for entry in TABLE["not_run"] for name in entry["operators"])}
MISSING = NAMED - set(schemas())  # other torch versions have others
WRITES: dict[str, dict[str, Any]] = {
    name: entry for name, entry in TABLE["writes"].items() if name not in MISSING
}
NOT_RUN = {
    name: entry["reason"]
    for entry in TABLE["not_run"]
    for name in entry["operators"]
    if name not in MISSING
}

Findings = dict[str, dict[str, Any]]


def torch_release() -> str:
    return torch.__version__.partition("+")[0]


def findings(samples: int, enough: int, count: int) -> Findings:
    """In a process of its own: other tests have registered operators here."""
    program = ["-m", "ebb_tests.operators.hidden_writes", str(samples), str(enough), str(count)]
    return json.loads(run_process(program, PYTHONPATH=os.pathsep.join(sys.path)))


def hidden(found: Findings) -> dict[str, set[str]]:
    return {name: set(finding["hidden"]) for name, finding in found.items() if finding["hidden"]}


def decomposes(name: str) -> bool:
    """Only into others, above ebb's key, which sees those."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU")


def assert_known(found: Findings) -> None:
    unsaid = hidden(found)
    known = {name: set(entry["arguments"]) for name, entry in WRITES.items()}
    new = {name: found[name]["hidden"] for name in unsaid if unsaid[name] - known.get(name, set())}
    assert new == {}, "operators write what their schemas do not mark; ebb must know, and the table"


@pytest.fixture(scope="module")
def few() -> Findings:
    return findings(samples=2, enough=3, count=40)


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_what_is_written_unsaid_is_in_the_table(few):
    assert_known(few)


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_most_operators_are_run(few):
    assert sum(finding["calls"] > 0 for finding in few.values()) > 2700
    assert sum(finding["calls"] for finding in few.values()) > 30_000


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_collectives_write_as_the_table_says(few):
    unsaid = hidden(few)
    for name, entry in WRITES.items():
        if "c10d" in name and (name != "c10d::alltoall_" or torch.__version__ >= (2, 12)):
            assert unsaid[name] == set(entry["arguments"]), name


@pytest.mark.slow
@pytest.mark.not_sanitized
def test_all_operators_are_run_or_in_the_table_and_all_writes_happen():
    found = findings(samples=4, enough=20, count=250)

    assert_known(found)
    unsaid = hidden(found)
    here = {n: e for n, e in WRITES.items() if found[n]["calls"] and not decomposes(n)}
    never = {
        name
        for name, entry in here.items()
        if unsaid.get(name) != set(entry["arguments"]) and not entry.get("geometry")
    }
    assert never == set(), "writes in the table that did not happen"
    quiet = {
        name
        for name, finding in found.items()
        if name in schemas()
        and not finding["calls"]
        and runs_on_the_cpu(name)
        and not decomposes(name)
    }
    assert quiet - set(NOT_RUN) == set(), "no call of these succeeds: say why in the table"


def test_the_table_names_operators_that_there_are():
    later = {name for name, entry in TABLE["writes"].items() if "since" in entry}
    assert later >= MISSING or torch_release() != TABLE["torch"]
    assert len(MISSING) < 20
    for name, entry in WRITES.items():
        arguments = {a.name: a for a in schemas()[name].arguments}
        assert set(entry["arguments"]) <= set(arguments)
        assert not any(writes(arguments[argument]) for argument in entry["arguments"])


def test_what_is_in_the_table_as_not_run_could_be_reached():
    """Operators without any kernel for the CPU need no entry."""
    assert all(runs_on_the_cpu(name) for name in NOT_RUN)


@pytest.mark.parametrize("name", WRITES)
def test_ebb_takes_them_for_writes(name):
    if decomposes(name):
        pytest.skip("ebb sees what it decomposes into")
    if WRITES[name].get("geometry"):
        pytest.skip("no byte changes")
    if WRITES[name].get("begun_before"):
        pytest.skip("the operator that began the write counts as the writer")
    uses = operator_facts(overload(name))["uses"]

    for argument in WRITES[name]["arguments"]:
        assert uses[argument] != "read", argument


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_ebb_takes_nothing_for_a_write_that_never_happens(few):
    never = []
    for name in set(few) & set(schemas()):
        uses = operator_facts(overload(name))["uses"]
        arguments = [a.name for a in schemas()[name].arguments if not writes(a)]
        wrongly = {a for a in arguments if uses.get(a, "read") not in ("read", "unread")}
        if few[name]["calls"] and wrongly - set(WRITES.get(name, {"arguments": ()})["arguments"]):
            never.append(name)
    assert never == []


def leaf(*shape: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(sum(shape))
    return torch.rand(shape, dtype=torch.float64, generator=source).requires_grad_()


def stat(n: int) -> torch.Tensor:
    return torch.arange(1.0, n + 1, dtype=torch.float64)


OPS = torch.ops.aten
X = leaf(4, 3, 5)
# Each in a program in which all arguments are computed, and the written ones are used again.
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "native_batch_norm": (
        lambda x, mean, var: OPS.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5),
        (X, stat(3), stat(3)),
    ),
    "native_batch_norm, evaluated": (
        lambda x, mean, var: OPS.native_batch_norm(x, None, None, mean, var, False, 0.1, 1e-5),
        (X, stat(3), stat(3)),
    ),
    "batch_norm": (
        lambda x, mean, var: torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False),
        (X, stat(3), stat(3)),
    ),
    "_batch_norm_impl_index": (
        lambda x, mean, var: OPS._batch_norm_impl_index(
            x, None, None, mean, var, True, 0.1, 1e-5, False
        )[0],
        (X, stat(3), stat(3)),
    ),
    "instance_norm": (
        lambda x, mean, var: torch.instance_norm(x, None, None, mean, var, True, 0.1, 1e-5, False),
        (X, stat(3), stat(3)),
    ),
    "batch_norm_update_stats": (
        lambda x, mean, var: OPS.batch_norm_update_stats(x.detach(), mean, var, 0.1),
        (X, stat(3), stat(3)),
    ),
    "cov": (lambda x: torch.cov(x.flatten()), (X,)),
    "cov, no dimensions": (lambda x: torch.cov(x.sum().detach()), (X,)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_written_arguments_that_are_computed_and_used_again(program):
    function, args = PROGRAMS[program]

    def uses_again(*args: torch.Tensor) -> list[torch.Tensor]:
        made = function(*args)
        made = [made] if isinstance(made, torch.Tensor) else list(made)
        return [*made, *(t.detach() * 1 for t in args)]

    assert not compare(program, Call(uses_again, args, {}), [(INPUTS, "recompute_all")], Counter())


def test_an_input_that_gets_another_shape_unsaid_is_refused():
    x, w = leaf(2, 5, 5), leaf(2, 4, 3, 3)
    with ebb.region():
        loss = OPS.slow_conv_transpose2d(x * 2, w, [3, 3]).sum()

    with pytest.raises(RuntimeError, match="Expected 4-dimensional input"):
        loss.backward()
