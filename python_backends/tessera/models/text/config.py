"""Which bodies the engine runs, and the language model's section of config.json -> TextConfig.

Defaults are those of transformers ``configuration_qwen2.py``, ``configuration_qwen3.py``,
``configuration_qwen3_moe.py``, ``configuration_llama.py`` and ``configuration_phi3.py``, and of OpenGVLab
``configuration_internlm2.py``.

What every layout reads alike.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.checkpoint.config import BodyNames, CheckpointConfig, ExpertsConfig, NameTable, TextConfig
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
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, head_dim=None, max_position_embeddings=2048, rms_norm_eps=1e-6,
)  # fmt: skip
_QWEN2 = dict(_LLAMA, vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768)
# Published bodies that are known and refused: what they have that no model here does.
_EXPERTS = "its feed-forward layers are mixtures of experts of another kind than Qwen3-MoE's"
_OWN_CODE = "it is defined by code that comes with the checkpoint, which is never run"
_REFUSED = {
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
    means anything; ``windowed``: whether a stated window is in force. ``experts``: the defaults of ExpertsConfig's
    fields, where it has experts.
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
    experts: Mapping[str, Any] | None = None


_PHI3 = dict(
    _LLAMA, vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, rms_norm_eps=1e-5
)
_QWEN3 = dict(_QWEN2, head_dim=128)
# head_dim is no field of its class: None, where a file states none.
_QWEN3_MOE = dict(_QWEN2, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4)
_QWEN3_EXPERTS = dict(
    **dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
    **dict(norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=None),
)
#: what transformers 5 saves num_experts as, and what training alone goes by
_SAVED_EXPERTS, _ROUTER_LOSS = "num_local_experts", ("output_router_logits", "router_aux_loss_coef")
# What is read of a text model's section beside TextConfig's own names.
_READ_HERE = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
    *("attention_bias", "bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
)
_SWITCH, _DECODER = ("attention_bias", False), "tessera.models.text.decoder"
_MOE = "tessera.models.text.qwen3_moe:Qwen3Moe"
_HEAD_NORMS = BodyNames(more=(r"self_attn\.[qk]_norm\.weight",))
_EXPERT_NAMES = BodyNames(
    more=(
        *_HEAD_NORMS.more,
        r"mlp\.gate\.weight",
        rf"mlp\.experts\.\d+\.(?:gate|up|down)_proj\.{LINEAR}",
        r"mlp\.experts\.(?:gate_up|down)_proj(?:_scale_inv)?",  # of all experts, as transformers 5 holds them
    )
)
_JOINED = BodyNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_INTERNLM2 = BodyNames(
    embedding="tok_embeddings", head="output", input_norm="attention_norm", post_norm="ffn_norm",
    qkv=("attention.wqkv",), output="attention.wo", gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)  # fmt: skip
BODIES = (
    TextSpec("Qwen2ForCausalLM", "qwen2", f"{_DECODER}:Qwen2", BodyNames(), _QWEN2, (True, False)),
    TextSpec("Qwen3ForCausalLM", "qwen3", f"{_DECODER}:Qwen3", _HEAD_NORMS, _QWEN3, _SWITCH),
    TextSpec("Qwen3MoeForCausalLM", "qwen3_moe", _MOE, _EXPERT_NAMES, _QWEN3_MOE, _SWITCH, experts=_QWEN3_EXPERTS),
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


def _read_experts(spec: TextSpec, section: Mapping[str, Any], layers: int, prefix: str) -> ExpertsConfig | None:
    if spec.experts is None:
        return None
    stated = {name: section.get(name, value) for name, value in spec.experts.items()}
    counts = [section[name] for name in ("num_experts", _SAVED_EXPERTS) if name in section]
    if any(count != counts[0] for count in counts):
        raise CheckpointError(f"{prefix}num_experts and {_SAVED_EXPERTS} differ: {counts[0]!r:.50}, {counts[1]!r:.50}")
    stated["num_experts"] = (counts or [stated["num_experts"]])[0]
    without = stated.pop("mlp_only_layers") or []
    if not isinstance(without, list) or any(type(index) is not int or not 0 <= index < layers for index in without):
        raise CheckpointError(f"{prefix}mlp_only_layers must be numbers of its {layers} layers, not {without!r:.80}")
    experts = read_fields(ExpertsConfig, stated, prefix, mlp_only_layers=tuple(without))
    if experts.num_experts_per_tok > experts.num_experts:
        raise CheckpointError(
            f"{prefix}num_experts_per_tok is {experts.num_experts_per_tok} of {experts.num_experts} experts"
        )
    return experts


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
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
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
    experts = _read_experts(spec, text_section, stated["num_hidden_layers"], prefix)
    switch, other = spec.biases
    biases = (bool(text_section.get(switch, other)),) * 2 if isinstance(switch, str) else (switch, other)
    tied = text_section.get("tie_word_embeddings", False) if tie is None else tie
    read_here = (*_READ_HERE, *((*spec.experts, _SAVED_EXPERTS, *_ROUTER_LOSS) if spec.experts else ()))
    text = read_fields(
        TextConfig,
        stated,
        prefix,
        (*read_here, switch) if isinstance(switch, str) else read_here,
        architecture=spec.architecture,
        **rope._asdict(),
        mrope_interleaved=mrope_interleaved,
        row_depth=row_depth,
        experts=experts,
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
