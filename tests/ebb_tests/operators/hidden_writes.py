"""Finds writes of operators that their schemas do not declare, by comparing bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ebb_tests.isolation import each_isolated
from ebb_tests.operators import library_examples
from ebb_tests.operators.examples import PROGRAMS
from ebb_tests.operators.inputs import (
    Guess,
    Named,
    arguments_by_name,
    base_of,
    copy_of,
    overload,
    parts_of,
    runs_on_the_cpu,
    schemas,
    tensors_of,
    variants,
    with_flags_flipped,
    writes,
)


@dataclasses.dataclass
class Finding:
    """Results for one operator, summed over all calls."""

    calls: int = 0
    hidden: dict[str, str] = dataclasses.field(default_factory=dict)  # argument: a call
    times: Counter[str] = dataclasses.field(default_factory=Counter)  # by argument
    declared: set[str] = dataclasses.field(default_factory=set)  # arguments seen written
    errors: Counter[str] = dataclasses.field(default_factory=Counter)

    def written(self) -> dict[str, str]:
        """Hidden writes. Excludes writes in fewer than 1 of 200 calls: other code made them."""
        return {key: how for key, how in self.hidden.items() if self.times[key] * 200 >= self.calls}

    def note(
        self,
        name: str,
        tensors: dict[str, list[torch.Tensor]],
        before: dict[str, list[Any]],
        about: str,
        shared: Collection[str] = (),
    ) -> None:
        """Adds a call of the operator `name`, whose arguments had the contents `before`."""
        self.calls += 1
        for key, old in before.items():
            if [contents(t) for t in tensors[key]] == old:
                continue
            if key in declared_writes(name):
                self.declared.add(key)
            elif key not in shared:
                self.hidden.setdefault(key, about)
                self.times[key] += 1

    def add(self, other: Finding) -> None:
        self.calls += other.calls
        self.hidden = other.hidden | self.hidden
        self.times.update(other.times)
        self.declared |= other.declared
        self.errors.update(other.errors)


def contents(x: torch.Tensor) -> tuple[Any, ...]:
    """All that a write can change: geometry, and the bytes of the whole storages."""
    if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
        return ()
    x = x.detach()
    seen: list[Any] = [tuple(x.shape) if not x.is_nested else x._nested_tensor_size().tolist()]
    if x.is_quantized and x.qscheme() == torch.per_channel_affine:
        seen += [contents(x.q_per_channel_scales()), contents(x.q_per_channel_zero_points())]
    for part in parts_of(x):
        if part.is_meta:
            continue
        storage = part.untyped_storage()
        seen += [part.storage_offset() if not part.is_nested else 0, bytes_of(storage)]
    return tuple(seen)


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    if not storage.nbytes() or storage.device.type != "cpu":
        return b""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def declared_writes(name: str) -> set[str]:
    return {a.name for a in schemas()[name].arguments if writes(a)}


def described(named: Named) -> str:
    """A call's arguments in one line."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            layout = "" if value.layout is torch.strided else f"{value.layout} "
            shape = "nested" if value.is_nested else list(value.shape)
            return f"{layout}{str(value.dtype).removeprefix('torch.')}{shape}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(one, value)) + "]"
        return repr(value)[:40]

    return ", ".join(f"{key}={one(value)}" for key, value in named.items())


def storages_of(tensors: list[torch.Tensor]) -> set[int]:
    dense = [part for t in tensors for part in parts_of(t.detach()) if not part.is_meta]
    return {part.untyped_storage()._cdata for part in dense}


def observe(
    name: str, args: Any, kwargs: Named, finding: Finding, function: Callable[..., Any]
) -> Any:
    """Calls an operator, records which arguments' bytes changed, and returns the result.

    Ignores an argument that shares memory with an argument that the schema declares as written.
    """
    named = arguments_by_name(name, args, kwargs)
    with torch._C._DisableTorchDispatch():
        tensors = {key: tensors_of(value) for key, value in named.items()}
        marked = {s for key in declared_writes(name) for s in storages_of(tensors.get(key, []))}
        before = {key: [contents(t) for t in some] for key, some in tensors.items() if some}
        about = described(named)
        shared = {key for key, some in tensors.items() if marked & storages_of(some)}
    result = function(*args, **kwargs)
    with torch._C._DisableTorchDispatch():
        finding.note(name, tensors, before, about, shared)
    return result


class Watch(TorchDispatchMode):
    """Observes each operator that a program dispatches, and keeps some calls as examples."""

    KEPT = 4
    SMALL = 1 << 16  # elements of an example, at most

    def __init__(self, findings: dict[str, Finding], examples: dict[str, list[Named]]) -> None:
        super().__init__()
        self.findings = findings
        self.examples = examples

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name + (
            f".{func._schema.overload_name}" if func._schema.overload_name else ""
        )
        if name not in schemas():
            return func(*args, **kwargs)
        self.keep(name, args, kwargs)
        return observe(name, args, kwargs, self.findings.setdefault(name, Finding()), func)

    def keep(self, name: str, args: Any, kwargs: Named) -> None:
        with torch._C._DisableTorchDispatch():
            known = self.examples.setdefault(base_of(name), [])
            named = arguments_by_name(name, args, kwargs)
            tensors = tensors_of(named)
            small = sum(t.numel() for t in tensors) < self.SMALL
            if small and sum(1 for e in known if e.keys() == named.keys()) < self.KEPT:
                known.append(copy_of(named))


def attempts(
    name: str, examples: list[Named], skipped: frozenset[int], count: int
) -> Iterator[tuple[int, Any, Named]]:
    """Calls to try: examples, examples with a flag flipped, then guesses."""
    number = 0
    arguments = {a.name for a in schemas()[name].arguments}
    own = [e for e in examples if set(e) <= arguments]
    for example in own[:6]:
        for flipped in (example, *with_flags_flipped(example)):
            number += 1
            if number not in skipped:
                yield number, [], copy_of(flipped)
    for guess in range(count):
        number += 1
        if number not in skipped:
            try:
                args, kwargs = Guess(name, guess, examples).arguments()
            except Exception:
                continue
            yield number, args, kwargs


def examine(
    name: str,
    tell: Callable[[int], None],
    skipped: frozenset[int],
    examples: list[Named],
    *,
    enough: int,
    count: int,
) -> Finding:
    """Calls an operator until `enough` calls succeed. Adds successful calls to `examples`."""
    finding = Finding()
    function = overload(name)
    for number, args, kwargs in attempts(name, examples, skipped, count):
        tell(number)
        named = copy_of(arguments_by_name(name, args, kwargs))
        try:
            observe(name, args, kwargs, finding, function)
        except Exception as error:
            finding.errors[f"{type(error).__name__}: {error}".split("\n")[0][:200]] += 1
        else:
            if len(examples) < 12:
                examples.append(named)
        if finding.calls >= enough:
            break
    finding.errors = Counter(dict(finding.errors.most_common(3)))
    return finding


MOST_CRASHES = 8
ATTEMPTS = 100_000  # more than one operator has; offset between numbers of variants


def examine_variants(
    base: str,
    tell: Callable[[int], None],
    skipped: frozenset[int],
    examples: list[Named],
    *,
    enough: int,
    count: int,
) -> dict[str, Finding]:
    """Calls all variants of an operator. A successful call is an example for later variants."""
    findings = {}
    for place, name in enumerate(sorted(variants()[base], key=lambda n: (len(n), n))):
        if not runs_on_the_cpu(name):
            continue
        first = place * ATTEMPTS
        own = frozenset(n - first for n in skipped if first <= n < first + ATTEMPTS)
        if len(own) >= MOST_CRASHES:
            findings[name] = Finding(errors=Counter(["it ends the process"]))
            continue

        def tell_variant(number: int, first: int = first) -> None:
            tell(first + number)

        findings[name] = examine(name, tell_variant, own, examples, enough=enough, count=count)
    return findings


def go_back(made: Any) -> None:
    made = [t for t in tensors_of(made) if t.requires_grad]
    torch.autograd.backward(made, [torch.ones_like(t) for t in made])


def watch_programs(findings: dict[str, Finding], examples: dict[str, list[Named]]) -> None:
    """Runs all programs. Ignores errors: some builds of torch lack an engine or a library."""
    for program in [*PROGRAMS, *library_examples.programs()]:
        with Watch(findings, examples), contextlib.suppress(Exception):
            go_back(program())


def watch_databases(
    findings: dict[str, Finding], examples: dict[str, list[Named]], samples: int
) -> None:
    """Runs samples of torch's test database of operators, forward and backward."""
    from ebb_tests.operators.database import ON_THE_CPU, dtypes_of, samples_of

    for op in ON_THE_CPU:
        for dtype in dtypes_of(op):
            for sample in itertools.islice(samples_of(op, dtype), samples):
                inputs = tensors_of([sample.input, sample.args, sample.kwargs])
                if sum(t.numel() for t in inputs) > Watch.SMALL:
                    continue
                with Watch(findings, examples), contextlib.suppress(Exception):
                    go_back(op(sample.input, *sample.args, **sample.kwargs))


def examine_all(samples: int, enough: int, count: int) -> dict[str, Finding]:
    """Findings for each operator of the dispatcher, without operators that tests register."""
    library_examples.programs()
    schemas()  # cached before the test database registers its own operators
    findings: dict[str, Finding] = {}
    examples: dict[str, list[Named]] = {}
    watch_programs(findings, examples)
    watch_databases(findings, examples, samples)

    def work(base: str, tell: Callable[[int], None], skipped: frozenset[int]) -> Any:
        known = examples.get(base, [])
        return examine_variants(base, tell, skipped, known, enough=enough, count=count)

    for _, found, _ in each_isolated(variants(), work, crashes=100):
        for name, finding in (found or {}).items():
            findings.setdefault(name, Finding()).add(finding)
    return findings


def main() -> None:
    """Prints what `examine_all` and the collectives found, as JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        findings = examine_all(*map(int, sys.argv[1:]))  # operators may write files
    from ebb_tests.operators.collectives import examine_collectives

    for name, finding in examine_collectives().items():
        findings.setdefault(name, Finding()).add(finding)
    table = {}
    for name in schemas():
        finding = findings.get(name, Finding())
        table[name] = {
            "calls": finding.calls,
            "hidden": finding.written(),
            "declared": sorted(finding.declared),
            "errors": list(finding.errors),
        }
    json.dump(table, sys.stdout)


if __name__ == "__main__":
    main()
