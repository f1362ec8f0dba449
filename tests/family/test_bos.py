"""Whether <s> leads a prompt: twins of the published sizes in the original layout, with and without the key.

No published file was read here. The bodies and templates are those that OpenGVLab names for each size; the defaults are
those that the tokenizer classes document.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint_folders as folders
import pytest
from test_family_tokenizer import PHI3_TOKENS, train, write_phi3_tokenizer, write_vocab_and_merges
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import LlamaTokenizer

from tessera.checkpoint.config import read_config
from tessera.checkpoint.files import read_json
from tessera.errors import CheckpointError
from tessera.family.tokenizer import Tokenizer
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest

CHAT_TOKENS = [*PHI3_TOKENS, "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]
KEYS: list[dict[str, Any]] = [{}, {"add_bos_token": True}, {"add_bos_token": False}]


@dataclass(frozen=True)
class Size:
    """A published size: the body's architecture, the tokenizer's class and the conversation template."""

    name: str
    body: str
    tokenizer: str
    template: str


INTERNLM2, LLAMA, QWEN2 = "InternLM2ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM"
PHI3, QWEN3 = "Phi3ForCausalLM", "Qwen3ForCausalLM"
SIZES = [
    Size("InternVL2-1B", QWEN2, "Qwen2Tokenizer", "Hermes-2"),
    *(Size(f"InternVL2-{size}B", INTERNLM2, "InternLM2Tokenizer", "internlm2-chat") for size in (2, 8, 26)),
    Size("InternVL2-4B", PHI3, "LlamaTokenizer", "phi3-chat"),
    Size("InternVL2-40B", LLAMA, "LlamaTokenizer", "Hermes-2"),
    Size("InternVL2-Llama3-76B", LLAMA, "PreTrainedTokenizerFast", "internlm2-chat"),
    *(Size(f"InternVL2_5-{size}B", QWEN2, "Qwen2Tokenizer", "internvl2_5") for size in (1, 4, 38, 78)),
    *(Size(f"InternVL2_5-{size}B", INTERNLM2, "InternLM2Tokenizer", "internvl2_5") for size in (2, 8, 26)),
    *(Size(f"InternVL3-{size}B", QWEN2, "Qwen2Tokenizer", "internvl2_5") for size in (1, 2, 8, 14, 38, 78)),
    *(Size(f"InternVL3_5-{size}B", QWEN3, "Qwen2Tokenizer", "internvl2_5") for size in (1, 2, 4, 8, 14, 38)),
]
# Where the files state nothing. The 76B's tokenizer.json states it in its post-processor.
BY_DEFAULT = {"InternLM2Tokenizer": True, "LlamaTokenizer": True, "Qwen2Tokenizer": False}
BY_DEFAULT["PreTrainedTokenizerFast"] = True


def twin(folder: Path, size: Size, stated: dict[str, Any]) -> Path:
    llm = {"architectures": [size.body], "max_position_embeddings": 4096}
    folders.write_chat_folder(folder, size.template, llm_config=llm, system_message="You inspect homes.")
    names: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if size.tokenizer == "Qwen2Tokenizer":
        vocabulary = write_vocab_and_merges(folder, folders.byte_level(folders.QWEN2_WORDS))
        names = {"bos_token": None, "eos_token": "<|im_end|>"}
        names["added_tokens_decoder"] = {str(vocabulary[token]): folders.special(token) for token in folders.SPECIAL}
        if stated.get("add_bos_token"):
            names["bos_token"] = "<|endoftext|>"
    elif size.tokenizer == "PreTrainedTokenizerFast":
        folders.llama_like().save(str(folder / "tokenizer.json"))
    else:
        train(folder)
        write_phi3_tokenizer(folder, CHAT_TOKENS)
        names["added_tokens_decoder"] = read_json(folder, "tokenizer_config.json")["added_tokens_decoder"]
    folders.write(folder, "tokenizer_config.json", {"tokenizer_class": size.tokenizer, **names, **stated})
    return folder


def prompt_ids(folder: Path) -> tuple[list[int], Tokenizer]:
    preprocessor = Preprocessor.from_checkpoint(folder)
    ids = preprocessor(PreprocessRequest(text="Is there a socket?")).input_ids.tolist()
    return ids, preprocessor.prompts.tokenizer


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
@pytest.mark.parametrize("stated", KEYS, ids=str)
def test_bos_of_every_published_size(tmp_path: Path, size: Size, stated: dict[str, Any]) -> None:
    ids, tokenizer = prompt_ids(twin(tmp_path, size, stated))
    expected = stated.get("add_bos_token", BY_DEFAULT[size.tokenizer])
    start = tokenizer.token_id("<|system|>" if size.template == "phi3-chat" else "<|im_start|>")
    assert ids[: 1 + expected] == ([tokenizer.bos_id, start] if expected else [start])
    assert ids.count(tokenizer.bos_id) == int(expected)


def test_llama_documents_the_default_that_is_used() -> None:
    """transformers 5 itself no longer follows it: with tokenizer.model and no key its LlamaTokenizer adds none."""
    default = re.search(r"add_bos_token.*?defaults to `(\w+)`", LlamaTokenizer.__doc__ or "", re.DOTALL)
    assert default is not None and default[1] == str(BY_DEFAULT["LlamaTokenizer"])


@pytest.mark.parametrize("stated", KEYS[1:], ids=str)
def test_a_stated_key_means_what_transformers_makes_of_it(tmp_path: Path, stated: dict[str, Any]) -> None:
    train(tmp_path)
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    folders.write(tmp_path, "tokenizer_config.json", {**names, **stated})
    ours = Tokenizer.from_folder(tmp_path)
    reference = LlamaTokenizer.from_pretrained(tmp_path)
    assert ours.prefix_ids + ours.encode("user") + ours.suffix_ids == reference("user")["input_ids"]


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "InternLM2TokenizerFast"])
def test_fast_classes_have_the_same_default(tmp_path: Path, name: str) -> None:
    train(tmp_path)
    folders.write(tmp_path, "tokenizer_config.json", {"tokenizer_class": name})
    assert Tokenizer.from_folder(tmp_path).prefix_ids == [1]  # the class's <s>, though no bos_token is named


@pytest.mark.parametrize("name", ["InternLM2Tokenizer", "LlamaTokenizerFast", "InternLM3Tokenizer", None])
@pytest.mark.parametrize("adds", [True, False])
def test_a_post_processor_beside_it_states_it(tmp_path: Path, name: str | None, adds: bool) -> None:
    backend: Backend = folders.llama_like()
    if not adds:
        backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    backend.save(str(tmp_path / "tokenizer.json"))
    folders.write(tmp_path, "tokenizer_config.json", {"tokenizer_class": name, "bos_token": "<s>"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.prefix_ids == ([tokenizer.bos_id] if adds else [])


def test_tokenizer_json_alone_is_taken_as_it_is(tmp_path: Path) -> None:
    folders.byte_level().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).prefix_ids == []


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"tokenizer_class": "InternLM3Tokenizer"}, "InternLM3Tokenizer"),
        (
            {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["own.MyTokenizer", None]}},
            "MyTokenizer",
        ),
        ({"auto_map": {"AutoTokenizer": "own.MyTokenizerFast"}}, "MyTokenizer"),
        ({}, "None"),
    ],
)
def test_a_class_whose_default_is_unknown_is_refused_by_name(tmp_path: Path, settings: Any, name: str) -> None:
    train(tmp_path)
    folders.write(tmp_path, "tokenizer_config.json", settings)
    with pytest.raises(CheckpointError, match=rf"add_bos_token.*{name}.*state add_bos_token"):
        Tokenizer.from_folder(tmp_path)
    folders.write(tmp_path, "tokenizer_config.json", {**settings, "bos_token": "<s>", "add_bos_token": True})
    assert Tokenizer.from_folder(tmp_path).prefix_ids == [1]


def test_a_bos_token_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    write_vocab_and_merges(tmp_path, folders.byte_level())
    folders.write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True})
    with pytest.raises(CheckpointError, match="add a bos_token"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "body", "template", "words"),
    [
        ("InternVL3-9B", "InternLM3ForCausalLM", "internvl2_5", "'InternLM3ForCausalLM'.*code that comes with"),
        ("InternVL3_5-30B-A3B", "Qwen3MoeForCausalLM", "internvl2_5", "'Qwen3MoeForCausalLM'.*mixtures of experts"),
        ("InternVL3_5-GPT-OSS-20B", "GptOssForCausalLM", "internvl3_5_gpt_oss", "'GptOssForCausalLM'.*experts"),
        ("a known body with such a template", QWEN3, "internvl3_5_gpt_oss", "template 'internvl3_5_gpt_oss'"),
    ],
)
def test_sizes_that_are_refused_say_why(tmp_path: Path, name: str, body: str, template: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        prompt_ids(twin(tmp_path, Size(name, body, "Qwen2Tokenizer", template), {}))


@pytest.mark.parametrize("model_type", ["internlm3", "qwen3_moe", "gpt_oss"])
def test_native_bodies_that_are_refused_say_why(tmp_path: Path, model_type: str) -> None:
    folders.write_hf_folder(tmp_path, folders.byte_level())
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = model_type
    folders.write(tmp_path, "config.json", config)
    with pytest.raises(CheckpointError, match=f"'{model_type}' is not supported"):
        read_config(tmp_path)
