"""Models of transformers, with small configurations."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from budget_jobs.model_job import Made

WORDS = {"vocab_size": 101, "use_cache": False}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
TEXT = {**LAYERS, **ENDS, "vocab_size": 101, "max_position_embeddings": 64, "pad_token_id": 0}
DECODER = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
SPEECH = {
    **LAYERS,
    "vocab_size": 24,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "feat_extract_norm": "layer",
    "ctc_zero_infinity": True,
}
VISION = {**LAYERS, "image_size": 32, "patch_size": 8, "num_labels": 5}
SEQUENCES = {
    **WORDS,
    **ENDS,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


def words() -> dict[str, Tensor]:
    ids = torch.randint(3, 101, (4, 32))
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(5, (4,))}


def segments() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(5, (2, 32, 32))}


def sounds() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 1600), "labels": torch.randint(1, 20, (2, 3))}


def spectra() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 16, 64), "labels": torch.randint(3, 101, (2, 12))}


def captions() -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "input_ids": torch.randint(3, 101, (4, 16)),
        "return_loss": True,
    }


Batch = Callable[[], dict[str, Any]]
Settings = dict[str, Any]


def case(model: str, batch: Batch, *shared: Settings, **own: Any) -> tuple[str, Batch, Settings]:
    """The name of a class, a function that makes a batch, and the settings of the model."""
    return model, batch, functools.reduce(operator.or_, shared, {}) | own


PYRAMID = {"hidden_sizes": [8, 16, 24, 32], "depths": [2, 2, 2, 2], "num_labels": 5}
PARTS = {
    "text_config": {**TEXT, "num_hidden_layers": 3},
    "vision_config": {**VISION, "num_hidden_layers": 3},
}
HUGGING_FACE = {
    **{
        name: case(f"{name}ForCausalLM", words, DECODER, more)
        for name, more in {
            "Llama": {},
            "Mistral": {"sliding_window": 8},
            "Qwen2": {},
            "Qwen3": {"head_dim": 8},
            "Gemma": {"head_dim": 8},
            "Gemma2": {"head_dim": 8, "sliding_window": 8},
            "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
            "Phi": {},
            "Phi3": {},
            "Cohere": {},
            "Granite": {},
            "Olmo": {},
            "Olmo2": {},
            "Starcoder2": {},
            "StableLm": {},
            "GPTNeoX": {},
            "Persimmon": {},
            "Glm": {"head_dim": 8},
        }.items()
    },
    **{
        name: case(f"{name}ForMaskedLM", words, TEXT, more, type_vocab_size=2)
        for name, more in {
            "Bert": {},
            "Roberta": {},
            "Electra": {"embedding_size": 16},
            "Albert": {"embedding_size": 16},
            "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
            "MobileBert": {
                "true_hidden_size": 32,
                "intra_bottleneck_size": 32,
                "embedding_size": 16,
            },
            "ConvBert": {"embedding_size": 16},
            "RoFormer": {},
            "MPNet": {},
        }.items()
    },
    "DistilBert": case(
        "DistilBertForMaskedLM", words, vocab_size=101, dim=32, hidden_dim=64, n_layers=4, n_heads=4
    ),
    "GPT2": case(
        "GPT2LMHeadModel", words, WORDS, ENDS, n_embd=32, n_layer=4, n_head=4, n_positions=64
    ),
    "GPTNeo": case(
        "GPTNeoForCausalLM",
        words,
        WORDS,
        ENDS,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        max_position_embeddings=64,
    ),
    "OPT": case("OPTForCausalLM", words, TEXT, WORDS, ffn_dim=64, word_embed_proj_dim=32),
    "Bloom": case("BloomForCausalLM", words, WORDS, hidden_size=32, n_layer=4, n_head=4),
    "Falcon": case(
        "FalconForCausalLM",
        words,
        WORDS,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
    ),
    "Mpt": case("MptForCausalLM", words, WORDS, d_model=32, n_layers=4, n_heads=4),
    "Mamba": case(
        "MambaForCausalLM", words, WORDS, hidden_size=16, state_size=4, num_hidden_layers=3
    ),
    "T5": case(
        "T5ForConditionalGeneration",
        words,
        WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "Bart": case("BartForConditionalGeneration", words, SEQUENCES),
    "Pegasus": case("PegasusForConditionalGeneration", words, SEQUENCES),
    "Whisper": case(
        "WhisperForConditionalGeneration",
        spectra,
        SEQUENCES,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=64,
    ),
    "ViT": case("ViTForImageClassification", images, VISION),
    "DeiT": case("DeiTForImageClassification", images, VISION),
    "BEiT": case("BeitForImageClassification", images, VISION),
    "Dinov2": case("Dinov2ForImageClassification", images, VISION, mlp_ratio=2),
    "Swin": case(
        "SwinForImageClassification",
        images,
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
    ),
    "ConvNext": case(
        "ConvNextForImageClassification",
        images,
        num_stages=2,
        hidden_sizes=[16, 32],
        depths=[2, 3],
        num_labels=5,
    ),
    "ResNet": case(
        "ResNetForImageClassification",
        images,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_labels=5,
    ),
    "SegFormer": case(
        "SegformerForSemanticSegmentation",
        segments,
        PYRAMID,
        decoder_hidden_size=16,
        num_attention_heads=[1, 2, 2, 4],
    ),
    "PoolFormer": case("PoolFormerForImageClassification", images, PYRAMID),
    "CLIP": case("CLIPModel", captions, PARTS, projection_dim=16),
    "SigLIP": case("SiglipModel", captions, PARTS),
    "Wav2Vec2": case("Wav2Vec2ForCTC", sounds, SPEECH),
    "Hubert": case("HubertForCTC", sounds, SPEECH),
}


def build(transformers: Any, name: str) -> Any:
    model, _, settings = HUGGING_FACE[name]
    kind = getattr(transformers, model)
    return kind(kind.config_class(**settings))


def of_transformers(name: str) -> Callable[[], Made]:
    def made() -> Made:
        import transformers

        module, batch = build(transformers, name), HUGGING_FACE[name][1]
        return module, lambda: module(**batch()).loss

    return made
