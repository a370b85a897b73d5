"""Answers to the puzzles of chapter 14."""

import numpy as np

from tests.course.answers import Chapter

from fp8_decoder import Decoder

chapter = Chapter("14_transformer_training")
LAYERS = ("qkv", "out", "gate", "up", "down")


@chapter.puzzle(lambda: chapter.careful)
def careful(answer):
    return chapter.check_ends(answer)


def ends(*blocks: int) -> tuple[str, ...]:
    return tuple(f"{block}.{layer}" for block in blocks for layer in LAYERS)


careful.right(Decoder(blocks=4, in_bf16=("scores", *ends(0, 3))))
careful.wrong("not yet: give a Decoder, not tuple")(ends(0, 3))
careful.wrong("its precision is 'bf16'")(Decoder("bf16", blocks=4))
careful.wrong("not yet: in the wrong precision: ['1.down'")(
    Decoder(blocks=4, in_bf16=("scores", *ends(0, 1, 3)))
)


@chapter.puzzle(lambda: chapter.alarm)
def alarm(answer):
    return chapter.check_alarm(answer)


@alarm.right
def by_its_logarithm(amaxes):
    bits = np.log2(amaxes)
    grown = bits[60:] - np.maximum.accumulate(bits)[30:-30]
    return int(np.argmax(grown > 2)) + 60 if np.any(grown > 2) else None


@alarm.wrong("healthy series")
def twice_the_last(amaxes):
    return next((n for n in range(31, len(amaxes)) if amaxes[n] > 1.2 * amaxes[n - 1]), None)


@alarm.wrong("not yet: it rang at step 299")
def at_the_end(amaxes):
    return len(amaxes) - 1 if max(amaxes) > 1000 else None


@alarm.wrong("not yet: IndexError")
def beyond_the_end(amaxes):
    return amaxes[len(amaxes)]
