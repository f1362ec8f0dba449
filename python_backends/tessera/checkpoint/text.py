"""The language model's section of config.json -> TextConfig, for every body that the engine runs.

Defaults are those of transformers ``configuration_qwen2.py`` and ``configuration_llama.py`` and of OpenGVLab
``configuration_internlm2.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.checkpoint.config import TextConfig
from tessera.checkpoint.files import one_of
from tessera.checkpoint.names import has_output_head
from tessera.checkpoint.weights import SafetensorsFolder
from tessera.errors import CheckpointError

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
}
# What a saver may have left out because it equals the class default.
_LLAMA = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": dict(
        _LLAMA, vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768
    ),
    "LlamaForCausalLM": _LLAMA,
    "InternLM2ForCausalLM": dict(_LLAMA, vocab_size=103168),
}


def read_text(folder: Path, section: Mapping[str, Any], tie: bool | None = None) -> TextConfig:
    """The language model that ``section`` of the folder's config.json describes.

    ``tie`` is what config.json says of tied embeddings outside of the section. Raises CheckpointError for a body that
    is not supported, or one that wants what the engine does not do.
    """
    where = f"{folder}/config.json"
    model_type = section.get("model_type")
    architecture = (section.get("architectures") or [ARCHITECTURES.get(str(model_type), model_type)])[0]
    one_of(architecture, _DEFAULTS, f"{where}: text model")
    one_of(bool(section.get("use_sliding_window")), (False,), f"{where}: sliding-window attention: use_sliding_window")
    one_of(section.get("hidden_act", "silu"), ("silu",), f"{where}: the text model's hidden_act")
    values = {name: section.get(name, default) for name, default in _DEFAULTS[architecture].items()}
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = section.get("num_key_value_heads", values.get("num_key_value_heads")) or heads
    if heads % values["num_key_value_heads"]:
        raise CheckpointError(f"{where}: {heads} heads do not divide over {values['num_key_value_heads']} key heads")
    head_dim = section.get("head_dim") or values["hidden_size"] // heads
    theta, scaling, axes = _rope(section, head_dim, where)
    # Qwen2 has q/k/v biases and no other; Llama and InternLM2 have one switch for q/k/v and output.
    switch = {"LlamaForCausalLM": ("attention_bias", False), "InternLM2ForCausalLM": ("bias", True)}
    bias = bool(section.get(*switch[architecture])) if architecture in switch else None
    tied = section.get("tie_word_embeddings", False) if tie is None else tie
    return TextConfig(
        architecture=architecture,
        head_dim=head_dim,
        rms_norm_eps=section.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        mrope_section=axes,
        attention_bias=True if bias is None else bias,
        output_bias=bool(bias),
        mlp_bias=architecture == "LlamaForCausalLM" and bool(section.get("mlp_bias", False)),
        # A stored head wins over the flag, as in transformers' tie_weights.
        tie_word_embeddings=bool(tied) and not has_output_head(SafetensorsFolder(folder).names()),
        hidden_act="silu",
        **values,
    )


def _rope(
    section: Mapping[str, Any], head_dim: int, where: str
) -> tuple[float, dict[str, Any] | None, tuple[int, ...] | None]:
    """``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` -> (theta, scaling, mrope_section).

    Older savers call rope over several axes the type "mrope", newer ones "default" with an ``mrope_section``.
    """
    settings = dict(section.get("rope_parameters") or section.get("rope_scaling") or {})
    theta = float(settings.pop("rope_theta", section.get("rope_theta", 10000.0)))
    old_name = settings.pop("type", None)
    kind, axes = settings.setdefault("rope_type", old_name or "default"), settings.pop("mrope_section", None)
    if kind == "mrope" or axes is not None:
        one_of(settings.get("mrope_interleaved", False), (False,), f"{where}: mrope_interleaved")
        if not isinstance(axes, list) or not all(type(size) is int for size in axes) or sum(axes) != head_dim // 2:
            raise CheckpointError(
                f"{where}: mrope_section {axes!r:.50} must be whole numbers that sum to half the head size, "
                f"{head_dim // 2}"
            )
    return theta, None if kind in ("default", "mrope") else settings, None if axes is None else tuple(axes)
