"""A sentencepiece ``tokenizer.model`` made into a ``tokenizers`` object.

How a tokenizer's pieces spell text, as bytes: what its decoder does, one piece at a time.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tessera.errors import CheckpointError

SPACE = "▁"


def sentencepiece_tokenizer(data: bytes, prefix_once: bool = False) -> Tokenizer:
    """A BPE tokenizer from the bytes of a tokenizer.model.

    Where the model puts a space in front, each text between special tokens gets one; ``prefix_once``: only a text
    that begins the whole (transformers' LlamaTokenizer with ``legacy: false``). Raises CheckpointError if they are not
    such a file, or one of another model type (unigram, word, char).
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(data)
        pieces = list(proto.pieces)
        texts = [piece.piece for piece in pieces]
    except (DecodeError, ValueError) as error:
        raise CheckpointError(f"tokenizer.model is not a sentencepiece model: {error!r}") from None
    if not pieces:
        raise CheckpointError("tokenizer.model holds no pieces")
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != trainer.BPE:
        raise CheckpointError(
            f"tokenizer.model has sentencepiece model type {trainer.model_type}; supported is 2 (BPE). "
            "Save the tokenizer as tokenizer.json"
        )
    if trainer.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise CheckpointError("tokenizer.model writes spaces in a way that is not supported; save it as tokenizer.json")
    usable = {piece.piece: piece.score for piece in pieces if piece.type == kinds.NORMAL}
    unknown = next((piece.piece for piece in pieces if piece.type == kinds.UNKNOWN), None)
    fallback = any(piece.type == kinds.BYTE for piece in pieces)
    steps: list[Any] = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    vocabulary = {text: index for index, text in enumerate(texts)}
    merges = _merges(usable, vocabulary)
    tokenizer = spm_backend(vocabulary, merges, unknown, fallback, steps, rules.add_dummy_prefix, prefix_once)
    own = [piece.piece for piece in pieces if piece.type in (kinds.UNKNOWN, kinds.CONTROL)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in own])
    users = [piece.piece for piece in pieces if piece.type == kinds.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in users])
    return tokenizer


def spm_backend(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    unknown: str | None,
    byte_fallback: bool,
    normalize: list[Any],
    dummy_prefix: bool,
    prefix_once: bool = False,
) -> Tokenizer:
    """BPE over pieces whose spaces are SPACE; ``dummy_prefix``: a space is put in front, and taken off again."""
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    if dummy_prefix and prefix_once:
        tokenizer.normalizer = normalizers.Sequence(normalize)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prefix: list[Any] = [normalizers.Prepend(SPACE)] if dummy_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*normalize, *prefix, normalizers.Replace(" ", SPACE)])
    strip: list[Any] = [decoders.Strip(content=" ", left=1, right=0)] if dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(scores: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way of joining two pieces into a third, best score first: what sentencepiece decides on the fly."""
    found = [
        (-score, ids[text[:cut]], ids[text[cut:]], (text[:cut], text[cut:]))
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return [merge for *_, merge in sorted(found)]


# The steps of sentencepiece's decoder, as `spm_backend` and transformers write them.
REPLACE = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BYTE_FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}


def spelling_of(backend: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """A piece's bytes, and whether a space in front of the whole text is taken off.

    Raises CheckpointError for a decoder that is neither byte-level nor sentencepiece's.
    """
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    if REPLACE not in steps or any(step not in (REPLACE, STRIP, BYTE_FALLBACK, FUSE) for step in steps):
        raise CheckpointError(
            f"tokenizer.json has the decoder {'+'.join(map(str, kinds))}, which is not supported; supported are "
            "ByteLevel and sentencepiece's (Replace, ByteFallback, Fuse, Strip)"
        )
    return _byte_fallback if BYTE_FALLBACK in steps else _spaced, STRIP in steps


def _spaced(piece: str) -> bytes:
    return piece.replace(SPACE, " ").encode()


def _byte_fallback(piece: str) -> bytes:
    is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    return bytes.fromhex(piece[3:5]) if is_byte else _spaced(piece)


def _byte_level(piece: str) -> bytes:
    table = _byte_level_table()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()


@cache
def _byte_level_table() -> dict[str, int]:
    """GPT-2's character for each byte: printable ones stand for themselves, the others are numbered from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
