"""What the rest of the house reads of a checkpoint folder: one frozen description, made by the readers of
``tessera.models``.

Values a file omits take the defaults of the class that wrote it, because savers leave defaults out.
Code named by a checkpoint (``auto_map``) is never looked at.

How many tokens prompt and answer may have together: preprocess and engine ask this one rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera.checkpoint.files import read_json
from tessera.errors import CheckpointError, ConfigError

#: (pattern of a stored name, our name) for each weight; no name of ours for what the configuration says already
NameTable = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class BodyNames:
    """What a language model's files call its weights, but for how names begin; Llama's are the defaults.

    ``qkv`` and ``gate_up`` are one name where they are stored as one. ``more``: patterns of a layer's other weights.
    """

    embedding: str = "embed_tokens"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward layers of ``num_experts`` gated MLPs, of which each token sees ``num_experts_per_tok``.

    ``norm_topk_prob``: whether their weights sum to one. Layers of ``mlp_only_layers`` have a single MLP, as have those
    between every ``decoder_sparse_step``.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: Literal[True, False]
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]

    def at(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True)
class TextConfig:
    """The language model. ``attention_bias`` is q/k/v's, ``output_bias`` the attention output projection's.

    ``rope_scaling`` is None for plain rope, else a dict whose key ``rope_type`` names the rule. ``mrope_section``:
    how many of a head's frequencies turn with each axis of the positions; None for positions of one axis.
    They do so axis after axis, or in turn: ``mrope_interleaved``. ``row_depth``: how many rows of ``hidden_size`` a
    picture's token has, of which the first is its embedding. ``experts``: None for a body that has none.
    ``tie_word_embeddings`` is what the weights need: False whenever the checkpoint stores an output head.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    hidden_act: Literal["silu"] = "silu"
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False
    row_depth: int = 1
    experts: ExpertsConfig | None = None
    names: BodyNames = BodyNames()

    @property
    def row_size(self) -> int:
        """Values of a picture's row: what its tower gives for a token, what the stages carry, cache and spill as one,
        and how wide tokens are that ``forward_layers`` is given."""
        return self.hidden_size * self.row_depth


@dataclass(frozen=True)
class CheckpointConfig:
    """Everything read from a checkpoint folder except its tensors.

    ``layout`` is a name for messages: what differs between layouts stands in the other fields. ``vision`` describes the
    vision tower and ``pictures`` how pictures are cut for it; only the family and its tower look into them.
    ``image_token_id`` is None where only the tokenizer knows it. ``conversation`` names the turn template of
    ``prompt/templates.py``, None where the checkpoint has a chat template; ``system_message`` is config.json's own,
    unchecked, None where it states none. ``weight_names`` are the tables of ``split_names``, by part: "vision" and
    "text". ``module_names``: (how stored names of modules may begin, what the checkpoint's own code has there), of
    which the first that fits holds; where none does, modules are stored by their names. ``raw`` is config.json itself,
    ``processor`` as ``files.read_processor`` gives it.
    """

    folder: Path
    layout: str
    model_type: str
    vision: Any
    text: TextConfig
    weight_names: Mapping[str, NameTable]
    image_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: dict[str, Any]
    processor: dict[str, Any]
    module_names: NameTable = ()
    pictures: Any = None
    conversation: str | None = None
    system_message: Any = None

    @property
    def architecture(self) -> str:
        """What config.json names, by which ``models.registry`` knows the model."""
        return architecture_of(self.raw)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """quantization_config, from the file's root or from the text model's section; None if nothing is quantized.

        ModelOpt writes a file of its own beside config.json. Raises CheckpointError if two places disagree.
        """
        places = [self.raw, *(self.raw.get(name) or {} for name in ("text_config", "llm_config"))]
        found = [place["quantization_config"] for place in places if place.get("quantization_config")]
        modelopt = read_json(self.folder, "hf_quant_config.json").get("quantization")
        if modelopt and not found:
            found = [{"quant_method": "modelopt", **modelopt}]
        if any(other != found[0] for other in found):
            raise CheckpointError(f"{self.folder}/config.json states two quantization_configs that differ")
        return found[0] if found else None


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The class that config.json names, else its model type."""
    return str((raw.get("architectures") or [raw.get("model_type")])[0])


def context_length(text: TextConfig, max_model_len: int | None = None) -> int:
    """``max_model_len`` in tokens, or the trained length where it is None.

    Raises ConfigError for more than the trained length, unless the checkpoint's rope is dynamic: only that one reaches
    further.
    """
    trained = text.max_position_embeddings
    asked = max_model_len or trained
    if asked > trained and (text.rope_scaling or {}).get("rope_type") != "dynamic":
        raise ConfigError(f"max_model_len {asked} exceeds the checkpoint's context of {trained}")
    return asked
