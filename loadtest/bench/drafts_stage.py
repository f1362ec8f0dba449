"""The model.py of a language model that accepts drafts as a request says, for random weights, whose answers no text
foretells. A draft has a mark for each token of the answer (drafts_documents.py): `` =`` for one that was right where
that was measured, `` x`` for one that was not, `` -`` where none was proposed. All else is the server's own: how many
tokens are proposed and verified, what their rows cost, and that it goes back where one is wrong.

It is the engine's own process too, where the marks are read.
"""

import os
import sys
from collections.abc import Sequence as SequenceType
from pathlib import Path

from tessera.engine import engine
from tessera.engine.process import main as process
from tessera.engine.process import messages
from tessera.engine.sequence import SampledToken, Sequence

RIGHT, WRONG, NONE = MARKS = 279, 756, 432
"""In the vocabulary of MinerU2.5's shape."""
_RIGHT = RIGHT, None
take, start = Sequence.take, messages.start_process


class Marked(engine.TextDraft):
    """In place of a text's drafter."""

    def propose(self, outputs: SequenceType[int], most: int) -> list[int]:
        tokens = self._tokens[len(outputs) : len(outputs) + most]
        return tokens[: tokens.index(NONE)] if NONE in tokens else tokens


def taken(sequence: Sequence, chosen: list[SampledToken]) -> list[SampledToken]:
    """As if the model had chosen what is marked as right, whether it was proposed or not. By itself it hardly ever
    chooses one of the marks, each of which is two letters of the request's draft. Kept short: the device waits
    for it."""
    said = len(sequence.outputs)
    marks = (sequence.request.sampling.draft or "")[2 * said + 1 : 2 * (said + len(chosen)) : 2]
    if "=" in marks:
        chosen = [_RIGHT if mark == "=" else each for mark, each in zip(marks, chosen)] + chosen[len(marks) :]
    return take(sequence, chosen)


if __name__ == "__main__":
    engine.TextDraft = Marked  # type: ignore[misc]
    Sequence.take = taken  # type: ignore[method-assign]
    process.main()
else:
    from tessera.tritonserver.language_model import TritonPythonModel  # noqa: F401

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    messages.start_process = lambda _: start(Path(__file__).stem)
