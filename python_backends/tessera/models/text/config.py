"""Which bodies the engine runs, and the language model's section of config.json -> TextConfig.

Defaults are those of transformers ``configuration_qwen2.py``, ``configuration_qwen3.py``, ``configuration_llama.py``
and ``configuration_phi3.py``, and of OpenGVLab ``configuration_internlm2.py``.

What every layout reads alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.checkpoint.config import BodyNames, CheckpointConfig, NameTable, TextConfig
from tessera.checkpoint.files import check_size, one_of, read_fields, read_json, read_processor
from tessera.checkpoint.rope import RopeReader
from tessera.checkpoint.weights import LINEAR, SafetensorsFolder
from tessera.errors import CheckpointError

# "language_model.model.x" (saved by transformers 5 and by the original code) and "model.language_model.x"
# (transformers 4.52) are the same module; Qwen2-VL's savers write "model.x".
_BODY = r"(?:model\.|(?:model\.)?language_model\.(?:model\.)?)"
_HEAD = r"(?:model\.)?(?:language_model\.)?"
_OUTPUT_HEAD = re.compile(rf"{_HEAD}(?:lm_head|output)\.(?:weight|qweight|weight_packed)")


def weight_names(names: BodyNames) -> NameTable:
    """Every weight is called as in its file but for how its name begins."""
    linears = "|".join((*names.qkv, names.output, *names.gate_up, names.down)).replace(".", r"\.")
    norms = (rf"{name}\.weight" for name in (names.input_norm, names.post_norm))
    layer = "|".join((rf"(?:{linears})\.{LINEAR}", *norms, *names.more))
    return (
        (rf"{_BODY}layers\.\d+\.(?:self_attn|attention)\.rotary_emb\.inv_freq", ""),  # as old savers stored it
        (rf"{_BODY}({names.embedding}\.weight|norm\.weight|layers\.\d+\.(?:{layer}))", r"model.\1"),
        (rf"{_HEAD}({names.head}\.{LINEAR})", r"\1"),
    )


_LLAMA = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
)
_QWEN2 = dict(_LLAMA, vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768)
# Published bodies that are known and refused: what they have that no model here does.
_EXPERTS = "its feed-forward layers are mixtures of experts"
_OWN_CODE = "it is defined by code that comes with the checkpoint, which is never run"
_REFUSED = {
    **dict.fromkeys(("qwen3_moe", "Qwen3MoeForCausalLM"), _EXPERTS),
    **dict.fromkeys(("gpt_oss", "GptOssForCausalLM"), _EXPERTS),
    **dict.fromkeys(("internlm3", "InternLM3ForCausalLM"), _OWN_CODE),
}


@dataclass(frozen=True)
class TextSpec:
    """A body. ``model``: the import path of its class; ``names``: of its weights, of which there are no others;
    ``defaults``: what a saver may have left out because it equals the class default.

    ``biases``: whether the attention's projections have them, q/k/v's and the output's, or the switch of the
    configuration that says so for both, and its default. ``ropes``: the rules that it has beside plain rope;
    ``rope_sections``: those of the configuration that its own code looks at alone. ``mlp_switch``: whether mlp_bias
    means anything; ``windowed``: whether a stated window is in force.
    """

    architecture: str
    model_type: str
    model: str
    names: BodyNames
    defaults: Mapping[str, Any]
    biases: tuple[bool, bool] | tuple[str, bool]
    ropes: tuple[str, ...] = ("linear", "dynamic", "llama3")
    rope_sections: tuple[str, ...] = ()
    mlp_switch: bool = False
    windowed: bool = False


_PHI3 = dict(
    _LLAMA, vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, rms_norm_eps=1e-5
)
_QWEN3 = dict(_QWEN2, head_dim=128)
# What is read of a text model's section beside TextConfig's own names.
_READ_HERE = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
    *("attention_bias", "bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
)
_SWITCH, _DECODER = ("attention_bias", False), "tessera.models.text.decoder"
_HEAD_NORMS = BodyNames(more=(r"self_attn\.[qk]_norm\.weight",))
_JOINED = BodyNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_INTERNLM2 = BodyNames(
    embedding="tok_embeddings",
    head="output",
    input_norm="attention_norm",
    post_norm="ffn_norm",
    qkv=("attention.wqkv",),
    output="attention.wo",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
BODIES = (
    TextSpec("Qwen2ForCausalLM", "qwen2", f"{_DECODER}:Qwen2", BodyNames(), _QWEN2, (True, False)),
    TextSpec("Qwen3ForCausalLM", "qwen3", f"{_DECODER}:Qwen3", _HEAD_NORMS, _QWEN3, _SWITCH),
    TextSpec("LlamaForCausalLM", "llama", f"{_DECODER}:Qwen2", BodyNames(), _LLAMA, _SWITCH, mlp_switch=True),
    TextSpec(
        "Phi3ForCausalLM", "phi3", f"{_DECODER}:Qwen2", _JOINED, _PHI3, (False, False), ("longrope",), windowed=True
    ),
    TextSpec(
        "InternLM2ForCausalLM",
        "internlm2",
        f"{_DECODER}:InternLM2",
        _INTERNLM2,
        dict(_LLAMA, vocab_size=103168),
        ("bias", True),
        ropes=("linear", "dynamic"),
        rope_sections=("rope_scaling",),
    ),
)


def _refuse_windows(section: Mapping[str, Any], window: int | None, positions: int, where: str) -> None:
    """No window is applied: ``window``, one in force, is refused where it is shorter than the context."""
    what = f"{where}: sliding-window attention"
    one_of(bool(section.get("use_sliding_window")), (False,), f"{what}: use_sliding_window")
    for kind in section.get("layer_types") or ():
        one_of(kind, ("full_attention",), f"{what}: layer type")
    if window is not None and window < positions:
        raise CheckpointError(
            f"{what} is not supported: the window of {window} tokens is shorter than the context of {positions}"
        )


def assemble(
    folder: Path,
    raw: dict[str, Any],
    text_section: Mapping[str, Any],
    tie: bool | None = None,
    mrope_section: Sequence[int] | None = None,
    bodies: Sequence[TextSpec] = BODIES,
    mrope_interleaved: bool = False,
    row_depth: int = 1,
    **fields: Any,
) -> CheckpointConfig:
    """A checkpoint whose language model, one of ``bodies``, is what ``text_section`` describes.

    ``tie`` is what config.json says of tied embeddings outside of the section; ``mrope_section`` what holds where the
    section states none, None for a body whose positions have one axis. ``fields`` are CheckpointConfig's others, and
    ``vision_names``. Raises CheckpointError for a body that is not supported, or one that wants what the engine does
    not do.
    """
    specs = {spec.architecture: spec for spec in bodies}
    model_type = text_section.get("model_type")
    of_type = next((spec.architecture for spec in bodies if spec.model_type == model_type), model_type)
    architecture = (text_section.get("architectures") or [of_type])[0]
    where = f"{folder}/config.json"
    one_of(architecture, specs, f"{where}: text model", _REFUSED)
    spec = specs[architecture]
    stated, prefix = {**spec.defaults, **text_section}, f"{where}: text model's "
    for name in ("hidden_size", "num_attention_heads"):
        check_size(stated[name], prefix + name)
    heads = stated["num_attention_heads"]
    if stated["num_key_value_heads"] is None:
        stated["num_key_value_heads"] = heads
    if stated["head_dim"] is None:
        stated["head_dim"] = stated["hidden_size"] // heads
    for name in ("head_dim", "max_position_embeddings"):
        check_size(stated[name], prefix + name)
    positions = stated["max_position_embeddings"]
    reader = RopeReader(
        spec.ropes, stated["head_dim"], positions, where, mrope_section, spec.rope_sections, mrope_interleaved
    )
    rope = reader.read(text_section, raw)
    _refuse_windows(text_section, text_section.get("sliding_window") if spec.windowed else None, positions, where)
    switch, other = spec.biases
    biases = (bool(text_section.get(switch, other)),) * 2 if isinstance(switch, str) else (switch, other)
    tied = text_section.get("tie_word_embeddings", False) if tie is None else tie
    text = read_fields(
        TextConfig,
        stated,
        prefix,
        (*_READ_HERE, switch) if isinstance(switch, str) else _READ_HERE,
        architecture=spec.architecture,
        **rope._asdict(),
        mrope_interleaved=mrope_interleaved,
        row_depth=row_depth,
        names=spec.names,
        attention_bias=biases[0],
        output_bias=biases[1],
        mlp_bias=spec.mlp_switch and bool(text_section.get("mlp_bias", False)),
        # A stored head wins over the flag, as in transformers' tie_weights.
        tie_word_embeddings=bool(tied) and not any(map(_OUTPUT_HEAD.fullmatch, SafetensorsFolder(folder).names())),
    )
    if heads % text.num_key_value_heads:
        raise CheckpointError(f"{where}: {heads} heads do not divide over {text.num_key_value_heads} key heads")
    eos = read_json(folder, "generation_config.json").get("eos_token_id", text_section.get("eos_token_id"))
    return CheckpointConfig(
        folder=folder,
        model_type=raw.get("model_type", fields["layout"]),
        text=text,
        weight_names={"vision": fields.pop("vision_names"), "text": weight_names(spec.names)},
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        raw=raw,
        processor=read_processor(folder),
        **fields,
    )
