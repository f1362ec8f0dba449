"""Text to token ids and back, from whichever tokenizer files a checkpoint has.

``tokenizer.json`` as it is; else a sentencepiece ``tokenizer.model`` or ``vocab.json`` + ``merges.txt``, made into the
same kind of object here. Special tokens come from tokenizer_config.json (added_tokens_decoder), added_tokens.json
and special_tokens_map.json. No code of the checkpoint is run.

Token ids to text as they come.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tessera.checkpoint.files import read_json
from tessera.errors import CheckpointError
from tessera.prompt.spelling import sentencepiece_tokenizer, spelling_of, spm_backend

# How Qwen2 splits text into words (transformers tokenization_qwen2.py); vocab.json + merges.txt do not say.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# What a tokenizer class puts in front of a text unless tokenizer_config.json states add_bos_token: transformers'
# documentation, and for InternLM2 the tokenization_internlm2.py that its checkpoints carry.
DEFAULT_BOS = {"LlamaTokenizer": "<s>", "InternLM2Tokenizer": "<s>", "Qwen2Tokenizer": None, "GPT2Tokenizer": None}
# Classes that are whatever tokenizer.json says.
PLAIN_CLASSES = (None, "PreTrainedTokenizer", "TokenizersBackend")


class Tokenizer:
    """Thread-safe for reading. ``vocab_size`` counts ids, so that every id below it may occur.

    ``strips_space``: a space in front of a whole text is no part of it.
    """

    def __init__(self, backend: Backend, settings: dict[str, Any], affixes: tuple[list[int], list[int]]) -> None:
        self.backend = backend
        self.settings = settings
        self.prefix_ids, self.suffix_ids = affixes
        self._spell, self.strips_space = spelling_of(backend)
        self._bytes: dict[int, bytes] = {}
        self._plain: dict[tuple[frozenset[str], bool], Backend] = {}
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.named = {name: content for name in NAMED_TOKENS if (content := _content(settings.get(name))) is not None}

    @staticmethod
    def from_folder(folder: Path) -> Tokenizer:
        """Load what lies in ``folder``; raises CheckpointError for what cannot be read or known from it."""
        settings = {**read_json(folder, "special_tokens_map.json"), **read_json(folder, "tokenizer_config.json")}
        backend = _load_backend(folder, settings)
        _add_tokens(backend, _stated_tokens(folder, settings))
        return Tokenizer(backend, settings, _affixes(backend, settings, (folder / "tokenizer.json").is_file()))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of ``text``; special tokens written in it count as such only if ``special``. Nothing is put in front."""
        if special:
            return self.backend.encode(text, add_special_tokens=False).ids
        return self.plain(self.special_tokens, first=True).encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids beyond the vocabulary (a model's padding rows) give nothing."""
        stream = self.stream(skip_special_tokens)
        return stream.push(ids) + stream.end()

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """What ``decode`` gives, for ids that come one after the other."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return TextStream(lambda index: b"" if index in hidden else self.token_bytes(index), self.strips_space)

    def token_bytes(self, index: int) -> bytes:
        """What a token adds to the text, in UTF-8; nothing beyond the vocabulary."""
        found = self._bytes.get(index)
        if found is None:
            piece = self.backend.id_to_token(int(index)) if 0 <= index < self.vocab_size else None
            found = self._bytes[index] = self._spell(piece or "")
        return found

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    @property
    def eos_id(self) -> int | None:
        return self.token_id(self.named.get("eos_token", ""))

    @cached_property
    def added_tokens(self) -> dict[str, AddedToken]:
        """Every added token by its text; ``.special`` tells the ones with a meaning of their own."""
        return {token.content: token for token in self.backend.get_added_tokens_decoder().values()}

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(content for content, token in self.added_tokens.items() if token.special)

    @cached_property
    def special_ids(self) -> frozenset[int | None]:
        return frozenset(map(self.token_id, self.special_tokens))

    @cached_property
    def numbers(self) -> frozenset[int]:
        """The tokens that have nothing but digits."""
        pieces = self.backend.get_vocab(with_added_tokens=False).items()
        return frozenset(token for piece, token in pieces if piece.isascii() and piece.isdecimal())

    @cached_property
    def special_names(self) -> dict[str, str]:
        """What a chat template may ask for by name: bos_token, eos_token, and any other ``*_token`` of the settings."""
        return {
            name: content
            for name, value in self.settings.items()
            if name.endswith("_token") and (content := _content(value)) is not None
        }

    @cached_property
    def longest_token(self) -> int:
        """Characters (bytes for byte-level vocabularies) of the longest piece: no token stands for more text."""
        return max(len(piece) for piece in self.backend.get_vocab(with_added_tokens=True))

    def plain(self, controls: frozenset[str], first: bool) -> Backend:
        """A tokenizer to which ``controls`` are ordinary text; all other added tokens stay whole.

        ``first`` tells whether the text begins the prompt: some tokenizers treat only a prompt's first word as if a
        space stood before it.
        """
        key = (controls, first)
        if key not in self._plain:
            content = json.loads(self.backend.to_str())
            for token in content["added_tokens"]:
                token["special"] = token["content"] in controls
            outer = content["pre_tokenizer"] or {}
            for step in outer.get("pretokenizers", [outer]):
                if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
                    step["prepend_scheme"] = "always" if first else "never"
            backend = Backend.from_str(json.dumps(content))
            backend.encode_special_tokens = True
            self._plain[key] = backend
        return self._plain[key]


def _load_backend(folder: Path, settings: dict[str, Any]) -> Backend:
    if (folder / "tokenizer.json").is_file():
        try:
            backend = Backend.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"tokenizer.json of the checkpoint cannot be read: {error}") from None
        backend.no_padding()
        backend.no_truncation()
        return backend
    if (folder / "tokenizer.model").is_file():
        once = _class_name(settings) == "LlamaTokenizer" and settings.get("legacy") is False
        return sentencepiece_tokenizer((folder / "tokenizer.model").read_bytes(), prefix_once=once)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_vocab_and_merges(folder, settings)
    raise CheckpointError(
        "the checkpoint has no tokenizer: put tokenizer.json, tokenizer.model or vocab.json + merges.txt "
        "beside config.json"
    )


def _from_vocab_and_merges(folder: Path, settings: dict[str, Any]) -> Backend:
    """Byte-level BPE (GPT-2's words, or Qwen2's by class name), or llama-style if the vocabulary has byte pieces."""
    try:
        vocabulary, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        byte_level = models.BPE(vocab=vocabulary, merges=merges)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"vocab.json and merges.txt of the checkpoint cannot be read: {error}") from None
    if "<0x0A>" in vocabulary:
        unknown = _content(settings.get("unk_token")) or "<unk>"
        prefix = settings.get("add_prefix_space", True) is not False
        return spm_backend(vocabulary, merges, unknown if unknown in vocabulary else None, True, [], prefix)
    backend = Backend(byte_level)
    if settings.get("tokenizer_class", "").startswith("Qwen2"):
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    return backend


def _stated_tokens(folder: Path, settings: dict[str, Any]) -> dict[int | str, AddedToken]:
    """Added tokens that the side files state, by id where they state one, else by their text."""
    named = [settings.get(name) for name in NAMED_TOKENS]
    named += settings.get("additional_special_tokens") or []
    extra = settings.get("extra_special_tokens") or []
    named += list(extra.values()) if isinstance(extra, dict) else extra
    special = {content for token in named if (content := _content(token)) is not None}
    tokens: dict[int | str, AddedToken] = {
        int(index): _added(token, special) for index, token in (settings.get("added_tokens_decoder") or {}).items()
    }
    for content, index in read_json(folder, "added_tokens.json").items():
        tokens.setdefault(int(index), _added(content, special))
    with_id = {token.content for token in tokens.values()}
    tokens.update({content: _added(content, special) for content in sorted(special - with_id)})
    return tokens


def _added(token: str | dict[str, Any], special: set[str]) -> AddedToken:
    stated = token if isinstance(token, dict) else {"content": token}
    content = str(stated["content"])
    flags = {name: stated.get(name, False) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(content, **flags | {"special": flags["special"] or content in special})


def _add_tokens(backend: Backend, stated: dict[int | str, AddedToken]) -> None:
    """Register the stated tokens under their own ids; raises CheckpointError where an id means something else."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, int] = {}
    for key, token in stated.items():
        known = backend.token_to_id(token.content)
        if isinstance(key, int) and known is None:
            other = backend.id_to_token(key)
            if other is not None:
                raise CheckpointError(f"the checkpoint gives token id {key} to both {token.content!r} and {other!r}")
            missing[token.content] = key
        elif isinstance(key, int) and known != key:
            raise CheckpointError(f"token {token.content!r} has id {known} in the vocabulary, {key} in the settings")
    if missing:
        # The library numbers new tokens itself; a token that is in the model's vocabulary keeps its number.
        content = json.loads(backend.to_str())
        content["model"]["vocab"].update(missing)
        fresh = Backend.from_str(json.dumps(content))
        backend.model = fresh.model
    # A special token the settings name without an id, that no vocabulary has, does not exist.
    tokens = [
        token
        for _, token in sorted(stated.items(), key=lambda item: str(item[0]).zfill(12))
        if token.content not in present and backend.token_to_id(token.content) is not None
    ]
    backend.add_special_tokens([token for token in tokens if token.special])
    backend.add_tokens([token for token in tokens if not token.special])


def _affixes(backend: Backend, settings: dict[str, Any], has_json: bool) -> tuple[list[int], list[int]]:
    """Ids that go round a prompt: as the settings state, else tokenizer.json's post-processor, else the class."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    at = next(i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare)
    prefix, suffix = whole[:at], whole[at + len(bare) :]
    name = _class_name(settings)
    add_bos, add_eos = settings.get("add_bos_token"), settings.get("add_eos_token")
    if add_bos is None and backend.post_processor is None and not (has_json and name in PLAIN_CLASSES):
        if name not in DEFAULT_BOS:
            raise CheckpointError(
                f"tokenizer_config.json states no add_bos_token, and whether the tokenizer class {name!r} puts a bos "
                f"token in front is not known (known are {', '.join(DEFAULT_BOS)}); state add_bos_token there"
            )
        add_bos = DEFAULT_BOS[name] is not None

    def stated(key: str, default: str | None) -> list[int]:
        index = backend.token_to_id(_content(settings.get(key)) or default or "")
        if index is None:
            raise CheckpointError(f"the tokenizer is to add a {key}, but its files name none that it has")
        return [index]

    if add_bos is not None:
        prefix = stated("bos_token", DEFAULT_BOS.get(name or "")) if add_bos else []
    if add_eos is not None:
        suffix = stated("eos_token", None) if add_eos else []
    return prefix, suffix


def _class_name(settings: dict[str, Any]) -> str | None:
    """The class that reads these files: one that comes with the checkpoint, else transformers' of that name."""
    own = (settings.get("auto_map") or {}).get("AutoTokenizer")
    named = next(filter(None, own if isinstance(own, list) else [own]), None) or settings.get("tokenizer_class")
    return None if named is None else str(named).rpartition(".")[2].removesuffix("Fast")


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


class TextStream:
    """Whole characters, each as soon as its last byte is there; the parts together are the text of all ids at once.

    ``token_bytes`` gives what a token adds to the text, in UTF-8; of bytes that make no character comes U+FFFD. Not
    ``tokenizers.decoders.DecodeStream``: of the bytes of 中, 0xFF and 🙂 it gives 中 alone, and it has no end at which
    to ask for the rest.
    ``strip_space``: a space in front of the whole text is no part of it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        data = b"".join(map(self._token_bytes, ids))
        if data and self._strip_space:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def end(self) -> str:
        """What an unfinished character leaves."""
        return self._utf8.decode(b"", final=True)
