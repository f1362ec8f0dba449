"""What transformers' processors and vLLM's rule make of logits, row by row, and what answers follow from them."""

from array import array

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tessera.engine.execution.sampler import uniform
from tessera.engine.scheduling.scheduler import ScheduledBatch, ScheduledSpan
from tessera.engine.sequence import Request, SamplingParameters, Sequence


def penalized(logits, prompt, answer, parameters):
    """float32 [vocabulary]; a prompt's negative numbers are pictures."""
    vocabulary = len(logits)
    pictures = -min(0, *prompt)
    said = torch.tensor([[*prompt, *answer]])
    scores = logits.float()[None]
    if parameters.logit_bias:
        bias = {(token,): bias for token, bias in parameters.logit_bias}
        scores = SequenceBiasLogitsProcessor(bias)(torch.zeros((1, 0), dtype=torch.int64), scores)
    if parameters.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty)(said[said >= 0][None], scores)
    counts = torch.tensor(answer, dtype=torch.int64).bincount(minlength=vocabulary)
    scores = scores - parameters.frequency_penalty * counts - parameters.presence_penalty * (counts > 0)
    if parameters.no_repeat_ngram_size:
        said = torch.where(said < 0, vocabulary - 1 - said, said)  # ids of their own, beyond the vocabulary
        scores = torch.cat([scores, torch.zeros(1, pictures)], dim=1)
        scores = NoRepeatNGramLogitsProcessor(parameters.no_repeat_ngram_size)(said, scores)
    return scores[0, :vocabulary]


def plain_answer(runner, request, stop_ids=()):
    """The answer as a plain loop writes it: each token from a forward over all before it and the processors in turn.

    Where transformers would draw at random, the number that the engine draws picks among the tokens by likelihood.
    """
    asked, answer = request.sampling, []
    stop_ids = {*stop_ids, *asked.stop_token_ids}
    prompt = [int(token) for token in request.input_ids]
    for number, (start, rows) in reversed(list(enumerate(request.spans, 1))):
        prompt[start : start + rows] = [-number]
    while len(answer) < asked.max_tokens and not (
        answer and answer[-1] in stop_ids and len(answer) >= asked.min_tokens
    ):
        ids = np.concatenate([request.input_ids, np.array(answer, np.int32)])
        whole = Request("", ids, request.spans, request.embeddings, request.digest, SamplingParameters(max_tokens=1))
        sequence = Sequence(whole)
        sequence.block_table = array("q", range(runner.num_blocks))
        logits = runner.logits(ScheduledBatch([ScheduledSpan(sequence, 0, len(ids), True)]))[0]
        scores = penalized(logits.cpu(), prompt, answer, asked)
        if stop_ids and asked.min_tokens:
            shortest = MinNewTokensLengthLogitsProcessor(0, asked.min_tokens, list(stop_ids))
            scores = shortest(torch.tensor([answer], dtype=torch.int64), scores[None])[0]
        answer.append(
            _drawn(scores, uniform(asked.seed, len(answer)), asked) if asked.temperature else int(scores.argmax())
        )
    return answer


def _drawn(scores, number, asked):
    """The token of likelihood's order at which all before it and it have more than ``number`` of the probability."""
    wrappers = [TemperatureLogitsWarper(float(asked.temperature))]
    wrappers += [MinPLogitsWarper(asked.min_p)] if asked.min_p else []  # in vLLM's place
    wrappers += [TopKLogitsWarper(asked.top_k)] if asked.top_k > 0 else []
    wrappers += [TopPLogitsWarper(asked.top_p)] if asked.top_p < 1 else []
    probabilities, order = LogitsProcessorList(wrappers)(None, scores[None])[0].softmax(-1).sort(descending=True)
    return int(order[int((probabilities.cumsum(-1) <= number).sum())])
