"""Hands the policies of regions in a compiled graph to torch's partitioner."""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch.compiler import is_exporting
from torch.utils.checkpoint import CheckpointPolicy

from ebb._policy.decision import MADE_AGAIN, PAGE, SAVE
from ebb._policy.policy import Decider, Policy, Result, policy_of_number
from ebb._policy.rule import qualified_name
from ebb._region import tracing
from ebb._region.disable import is_switched_off
from ebb._support.log import log

# Note [Regions in compiled graphs]
# Under torch.compile ebb does not intercept operators: AOTAutograd traces forward and backward into
# one joint graph, and torch's partitioner decides which results forward saves. So ebb marks results
# for the partitioner, with the tags of torch's selective checkpointing:
#
# 1. While Dynamo traces a region, torch.fx.traceback.annotate adds the region's number to nodes.
#    The function's side effects stay the same. At a graph break inside the region, Dynamo does
#    not compile the frame; the region then runs in eager mode, around the compiled parts.
# 2. `_tag` runs on the joint graph before the partitioner. For each forward node with a number, the
#    region's policy decides: SAVE, OFFLOAD and PAGE become MUST_SAVE, RECOMPUTE becomes
#    PREFER_RECOMPUTE.
#
# Recomputation in backward is wrong if it reads a graph input that forward has written: a compiled
# graph does not keep the old contents. torch's checkpointing gives wrong gradients there. So each
# node that depends on such an input becomes MUST_SAVE. Direct readers alone do not suffice, since
# Inductor removes operators that only copy, with their tags. Inputs that autograd saves without a
# version check count as written.
#
# Results of these operators also become MUST_SAVE:
# - operators that are not torch's own, as in eager regions;
# - random operators that only backward needs, since the partitioner would not run them in forward;
# - random operators in a graph with DTensors;
# - random operators on the CPU, if the result is smaller than the generator state that
#   recomputation would save.

REGION = "ebb_region"  # annotation: the region's unit and number, see `enter`
MODULE = "ebb_module"  # annotation: the names of the innermost running module
_GENERATOR_STATE = 5056  # bytes, on the CPU

_numbers = itertools.count(1)
_entered: dict[int, tuple[str, str]] = {}  # by region number: the policy's number, the name


def enter(policy: str, name: str) -> str:
    """The annotation of a region that Dynamo traces, under the policy with this number.

    "unit:number": the number of the outermost region, which backward recomputes as a unit, and the
    number of this region. Empty under EBB_DISABLE, and under torch.export, whose graph outlives the
    process.
    """
    if is_switched_off():
        return ""
    if is_exporting():
        tracing.region_is_traced()
        return ""
    _install()
    _warn_of_conditions(policy_of_number(policy))
    number = next(_numbers)
    _entered[number] = (policy, name)
    outer = torch.fx.traceback.current_meta.get("custom", {}).get(REGION)
    return f"{outer.split(':')[0] if outer else number}:{number}"


def new_number() -> int:
    """A number below those of all regions that Dynamo traces from now on."""
    return next(_numbers)


def names_entered(since: int = 0) -> set[str]:
    """Names of the regions that Dynamo has traced since `new_number` returned `since`."""
    return {name for number, (_, name) in _entered.items() if number > since}


# torch.compiler.assume_constant_result sets the same attribute, but imports Dynamo, which takes a
# second in each process.
enter._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Pass:
    """A value for torch._functorch.config.joint_custom_pass; calls the previous value first.

    It holds the settings of torch that `_uninstall` restores.
    """

    def __init__(self, before: Callable[..., Any] | None, is_cached: bool) -> None:
        self.before = before
        self.is_cached = is_cached

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        if self.before is not None:
            graph = self.before(graph, inputs)
        _tag(graph)
        return graph


def _warn_of_conditions(policy: Policy | None) -> None:
    if policy is None:
        return
    elsewhere = policy._offloads or policy._compiled.gives(int(PAGE)) or policy.inputs is not SAVE
    if elsewhere or any(rule.name is not None for rule in policy.rules):
        _warn_once()


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "ebb: in a graph of torch.compile, OFFLOAD and PAGE mean SAVE, and rules with name= match "
        "nothing.",
        stacklevel=2,
    )


def _install() -> None:
    """Changes torch's settings until Dynamo has compiled the frame that it traces now."""
    from torch._dynamo.callback import callback_handler  # noqa: PLC0415 - Dynamo is there

    config = torch._functorch.config
    if isinstance(config.joint_custom_pass, _Pass):
        return
    config.joint_custom_pass = _Pass(config.joint_custom_pass, config.enable_autograd_cache)
    # The cache's key does not contain the annotations, so the cache would return a graph that was
    # partitioned without this policy.
    config.enable_autograd_cache = False
    if _end_callback() not in callback_handler.end_callbacks:  # torch._dynamo.reset() clears it
        callback_handler.register_end_callback(_end_callback())


@functools.cache
def _end_callback() -> Callable[[Any], None]:
    """`_uninstall`, hidden from Dynamo: Dynamo calls end callbacks with a lock held, also when a
    backward was compiled inside of a frame that Dynamo watches. Dynamo would compile the callback's
    frame and wait for the lock for ever."""
    disable: Any = torch._dynamo.disable
    return cast("Callable[[Any], None]", disable(_uninstall))


def _uninstall(_: Any) -> None:
    config: Any = torch._functorch.config
    ours = config.joint_custom_pass
    if isinstance(ours, _Pass):
        config.joint_custom_pass = ours.before
        config.enable_autograd_cache = ours.is_cached


def _tag(module: torch.fx.GraphModule) -> None:
    nodes = list(module.graph.nodes)
    forward = [n for n in nodes if n.meta.get("partitioner_tag") == "is_forward"]
    regions = [n for n in forward if _region(n) and "recompute" not in n.meta]
    if not regions:
        return
    written = _written_inputs(nodes)
    if written is None:
        log.warning("ebb: a compiled graph's written inputs are unknown: regions do nothing in it")
        return
    _decide(regions)
    needed, has_objects = _needed_in_forward(nodes), _has_objects(nodes)
    _save(
        node
        for node in regions
        if _is_random(node) and (has_objects or node not in needed or _is_small_on_cpu(node))
    )
    _save_dependents(forward, written)


def _annotation(node: torch.fx.Node) -> dict[str, Any]:
    custom = node.meta.get("custom")
    return custom if isinstance(custom, dict) else {}


def _region(node: torch.fx.Node) -> list[int]:
    """The numbers of the node's unit and region, see `enter`; empty outside of regions."""
    return [int(number) for number in _annotation(node).get(REGION, "").split(":") if number]


def _values(node: torch.fx.Node) -> Sequence[Any]:
    """The operator's outputs, as fake tensors."""
    value = node.meta.get("val")
    return value if isinstance(value, (tuple, list)) else [value]


def _items(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes of the single outputs, if the operator has several."""
    return [user for user in node.users if user.target is operator.getitem]


def _written_inputs(nodes: list[torch.fx.Node]) -> set[torch.fx.Node] | None:
    """The inputs that the graph writes, or that autograd saves without a version check; None if
    the written inputs are unknown."""
    inputs = [n for n in nodes if n.op == "placeholder"]
    written = {n for n in inputs if n.meta.get("saved_tensor_with_no_vc_check")}
    written |= {
        node.args[0]  # type: ignore[misc]
        for node in nodes
        if node.op == "call_function" and _writes_an_input(node)
    }
    outputs = nodes[-1].meta.get("desc")
    if outputs is None:
        return None
    for output in map(_whole, outputs):
        if hasattr(output, "mutated_input"):
            whole = str(_whole(output.mutated_input))
            parts = [n for n in inputs if str(_whole(n.meta.get("desc"))) == whole]
            if not parts:
                return None
            written.update(parts)
    return written


def _whole(part: Any) -> Any:
    """torch's descriptor of the whole tensor, if `part` describes a part of a tensor subclass."""
    while hasattr(part, "base") and not hasattr(part, "mutated_input"):
        part = part.base
    return part


def _writes_an_input(node: torch.fx.Node) -> bool:
    target = node.args[0] if node.args else None
    is_input = isinstance(target, torch.fx.Node) and target.op == "placeholder"
    schema = getattr(node.target, "_schema", None)
    return is_input and schema is not None and schema.is_mutable


def _decide(nodes: Iterable[torch.fx.Node]) -> None:
    deciders: dict[int, Decider | None] = {}
    counts: Counter[tuple[str, bool]] = Counter()
    for node in nodes:
        unit, number = _region(node)
        node.meta["ac_graph_id"] = unit
        policy_number, name = _entered.get(number, ("", ""))
        if number not in deciders:
            policy = policy_of_number(policy_number)
            deciders[number] = None if policy is None else Decider(policy.rules, policy.default)
        decider = deciders[number]
        results = _results(node)
        if decider is None or not results or node.target is operator.getitem:
            continue
        for saved, marked in _marks(node, decider, results):
            tag = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
            marked.meta["recompute"] = tag
        counts[name, node.meta["recompute"] == CheckpointPolicy.MUST_SAVE] += 1
    for name in dict.fromkeys(name for name, _ in counts):
        log.info(
            "region %s in a compiled graph: %d operators saved, %d recomputed",
            name,
            counts[name, True],
            counts[name, False],
        )


def _results(node: torch.fx.Node) -> list[Result | None]:
    """An operator's outputs, None for an output that is no tensor; empty if none is a tensor."""
    results = [
        Result(_hint(v.numel() * v.element_size()), v.dtype)
        if isinstance(v, torch.Tensor)
        else None
        for v in _values(node)
    ]
    return results if any(result is not None for result in results) else []


def _hint(size: Any) -> int:
    """The size in the first call, without a guard on it; 0 if it depends on data."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint or 0)
    return int(size)


def _marks(
    node: torch.fx.Node, decider: Decider, results: list[Result | None]
) -> list[tuple[bool, torch.fx.Node]]:
    """Pairs (True if the policy saves the node, node), for an operator's node and its outputs'."""
    if isinstance(node.target, torch._ops.OpOverload):
        modules = tuple(_annotation(node).get(MODULE, "").split("\n"))
        decisions = decider.decide(qualified_name(node.target), results, modules)
    else:
        decisions = [SAVE] * len(results)  # a higher-order operator
    namespace = getattr(node.target, "namespace", "")
    saved = [namespace not in ("aten", "prims") or d not in MADE_AGAIN for d in decisions]
    if not isinstance(node.meta["val"], (tuple, list)):
        return [(saved[0], node)]
    return [(all(saved), node), *((saved[item.args[1]], item) for item in _items(node))]  # type: ignore[index]


def _save(nodes: Iterable[torch.fx.Node]) -> None:
    for node in nodes:
        for result in (node, *_items(node)):
            result.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _has_objects(nodes: list[torch.fx.Node]) -> bool:
    """True if the graph has inputs such as a DeviceMesh, as graphs with DTensors have. torch's
    partitioner fails to compile such a graph if it recomputes random numbers."""
    values = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    plain = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, type(None))
    return not all(isinstance(value, plain) for value in values)


def _is_small_on_cpu(node: torch.fx.Node) -> bool:
    on_cpu = all(v.device.type == "cpu" for v in _values(node) if isinstance(v, torch.Tensor))
    return on_cpu and sum(r.nbytes for r in _results(node) if r is not None) < _GENERATOR_STATE


def _needed_in_forward(nodes: list[torch.fx.Node]) -> set[torch.fx.Node]:
    """Nodes on which a result of forward depends."""
    results = nodes[-1].all_input_nodes
    found = {n for n in results if n.meta.get("partitioner_tag") != "is_backward"}
    for node in reversed(nodes):
        if node in found or node.meta.get("partitioner_tag") == "must_be_in_forward":
            found.update(node.all_input_nodes)
    return found


def _save_dependents(forward: list[torch.fx.Node], written: set[torch.fx.Node]) -> None:
    """Saves results that depend on inputs that the graph writes."""
    dependent = set(written)
    for node in forward:
        if not dependent.intersection(node.all_input_nodes):
            continue
        statistics = _statistics(node, dependent)
        if statistics is not None:
            _save(statistics)
            dependent.update(statistics)
            continue
        dependent.add(node)
        maker = node.args[0] if node.target is operator.getitem else node
        if _is_view(maker):
            node.meta.pop("recompute", None)  # a saved view of the input shows the new contents
        else:
            _save([node])


_BATCH_NORMS = (
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._batch_norm_with_update_functional.default,
)


def _statistics(node: torch.fx.Node, dependent: set[torch.fx.Node]) -> list[torch.fx.Node] | None:
    """The new running statistics, if `node` is a batch norm in training whose other results do not
    depend on `dependent`; else None."""
    is_training = node.target is _BATCH_NORMS[1] or (len(node.args) > 5 and node.args[5] is True)
    read = {n for n in node.args[:3] if isinstance(n, torch.fx.Node)}
    if node.target not in _BATCH_NORMS or not is_training or dependent & read:
        return None
    last = len(node.meta["val"])
    return [item for item in _items(node) if item.args[1] in (last - 2, last - 1)]


def _is_view(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    results = () if schema is None else schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in results)
