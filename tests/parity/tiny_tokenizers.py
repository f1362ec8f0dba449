"""Small tokenizers in each form a folder may hold: tokenizer.json, vocab.json with merges.txt, sentencepiece."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
IMAGE_TOKEN = "<IMG_CONTEXT>"
CORPUS = (
    "Is there a socket in the picture? Yes, there is one socket near the door.",
    "Is there an exposed wire? No. What hazard do you see: damp, a crack, a gas bottle, or a blocked exit?",
    "Describe the room. The room has a table, two chairs and a window; a smoke detector is on the ceiling.",
    "What colour is the chair? Red, green, blue, white, brown or grey. How many doors are there? Two.",
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_vocab_and_merges(folder: Path) -> None:
    model = json.loads(byte_level_tokenizer().to_str())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    ordinary = {token: number for token, number in model["vocab"].items() if token not in SPECIAL_TOKENS}
    write_json(folder / "vocab.json", ordinary)
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    added = {token: model["vocab"][token] for token in SPECIAL_TOKENS}
    _write_added_tokens(folder, added, {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}, {})


def write_sentencepiece(
    folder: Path, vocab_size: int, tokenizer_class: str, turns: tuple[str, ...], flags: dict[str, Any]
) -> None:
    """``tokenizer.model`` with byte fallback, all letters, some merged pieces, and the special tokens added after.

    ``turns``: the tokens that turns are made of, with these ``flags``.
    """
    words = sorted({f"▁{word}" for line in CORPUS for word in line.split()}, key=lambda word: (len(word), word))
    letters = sorted({*"▁", *(chr(code) for code in range(33, 127))})
    grown = {word[:end] for word in words for end in range(2, len(word) + 1)} - set(letters)
    # A piece can only be built from two shorter ones, so every prefix of a word is a piece.
    merged = sorted(grown, key=lambda piece: (len(piece), piece))
    room = vocab_size - 3 - 256 - len(letters) - 8
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(piece, -float(rank), 1) for rank, piece in enumerate([*merged[: max(room, 0)], *letters])]
    if len(pieces) + 8 > vocab_size:
        raise ValueError(f"a sentencepiece vocabulary needs {len(pieces) + 8} ids, the model has {vocab_size}")
    (folder / "tokenizer.model").write_bytes(_sentencepiece_model(pieces))
    added = {token: len(pieces) + number for number, token in enumerate((*turns, "<img>", "</img>", IMAGE_TOKEN))}
    settings = {"tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {"add_bos_token": True, "add_eos_token": False, "legacy": False}
    _write_added_tokens(folder, added, settings, dict.fromkeys(turns, flags))


def _write_added_tokens(
    folder: Path, added: dict[str, int], settings: dict[str, Any], flags: dict[str, dict[str, Any]]
) -> None:
    write_json(folder / "added_tokens.json", added)
    decoder = {
        str(number): {"content": token, "special": True, **flags.get(token, {})} for token, number in added.items()
    }
    write_json(folder / "tokenizer_config.json", {**settings, "added_tokens_decoder": decoder})


def _sentencepiece_model(pieces: list[tuple[str, float, int]]) -> bytes:
    """BPE of (text, score, type) with byte fallback; nothing is normalised, and a space is put in front."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    each = [proto.ModelProto.SentencePiece(piece=text, score=score, type=kind) for text, score, kind in pieces]
    trainer = proto.TrainerSpec(model_type="BPE", vocab_size=len(pieces), byte_fallback=True)
    normalizer = proto.NormalizerSpec(name="identity", remove_extra_whitespaces=False)
    return proto.ModelProto(pieces=each, trainer_spec=trainer, normalizer_spec=normalizer).SerializeToString()


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
