"""The drop-in for torch.utils.checkpoint.checkpoint."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

import ebb


def block(x, w, scale=1.0):
    return torch.nn.functional.dropout((x @ w).exp() * scale, 0.5).sin()


def test_gradients_and_one_call():
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    calls = []

    def counted(x, w, scale):
        calls.append(1)
        return block(x, w, scale)

    torch.manual_seed(0)
    block(x, w, 0.5).sum().backward()
    expected, w.grad = w.grad, None
    for policy in (None, ebb.policies.save_matmuls):
        torch.manual_seed(0)
        ebb.checkpoint(counted, x, w, scale=0.5, policy=policy).sum().backward()
        assert torch.equal(w.grad, expected)
        w.grad = None

    assert calls == [1, 1]
    assert any(name.endswith("counted") for name in ebb.stats()["regions"])


def test_every_keyword_of_torch_is_accepted():
    parameters = inspect.signature(torch_checkpoint.checkpoint).parameters
    ours = inspect.signature(ebb.checkpoint).parameters
    keywords = [
        n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL and n != "function"
    ]

    later = {n: parameters[n].default for n in set(keywords) - set(ours) if n != "kwargs"}
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    for reentrant in (True, False, None):
        ebb.checkpoint(
            block,
            x,
            w,
            use_reentrant=reentrant,
            preserve_rng_state=False,
            determinism_check="none",
            debug=True,
            early_stop=False,
            context_fn=torch_checkpoint.noop_context_fn,
            **later,
        ).sum().backward()


mm = torch.ops.aten.mm.default


def saves_mm(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is mm else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [[mm], saves_mm], ids=["list", "function"])
def test_a_context_fn_saves_what_it_says(policy):
    context_fn = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    torch.manual_seed(0)
    block(x, w).sum().backward()
    expected, w.grad = w.grad, None
    ebb.checkpoint(block, x, w).sum().backward()
    everything, w.grad = ebb.stats()["total"]["ops_replayed"], None

    for _ in range(2):  # the second call reuses the answers
        ebb.reset_stats()
        torch.manual_seed(0)
        ebb.checkpoint(block, x, w, context_fn=context_fn).sum().backward()
        assert torch.equal(w.grad, expected)
        w.grad = None
        assert ebb.stats()["total"]["bytes_saved"] >= 3 * 4 * 4  # the product
        assert ebb.stats()["total"]["ops_replayed"] < everything


def test_a_policy_and_a_context_fn_exclude_each_other():
    context_fn = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [mm])
    with pytest.raises(ValueError, match="a policy or a context_fn, not both"):
        ebb.checkpoint(
            block,
            torch.ones(2, 2),
            torch.ones(2, 2),
            policy=ebb.policies.save_all,
            context_fn=context_fn,
        )


def test_a_compiled_checkpoint_takes_a_context_fn(fresh_dynamo):
    context_fn = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [mm])
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)

    def program(x, w):
        return ebb.checkpoint(lambda x, w: (x @ w).exp().sin(), x, w, context_fn=context_fn)

    program(x, w).sum().backward()
    expected, w.grad = w.grad, None
    torch.compile(program, backend="aot_eager", fullgraph=True)(x, w).sum().backward()
    assert torch.equal(w.grad, expected)
