"""What transformers' processors and vLLM's rule make of logits, row by row, and what answers follow from them."""

from __future__ import annotations

import numpy as np
import torch
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from tessera.engine.request import Request, SamplingParameters
from tessera.engine.scheduling.batch import ScheduledBatch, ScheduledSpan
from tessera.engine.sequence import Sequence


def penalized(logits, prompt, answer, parameters):
    """float32 [vocabulary]; a prompt's negative numbers are pictures."""
    vocabulary = len(logits)
    pictures = -min(0, *prompt)
    said = torch.tensor([[*prompt, *answer]])
    scores = logits.float()[None]
    if parameters.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty)(said[said >= 0][None], scores)
    counts = torch.tensor(answer, dtype=torch.int64).bincount(minlength=vocabulary)
    scores = scores - parameters.frequency_penalty * counts - parameters.presence_penalty * (counts > 0)
    if parameters.no_repeat_ngram_size:
        said = torch.where(said < 0, vocabulary - 1 - said, said)  # ids of their own, beyond the vocabulary
        scores = torch.cat([scores, torch.zeros(1, pictures)], dim=1)
        scores = NoRepeatNGramLogitsProcessor(parameters.no_repeat_ngram_size)(said, scores)
    return scores[0, :vocabulary]


def likeliest_answer(runner, request):
    """The greedy answer of ``max_tokens``; each token from a forward over all before it."""
    count, answer = request.sampling.max_tokens, []
    prompt = [int(token) for token in request.input_ids]
    for number, (start, rows) in reversed(list(enumerate(request.spans, 1))):
        prompt[start : start + rows] = [-number]
    while len(answer) < count:
        ids = np.concatenate([request.input_ids, np.array(answer, np.int32)])
        whole = Request("", ids, request.spans, request.embeddings, request.digest, SamplingParameters(max_tokens=1))
        sequence = Sequence(whole)
        sequence.block_table = list(range(runner.num_blocks))
        logits = runner.logits(ScheduledBatch([ScheduledSpan(sequence, 0, len(ids), True)]))[0]
        answer.append(int(penalized(logits.cpu(), prompt, answer, request.sampling).argmax()))
    return answer
