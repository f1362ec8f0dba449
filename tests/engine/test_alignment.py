"""What is proposed, against a twin that looks at every place of the text; no engine, no device."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from tessera.engine.drafts.alignment import CERTAIN, LONGEST, Alignment, SuffixAutomaton
from tessera.engine.drafts.suffixes import BETWEEN, PROMPT_TOKENS, EarlierAnswers, Suffixes, read_tokens
from tessera.engine.drafts.text import NEAR, PIECE, TextDraft


class Twin:
    """As Alignment: of the ends that are longer by one token at most, the longest that occurs in ``text``."""

    def __init__(self) -> None:
        self.length, self.place, self.certain = 0, None, -1

    def take(self, text: Sequence[int], answer: Sequence[int]) -> None:
        def ends(count: int) -> list[int]:
            end = list(answer[len(answer) - count :])
            return [at for at in range(count - 1, len(text)) if list(text[at + 1 - count : at + 1]) == end]

        most = min(self.length + 1, len(answer), len(text))
        self.length = next((count for count in range(most, 0, -1) if ends(count)), 0)
        self.place = None
        if self.length:
            later = [at for at in ends(min(self.length, LONGEST)) if at > self.certain]
            self.place = later[0] if later else ends(self.length)[0]
            if self.length >= CERTAIN:
                self.certain = self.place


def answer_like(text: Sequence[int], random: Random, tokens: int) -> list[int]:
    """Parts of the text in any order, with tokens of their own between them."""
    answer: list[int] = []
    while text and len(answer) < 60:
        begin = random.randrange(len(text))
        answer += text[begin : begin + random.randrange(1, 12)] + [random.randrange(tokens + 1)] * random.randrange(2)
    return answer


@pytest.mark.parametrize("seed", range(60))
def test_longest_end_and_its_place_are_those_of_a_search(seed: int) -> None:
    random = Random(seed)
    tokens = random.choice((1, 2, 3, 8))
    text = [random.randrange(tokens) for _ in range(random.choice((0, 1, 5, 40, 90)))]
    alignment, twin = Alignment(SuffixAutomaton(text)), Twin()
    answer = answer_like(text, random, tokens)
    for at in range(len(answer)):
        alignment.take(answer, at)
        twin.take(text, answer[: at + 1])
        assert (alignment.length, alignment.place) == (twin.length, twin.place), at


@pytest.mark.parametrize("seed", range(30))
def test_text_may_grow_while_an_answer_is_aligned(seed: int) -> None:
    random = Random(seed)
    tokens = random.choice((2, 3))
    automaton = SuffixAutomaton()
    alignment, twin, answer = Alignment(automaton), Twin(), list[int]()
    for _ in range(120):
        if random.random() < 0.5:
            automaton.extend(random.randrange(tokens) for _ in range(random.randrange(1, 5)))
        answer.append(random.randrange(tokens))
        alignment.take(answer, len(answer) - 1)
        twin.take(automaton.tokens, answer)
        assert (alignment.length, alignment.place) == (twin.length, twin.place)


def test_states_are_fewer_than_twice_the_tokens() -> None:
    random = Random(3)
    for text in ([0] * 500, [0, 1] * 250, [random.randrange(2) for _ in range(500)], [*range(500)]):
        automaton = SuffixAutomaton(text)
        assert len(automaton.ways) <= 2 * len(text)
        assert sum(map(len, automaton.ways)) <= 3 * len(text)


def test_one_token_of_thousands_of_places_is_not_looked_for_at_all_of_them() -> None:
    text = [5, 7, 1, 2, 3, *[0, 7] * 2000, 5, 7]
    alignment, answer = Alignment(SuffixAutomaton(text)), [1, 2, 3, 5, 7]
    for at in range(len(answer)):
        alignment.take(answer, at)
    assert (alignment.length, alignment.place) == (2, 1), "the first of all, which is known without a search"


def steps(draft: TextDraft, answer: Sequence[int], most: int = 15) -> int:
    """Steps that an answer takes where what is proposed and right is accepted."""
    count, known = 0, 0
    while known < len(answer):
        proposed, count = draft.propose(answer[:known], most), count + 1
        assert len(proposed) <= most
        right = next((n for n, pair in enumerate(zip(proposed, answer[known:])) if pair[0] != pair[1]), None)
        known += 1 + (min(len(proposed), len(answer) - known) if right is None else right)
    return count


WORDS = [*range(100, 164)]


def test_draft_is_proposed_from_its_beginning() -> None:
    draft = TextDraft(WORDS)
    assert draft.propose([], 3) == WORDS[:3]
    assert draft.propose(WORDS[:2], 3) == WORDS[2:5]
    assert draft.propose(WORDS, 3) == []
    assert steps(TextDraft(WORDS), WORDS) == 4


@pytest.mark.parametrize(
    ("answer", "most"),
    [
        ([*WORDS[:20], 1, *WORDS[21:]], 6),  # another token in the place of one
        ([*WORDS[:20], 1, 2, *WORDS[22:]], 7),  # of two
        ([*WORDS[:20], 1, *WORDS[20:]], 7),  # one more
        ([*WORDS[:20], *WORDS[21:]], 6),  # one less
        ([*WORDS[:20], *WORDS[23:]], 6),  # as far as a single token is believed
        ([*WORDS[:20], *WORDS[40:]], 5),  # further: two tokens must agree
        ([*WORDS[32:], *WORDS[:32]], 8),  # in another order
        ([1, 2, 3, *WORDS], 9),
    ],
)
def test_alignment_goes_on_after_a_mismatch(answer: list[int], most: int) -> None:
    assert steps(TextDraft(WORDS), answer) <= most


def test_of_several_places_the_first_after_the_last_certain_one_is_taken() -> None:
    row = [1, 50, 2]
    draft = [*row, 10, *row, 11, *row, 12]
    taken = TextDraft(draft)
    assert taken.propose([*row, 10, 1], 3) == [50, 2, 11]
    assert taken.propose([*row, 10, 1, 50, 2, 11, 1, 50], 2) == [2, 12]


def test_far_token_alone_is_not_believed() -> None:
    draft = TextDraft(WORDS)
    assert draft.propose([WORDS[40]], 2) == WORDS[1:3], "taken for another one in the first one's place"
    assert draft.propose([WORDS[40], WORDS[41]], 2) == WORDS[42:44]


@pytest.mark.parametrize("seed", range(40))
def test_text_draft_is_that_of_its_twin(seed: int) -> None:
    random = Random(seed)
    tokens = random.choice((2, 4, 30))
    text = [random.randrange(tokens) for _ in range(random.randrange(1, 120))]
    answer, draft, twin, place = answer_like(text, random, tokens), TextDraft(text), Twin(), -1
    for known in range(len(answer) + 1):
        if known:
            twin.take(text, answer[:known])
            near = twin.place is not None and 0 < twin.place - place <= NEAR
            place = twin.place if twin.length > 1 or near else min(place + 1, len(text))
        if random.random() < 0.5:  # the engine asks where it wants to
            assert draft.propose(answer[:known], 5) == text[place + 1 : place + 6]


def test_long_draft_is_read_in_pieces() -> None:
    text = [Random(5).randrange(50) for _ in range(4 * PIECE)]
    draft = TextDraft(text)
    assert draft.propose([], 4) == text[:4]
    assert draft.propose(text[300:310], 4) == text[310:314], "which the first piece does not hold"
    assert steps(TextDraft(text), text) == len(text) // 16


def test_suffixes_propose_what_followed_in_the_prompt() -> None:
    suffixes = Suffixes([1, 2, 3, 4, 5, 6, BETWEEN, 7, 8, 9, 10], EarlierAnswers(), "a")
    assert suffixes.propose([], 4) == []
    assert suffixes.propose([1, 2, 3], 4) == [], "three tokens are too few"
    assert suffixes.propose([1, 2, 3, 4], 4) == [5, 6], "up to a picture"
    assert suffixes.propose([1, 2, 3, 4, 7, 8, 9, 10], 4) == [], "nothing follows"


def test_suffixes_propose_no_more_than_occurred() -> None:
    suffixes = Suffixes([*range(20)], EarlierAnswers(), "a")
    assert suffixes.propose([0, 1, 2, 3], 15) == [4, 5, 6, 7]
    assert suffixes.propose([0, 1, 2, 3, 4], 15) == [5, 6, 7, 8, 9]
    assert suffixes.propose([0, 1, 2, 3, 4], 2) == [5, 6]


def test_pictures_are_no_tokens() -> None:
    ids, spans = np.arange(20, dtype=np.int32), np.array([[2, 5], [10, 1]], np.int32)
    assert read_tokens(ids, spans) == [0, 1, BETWEEN, 7, 8, 9, BETWEEN, *range(11, 20)]
    assert read_tokens(ids, np.zeros((0, 2), np.int32)) == [*range(20)]


def test_suffixes_read_the_end_of_a_long_prompt() -> None:
    prompt = np.arange(10 + PROMPT_TOKENS)
    suffixes = Suffixes(read_tokens(prompt, np.zeros((0, 2))), EarlierAnswers(), "a")
    for _ in range(PROMPT_TOKENS // PIECE):
        suffixes.propose([], 4)
    assert suffixes.propose([4, 5, 6, 7], 4) == []
    assert suffixes.propose([4, 5, 6, 7, 500, 501, 502, 503], 4) == [504, 505, 506, 507]


def test_earlier_answers_are_of_one_name() -> None:
    earlier = EarlierAnswers()
    earlier.add("a", [1, 2, 3, 4, 5])
    earlier.add("a", [6, 7, 8])
    of = {name: Suffixes([], earlier, name) for name in "ab"}
    assert {name: each.propose([1, 2, 3, 4], 4) for name, each in of.items()} == {"a": [5], "b": []}


def test_answers_that_end_meanwhile_are_drawn_on_too() -> None:
    earlier = EarlierAnswers()
    suffixes = Suffixes([], earlier, "a")
    answer = [*range(40)]
    assert suffixes.propose(answer, 4) == []
    earlier.add("a", [*range(60)])
    assert suffixes.propose(answer, 4) == [40, 41, 42, 43]
    assert suffixes.propose([*answer, *range(4)], 4) == [4, 5, 6, 7]
    assert suffixes.propose([*answer, *range(4), *range(20, 59)], 4) == [59], "though it was not asked for 39 tokens"


def test_earlier_answers_are_bounded_in_tokens_and_names() -> None:
    earlier = EarlierAnswers(names=2, tokens=10)
    for number in range(20):
        earlier.add("a", [number] * 4)
        assert sum(len(text.tokens) for text in earlier.of("a")) <= 2 * 11
    assert {token for text in earlier.of("a") for token in text.tokens} == {16, 17, 18, 19, BETWEEN}
    earlier.add("a", [*range(30)])
    assert earlier.of("a")[0].tokens == [*range(10), BETWEEN]
    earlier.add("b", [1])
    assert earlier.of("a")
    earlier.add("c", [1])
    assert [bool(earlier.of(name)) for name in "abc"] == [True, False, True], "the one not used for longest goes"
