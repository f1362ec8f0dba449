"""Train the default model's byte-level BPE on the scenes' questions and answers.

python make_tokenizer.py --out checkpoint --scenes 4000
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from architecture import SPECIAL_TOKENS, VOCABULARY, save_tokenizer, wrap_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# So that plain English outside the questions does not fall apart into single bytes.
ENGLISH = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my "
    "now over such our man me even most made after also did many"
)


def train_tokenizer(corpus: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` entries; the special tokens have the lowest ids, every byte is in."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def scene_corpus(scenes: int) -> Iterator[str]:
    """Questions and answers of training scenes, the roles of a chat, and common English words.

    Short answers are repeated: each should be few tokens, and without that the questions' words would take every merge.
    """
    import scene

    for seed in range(scenes):
        for question in scene.questions(scene.sample(seed, "train")):
            yield question.text
            yield from [question.answer] * (1 if question.kind == "description" else 8)
    yield from ["user", "assistant", "system"] * scenes
    yield from [ENGLISH] * (scenes // 20 + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--scenes", type=int, default=4000)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(scene_corpus(arguments.scenes))
    save_tokenizer(arguments.out, wrap_tokenizer(tokenizer))
    print(f"{tokenizer.get_vocab_size()} entries in {arguments.out}")


if __name__ == "__main__":
    main()
