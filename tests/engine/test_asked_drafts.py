"""Requests that bring a draft or draw on earlier answers: what is drafted for them, and what their ends tell of it."""

import pytest
from engine_fakes import EOS, draft, make_engine, make_request, run, tokens_of

TEXT = "The house was built in the spring, and the garden was laid out in the summer."
ANSWER = [*TEXT.encode(), EOS]


class Served:
    """An engine whose steps cost the same whatever they hold, and whose answers all are ``answer``."""

    def __init__(self, answer=ANSWER, **settings):
        self.engine, self.runner = make_engine(**{"drafts": 15} | settings)
        draft(self.engine, self.engine._drafters)
        self.answer = answer

    def steps(self, name="r", prompt=(7, 8, 9), **sampling):
        """Asks, and returns how many steps the answer took and the drafted tokens of its end."""
        self.runner.script[name] = self.answer
        before = self.engine.metrics.steps
        request = make_request(list(prompt), name, **{"max_tokens": 80, "ignore_eos": False} | sampling)
        self.engine.submit(request)
        events = run(self.engine)
        assert tokens_of(events, name) == self.answer
        return self.engine.metrics.steps - before, events[-1].drafted_tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_is_verified_with_the_token_that_ends_the_answer(ahead):
    served = Served(async_launch=ahead)
    alone, none = served.steps()
    assert alone >= len(ANSWER) and none == (0, 0)
    steps, (verified, right) = served.steps(draft=TEXT)
    assert verified == right and steps < alone / 8
    assert right == len(ANSWER) - steps + 1, "each step but the last has a token of its own"


def test_a_draft_that_is_partly_right_says_so():
    steps, (verified, right) = Served().steps(draft=TEXT.replace("garden", "yard"))
    assert 0 < right < verified and steps < len(ANSWER) / 4


def test_what_is_written_past_the_end_has_no_end_in_its_draft():
    answer = [*TEXT.encode()]
    served = Served(answer)
    _, (verified, right) = served.steps(draft=TEXT, ignore_eos=True, max_tokens=len(answer))
    assert verified == right


def test_answers_of_a_pool_are_drafts_for_its_later_ones():
    served = Served()
    first, drafted = served.steps("first", draft_pool="a")
    assert first == len(ANSWER) - drafted[1] > len(ANSWER) * 0.8, "what it says twice is drafted too"
    steps, (verified, right) = served.steps("second", draft_pool="a")
    assert verified == right > len(ANSWER) / 2 and steps < first / 4
    assert served.steps("other", draft_pool="b")[1] == drafted and served.steps("none")[1] == (0, 0)


def test_a_pools_requests_draw_on_their_prompts_too():
    served = Served()
    prompt = [1, 2, *ANSWER[:-1], 1]
    assert served.steps(prompt=prompt)[1] == (0, 0)
    assert served.steps("named", prompt=prompt, draft_pool="a")[1][1] > len(ANSWER) / 2


def test_where_drafts_are_off_none_is_verified():
    served = Served(drafts=0)
    for _ in range(2):
        assert served.steps(draft=TEXT, draft_pool="a") == (len(ANSWER), (0, 0))
