"""The model.py of a language model with random weights whose answers are recorded ones, so that texts foretell them.
``answers.json`` beside it has the tokens of each; which one is a request's, its seed says. All else is the server's
own: its drafters, how many tokens are proposed and verified, what their rows cost, and that it goes back where one is
wrong.

It is the engine's own process too, where tokens are taken.
"""

import json
import os
import sys
from pathlib import Path

from tessera.engine.process import main as process
from tessera.engine.process import messages
from tessera.engine.sequence import SampledToken, Sequence

ANSWERS: list[list[SampledToken]] = []
take, start = Sequence.take, messages.start_process


def taken(sequence: Sequence, chosen: list[SampledToken]) -> list[SampledToken]:
    """As if the model had chosen the answer's tokens, and behind its end what it did. Kept short: the device waits for
    it."""
    if (seed := sequence.request.sampling.seed) is not None:
        said = len(sequence.outputs)
        known = ANSWERS[seed][said : said + len(chosen)]
        chosen = known + chosen[len(known) :]
    return take(sequence, chosen)


if __name__ == "__main__":
    recorded = json.loads(Path(__file__).with_name("answers.json").read_text())
    ANSWERS += [[(token, None) for token in answer] for answer in recorded]
    Sequence.take = taken  # type: ignore[method-assign]
    process.main()
else:
    from tessera.tritonserver.language_model import TritonPythonModel  # noqa: F401

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    messages.start_process = lambda _: start(Path(__file__).stem)
