"""PEFT: LoRA on a model with gradient checkpointing."""

from __future__ import annotations

import pytest

from ebb_tests.frameworks.own_checkpointing import check_regions, tiny_llama

peft = pytest.importorskip("peft", reason="needs peft")


def lora(*, checkpoints):
    def make():
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        return tiny_llama(checkpoints, wrap=lambda model: peft.get_peft_model(model, config))

    return make


def test_lora_with_gradient_checkpointing():
    check_regions(lora(checkpoints=False), lora(checkpoints=True), regions=4)
