"""Tokenizers made from a checkpoint's other files, against the libraries those files are from."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import checkpoint_folders as folders
from transformers import LlamaTokenizer, Qwen2Tokenizer

from tessera.errors import CheckpointError
from tessera.prompt.spelling import sentencepiece_tokenizer
from tessera.prompt.tokenizer import Tokenizer

TEXTS = [
    "Is there a socket?",
    " leading",
    "double  space",
    "tab\tand\nnewline\n",
    "café 中文 🙂",
    "12345",
    "x",
    " ",
    "Ünseen ßß",
]
ANY_TEXT = st.text(st.sampled_from("aeist owcké.\n 1🙂中") | st.characters(exclude_categories=["Cs", "Cc"]))
# sentencepiece ends a text at a zero byte and reads its own space sign as a space; control tokens spelled out are its
# wrapper's, and ours, not its own.
ORDINARY = ANY_TEXT.filter(lambda text: not any(part in text for part in ("\0", "▁", "<s>", "</s>", "<unk>")))


def train(folder: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(folders.CORPUS).splitlines()),
        model_writer=stream,
        **{
            "model_type": "bpe",
            "vocab_size": 400,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "user_defined_symbols": ["[UNUSED]"],
            "minloglevel": 2,
            **options,
        },
    )
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(stream.getvalue())
    folders.write(folder, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})
    return sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "no dummy prefix": {"add_dummy_prefix": False},
    "nfkc, spaces collapsed": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    folder = tmp_path_factory.mktemp("sentencepiece")
    reference = train(folder, **VARIANTS[request.param])
    return Tokenizer.from_folder(folder), reference


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ORDINARY)
def test_sentencepiece_any_text(pair: Any, text: str) -> None:
    ours, reference = pair
    ids = reference.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == reference.decode(ids)


def test_internlm2_files(tmp_path: Path) -> None:
    """A tokenizer.model with chat tokens behind a gap in the ids, as InternLM2's tokenizer_config.json states them."""
    reference = train(tmp_path)
    size = reference.get_piece_size()
    names = ["<|im_end|>", "<|im_start|>", "<img>", "</img>", "<IMG_CONTEXT>"]
    stated = {str(size + 7 + index): folders.special(name) for index, name in enumerate(names)}
    settings_ = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "InternLM2Tokenizer"}
    folders.write(tmp_path, "tokenizer_config.json", {**settings_, "added_tokens_decoder": stated})
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode("<|im_start|>user\nhi<|im_end|>") == [size + 8, *reference.encode("user\nhi"), size + 7]
    assert ours.encode("<img>", special=False) == reference.encode("<img>")
    assert (ours.token_id("<s>"), ours.eos_id, ours.vocab_size) == (1, 2, size + 12)
    assert ours.decode([size + 8, *reference.encode("user")]) == "user"
    assert ours.decode([size + 3, size + 100, -1]) == ""
    assert ours.prefix_ids == [1]


PHI3_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def write_phi3_tokenizer(folder: Path, names: list[str], **stated: Any) -> int:
    """Phi-3's files: its tokens take the whitespace behind them. Gives the first id of the added ``names``."""
    first = train(folder).get_piece_size()
    added = {
        str(first + index): folders.special(name) | {"rstrip": name in PHI3_TOKENS} for index, name in enumerate(names)
    }
    own = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    settings_ = {"tokenizer_class": "LlamaTokenizer", **own, "added_tokens_decoder": added, **stated}
    folders.write(folder, "tokenizer_config.json", settings_)
    return first


def test_phi3_files(tmp_path: Path) -> None:
    """Not legacy: only the first word of all has a space put in front."""
    write_phi3_tokenizer(tmp_path, PHI3_TOKENS, add_bos_token=True)
    ours, reference = Tokenizer.from_folder(tmp_path), LlamaTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "<|user|>\nIs it?<|end|><|assistant|>\n Yes. <|end|>", "a<|end|>b", " <|end|>"]:
        assert ours.prefix_ids + ours.encode(text) == reference(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == reference.decode(ours.encode(text), skip_special_tokens=True), text


def write_vocab_and_merges(folder: Path, tokenizer: Any) -> dict[str, int]:
    model = json.loads(tokenizer.to_str())["model"]
    folders.write(folder, "vocab.json", model["vocab"])
    lines = [" ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n", encoding="utf-8")
    folders.write(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    return model["vocab"]


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "byte pieces"])
def test_vocab_and_merges(tmp_path: Path, kind: str) -> None:
    """Byte pieces: InternLM2's written as vocab.json + merges.txt have the ids of its tokenizer.model."""
    if kind == "byte pieces":
        encode = train(tmp_path, user_defined_symbols=[]).encode
        write_vocab_and_merges(tmp_path, Tokenizer.from_folder(tmp_path).backend)
        (tmp_path / "tokenizer.model").unlink()
    else:
        original = folders.byte_level(folders.QWEN2_WORDS if kind == "qwen2" else None)
        write_vocab_and_merges(tmp_path, original)

        def encode(text: str) -> list[int]:
            return original.encode(text).ids

    if kind == "qwen2":
        folders.write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
        reference = Qwen2Tokenizer.from_pretrained(tmp_path)
        assert [reference(text)["input_ids"] for text in TEXTS] == [encode(text) for text in TEXTS]
    ours = Tokenizer.from_folder(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [encode(text) for text in TEXTS]


def test_added_tokens_json(tmp_path: Path) -> None:
    vocabulary = write_vocab_and_merges(tmp_path, folders.byte_level())
    first = len(vocabulary)
    folders.write(tmp_path, "added_tokens.json", {"<|new|>": first + 1, "<tool>": first})
    folders.write(tmp_path, "special_tokens_map.json", {"additional_special_tokens": ["<|new|>"]})
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode("a<|new|><tool>") == [*ours.encode("a"), first + 1, first]
    assert "<|new|>" in ours.special_tokens
    assert "<tool>" not in ours.special_tokens
    assert first + 1 not in ours.encode("<|new|>", special=False)


def test_ids_that_mean_two_things_are_refused(tmp_path: Path) -> None:
    folders.byte_level().save(str(tmp_path / "tokenizer.json"))
    folders.write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": {"3": folders.special("<new>")}})
    with pytest.raises(CheckpointError, match="'<new>'.*'<img>'"):
        Tokenizer.from_folder(tmp_path)
    folders.write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": {"900": folders.special("<img>")}})
    with pytest.raises(CheckpointError, match="id 3 .* 900"):
        Tokenizer.from_folder(tmp_path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    train(tmp_path / "unigram", model_type="unigram", vocab_size=320)
    with pytest.raises(CheckpointError, match="model type 1"):
        Tokenizer.from_folder(tmp_path / "unigram")
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xff\x01garbage")
    with pytest.raises(CheckpointError, match="not a sentencepiece model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) not in str(caught.value)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_model_or_an_error(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        sentencepiece_tokenizer(data)
