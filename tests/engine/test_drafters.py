"""What is proposed, against twins that look at every place of the text; no engine, no device."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from random import Random

import numpy as np
import pytest

from tessera.engine.drafts import text as text_drafts
from tessera.engine.drafts.numbers import BEFORE, CONTEXT, LONGEST_NUMBER, Habits, Numbers
from tessera.engine.drafts.text import (
    BETWEEN,
    CERTAIN,
    LATEST,
    LEAST,
    LONGEST,
    NEAR,
    PIECE,
    PROMPT_TOKENS,
    EarlierAnswers,
    Occurrences,
    Suffixes,
    TextDraft,
    alike,
    read_tokens,
)  # fmt: skip


def agreeing(text: Sequence[int], place: int, answer: Sequence[int]) -> int:
    """As :meth:`Occurrences.agreeing`, up to 16 tokens."""
    most = min(place, len(answer), LONGEST)
    return next(
        count for count in range(most, -1, -1) if [*text[place - count : place]] == [*answer][len(answer) - count :]
    )


class Twin:
    """As TextDraft."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.place, self.agreeing = text, 0, CERTAIN

    def take(self, answer: Sequence[int]) -> None:
        here, text = self.place, self.text
        if text[here : here + 1] == [answer[-1]]:
            self.place, self.agreeing = here + 1, self.agreeing + 1
            if self.agreeing >= CERTAIN:
                return
        else:
            self.agreeing = 0
        here, places = self.place, range(len(text) + 1)
        for place in [*places[here:], *places[:here]]:
            count = agreeing(text, place, answer)
            if count > max(1, self.agreeing):
                self.place, self.agreeing = place, count
        near = [ahead for ahead in range(NEAR) if text[here + ahead : here + ahead + 1] == [answer[-1]]]
        if not self.agreeing:
            self.place, self.agreeing = (here + 1 + near[0], 1) if near else (min(here + 1, len(text)), 0)


def answer_like(text: Sequence[int], random: Random, tokens: int) -> list[int]:
    """Parts of the text in any order, with tokens of their own between them."""
    answer: list[int] = []
    while text and len(answer) < 60:
        begin = random.randrange(len(text))
        answer += text[begin : begin + random.randrange(1, 12)] + [random.randrange(tokens + 1)] * random.randrange(2)
    return answer


@pytest.mark.parametrize("order", [2, 4])
def test_occurrences_are_those_of_a_search_while_the_text_grows(order: int) -> None:
    random = Random(order)
    text, whole = Occurrences(order), list[int]()
    for _ in range(60):
        piece = [random.randrange(3) for _ in range(random.randrange(4))]
        text.extend(piece)
        whole += piece
    assert text.tokens == whole
    rows = {tuple(whole[at : at + order]) for at in range(len(whole) + 1 - order)}
    found = {
        row: [at for at in range(len(whole), order - 1, -1) if tuple(whole[at - order : at]) == row] for row in rows
    }
    assert {row: text.behind(row, 99) for row in rows} == found and max(map(len, found.values())) > 2
    assert {row: text.behind(row, 2) for row in rows} == {row: places[:2] for row, places in found.items()}
    assert text.behind((7,) * order, 99) == []


@pytest.mark.parametrize("seed", range(20))
def test_how_much_agrees_is_that_of_a_search(seed: int) -> None:
    random = Random(seed)
    whole = [random.randrange(2) for _ in range(40)]
    text, answer = Occurrences(2, whole), [random.randrange(2) for _ in range(30)]
    for place in range(len(whole) + 1):
        assert text.agreeing(place, answer, len(answer), LONGEST) == agreeing(whole, place, answer)


@pytest.mark.parametrize("seed", range(60))
def test_suffixes_are_those_of_a_search(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_drafts, "MOST_IN_VAIN", 0)
    random = Random(seed)
    tokens, numbers = random.choice((2, 3)), random.choice((frozenset[int](), frozenset([0]), frozenset([0, 1])))
    prompt, earlier = [random.randrange(tokens) for _ in range(20)], EarlierAnswers(numbers)
    answers = [[random.randrange(tokens) for _ in range(12)] for _ in range(2)]
    for answer in answers:
        earlier.add("a", answer)
    suffixes, whole, longest = Suffixes(prompt, earlier, "a"), answer_like(prompt, random, tokens), 0
    at, place, same, found = 0, 0, 0, list[int]()  # a text, a place there, and how many tokens before it are the same
    for said in range(min(60, len(whole))):
        answer = whole[:said]
        texts = [answer, prompt, [*answers[0], BETWEEN, *answers[1], BETWEEN]]
        if longest == LONGEST and place + 1 < len(texts[at]) and goes_on(texts[at][place], answer[-1], numbers):
            # Where all that is looked at agreed, and the text went on as the answer, no other place is sought.
            same = same + 1 if texts[at][place] == answer[-1] else 0
            place += 1
            found = texts[at][place : place + 15]
        else:
            found, longest = [], 0
            for number, text in enumerate(texts):
                # Of a text the eight newest places are looked at, and of these the newest of the longest.
                ends = range(len(text) + (text is answer))
                found_at = [(agreeing(alike(text, numbers), end, alike(answer, numbers)), end) for end in ends]
                for count, end in [each for each in found_at if each[0] >= LEAST][: -LATEST - 1 : -1]:
                    if count > longest and end < len(text):
                        longest, found, at, place = count, text[end : end + min(15, count)], number, end
            same = LONGEST * (longest == LONGEST and agreeing(texts[at], place, answer) == LONGEST)
        until = [n for n, token in enumerate(found) if token == BETWEEN or (token in numbers and same < LONGEST)]
        end = until[0] if until else len(found)
        proposed = suffixes.propose(answer, 15)
        assert proposed[:end] == found[:end] and len(proposed) <= len(found)
        assert all(goes_on(*pair, numbers) for pair in zip(proposed, found))


def goes_on(one: int, other: int, numbers: frozenset[int]) -> bool:
    return one == other or numbers.issuperset((one, other))


DIGITS, SIGNS = frozenset(range(10)), [20, 21, 22, 23]
SPACE = 24


def layout(random: Random, blocks: int) -> list[int]:
    """Of each block the left edge, which is the same in all, and the top, which is where the block above it ends, but
    for the last of their two digits; then the bottom."""
    tokens, bottom = list[int](), 10
    for _ in range(blocks):
        top, bottom = bottom // 10 * 10 + random.randrange(10), bottom + 10
        tokens += [4, 2, SPACE, *divmod(top, 10), SPACE, *divmod(bottom, 10), *SIGNS]
    return tokens


def test_between_numbers_of_a_layout_all_is_proposed_that_stays() -> None:
    random = Random(0)
    numbers = [token for _ in range(6) for token in (*(random.randrange(10) for _ in range(6)), *SIGNS)]
    suffixes = Suffixes((), EarlierAnswers(DIGITS), "a")
    proposed = [suffixes.propose(numbers[:said], 15) for said in range(len(numbers))]
    assert proposed[26][:4] == SIGNS and proposed[28][:2] == SIGNS[2:]


def test_numbers_begin_as_those_that_they_were_like_before() -> None:
    answer, earlier = layout(Random(0), 8), EarlierAnswers(DIGITS)
    suffixes = Suffixes((), earlier, "a")
    proposed = {said: suffixes.propose(answer[:said], 15) for said in range(len(answer))}
    for block in range(5, 8):
        left, top, bottom = 12 * block, 12 * block + 3, 12 * block + 6
        assert proposed[left - 4] == [*SIGNS, 4, 2, SPACE, answer[top]], "a top's last digit is anything"
        assert proposed[top + 1] == [], "which is known to nobody"
        assert proposed[top + 2][:1] == [SPACE] and answer[bottom] not in proposed[top + 2]
    another = Suffixes((), earlier, "a")
    known = [another.propose(answer[:said], 15) for said in range(30)]
    assert known[20] == [*SIGNS, 4, 2, SPACE, answer[27]], "what numbers do at a place is known of other answers"


def test_a_text_that_agrees_in_its_numbers_too_is_copied_as_long_as_it_does() -> None:
    random, earlier = Random(0), EarlierAnswers(DIGITS)
    text = [token for block in range(6) for token in (*(random.randrange(10) for _ in range(6)), *range(100, 116, 4))]
    text = [token + place // 10 if token >= 100 else token for place, token in enumerate(text)]
    earlier.add("a", text)
    suffixes = Suffixes((), earlier, "a")
    assert suffixes.propose(text[:20], 15) == text[20:35]
    assert suffixes.propose(text[:22], 15) == text[22:37]
    other = [*text[:22], (text[22] + 1) % 10, *text[23:26]]
    assert suffixes.propose(other, 15)[:4] == text[26:30], "but for numbers it still agrees"
    for each in (suffixes, Suffixes((), earlier, "a")):
        assert each.propose([*other, *text[26:32]], 15)[:4] != text[32:36]
    assert suffixes.propose([*other, *text[26:42]], 15) == text[42:57]


def test_where_a_text_ends_another_is_sought() -> None:
    earlier = EarlierAnswers()
    earlier.add("a", [*range(30)])
    suffixes = Suffixes([*range(20)], earlier, "a")
    assert suffixes.propose([*range(19)], 15) == [19], "of the prompt, where as much agrees"
    assert suffixes.propose([*range(20)], 5) == [20, 21, 22, 23, 24]


def test_numbers_are_told_apart_by_their_places() -> None:
    """By a search: how often a number at such a place was like another before it; what is long ago counts less."""
    random = Random(1)
    answer = [random.choice((0, 1, 2, 20, 21)) for _ in range(400)]
    for least in (0, 200):
        habits = Habits()
        numbers, known = Numbers(DIGITS, habits), dict[tuple[object, ...], tuple[float, float]]()
        for said, token in enumerate(answer):
            if said >= least and token in DIGITS:
                for place, guess in places(answer[least:said]):
                    context, back, begun = place
                    right, tried = known.get(place, (0.25, 1.0))
                    assert habits.of((context, begun))[back] == (right, tried)
                    known[place] = right * 31 / 32 + (guess == token), tried * 31 / 32 + 1
            if said >= least:
                numbers.read([token])
        assert len(known) > 20


def test_habits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.engine.drafts.numbers._MOST", 3)
    habits, places = Habits(), [((20,), said) for said in range(4)]
    for place in (*places[:3], places[0], places[3]):
        habits.learned(place)[1] = (1.0, 1.0)
    kept = [habits.of(place)[1] == (1.0, 1.0) for place in places]
    assert kept == [True, False, True, True], "the one not seen for longest goes"
    read, answer = Numbers(DIGITS, Habits()), [1] * 40
    read.read([*answer, SPACE, *answer])
    assert len(read.filled([1])) == 0 and len(read._read[2]) == LONGEST_NUMBER


def places(answer: Sequence[int]) -> Iterator[tuple[tuple[tuple[int, ...], int, int], int]]:
    """Of the number that comes next, or goes on: what stands in front of it, which one before it begins so, and how
    many of its tokens are known; and the token of that one."""
    runs = [[*run] for _, run in groupby(answer, DIGITS.__contains__)]
    numbers = [tuple(run) for run in runs if run[0] in DIGITS]
    begun = numbers.pop() if answer and answer[-1] in DIGITS else ()
    context = tuple(token for token in answer if token not in DIGITS)[-CONTEXT:]
    for back, number in enumerate(each[:LONGEST_NUMBER] for each in numbers[: -BEFORE - 1 : -1]):
        if number[: len(begun)] == begun and number != begun:
            yield (context, back, len(begun)), number[len(begun)]


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
    tokens = random.choice((4, 8, 30))
    text = [random.randrange(tokens) for _ in range(random.randrange(1, 120))]
    answer, draft, twin = answer_like(text, random, tokens), TextDraft(text), Twin(text)
    for known in range(len(answer) + 1):
        if known:
            twin.take(answer[:known])
        if known % 7 == 0 or random.random() < 0.5:  # the engine asks where it wants to
            assert draft.propose(answer[:known], 5) == text[twin.place : twin.place + 5]


def test_what_an_answer_said_long_before_it_was_asked_does_not_matter() -> None:
    draft = TextDraft(WORDS)
    assert draft.propose([1] * 500, 3) == []
    assert draft.propose([*[1] * 500, *WORDS[:30]], 3) == WORDS[30:33]


def test_long_draft_is_read_in_pieces() -> None:
    random = Random(5)
    text = [random.randrange(50) for _ in range(4 * PIECE)]
    draft = TextDraft(text)
    assert draft.propose([], 4) == text[:4]
    assert draft.propose(text[600:610], 4) != text[610:614], "which the first piece does not hold"
    assert draft.propose(text[600:611], 4) == text[611:615]
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
    assert suffixes.propose([*answer, 40], 4) == [41, 42, 43, 44]
    answer.append(40)
    assert suffixes.propose([*answer, *range(4)], 4) == [4, 5, 6, 7]
    assert suffixes.propose([*answer, *range(4), *range(20, 59)], 4) == [59], "though it was not asked for 39 tokens"


def test_where_nothing_is_found_it_is_looked_ever_less(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, suffixes = list[int](), Suffixes([], EarlierAnswers(), "a")
    monkeypatch.setattr(suffixes, "_seek", lambda: looked.append(len(suffixes._answer.tokens)))
    for said in range(60):
        assert suffixes.propose(range(said), 4) == []
    assert looked == [0, 1, 2, 3, 4, 5, 7, 11, 19, 27, 35, 43, 51, 59]
    monkeypatch.undo()
    assert suffixes.propose([*range(60), *range(8)], 4) == [8, 9, 10, 11]


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
    suffixes = Suffixes([], earlier, "d")  # requests come by another thread
    assert [bool(earlier.of(name)) for name in "ac"] == [True, True]
    suffixes.propose([], 1)
    assert [bool(earlier.of(name)) for name in "ac"] == [False, True]
