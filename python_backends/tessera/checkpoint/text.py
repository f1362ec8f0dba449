"""The language model's section of config.json -> TextConfig, for every body that the engine runs.

Defaults are those of transformers ``configuration_qwen2.py``, ``configuration_qwen3.py``, ``configuration_llama.py``
and ``configuration_phi3.py``, and of OpenGVLab ``configuration_internlm2.py``.

What every layout reads alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.checkpoint.config import CheckpointConfig, TextConfig
from tessera.checkpoint.files import check_number, check_sizes, one_of, read_json, read_processor
from tessera.checkpoint.rope import read_rope
from tessera.checkpoint.weights import TEXT_NAMES, SafetensorsFolder, has_output_head
from tessera.errors import CheckpointError

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
}
# What a saver may have left out because it equals the class default.
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
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": dict(_QWEN2, head_dim=128),
    "LlamaForCausalLM": _LLAMA,
    "Phi3ForCausalLM": dict(
        _LLAMA,
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    "InternLM2ForCausalLM": dict(_LLAMA, vocab_size=103168),
}
# Published bodies that are known and refused: what they have that no model here does.
_EXPERTS = "its feed-forward layers are mixtures of experts"
_OWN_CODE = "it is defined by code that comes with the checkpoint, which is never run"
_REFUSED = {
    **dict.fromkeys(("qwen3_moe", "Qwen3MoeForCausalLM"), _EXPERTS),
    **dict.fromkeys(("gpt_oss", "GptOssForCausalLM"), _EXPERTS),
    **dict.fromkeys(("internlm3", "InternLM3ForCausalLM"), _OWN_CODE),
}
# Whether the attention's projections have biases is one switch of the configuration, or fixed: q/k/v's, the output's.
_BIAS_SWITCH = {
    "Qwen3ForCausalLM": ("attention_bias", False),
    "LlamaForCausalLM": ("attention_bias", False),
    "InternLM2ForCausalLM": ("bias", True),
}
_BIASES = {"Qwen2ForCausalLM": (True, False), "Phi3ForCausalLM": (False, False)}


def read_text(
    folder: Path,
    section: Mapping[str, Any],
    root: Mapping[str, Any],
    tie: bool | None = None,
    mrope_section: Sequence[int] | None = None,
) -> TextConfig:
    """The language model that ``section`` of the folder's config.json, ``root``, describes.

    ``tie`` is what config.json says of tied embeddings outside of the section; ``mrope_section`` what holds where the
    section states none, None for a body whose positions have one axis. Raises CheckpointError for a body that is not
    supported, or one that wants what the engine does not do.
    """
    where = f"{folder}/config.json"
    architecture = _architecture(section, where)
    one_of(section.get("hidden_act", "silu"), ("silu",), f"{where}: the text model's hidden_act")
    values = {name: section.get(name, default) for name, default in _DEFAULTS[architecture].items()}
    heads = values["num_attention_heads"]
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    check_sizes(
        values, [name for name in values if name not in ("head_dim", "rms_norm_eps")], f"{where}: text model's "
    )
    if heads % values["num_key_value_heads"]:
        raise CheckpointError(f"{where}: {heads} heads do not divide over {values['num_key_value_heads']} key heads")
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // heads
    check_sizes(values, ["head_dim"], f"{where}: text model's ")
    check_number(values["rms_norm_eps"], f"{where}: text model's rms_norm_eps")
    rope = read_rope(
        section, root, architecture, values["head_dim"], values["max_position_embeddings"], where, mrope_section
    )
    _refuse_windows(architecture, section, values["max_position_embeddings"], where)
    biases = _BIASES.get(architecture) or (bool(section.get(*_BIAS_SWITCH[architecture])),) * 2
    tied = section.get("tie_word_embeddings", False) if tie is None else tie
    return TextConfig(
        architecture=architecture,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        mrope_section=rope.mrope_section,
        attention_bias=biases[0],
        output_bias=biases[1],
        mlp_bias=architecture == "LlamaForCausalLM" and bool(section.get("mlp_bias", False)),
        # A stored head wins over the flag, as in transformers' tie_weights.
        tie_word_embeddings=bool(tied) and not has_output_head(SafetensorsFolder(folder).names()),
        hidden_act="silu",
        **values,
    )


def _architecture(section: Mapping[str, Any], where: str) -> str:
    """The body's class; CheckpointError says why a known one is not supported."""
    model_type = section.get("model_type")
    architecture = (section.get("architectures") or [ARCHITECTURES.get(str(model_type), model_type)])[0]
    if architecture in _REFUSED:
        raise CheckpointError(
            f"{where}: text model {architecture!r} is not supported: {_REFUSED[architecture]}; "
            f"supported are {', '.join(_DEFAULTS)}"
        )
    one_of(architecture, _DEFAULTS, f"{where}: text model")
    return architecture


def _refuse_windows(architecture: str, section: Mapping[str, Any], positions: int, where: str) -> None:
    """No window is applied: one shorter than the context is refused. Phi-3's is in force wherever it is stated."""
    what = f"{where}: sliding-window attention"
    one_of(bool(section.get("use_sliding_window")), (False,), f"{what}: use_sliding_window")
    for kind in section.get("layer_types") or ():
        one_of(kind, ("full_attention",), f"{what}: layer type")
    window = section.get("sliding_window") if architecture == "Phi3ForCausalLM" else None
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
    **fields: Any,
) -> CheckpointConfig:
    """``text_section`` describes the language model (``read_text``); ``fields`` are CheckpointConfig's others, and
    ``vision_names``."""
    text = read_text(folder, text_section, raw, tie, mrope_section)
    eos = read_json(folder, "generation_config.json").get("eos_token_id", text_section.get("eos_token_id"))
    return CheckpointConfig(
        folder=folder,
        model_type=raw.get("model_type", fields["layout"]),
        text=text,
        weight_names={"vision": fields.pop("vision_names"), "text": TEXT_NAMES[text.architecture]},
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        raw=raw,
        processor=read_processor(folder),
        **fields,
    )
