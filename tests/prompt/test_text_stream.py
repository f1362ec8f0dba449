"""Ids to text in any portions: the portions together are the text of the whole, and that is the libraries' own."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models import checkpoint_folders as folders
from test_family_tokenizer import ANY_TEXT, train, write_vocab_and_merges
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from tessera.engine.rendering import Detokenizer
from tessera.engine.sequence import SamplingParameters
from tessera.errors import CheckpointError
from tessera.prompt.tokenizer import Tokenizer

KINDS = ["sentencepiece", "sentencepiece without a dummy prefix", "byte level", "llama's tokenizer.json"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("stream")
    if request.param.startswith("sentencepiece"):
        train(folder, add_dummy_prefix=request.param == "sentencepiece")
    elif request.param == "byte level":
        write_vocab_and_merges(folder, folders.byte_level())
    else:
        folders.llama_like().save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


ANY_FIXTURE = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY_FIXTURE
@given(ids=st.lists(st.integers(-1, 700), max_size=40), cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
@example(ids=[3 + byte for byte in (*"中".encode(), 0xFF, *"é".encode()[:1])], cuts=[1, 2, 3, 4], skip=True)
@example(ids=[3 + byte for byte in (*[0xFF] * 22, *"中".encode())], cuts=[24], skip=True)
def test_any_portions_give_the_whole(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    """Before, a byte that makes no character turned those round it into U+FFFD in the whole answer alone."""
    detokenizer = Detokenizer(tokenizer, SamplingParameters(skip_special_tokens=skip))
    bounds = sorted({0, *cuts, len(ids)})
    portions = [detokenizer.push(ids[start:end])[0] for start, end in pairwise(bounds)]
    assert "".join(portions) + detokenizer.flush() == tokenizer.decode(ids, skip)


@ANY_FIXTURE
@given(text=ANY_TEXT, skip=st.booleans())
def test_text_comes_back_as_the_library_gives_it(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(f"<s>{text}</s>")
    assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(folders.byte_level(), {}, ([], []))


@ANY_FIXTURE
@given(ids=st.lists(st.integers(0, 450), max_size=40), skip=st.booleans())
def test_any_ids_as_the_library_decodes_them(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    assert byte_level.decode(ids, skip) == byte_level.backend.decode(ids, skip_special_tokens=skip)


def test_a_byte_that_makes_no_character_spoils_no_other(tmp_path: Path) -> None:
    """As sentencepiece itself decodes; `tokenizers` turns the whole run of bytes into U+FFFD."""
    reference = train(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    ids = [reference.piece_to_id(f"<0x{byte:02X}>") for byte in (*"中".encode(), 0xFF, *"🙂".encode())]
    assert ours.decode(ids) == reference.decode(ids) == "中\ufffd🙂"


SPACED = decoders.Replace("▁", " ")


@pytest.mark.parametrize(
    "decoder", [decoders.WordPiece(), decoders.Metaspace(), decoders.Sequence([SPACED, decoders.CTC()]), None]
)
def test_decoders_of_another_kind_are_refused(tmp_path: Path, decoder: object) -> None:
    backend: Backend = folders.byte_level()
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="decoder .* not supported"):
        Tokenizer.from_folder(tmp_path)
