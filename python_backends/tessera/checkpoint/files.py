"""Small JSON files of a checkpoint folder, and what they must state.

Messages of ``read_json`` name the file, never the folder: clients may see them.

A checkpoint by its name on the Hugging Face hub, in the cache that the hub's own tools fill; never downloaded.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tessera.errors import CheckpointError

Kind = TypeVar("Kind")
PILLOW_BICUBIC = 3  # as an image processor's "resample" has it
#: What a section of config.json may state without a change to any answer: names, what training and transformers' own
#: generation go by, what their old savers wrote of every model, and the switches of OpenGVLab's training code, which
#: transformers' convert_qianfan_ocr_weights_to_hf.py passes over too. Beside these, any name that unsloth signs.
PASSED_OVER = frozenset(
    (
        *("_attn_implementation_autoset", "_commit_hash", "_name_or_path", "add_cross_attention", "architectures"),
        *("attention_dropout", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens"),
        *("bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size", "debug", "decoder_start_token_id"),
        *("diversity_penalty", "do_sample", "drop_path_rate", "dropout", "dtype", "early_stopping", "embd_pdrop"),
        *("encoder_no_repeat_ngram_size", "eos_token_id", "ep_size", "exponential_decay_length_penalty"),
        *("finetuning_task", "micro_forward", "skip_checkpoint", "use_deepep", "use_fa3"),
        *("forced_bos_token_id", "forced_eos_token_id", "hidden_dropout_prob", "id2label", "initializer_factor"),
        *("initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "layer_scale_init_value"),
        *("length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups"),
        *("num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores"),
        *("pad_token_id", "prefix", "pretraining_tp", "problem_type", "projection_dropout", "pruned_heads"),
        *("quantization_config", "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict"),
        *("return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature"),
        *("tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p"),
        *("torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache"),
        *("use_flash_attn", "use_mask_token"),
    )
)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in ``folder/name``, or {} if there is no such file."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{name} of the checkpoint is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} of the checkpoint must hold an object, not {type(value).__name__}")
    return value


def read_processor(folder: Path) -> dict[str, Any]:
    """preprocessor_config.json and the image processor's part of processor_config.json as one; the latter wins.

    Without the nulls, which savers write for what is not set.
    """
    whole = read_json(folder, "processor_config.json")
    merged = read_json(folder, "preprocessor_config.json") | (whole.get("image_processor") or {})
    merged |= {name: value for name, value in whole.items() if not isinstance(value, dict)}
    return {name: value for name, value in merged.items() if value is not None}


def read_token_names(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json calls its tokens, as "image_token": flat, or under extra_special_tokens."""
    stated = read_json(folder, "tokenizer_config.json")
    extra = stated.get("extra_special_tokens")
    return (extra if isinstance(extra, dict) else {}) | stated


def section(raw: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """An object inside config.json; raises CheckpointError where there is none."""
    if not isinstance(raw.get(name), dict):
        raise CheckpointError(f"{where} has no section {name!r}")
    return raw[name]


def read_fields(kind: type[Kind], stated: Mapping[str, Any], prefix: str, also: Iterable[str] = (), **own: Any) -> Kind:
    """A section as the dataclass ``kind``, whose fields' names and types say what is read: an int or float must be
    positive, a Literal one of its values. ``own`` are fields that the section does not state.

    Raises CheckpointError that begins with ``prefix``, also for a name that is neither a field, nor one of ``also``,
    which are read elsewhere, nor one that changes no answer.
    """
    types = {name: kind_of for name, kind_of in get_type_hints(kind).items() if name not in own}
    for name, value in stated.items():
        if value is not None and name not in PASSED_OVER and not name.startswith("unsloth_"):
            one_of(name, [*types, *also], f"{prefix.rstrip('. ')} setting")
    values = {name: stated[name] for name in types if name in stated}
    for name, value in values.items():
        if get_origin(types[name]) is Literal:
            one_of(value, get_args(types[name]), prefix + name)
        elif types[name] is int:
            check_size(value, prefix + name)
        elif types[name] is float:
            check_number(value, prefix + name)
    return kind(**values, **own)


def check_size(value: Any, what: str) -> None:
    """Raises CheckpointError unless it is a positive whole number."""
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{what} must be a positive whole number, not {value!r:.50}")


def check_number(value: Any, what: str) -> None:
    """Raises CheckpointError unless it is a positive number."""
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"{what} must be a positive number, not {value!r:.50}")


def one_of(value: Any, supported: Iterable[Any], what: str, refused: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises CheckpointError for any other value; ``refused``: why, of those that are known and not supported."""
    if value not in (known := list(supported)):
        why = f": {reason}" if (reason := refused.get(str(value))) else ""
        raise CheckpointError(f"{what} {value!r:.80} is not supported{why}; supported are {', '.join(map(str, known))}")


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_name(named: Path | str) -> bool:
    """Whether this may be a model's name on the hub."""
    return _NAME.fullmatch(str(named)) is not None


def find_checkpoint(named: Path | str, environment: Mapping[str, str] = os.environ, base: Path = Path()) -> Path:
    """The folder ``named``, from ``base`` on; where there is none, the newest snapshot that the cache has of the model
    so called.

    Raises CheckpointError that says how to fetch it.
    """
    folder = base / named
    if folder.is_dir():
        return folder
    if not is_name(named):
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    cache = _cache(environment)
    model = cache / f"models--{str(named).replace('/', '--')}"
    try:
        commit = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        commit = ""
    if commit and (snapshot := model / "snapshots" / commit).is_dir():
        return snapshot
    raise CheckpointError(
        f"there is no checkpoint folder {named}, and the hub's cache {cache} has no model of this name: fetch it by "
        f"`hf download {named}` (of the package huggingface_hub), or name a folder"
    )


def _cache(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps models, by the variables that it reads."""
    if stated := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(stated).expanduser()
    home = environment.get("HF_HOME")
    if not home:
        home = os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"
