"""Rule 6: ops that write without saying so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.exactness import assert_exact, each_policy, exact, leaves, like_eager, same_bits
from ebb_tests.stand_ins import kernel

pytestmark = pytest.mark.engines("exactness", "device", "checked")


def state(module: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in module.parameters()]
    return [*(t.clone() for t in module.state_dict().values()), *grads]


@each_policy
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_statistics_are_updated_once(policy, momentum, training, track):
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, momentum=momentum, track_running_stats=track),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 2, 1),
        nn.BatchNorm2d(2, momentum=momentum, track_running_stats=track),
    ).train(training)
    ours = copy.deepcopy(plain)
    ebb.apply(ours, policy, modules="")

    for step in range(3):
        x = torch.randn(4, 2, 5, 5)
        for module in (plain, ours):
            module(x).square().sum().backward()
        for name, (a, e) in enumerate(zip(state(ours), state(plain), strict=True)):
            assert same_bits(a, e), (step, name)


def test_sync_batch_norm_helpers_and_legit_overloads():
    weight = torch.ones(3, dtype=torch.float64)

    def program(x):
        mean, var = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
        out, *_ = torch.ops.aten._native_batch_norm_legit(
            x * 2, weight, None, mean, var, True, 0.1, 1e-5
        )
        out2, *_ = torch.ops.aten._batch_norm_with_update(out, weight, None, mean, var, 0.1, 1e-5)
        return (out2 * out).exp(), mean * 2, var * 2

    assert_exact(program, leaves((4, 3)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
@exact((8, 8))
def test_rrelu_noise_is_the_one_that_forward_drew(x, training, inplace):
    return nn.functional.rrelu(x * 1, training=training, inplace=inplace) * 2


@exact((4,))
def test_write_through_data_is_seen_by_backward_as_in_eager(x):
    h = x * 2
    out = h * h  # saves h
    h.data.mul_(3)  # no version bump: eager's backward sees it
    return out.sum() + h.exp().sum()


@pytest.fixture
def cudnn_rnn():
    """A stand-in on the CPU that draws from its dropout state and advances it, as cuDNN does."""

    def run(x, weights, stride, buffer, hx, cx, *rest):
        *_, state = rest
        kept = x * (state % 2)
        state.add_(1)
        return kept, hx * 1, hx * 1, hx * 1, x.new_empty(0)

    with kernel("_cudnn_rnn", run):
        yield torch.ops.aten._cudnn_rnn.default


@pytest.mark.parametrize("made", ["outside", "inside"])
@like_eager(ebb.policies.recompute_all)
def test_a_recurrent_layer_of_cudnn_draws_its_masks_once(region, cudnn_rnn, made):
    """No schema says that it writes to `dropout_state`, and no version moves."""
    state = torch.ones(3, dtype=torch.float64)
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
    with region:
        state = state if made == "outside" else state * 1
        y = x
        for _ in range(3):
            with torch.no_grad():
                dropped = cudnn_rnn(
                    y.detach() + 1, [], 0, None, x.detach(), None,
                    0, 3, 0, 1, False, 0.5, True, False, [], state,
                )[0]  # fmt: skip
            y = (y * dropped).sin()
        loss = y.sum()
    return [*torch.autograd.grad(loss, x), state]
