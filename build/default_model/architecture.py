"""The default checkpoint's shape and how its folder is written.

An InternVL model (HF-native `InternVLForConditionalGeneration`): a ViT with patches of 28 pixels, pixel shuffle 0.5,
hence 64 tokens a 448x448 tile, and a Qwen2 text body.  Hidden and intermediate sizes are multiples of 128 and heads are
64 wide.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVisionConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

TILE = 448
PATCH = 28
TOKENS_PER_TILE = (TILE // PATCH // 2) ** 2
VOCABULARY = 640
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<video>",
)
PAD, IM_START, IM_END, IMG_START, IMG_END, IMG_CONTEXT, _VIDEO = range(len(SPECIAL_TOKENS))
IMAGE_MEAN = (0.485, 0.456, 0.406)
IMAGE_STD = (0.229, 0.224, 0.225)
MAX_PARAMETERS = 3_900_000
MAX_FOLDER_BYTES = 8_000_000

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n"
    "{% if m['content'] is string %}{{m['content']}}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] in ['image','image_url'] %}<IMG_CONTEXT>\n{% else %}{{c['text']}}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_config() -> InternVLConfig:
    """The default model's configuration."""
    text = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=PAD,
        architectures=["Qwen2ForCausalLM"],
    )
    vision = InternVLVisionConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=[TILE, TILE],
        patch_size=[PATCH, PATCH],
        attention_bias=True,
        norm_type="layer_norm",
        use_absolute_position_embeddings=True,
        use_mean_pooling=True,
        layer_scale_init_value=1.0,  # 0.1 is for deep towers; four layers learn faster without it
    )
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMG_CONTEXT,
        image_seq_length=TOKENS_PER_TILE,
        downsample_ratio=0.5,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        architectures=["InternVLForConditionalGeneration"],
        dtype="bfloat16",
    )


def build_model(seed: int = 0) -> InternVLForConditionalGeneration:
    """A float32 model with fresh weights drawn from `seed`."""
    torch.manual_seed(seed)
    model = InternVLForConditionalGeneration(build_config()).float()
    embeddings = model.model.vision_tower.embeddings
    # transformers starts the position table at zero; a small random start lets attention tell places apart at once.
    nn.init.normal_(embeddings.position_embeddings, std=0.02)
    nn.init.normal_(embeddings.cls_token, std=0.02)
    return model


def wrap_tokenizer(tokenizer: object) -> PreTrainedTokenizerFast:
    """A `tokenizers.Tokenizer` with the special-token roles that the processor asks for."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )


class StillProcessor(InternVLProcessor):
    """`InternVLProcessor` without its video half.

    `AutoProcessor` builds a video processor even for still pictures and refuses to without torchvision; this is the
    same code for pictures (transformers' own Pillow path) and works on every machine.
    """

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def load_processor(folder: str | Path) -> InternVLProcessor:
    """The checkpoint's processor, on machines with and without torchvision."""
    folder = Path(folder)
    settings = json.loads((folder / "processor_config.json").read_text())
    return StillProcessor(
        GotOcr2ImageProcessorPil(**settings["image_processor"]),
        AutoTokenizer.from_pretrained(folder),
        None,
        image_seq_length=settings["image_seq_length"],
        chat_template=(folder / "chat_template.jinja").read_text(),
    )


def processor_settings() -> dict[str, object]:
    """What `processor_config.json` holds, written here because transformers can write it only with torchvision."""
    common = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": TILE, "width": TILE},
    }
    image = {
        **common,
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 12,
        "image_processor_type": "GotOcr2ImageProcessor",
    }
    video = {
        **common,
        "do_sample_frames": False,
        "initial_shift": True,
        "return_metadata": False,
        "video_processor_type": "InternVLVideoProcessor",
    }
    return {
        "image_processor": image,
        "image_seq_length": TOKENS_PER_TILE,
        "processor_class": "InternVLProcessor",
        "video_processor": video,
    }


def save_tokenizer(folder: str | Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write tokenizer, chat template and processor settings."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "processor_class": "InternVLProcessor"}, indent=2) + "\n"
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "processor_config.json").write_text(json.dumps(processor_settings(), indent=2) + "\n")


def save_model(folder: str | Path, model: InternVLForConditionalGeneration) -> None:
    """Write config, generation config and bfloat16 weights.  The given model keeps its precision."""
    copy = InternVLForConditionalGeneration(build_config())
    copy.load_state_dict(model.state_dict())
    copy.bfloat16()
    copy.generation_config = GenerationConfig(eos_token_id=IM_END, pad_token_id=PAD)
    copy.save_pretrained(folder)
    (Path(folder) / "model.safetensors").chmod(0o644)  # transformers leaves it to its owner alone
