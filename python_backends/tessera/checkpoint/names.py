"""Exact tables of weight names: each layout's stored names -> the names our modules use.

Every pattern matches a whole name. A name that no pattern matches is an error, so a weight that nobody reads
cannot pass unseen. The language models' tables stand here, the vision towers' with their layouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tessera.checkpoint.config import CheckpointConfig, NameTable
from tessera.errors import CheckpointError

WB = r"(weight|bias)"
#: what the vision tower's linear layers store, in FP8 too
WBS = r"(weight|bias|weight_scale)"
#: what the language model's linear layers store, by any quantization; a layer's scheme says which of them it wants
LINEAR = (
    r"(weight|bias|qweight|qzeros|scales|g_idx|weight_packed|weight_shape|weight_scale|weight_zero_point|weight_g_idx"
    r"|weight_scale_inv|input_scale)"
)

# "language_model.model.x" (saved by transformers 5 and by the original code) and "model.language_model.x"
# (transformers 4.52) are the same module; Qwen2-VL's savers write "model.x".
_BODY = r"(?:model\.|(?:model\.)?language_model\.(?:model\.)?)"
_HEAD = r"(?:model\.)?(?:language_model\.)?"
_OUTSIDE: NameTable = (
    (rf"{_BODY}embed_tokens\.weight", "model.embed_tokens.weight"),
    (rf"{_BODY}layers\.(\d+)\.(input|post_attention)_layernorm\.weight", r"model.layers.\1.\2_layernorm.weight"),
    (rf"{_BODY}norm\.weight", "model.norm.weight"),
    (rf"{_HEAD}lm_head\.{LINEAR}", r"lm_head.\1"),
)
_LLAMA_TEXT: NameTable = (
    *_OUTSIDE,
    (rf"{_BODY}layers\.(\d+)\.self_attn\.([qkvo])_proj\.{LINEAR}", r"model.layers.\1.self_attn.\2_proj.\3"),
    (rf"{_BODY}layers\.(\d+)\.mlp\.(gate|up|down)_proj\.{LINEAR}", r"model.layers.\1.mlp.\2_proj.\3"),
)
_QWEN3_TEXT: NameTable = (
    *_LLAMA_TEXT,
    (rf"{_BODY}layers\.(\d+)\.self_attn\.([qk])_norm\.weight", r"model.layers.\1.self_attn.\2_norm.weight"),
)
_PHI3_TEXT: NameTable = (
    *_OUTSIDE,
    (rf"{_BODY}layers\.(\d+)\.self_attn\.(qkv|o)_proj\.{LINEAR}", r"model.layers.\1.self_attn.\2_proj.\3"),
    (rf"{_BODY}layers\.(\d+)\.mlp\.(gate_up|down)_proj\.{LINEAR}", r"model.layers.\1.mlp.\2_proj.\3"),
)
_INTERNLM2_TEXT: NameTable = (
    (rf"{_BODY}tok_embeddings\.weight", "model.tok_embeddings.weight"),
    (rf"{_BODY}layers\.(\d+)\.attention\.(wqkv|wo)\.{LINEAR}", r"model.layers.\1.attention.\2.\3"),
    (rf"{_BODY}layers\.(\d+)\.feed_forward\.w([123])\.{LINEAR}", r"model.layers.\1.feed_forward.w\2.\3"),
    (rf"{_BODY}layers\.(\d+)\.(attention|ffn)_norm\.weight", r"model.layers.\1.\2_norm.weight"),
    (rf"{_BODY}norm\.weight", "model.norm.weight"),
    (rf"{_HEAD}output\.{LINEAR}", r"output.\1"),
)

#: the language model's table, by its architecture
TEXT_NAMES = {
    "Qwen2ForCausalLM": _LLAMA_TEXT,
    "Qwen3ForCausalLM": _QWEN3_TEXT,
    "LlamaForCausalLM": _LLAMA_TEXT,
    "Phi3ForCausalLM": _PHI3_TEXT,
    "InternLM2ForCausalLM": _INTERNLM2_TEXT,
}
# A buffer that old savers stored; it follows from the configuration.
_IGNORED = re.compile(rf"{_BODY}layers\.\d+\.(?:self_attn|attention)\.rotary_emb\.inv_freq")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_OUTPUT_HEAD = re.compile(rf"{_HEAD}(?:lm_head|output)\.(?:weight|qweight|weight_packed)")


def has_output_head(names: Iterable[str]) -> bool:
    """Whether the stored names include the language model's own output projection."""
    return any(_OUTPUT_HEAD.fullmatch(name) for name in names)


def split_names(names: Iterable[str], config: CheckpointConfig) -> dict[str, dict[str, str]]:
    """Sort stored weight names into ``{"vision": {stored: ours}, "text": {stored: ours}}``.

    The text model's names are those of transformers' own class (``model.layers.N...``, ``lm_head.weight``) or, for
    InternLM2, the original ones (``model.layers.N.attention.wqkv.weight``, ``output.weight``).
    Raises CheckpointError for names that are not understood or that mean the same weight.
    """
    tables = [(part, *entry) for part, table in config.weight_names.items() for entry in table]
    split: dict[str, dict[str, str]] = {part: {} for part in config.weight_names}
    unknown: list[str] = []
    taken: dict[tuple[str, str], str] = {}
    for name in sorted(names):
        if _IGNORED.fullmatch(name):
            continue
        matches = ((part, re.fullmatch(pattern, name), ours) for part, pattern, ours in tables)
        found = next(((part, match.expand(ours)) for part, match, ours in matches if match), None)
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


def name_in_file(name: str, stored: Mapping[str, str]) -> str:
    """What the checkpoint calls a tensor or a module of ours, or would call one that it lacks.

    ``stored``: its names by ours. One that it lacks is called like that of another layer, else like its neighbours.
    """
    if name in stored:
        return stored[name]
    layers, anywhere = iter(_LAYER.findall(name)), re.compile(r"\d+".join(map(re.escape, _LAYER.split(name))))
    if alike := next((theirs for ours, theirs in stored.items() if anywhere.fullmatch(ours)), None):
        return _LAYER.sub(lambda layer: next(layers, layer[0]), alike)
    place = name
    while place:
        for ours, theirs in stored.items():
            rest = ours.removeprefix(place)
            if rest != ours and rest.startswith(".") and theirs.endswith(rest):
                return theirs.removesuffix(rest) + name[len(place) :]
        place = place.rpartition(".")[0]
    return name


def listed(names: Iterable[str], limit: int = 10) -> str:
    """The first names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
