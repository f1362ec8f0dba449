"""The model.py of a language model with random weights whose answers are recorded ones, so that texts foretell them.
``answers.json`` beside it has the tokens of each; which one is a request's, its seed says. All else is the server's
own: its drafters, how many tokens are proposed and verified, what their rows cost, and that it goes back where one is
wrong. With ``cut`` there too nothing wrong is proposed.

It is the engine's own process too, where tokens are taken.
"""

import json
import os
import sys
from collections.abc import Sequence as Outputs
from itertools import takewhile
from pathlib import Path

from tessera.engine.drafts.drafter import Drafter
from tessera.engine.engine import Engine
from tessera.engine.process import main as process
from tessera.engine.process import messages
from tessera.engine.sequence import Request, SampledToken, Sequence

ANSWERS: list[list[SampledToken]] = []
take, start, drafters = Sequence.take, messages.start_process, Engine._drafters


def taken(sequence: Sequence, chosen: list[SampledToken]) -> list[SampledToken]:
    """As if the model had chosen the answer's tokens, and behind its end what it did. Kept short: the device waits for
    it."""
    if (seed := sequence.request.sampling.seed) is not None:
        said = len(sequence.outputs)
        known = ANSWERS[seed][said : said + len(chosen)]
        chosen = known + chosen[len(known) :]
    return take(sequence, chosen)


class Cut:
    """What a drafter proposes, as far as the answer says it too."""

    def __init__(self, drafter: Drafter, answer: list[SampledToken]) -> None:
        self.prior, self.holds = drafter.prior, drafter.holds
        self._drafter, self._answer = drafter, [token for token, _ in answer]

    def propose(self, outputs: Outputs, most: int) -> list[int]:
        pairs = zip(self._drafter.propose(outputs, most), self._answer[len(outputs) :])
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def cut_drafters(engine: Engine, request: Request) -> list[Drafter]:
    found, seed = drafters(engine, request), request.sampling.seed
    return found if seed is None else [Cut(each, ANSWERS[seed]) for each in found]


if __name__ == "__main__":
    folder = Path(__file__).parent
    recorded = json.loads((folder / "answers.json").read_text())
    ANSWERS += [[(token, None) for token in answer] for answer in recorded]
    Sequence.take = taken  # type: ignore[method-assign]
    if (folder / "cut").exists():
        Engine._drafters = cut_drafters  # type: ignore[method-assign]
    process.main()
else:
    from tessera.tritonserver.language_model import TritonPythonModel  # noqa: F401

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    messages.start_process = lambda _: start(Path(__file__).stem)
