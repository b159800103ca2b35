"""Small models of many libraries, with the checkpointing that each library offers for them."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Own = str | dict[str, Any] | Callable[[Any], Any] | None
Batch = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A model of a library.

    Attributes:
        make: makes it, given the library's module and the keywords in `own`.
        batch: its positional arguments as a tuple, or its keywords as a dictionary.
        own: the library's checkpointing: a method of the model, keywords of `make`, or a function
            of the model; None if it has none.
        loss: of what the model returns.
        why: why ebb saves too little, if so.
    """

    library: str
    name: str
    make: Callable[..., nn.Module]
    batch: Batch
    own: Own = None
    why: str = ""

    def build(self, with_own: bool) -> nn.Module:
        torch.manual_seed(0)
        library = importlib.import_module(MODULES.get(self.library, self.library))
        keywords = self.own if with_own and isinstance(self.own, dict) else {}
        model = self.make(library, **keywords).train()
        if with_own and isinstance(self.own, str):
            getattr(model, self.own)()
        elif with_own and callable(self.own):
            self.own(model)
        return model


MODULES = {
    "torch": "torch.nn",
    "open_clip_torch": "open_clip",
    "segmentation-models-pytorch": "segmentation_models_pytorch",
    "sentence-transformers": "sentence_transformers",
    "x-transformers": "x_transformers",
    "vit-pytorch": "vit_pytorch",
    "torch_geometric": "torch_geometric.nn",
    "denoising-diffusion-pytorch": "denoising_diffusion_pytorch",
    "neuraloperator": "neuralop.models",
    "efficientnet-pytorch": "efficientnet_pytorch",
    "monai": "monai.networks.nets",
    "lightning": "lightning.pytorch.demos.transformer",
    "torchaudio": "torchaudio.models",
    "kornia": "kornia.models.vit",
}
CASES: list[Case] = []
# Libraries' checkpointing of larger units than ebb's blocks.
LARGER = (
    "the library checkpoints {} as one unit, which holds less; recomputing the unit at once gives "
    "it a higher peak"
)


def add(
    library: str, name: str, make: Callable[..., Any], batch: Batch, own: Own = None, why: str = ""
) -> None:
    CASES.append(Case(library, name, make, batch, own, why))


def images(count: int, size: int, channels: int = 3) -> Batch:
    return lambda: (torch.randn(count, channels, size, size),)


def noise(*shape: int) -> Batch:
    return lambda: (torch.randn(shape),)


def words(count: int, length: int, vocabulary: int = 100) -> Batch:
    return lambda: (torch.randint(vocabulary, (count, length)),)


# torch --------------------------------------------------------------------------------------------

add(
    "torch",
    "TransformerEncoder",
    lambda torch_nn: torch_nn.TransformerEncoder(
        torch_nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 6
    ),
    noise(8, 64, 64),
)
add(
    "torch",
    "Transformer",
    lambda torch_nn: torch_nn.Transformer(64, 4, 3, 3, 256, batch_first=True),
    lambda: (torch.randn(8, 64, 64), torch.randn(8, 64, 64)),
)
add(
    "torch",
    "Sequential of Sequentials",
    lambda torch_nn: torch_nn.Sequential(
        *(
            torch_nn.Sequential(torch_nn.Linear(64, 256), torch_nn.GELU(), torch_nn.Linear(256, 64))
            for _ in range(6)
        )
    ),
    noise(512, 64),
)


# torchvision --------------------------------------------------------------------------------------


def vision(name: str, batch: Batch, own: Own = None, why: str = "", **settings: Any) -> None:
    def make(torchvision: Any, **more: Any) -> Any:
        return torchvision.models.get_model(name, weights=None, **settings, **more)

    add("torchvision", name, make, batch, own, why)


def detection(name: str, **settings: Any) -> None:
    def batch() -> Any:
        box = torch.tensor([[8.0, 8.0, 60.0, 70.0], [20.0, 30.0, 90.0, 80.0]])
        mask = torch.zeros(2, 96, 96, dtype=torch.uint8)
        mask[:, 20:60, 20:60] = 1
        target = {"boxes": box, "labels": torch.tensor([1, 2]), "masks": mask}
        return [torch.rand(3, 96, 96), torch.rand(3, 96, 96)], [target, target]

    vision(name, batch, weights_backbone=None, min_size=96, max_size=96, num_classes=3, **settings)


vision("resnet18", images(8, 64))
vision("resnet50", images(4, 64))
vision("wide_resnet50_2", images(2, 64))
vision("vgg11_bn", images(2, 64), num_classes=10)
vision("densenet121", images(4, 64), {"memory_efficient": True})
vision("mobilenet_v2", images(4, 64))
vision("mobilenet_v3_small", images(8, 64))
vision("efficientnet_b0", images(4, 64))
vision("regnet_y_400mf", images(4, 64))
vision("shufflenet_v2_x1_0", images(8, 64))
vision("mnasnet0_5", images(8, 64))
vision(
    "squeezenet1_1",
    images(8, 64),
    why="the stem (a convolution, a ReLU and a pooling beside the blocks) holds 29 % of the bytes; "
    "half of the others are outputs of blocks, which the next block needs",
)
vision("googlenet", images(4, 64), aux_logits=False, init_weights=False)
vision("inception_v3", images(2, 128), aux_logits=False, init_weights=False)
vision("convnext_tiny", images(2, 64))
vision("swin_t", images(2, 64))
add(
    "torchvision",
    "VisionTransformer",
    lambda of: of.models.VisionTransformer(64, 8, 4, 4, 64, 256),
    images(4, 64),
)
vision("fcn_resnet50", images(2, 64), weights_backbone=None)
vision("deeplabv3_mobilenet_v3_large", images(2, 64), weights_backbone=None)
vision("lraspp_mobilenet_v3_large", images(4, 64), weights_backbone=None)
vision("r3d_18", noise(1, 3, 8, 48, 48))
vision("raft_small", lambda: (torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128), 3))
detection("fasterrcnn_mobilenet_v3_large_fpn")
detection("maskrcnn_resnet50_fpn")
detection("retinanet_resnet50_fpn")

# timm ---------------------------------------------------------------------------------------------


def timm(name: str, batch: Batch, **settings: Any) -> None:
    own = None if name == "hrnet_w18_small" else "set_grad_checkpointing"
    why = LARGER.format("a stage") if name in ("mobilevit_xxs", "nf_resnet26") else ""
    add("timm", name, lambda of: of.create_model(name, **settings), batch, own, why)


timm("resnet26", images(4, 64))
timm("vit_tiny_patch16_224", images(8, 96), img_size=96)
timm("efficientnet_b0", images(4, 64))
timm("convnext_atto", images(8, 64))
timm("swin_tiny_patch4_window7_224", images(2, 56), img_size=56)
timm("mixer_s32_224", images(4, 224))
timm("coatnet_nano_rw_224", images(2, 64), img_size=64)
timm("mobilevit_xxs", images(4, 64))
timm("regnety_002", images(8, 64))
timm("hrnet_w18_small", images(2, 64))
timm("nf_resnet26", images(4, 64))
timm("densenet121", images(4, 64))

# transformers -------------------------------------------------------------------------------------

TRANSFORMERS = (
    "Llama Gemma2 Mixtral Bert Albert DebertaV2 DistilBert GPT2 Bloom Mamba T5 Bart Whisper ViT"
    " Swin ConvNext ResNet SegFormer PoolFormer CLIP Wav2Vec2"
)
WHY_OF_TRANSFORMERS = {
    "Swin": LARGER.format("a stage"),
    "T5": "regions keep the constants from which T5 computes indices of relative positions, 8 "
    "bytes for each pair of positions, and one tensor more than checkpointing does",
}


def of_transformers(name: str) -> None:
    from budget_job_models import HUGGING_FACE

    kind, config, batch, settings = HUGGING_FACE[name]

    def make(transformers: Any) -> Any:
        return getattr(transformers, kind)(getattr(transformers, config)(**settings))

    has_none = ("Albert", "ConvNext", "ResNet", "PoolFormer")
    own = None if name in has_none else "gradient_checkpointing_enable"
    add("transformers", name, make, batch, own, WHY_OF_TRANSFORMERS.get(name, ""))


for _name in TRANSFORMERS.split():
    of_transformers(_name)

# diffusers ----------------------------------------------------------------------------------------


def diffusers(name: str, batch: Batch, why: str = "", **settings: Any) -> None:
    def make(of: Any) -> Any:
        return getattr(of, name)(**settings)

    add("diffusers", name, make, batch, "enable_gradient_checkpointing", why)


def steps(count: int = 2) -> Tensor:
    return torch.randint(1000, (count,))


diffusers(
    "UNet2DModel",
    lambda: (torch.randn(2, 3, 32, 32), steps()),
    sample_size=32,
    block_out_channels=(16, 32, 32),
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
diffusers(
    "UNet2DConditionModel",
    lambda: (torch.randn(2, 4, 32, 32), steps(), torch.randn(2, 8, 32)),
    sample_size=32,
    block_out_channels=(16, 32, 32),
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    norm_num_groups=8,
    cross_attention_dim=32,
)
diffusers(
    "AutoencoderKL",
    images(2, 32),
    LARGER.format("a down, middle or up block"),
    block_out_channels=(16, 32),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    layers_per_block=2,
    norm_num_groups=8,
)
diffusers(
    "DiTTransformer2DModel",
    lambda: {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "timestep": steps(),
        "class_labels": torch.tensor([1, 2]),
    },
    num_attention_heads=4,
    attention_head_dim=16,
    num_layers=4,
    sample_size=16,
)
diffusers(
    "SD3Transformer2DModel",
    lambda: (torch.randn(2, 4, 16, 16), torch.randn(2, 8, 32), torch.randn(2, 16), steps()),
    sample_size=16,
    in_channels=4,
    out_channels=4,
    num_layers=4,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    caption_projection_dim=64,
    pooled_projection_dim=16,
    pos_embed_max_size=16,
)
diffusers(
    "FluxTransformer2DModel",
    lambda: {
        "hidden_states": torch.randn(2, 64, 16),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.rand(2),
        "img_ids": torch.randint(8, (64, 3)),
        "txt_ids": torch.zeros(8, 3),
    },
    in_channels=16,
    num_layers=2,
    num_single_layers=4,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    pooled_projection_dim=16,
    axes_dims_rope=(4, 6, 6),
)

# segmentation-models-pytorch ----------------------------------------------------------------------


def segmentation(kind: str, encoder: str = "resnet18", size: int = 64) -> None:
    def make(of: Any) -> Any:
        return getattr(of, kind)(encoder, encoder_weights=None, classes=3)

    add("segmentation-models-pytorch", f"{kind}, {encoder}", make, images(4, size))


segmentation("Unet")
segmentation("UnetPlusPlus")
segmentation("FPN", "efficientnet-b0")
segmentation("DeepLabV3Plus", "mobilenet_v2")
segmentation("Segformer", "mit_b0")
segmentation("Linknet", "timm-regnety_002")

# sentence-transformers ----------------------------------------------------------------------------


TEXT_OF_BERT = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
}


def sentences(of: Any) -> Any:
    """A small BERT with pooling, from a folder, as a trained one would be."""
    from sentence_transformers import models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        vocabulary = os.path.join(folder, "vocab.txt")
        with open(vocabulary, "w") as file:
            file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
        BertTokenizerFast(vocabulary).save_pretrained(folder)
        BertModel(BertConfig(**TEXT_OF_BERT)).save_pretrained(folder)
        parts = [models.Transformer(folder), models.Pooling(64), models.Dense(64, 32)]
        return of.SentenceTransformer(modules=parts, device="cpu")


def sentence_batch() -> Any:
    ids = torch.randint(5, 13, (16, 48))
    return ({"input_ids": ids, "attention_mask": torch.ones_like(ids)},)


add(
    "sentence-transformers",
    "SentenceTransformer",
    sentences,
    sentence_batch,
    "gradient_checkpointing_enable",
)

# torchaudio ---------------------------------------------------------------------------------------

add(
    "torchaudio",
    "Conformer",
    lambda of: of.Conformer(32, 4, 64, 4, 15),
    lambda: (torch.randn(4, 64, 32), torch.full((4,), 64)),
)
add(
    "torchaudio",
    "Emformer",
    lambda of: of.Emformer(32, 4, 64, 4, 8, right_context_length=2),
    lambda: (torch.randn(4, 66, 32), torch.full((4,), 66)),
)
add(
    "torchaudio",
    "ConvTasNet",
    lambda of: of.ConvTasNet(2, 8, 64, 3, 32, 64, 4, 2),
    noise(2, 1, 2000),
)
add(
    "torchaudio",
    "wav2vec2_base",
    lambda of: of.wav2vec2_base(encoder_layer_drop=0.0, aux_num_out=20),
    noise(1, 8000),
)
add("torchaudio", "Wav2Letter", lambda of: of.Wav2Letter(20, "mfcc", 13), noise(4, 13, 200))
add(
    "torchaudio",
    "HDemucs",
    lambda of: of.HDemucs(["a", "b"], nfft=1024, depth=4, channels=8),
    noise(1, 2, 16384),
)
add("torchaudio", "DeepSpeech", lambda of: of.DeepSpeech(32, 128, 20), noise(4, 1, 100, 32))

# open_clip ----------------------------------------------------------------------------------------

VISION = {"layers": 4, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 48}
TEXT = {"context_length": 32, "vocab_size": 100, "width": 64, "heads": 4, "layers": 4}


def pairs(size: int = 48) -> Any:
    return torch.randn(4, 3, size, size), torch.randint(1, 100, (4, 32))


def open_clip(name: str, make: Callable[[Any], Any], size: int = 48) -> None:
    add("open_clip_torch", name, make, lambda: pairs(size), "set_grad_checkpointing")


open_clip("CLIP", lambda of: of.CLIP(32, VISION, TEXT))
open_clip("CustomTextCLIP", lambda of: of.CustomTextCLIP(32, VISION, TEXT))
open_clip(
    "CLIP with a ResNet",
    lambda of: of.CLIP(32, {**VISION, "layers": (1, 1, 1, 1), "width": 16, "image_size": 64}, TEXT),
    64,
)

# monai --------------------------------------------------------------------------------------------

add(
    "monai",
    "UNet",
    lambda of: of.UNet(2, 1, 2, (8, 16, 32, 64), (2, 2, 2), num_res_units=2),
    images(4, 64, 1),
)
add("monai", "BasicUNet", lambda of: of.BasicUNet(2, 1, 2, (8, 8, 16, 32, 32, 8)), images(4, 64, 1))
add("monai", "SegResNet", lambda of: of.SegResNet(2, 8, 1, 2), images(4, 64, 1))
add(
    "monai",
    "AttentionUnet",
    lambda of: of.AttentionUnet(2, 1, 2, (8, 16, 32), (2, 2)),
    images(4, 64, 1),
)
add(
    "monai",
    "DynUNet",
    lambda of: of.DynUNet(2, 1, 2, (3, 3, 3, 3), (1, 2, 2, 2), (2, 2, 2), filters=(8, 16, 32, 64)),
    images(4, 64, 1),
)
add(
    "monai",
    "UNETR",
    lambda of: of.UNETR(1, 2, 64, 8, 64, 128, 4, spatial_dims=2),
    images(2, 64, 1),
)
add(
    "monai",
    "SwinUNETR",
    lambda of, **more: of.SwinUNETR(1, 2, feature_size=12, spatial_dims=2, window_size=4, **more),
    images(2, 64, 1),
    {"use_checkpoint": True},
)
add("monai", "DenseNet121", lambda of: of.DenseNet121(2, 1, 3), images(2, 64, 1))
add(
    "monai",
    "DiffusionModelUNet",
    lambda of: of.DiffusionModelUNet(2, 1, 1, 1, (16, 32, 32), (False, True, True), 8),
    lambda: (torch.randn(2, 1, 32, 32), steps()),
)
add(
    "monai",
    "AutoencoderKL",
    lambda of, **more: of.AutoencoderKL(
        2, 1, 1, (1, 1), (16, 32), (False, True), norm_num_groups=8, **more
    ),
    images(2, 32, 1),
    {"use_checkpoint": True},
    LARGER.format("the encoder or the decoder"),
)

# peft ---------------------------------------------------------------------------------------------


def adapted(of: Any) -> Any:
    import transformers
    from budget_job_models import DECODER

    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
    return of.get_peft_model(base, of.LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"]))


def checkpoint_adapted(model: Any) -> None:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()


def decoder_batch() -> Any:
    ids = torch.randint(3, 101, (4, 32))
    return {"input_ids": ids, "labels": ids}


add("peft", "Llama with LoRA", adapted, decoder_batch, checkpoint_adapted)

# x-transformers -----------------------------------------------------------------------------------

add(
    "x-transformers",
    "decoder",
    lambda of: of.TransformerWrapper(
        num_tokens=100,
        max_seq_len=64,
        attn_layers=of.Decoder(dim=64, depth=4, heads=4, rotary_pos_emb=True),
    ),
    words(4, 64),
)
add(
    "x-transformers",
    "encoder and decoder",
    lambda of: of.XTransformer(
        dim=64,
        enc_num_tokens=100,
        enc_depth=3,
        enc_heads=4,
        enc_max_seq_len=64,
        dec_num_tokens=100,
        dec_depth=3,
        dec_heads=4,
        dec_max_seq_len=64,
    ),
    lambda: (torch.randint(100, (4, 64)), torch.randint(100, (4, 64))),
)
add(
    "x-transformers",
    "vision",
    lambda of: of.ViTransformerWrapper(
        image_size=64, patch_size=8, attn_layers=of.Encoder(dim=64, depth=4, heads=4)
    ),
    images(4, 64),
)

# vit-pytorch --------------------------------------------------------------------------------------


def vit(name: str, module: str, size: int, batch: Batch | None = None, **settings: Any) -> None:
    def make(of: Any) -> Any:
        part = importlib.import_module(f"vit_pytorch.{module}")
        return getattr(part, name)(num_classes=10, **settings)

    add("vit-pytorch", name, make, batch or images(4, size))


SIZES = {"dim": 64, "heads": 4, "mlp_dim": 128, "dim_head": 16}
vit("ViT", "vit", 64, image_size=64, patch_size=8, depth=4, **SIZES)
vit("CaiT", "cait", 64, image_size=64, patch_size=8, depth=3, cls_depth=2, **SIZES)
vit("CvT", "cvt", 64, s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=64, s3_depth=3)
vit("MaxViT", "max_vit", 56, dim=16, depth=(1, 2), dim_head=8)
vit(
    "ViViT",
    "vivit",
    32,
    noise(2, 3, 4, 32, 32),
    image_size=32,
    image_patch_size=8,
    frames=4,
    frame_patch_size=2,
    spatial_depth=2,
    temporal_depth=2,
    **SIZES,
)

# Others -------------------------------------------------------------------------------------------


def graph() -> Any:
    return torch.randn(256, 16), torch.randint(256, (2, 1024))


class DeepGcn(nn.Module):
    """As in the library's example: layers of its class in a list."""

    def __init__(self, of: Any, **more: Any) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.layers = nn.ModuleList(
            of.DeepGCNLayer(of.GENConv(64, 64), nn.LayerNorm(64), nn.ReLU(), **more)
            for _ in range(4)
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edges)
        return x


add("torch_geometric", "GAT", lambda of: of.GAT(16, 64, 4, heads=4), graph)
add("torch_geometric", "GIN", lambda of: of.GIN(16, 64, 4), graph)
add("torch_geometric", "DeepGCNLayer", DeepGcn, graph, {"ckpt_grad": True})
add(
    "lightning",
    "Transformer",
    lambda of: of.LightningTransformer(100),
    lambda: (torch.randint(100, (4, 32)), torch.randint(100, (4, 32))),
)
add("conformer", "Conformer", lambda of: of.Conformer(64, depth=3, heads=4), noise(4, 64, 64))
add(
    "denoising-diffusion-pytorch",
    "Unet",
    lambda of: of.Unet(16, dim_mults=(1, 2, 4), flash_attn=False),
    lambda: (torch.randn(2, 3, 32, 32), steps()),
)
add("neuraloperator", "FNO", lambda of: of.FNO((8, 8), 1, 1, 16, n_layers=4), images(4, 32, 1))
add(
    "efficientnet-pytorch",
    "EfficientNet-B0",
    lambda of: of.EfficientNet.from_name("efficientnet-b0"),
    images(4, 64),
)
add("encodec", "encoder", lambda of: of.modules.SEANetEncoder(n_filters=8), noise(1, 1, 8000))
add(
    "kornia",
    "VisionTransformer",
    lambda of: of.VisionTransformer(64, 8, embed_dim=64, depth=4, num_heads=4),
    images(4, 64),
)
