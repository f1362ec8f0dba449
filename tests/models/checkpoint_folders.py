"""Small checkpoint folders without weights, in both layouts, with tokenizers trained on a few sentences."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<ref>", "</ref>", "<video>",
]  # fmt: skip
CORPUS = [
    "user\nIs there a socket near the window? Answer yes or no.\n\n",
    "assistant\nYes, there are 2 sockets; one of them is broken.\n",
    "system\nYou inspect homes. It's 12345 steps — café, naïve, 中文 and emoji 🙂.\n  indented\tcode();\r\n",
] * 4
CHAT_TEMPLATE = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
{{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}
{{- '<IMG_CONTEXT>\\n' }}
            {%- elif part['type'] == 'text' %}
{{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TRIMMING_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] | trim }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<IMG_CONTEXT>{% else %}{{ c['text'] | trim }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}<|im_start|>assistant\n"
)
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(words: str | None = None, more: list[str] = []) -> Tokenizer:  # noqa: B006
    """``more``: special tokens beside SPECIAL."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte])
    tokenizer.normalizer = normalizers.NFC() if words else None
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL + more, initial_alphabet=alphabet)
    )
    return tokenizer


def llama_like() -> Tokenizer:
    """Metaspace with a space before the first word only, byte fallback, and <s> in front, as transformers writes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=[*names, *SPECIAL], max_token_length=8)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
    return Tokenizer.from_str(json.dumps(content))


def write_hf_folder(
    folder: Path,
    tokenizer: Tokenizer,
    template: str = CHAT_TEMPLATE,
    settings: dict[str, Any] | None = None,
    context: int = 4096,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    write(folder, "tokenizer_config.json", {"eos_token": "<|im_end|>", **(settings or {})})
    write(folder, "processor_config.json", {"image_processor": {"max_patches": 12}, "image_seq_length": 256})
    config = {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "image_token_id": tokenizer.token_to_id("<IMG_CONTEXT>"),
        "downsample_ratio": 0.5,
        "text_config": {"model_type": "qwen2", "max_position_embeddings": context, "eos_token_id": 2},
        "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
    }
    write(folder, "config.json", config)
    return folder


def write_chat_folder(folder: Path, template: str, **raw: Any) -> Path:
    """The original layout, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "template": template,
        "force_image_size": 448,
        "downsample_ratio": 0.5,
        "llm_config": {"architectures": ["InternLM2ForCausalLM"], "max_position_embeddings": 4096},
        "vision_config": {"image_size": 448, "patch_size": 14, "norm_type": "layer_norm"},
        **raw,
    }
    write(folder, "config.json", config)
    return folder


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content, ensure_ascii=False))


def special(content: str) -> dict[str, Any]:
    """One entry of added_tokens_decoder."""
    return {"content": content, "special": True, "lstrip": False, "rstrip": False, "normalized": False}


def added(content: str) -> AddedToken:
    return AddedToken(content, normalized=False, special=False)
