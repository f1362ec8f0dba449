"""Whether <s> leads a prompt: twins of the published sizes in the original layout, with and without the key.

The defaults are those that the tokenizer classes document.
"""

from pathlib import Path
from typing import Any

import pytest
from models import checkpoint_folders as folders
from published_sizes import BODIES, SIZES, Size
from test_family_tokenizer import PHI3_TOKENS, train, write_phi3_tokenizer, write_vocab_and_merges
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import LlamaTokenizer

from tessera.checkpoint.files import read_json
from tessera.errors import CheckpointError
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.prompt.tokenizer import Tokenizer

CHAT_TOKENS = [*PHI3_TOKENS, "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]
KEYS: list[dict[str, Any]] = [{}, {"add_bos_token": True}, {"add_bos_token": False}]


# Where the files state nothing. The 76B's tokenizer.json states it in its post-processor.
BY_DEFAULT = {"InternLM2Tokenizer": True, "LlamaTokenizer": True, "Qwen2Tokenizer": False}
BY_DEFAULT["PreTrainedTokenizerFast"] = True


def twin(folder: Path, size: Size, stated: dict[str, Any]) -> Path:
    llm = BODIES[size.body].config()
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


@pytest.mark.parametrize(
    "size", {(size.tokenizer, size.template): size for size in SIZES}.values(), ids=lambda size: size.name
)
@pytest.mark.parametrize("stated", KEYS, ids=str)
def test_bos_of_every_published_size(tmp_path: Path, size: Size, stated: dict[str, Any]) -> None:
    ids, tokenizer = prompt_ids(twin(tmp_path, size, stated))
    expected = stated.get("add_bos_token", BY_DEFAULT[size.tokenizer])
    start = tokenizer.token_id("<|system|>" if size.template == "phi3-chat" else "<|im_start|>")
    bos = tokenizer.token_id(tokenizer.named.get("bos_token", ""))
    assert ids[: 1 + expected] == ([bos, start] if expected else [start])
    assert ids.count(bos) == int(expected)


EOS = [{"add_bos_token": bos, "add_eos_token": eos} for bos in (True, False) for eos in (True, False)]


@pytest.mark.parametrize("stated", [*KEYS[1:], *EOS], ids=str)
def test_a_stated_key_means_what_transformers_makes_of_it(tmp_path: Path, stated: dict[str, Any]) -> None:
    train(tmp_path)
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    folders.write(tmp_path, "tokenizer_config.json", {**names, **stated})
    ours = Tokenizer.from_folder(tmp_path)
    reference = LlamaTokenizer.from_pretrained(tmp_path)
    assert ours.prefix_ids + ours.encode("user") + ours.suffix_ids == reference("user")["input_ids"]


def test_a_stated_end_token_stands_behind_the_prompt(tmp_path: Path) -> None:
    ids, tokenizer = prompt_ids(twin(tmp_path, SIZES[1], {"add_bos_token": False, "add_eos_token": True}))
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ([], [2])
    assert (ids[0] == 1, ids[-1] == 2, ids.count(2)) == (False, True, 1)


@pytest.mark.parametrize("stated", [None, True, False])
def test_a_post_processor_s_end_token_stays_unless_the_key_says_no(tmp_path: Path, stated: bool | None) -> None:
    backend: Backend = folders.llama_like()
    ends = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    backend.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>"} | ({} if stated is None else {"add_eos_token": stated})
    folders.write(tmp_path, "tokenizer_config.json", names)
    tokenizer = Tokenizer.from_folder(tmp_path)
    told = {None: [ends[1][1]], True: [tokenizer.token_id("<|im_end|>")], False: []}
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ([ends[0][1]], told[stated])


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
    assert tokenizer.prefix_ids == ([tokenizer.token_id("<s>")] if adds else [])


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


@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
def test_a_token_that_does_not_exist_is_refused(tmp_path: Path, key: str) -> None:
    write_vocab_and_merges(tmp_path, folders.byte_level())
    stated = {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, f"add_{key}": True}
    folders.write(tmp_path, "tokenizer_config.json", stated)
    with pytest.raises(CheckpointError, match=f"add a {key}"):
        Tokenizer.from_folder(tmp_path)
