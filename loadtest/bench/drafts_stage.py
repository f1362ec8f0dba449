"""The model.py of a language model that accepts drafts as a request says, for random weights, whose answers no text
foretells. A draft has a mark for each token of the answer (drafts_documents.py): `` =`` for one that was right where
that was measured, `` x`` for one that was not, `` -`` where none was proposed. All else is the server's own: how many
tokens are proposed and verified, what their rows cost, and that it goes back where one is wrong.

It is the engine's own process too, where the marks are read.
"""

from __future__ import annotations

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
take, start = Sequence.take, messages.start_process


class Marked:
    """In place of a text's drafter."""

    prior = engine.TextDraft.prior

    def __init__(self, tokens: SequenceType[int]) -> None:
        self._marks = list(tokens)

    def propose(self, outputs: SequenceType[int], most: int) -> list[int]:
        ahead = self._marks[len(outputs) : len(outputs) + most]
        return ahead[: ahead.index(NONE)] if NONE in ahead else ahead


def taken(sequence: Sequence, chosen: list[SampledToken]) -> list[SampledToken]:
    """As if the model had chosen what is marked as right. By itself it hardly ever chooses one of the marks."""
    right = [place < len(sequence.draft) and sequence.draft[place] == RIGHT for place in range(len(chosen))]
    return take(sequence, [(RIGHT, each[1]) if ours else each for ours, each in zip(right, chosen)])


if __name__ == "__main__":
    engine.TextDraft = Marked  # type: ignore[assignment,misc]
    Sequence.take = taken  # type: ignore[assignment]
    process.main()
else:
    from tessera.tritonserver.language_model import TritonPythonModel  # noqa: F401

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    messages.start_process = lambda _: start(Path(__file__).stem)
