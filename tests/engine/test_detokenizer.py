"""Deltas of text: whole characters, stop strings held back, nothing lost."""

from __future__ import annotations

from engine_fakes import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.engine.rendering import Detokenizer
from tessera.engine.sequence import SamplingParameters


def deltas(tokens, together=1, **parameters):
    """Each push's text, then the flush's; ends at a stop string as the engine does."""
    detokenizer = Detokenizer(ByteTokenizer(), SamplingParameters.parse(parameters))
    texts, tokens = [], list(tokens)
    for first in range(0, len(tokens), together):
        text, taken = detokenizer.push(tokens[first : first + together])
        texts.append(text)
        assert detokenizer.stopped or taken == len(tokens[first : first + together])
        if detokenizer.stopped:
            break
    return [*texts, detokenizer.flush()], detokenizer.stopped


def test_tokens_that_never_make_a_character_do_not_pile_up():
    texts, _ = deltas([0xFF] * 40 + list(b"end"))
    assert "".join(texts) == "\ufffd" * 40 + "end"
    assert texts[23] == "\ufffd"


pieces = st.sampled_from(["a", "b", "c", "ä", "€", "😀", "ab"])


@settings(max_examples=200)
@given(st.lists(pieces, max_size=30), st.lists(st.sampled_from(["ab", "b€", "aab", "😀ca"]), max_size=3))
def test_deltas_are_the_answer_up_to_the_first_stop(parts, stops):
    answer = "".join(parts)
    shown, stopped = deltas(answer.encode(), stop=stops)
    # The stop string that is complete first ends the answer; of two, the one that began first.
    for length in range(len(answer) + 1):
        found = [answer.find(stop) for stop in stops if stop in answer[:length]]
        if found:
            assert stopped and "".join(shown) == answer[: min(found)]
            return
    assert not stopped and "".join(shown) == answer


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_any_bytes_come_out_once(data):
    assert "".join(deltas(data)[0]) == data.decode("utf-8", errors="replace")


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from("abE"), max_size=24),
    st.lists(st.sampled_from(["ab", "abE", "Eab", "aa", "bEab"]), min_size=1, max_size=3, unique=True),
    st.integers(0, 12),
    st.integers(1, 7),
)
def test_a_stop_string_counts_if_any_of_it_follows_min_tokens(letters, stops, least, together):
    """vLLM's rule: what is complete within min_tokens does not stop, what ends after them does, wherever it began."""
    answer = "".join(letters)
    texts, stopped = deltas(answer.encode(), together, stop=stops, min_tokens=least)
    for end in range(least + 1, len(answer) + 1):
        begun = [end - len(stop) for stop in stops if answer[:end].endswith(stop)]
        if begun:
            assert stopped and "".join(texts) == answer[: min(begun)]
            return
    assert not stopped and "".join(texts) == answer
