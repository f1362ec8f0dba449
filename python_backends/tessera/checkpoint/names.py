"""Exact tables of weight names: each layout's stored names -> the names our modules use.

Every pattern matches a whole name. A name that no pattern matches is an error, so a weight that nobody reads
cannot pass unseen. Sources: transformers 5 ``modeling_internvl.py`` (module names) and
``conversion_mapping.py`` (the names it saves, without the leading ``model.``); OpenGVLab
``modeling_internvl_chat.py`` and ``modeling_intern_vit.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tessera.errors import CheckpointError

if TYPE_CHECKING:
    from tessera.checkpoint.config import CheckpointConfig

_WB = r"(weight|bias)"

# (pattern, our name). Our vision names are the parameter names of vision/intern_vit.py before packing.
_HF_VISION: tuple[tuple[str, str], ...] = tuple(
    (rf"(?:model\.)?{pattern}", ours)
    for pattern, ours in (
        (r"vision_tower\.embeddings\.cls_token", "class_embedding"),
        (r"vision_tower\.embeddings\.position_embeddings", "position_embedding"),
        (rf"vision_tower\.embeddings\.patch_embeddings\.projection\.{_WB}", r"patch_embedding.\1"),
        (
            rf"vision_tower\.encoder\.layer\.(\d+)\.attention\.([qkv])_proj\.{_WB}",
            r"layers.\1.attention.\2_proj.\3",
        ),
        (
            r"vision_tower\.encoder\.layer\.(\d+)\.attention\.([qk])_norm\.weight",
            r"layers.\1.attention.\2_norm.weight",
        ),
        (
            rf"vision_tower\.encoder\.layer\.(\d+)\.attention\.projection_layer\.{_WB}",
            r"layers.\1.attention.output.\2",
        ),
        (rf"vision_tower\.encoder\.layer\.(\d+)\.layernorm_before\.{_WB}", r"layers.\1.norm1.\2"),
        (rf"vision_tower\.encoder\.layer\.(\d+)\.layernorm_after\.{_WB}", r"layers.\1.norm2.\2"),
        (r"vision_tower\.encoder\.layer\.(\d+)\.lambda_([12])", r"layers.\1.scale\2"),
        (rf"vision_tower\.encoder\.layer\.(\d+)\.mlp\.fc([12])\.{_WB}", r"layers.\1.mlp.linear\2.\3"),
        (rf"vision_tower\.layernorm\.{_WB}", r"final_norm.\1"),
        (rf"multi_modal_projector\.layer_norm\.{_WB}", r"projector.norm.\1"),
        (rf"multi_modal_projector\.linear_([12])\.{_WB}", r"projector.linear\1.\2"),
    )
)

_CHAT_VISION: tuple[tuple[str, str], ...] = tuple(
    (rf"(?:model\.)?{pattern}", ours)
    for pattern, ours in (
        (r"vision_model\.embeddings\.class_embedding", "class_embedding"),
        (r"vision_model\.embeddings\.position_embedding", "position_embedding"),
        (rf"vision_model\.embeddings\.patch_embedding\.{_WB}", r"patch_embedding.\1"),
        (rf"vision_model\.encoder\.layers\.(\d+)\.attn\.qkv\.{_WB}", r"layers.\1.attention.qkv.\2"),
        (
            r"vision_model\.encoder\.layers\.(\d+)\.attn\.([qk])_norm\.weight",
            r"layers.\1.attention.\2_norm.weight",
        ),
        (rf"vision_model\.encoder\.layers\.(\d+)\.attn\.proj\.{_WB}", r"layers.\1.attention.output.\2"),
        (rf"vision_model\.encoder\.layers\.(\d+)\.norm([12])\.{_WB}", r"layers.\1.norm\2.\3"),
        (r"vision_model\.encoder\.layers\.(\d+)\.ls([12])", r"layers.\1.scale\2"),
        (rf"vision_model\.encoder\.layers\.(\d+)\.mlp\.fc([12])\.{_WB}", r"layers.\1.mlp.linear\2.\3"),
        (rf"mlp1\.0\.{_WB}", r"projector.norm.\1"),
        (rf"mlp1\.1\.{_WB}", r"projector.linear1.\1"),
        (rf"mlp1\.3\.{_WB}", r"projector.linear2.\1"),
    )
)

# "language_model.model.x" (saved by transformers 5 and by the original code) and "model.language_model.x"
# (transformers 4.52) are the same module.
_BODY = r"(?:model\.)?language_model\.(?:model\.)?"
_HEAD = r"(?:model\.)?(?:language_model\.)?"
_LLAMA_TEXT: tuple[tuple[str, str], ...] = (
    (rf"{_BODY}embed_tokens\.weight", "model.embed_tokens.weight"),
    (rf"{_BODY}layers\.(\d+)\.self_attn\.([qkvo])_proj\.{_WB}", r"model.layers.\1.self_attn.\2_proj.\3"),
    (rf"{_BODY}layers\.(\d+)\.mlp\.(gate|up|down)_proj\.{_WB}", r"model.layers.\1.mlp.\2_proj.\3"),
    (
        rf"{_BODY}layers\.(\d+)\.(input|post_attention)_layernorm\.weight",
        r"model.layers.\1.\2_layernorm.weight",
    ),
    (rf"{_BODY}norm\.weight", "model.norm.weight"),
    (rf"{_HEAD}lm_head\.weight", "lm_head.weight"),
)
_INTERNLM2_TEXT: tuple[tuple[str, str], ...] = (
    (rf"{_BODY}tok_embeddings\.weight", "model.tok_embeddings.weight"),
    (rf"{_BODY}layers\.(\d+)\.attention\.(wqkv|wo)\.{_WB}", r"model.layers.\1.attention.\2.\3"),
    (rf"{_BODY}layers\.(\d+)\.feed_forward\.w([123])\.weight", r"model.layers.\1.feed_forward.w\2.weight"),
    (rf"{_BODY}layers\.(\d+)\.(attention|ffn)_norm\.weight", r"model.layers.\1.\2_norm.weight"),
    (rf"{_BODY}norm\.weight", "model.norm.weight"),
    (rf"{_HEAD}output\.weight", "output.weight"),
)

_VISION = {"hf_native": _HF_VISION, "internvl_chat": _CHAT_VISION}
_TEXT = {
    "Qwen2ForCausalLM": _LLAMA_TEXT,
    "LlamaForCausalLM": _LLAMA_TEXT,
    "InternLM2ForCausalLM": _INTERNLM2_TEXT,
}
# A buffer that old savers stored; it follows from the configuration.
_IGNORED = re.compile(rf"{_BODY}layers\.\d+\.(?:self_attn|attention)\.rotary_emb\.inv_freq")
_OUTPUT_HEAD = re.compile(rf"{_HEAD}(?:lm_head|output)\.weight")


def has_output_head(names: Iterable[str]) -> bool:
    """Whether the stored names include the language model's own output projection."""
    return any(_OUTPUT_HEAD.fullmatch(name) for name in names)


def split_names(names: Iterable[str], config: CheckpointConfig) -> dict[str, dict[str, str]]:
    """Sort stored weight names into ``{"vision": {stored: ours}, "text": {stored: ours}}``.

    The text model's names are those of transformers' Qwen2/Llama (``model.layers.N...``, ``lm_head.weight``)
    or, for InternLM2, the original ones (``model.layers.N.attention.wqkv.weight``, ``output.weight``).
    Raises CheckpointError for names that are not understood or that mean the same weight.
    """
    tables = {"vision": _VISION[config.layout], "text": _TEXT[config.text.architecture]}
    compiled = {part: [(re.compile(p), ours) for p, ours in table] for part, table in tables.items()}
    split: dict[str, dict[str, str]] = {"vision": {}, "text": {}}
    unknown: list[str] = []
    taken: dict[tuple[str, str], str] = {}
    for name in sorted(names):
        if _IGNORED.fullmatch(name):
            continue
        found = _match(name, compiled)
        if found is None:
            unknown.append(name)
            continue
        if found in taken:
            raise CheckpointError(f"{config.folder}: weights {taken[found]!r} and {name!r} are the same weight")
        taken[found] = name
        part, ours = found
        split[part][name] = ours
    if unknown:
        raise CheckpointError(
            f"{config.folder}: {len(unknown)} weights are not known to layout {config.layout} with a "
            f"{config.text.architecture} body: {listed(unknown)}"
        )
    return split


def listed(names: Iterable[str], limit: int = 10) -> str:
    """The first names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def _match(name: str, tables: dict[str, list[tuple[re.Pattern[str], str]]]) -> tuple[str, str] | None:
    for part, table in tables.items():
        for pattern, ours in table:
            match = pattern.fullmatch(name)
            if match:
                return part, match.expand(ours)
    return None
