"""Megatron-Core's GPT with its layers in regions, on two ranks.

Megatron-Core runs collectives in place, shares one global buffer between layers, and switches
between random generators with its own tracker.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs Megatron-Core")

import ebb
from ebb._launch import takeover
from ebb_tests.frameworks import megatron_on_cpu
from ebb_tests.ranks.comparing import POLICIES, assert_exact, difference_of, run
from ebb_tests.ranks.two_ranks import on_two_ranks

STEPS, MICROBATCHES, ROWS, TOKENS, WORDS = 3, 2, 2, 8, 32

TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
KINDS = {
    "not parallel": {},
    "tensor": TENSOR,
    "sequence": SEQUENCE,
    "pipeline": {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
    "expert": EXPERTS | {"expert_model_parallel_size": 2},
    "sequence and expert": EXPERTS | SEQUENCE,
}


@pytest.mark.parametrize("kind", KINDS)
@on_two_ranks
def test_layers(kind):
    from megatron.core import parallel_state

    settings = KINDS[kind]
    sizes = {name: size for name, size in settings.items() if name.endswith("_parallel_size")}

    def train(inside):
        model = gpt(settings)
        inside.apply(model, "decoder.layers.*")
        return train_steps(model)

    with pytest.MonkeyPatch.context() as monkeypatch:
        megatron_on_cpu.stub(monkeypatch)
        parallel_state.initialize_model_parallel(**sizes)
        try:
            assert_exact(train)
        finally:
            parallel_state.destroy_model_parallel()


# Megatron's own recomputation, which EBB=1 takes over.
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


OWN = [
    ("not parallel", FULL),
    ("not parallel", BLOCK),
    ("not parallel", selective("core_attn", "layernorm")),
    ("tensor", FULL),
    ("tensor", selective("core_attn", "layernorm")),
    ("sequence", FULL),
    ("sequence", selective("layernorm")),
    ("pipeline", FULL),
    ("expert", FULL),
    ("expert", selective("moe", "layernorm")),
    ("sequence and expert", FULL),
    ("sequence and expert", selective("layernorm")),
]


@pytest.mark.parametrize("policy", ["recompute_all", "recompute_collectives"])
@pytest.mark.parametrize(("kind", "own"), OWN)
@on_two_ranks
def test_own_recomputation_in_regions(kind, own, policy):
    from megatron.core import parallel_state

    settings = KINDS[kind]
    sizes = {name: size for name, size in settings.items() if name.endswith("_parallel_size")}

    with pytest.MonkeyPatch.context() as monkeypatch:
        megatron_on_cpu.stub(monkeypatch)
        parallel_state.initialize_model_parallel(**sizes)
        try:
            expected = run(lambda _: train_steps(gpt(settings)), None)
            takeover.install(POLICIES[policy], "1", ())
            ebb.reset_stats()
            actual = run(lambda _: train_steps(gpt(settings | own)), None)
        finally:
            takeover.remove()
            parallel_state.destroy_model_parallel()

    assert not difference_of(actual, expected)
    assert ebb.stats()["total"]["ops_replayed"] > 0


def gpt(settings):
    """Builds a GPT with the same weights each time, and resets Megatron's global state."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.destroy_global_memory_buffer()
    parallel_state._set_global_memory_buffer()
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        **settings,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        vocab_size=WORDS,
        max_sequence_length=TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def train_steps(model):
    """Trains, and returns this rank's losses, gradients and parameters of each step by name."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        for number, loss in enumerate(losses):
            results[f"{step} loss {number}"] = loss["loss"]
        for name, parameter in model.named_parameters():
            results[f"{step} gradient of {name}"] = parameter.grad
        optimizer.step()
        for name, parameter in model.named_parameters():
            results[f"{step} {name}"] = parameter.detach().clone()
    return results


def forward_step(data, model):
    words = next(data)
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    hidden = torch.ones(1, 1, TOKENS, TOKENS).triu(1) > 0
    output = model(words[:, :-1], positions, hidden, labels=words[:, 1:])

    def loss_of(output):
        loss = output.mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of


def batches(step):
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        yield torch.randint(WORDS, (ROWS, TOKENS + 1), generator=generator)
