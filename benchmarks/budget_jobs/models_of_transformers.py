"""Models of transformers, with small configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from budget_jobs.model_job import Made

TEXT = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


DECODER = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
SPEECH = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
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


VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}


SEQUENCES = {
    "vocab_size": 101,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}


def words(**more: Any) -> dict[str, Tensor]:
    ids = torch.randint(3, 101, (4, 32))
    return {"input_ids": ids, "labels": ids}


def images(**more: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(5, (4,))}


def segments(**more: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(5, (2, 32, 32))}


def sounds(**more: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 1600), "labels": torch.randint(1, 20, (2, 3))}


def spectra(**more: Any) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 16, 64), "labels": torch.randint(3, 101, (2, 12))}


def captions(**more: Any) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "input_ids": torch.randint(3, 101, (4, 16)),
        "return_loss": True,
    }


HUGGING_FACE: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    # name: (model, config, batch, settings)
    **{
        name: (f"{name}ForCausalLM", f"{name}Config", words, {**DECODER, **more})
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
        name: (f"{name}ForMaskedLM", f"{name}Config", words, {**TEXT, "type_vocab_size": 2, **more})
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
    "DistilBert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        words,
        {"vocab_size": 101, "dim": 32, "hidden_dim": 64, "n_layers": 4, "n_heads": 4},
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        words,
        {
            "vocab_size": 101,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 64,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPTNeo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        words,
        {
            "vocab_size": 101,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "max_position_embeddings": 64,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        words,
        {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False},
    ),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        words,
        {"vocab_size": 101, "hidden_size": 32, "n_layer": 4, "n_head": 4, "use_cache": False},
    ),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        words,
        {
            "vocab_size": 101,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "use_cache": False,
        },
    ),
    "Mpt": (
        "MptForCausalLM",
        "MptConfig",
        words,
        {"vocab_size": 101, "d_model": 32, "n_layers": 4, "n_heads": 4, "use_cache": False},
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        words,
        {
            "vocab_size": 101,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 3,
            "use_cache": False,
        },
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        words,
        {
            "vocab_size": 101,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    ),
    "Bart": ("BartForConditionalGeneration", "BartConfig", words, SEQUENCES),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", words, SEQUENCES),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        spectra,
        {**SEQUENCES, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
    ),
    "ViT": ("ViTForImageClassification", "ViTConfig", images, VISION),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", images, VISION),
    "BEiT": ("BeitForImageClassification", "BeitConfig", images, VISION),
    "Dinov2": ("Dinov2ForImageClassification", "Dinov2Config", images, {**VISION, "mlp_ratio": 2}),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        images,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 5,
        },
    ),
    "ConvNext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        images,
        {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 3], "num_labels": 5},
    ),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        images,
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 5},
    ),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        segments,
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [2, 2, 2, 2],
            "decoder_hidden_size": 16,
            "num_attention_heads": [1, 2, 2, 4],
            "num_labels": 5,
        },
    ),
    "PoolFormer": (
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        images,
        {"hidden_sizes": [8, 16, 24, 32], "depths": [2, 2, 2, 2], "num_labels": 5},
    ),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        captions,
        {
            "text_config": {**TEXT, "num_hidden_layers": 3},
            "vision_config": {**VISION, "num_hidden_layers": 3},
            "projection_dim": 16,
        },
    ),
    "SigLIP": (
        "SiglipModel",
        "SiglipConfig",
        captions,
        {
            "text_config": {**TEXT, "num_hidden_layers": 3},
            "vision_config": {**VISION, "num_hidden_layers": 3},
        },
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        sounds,
        SPEECH,
    ),
    "Hubert": (
        "HubertForCTC",
        "HubertConfig",
        sounds,
        SPEECH,
    ),
}


def of_transformers(name: str) -> Callable[[], Made]:
    def made() -> Made:
        import transformers

        kind, config, batch, settings = HUGGING_FACE[name]
        module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return module, lambda: module(**batch()).loss

    return made
