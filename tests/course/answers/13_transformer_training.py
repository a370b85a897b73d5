"""Answers to the puzzles of chapter 13."""

import numpy as np

from tests.course.answers import Chapter

from fp8_decoder import Decoder

chapter = Chapter("13_transformer_training")
LAYERS = ("qkv", "out", "gate", "up", "down")


@chapter.puzzle(lambda: chapter.careful)
def careful(answer):
    return chapter.check_ends(answer)


def ends(*blocks: int) -> tuple[str, ...]:
    return tuple(f"{block}.{layer}" for block in blocks for layer in LAYERS)


careful.right(Decoder(blocks=4, in_bf16=("scores", *ends(0, 3))))
careful.right(Decoder("fp8", 256, 64, 2, 160, 4, in_bf16=(*ends(3, 0), "scores")))
careful.right(
    Decoder(
        blocks=4, width=32, in_bf16=tuple(n for n in Decoder(blocks=4).layers if n[0] not in "12")
    )
)
careful.wrong("not yet: give a Decoder, not tuple")(ends(0, 3))
careful.wrong("not yet: it has 2 blocks")(Decoder(in_bf16=("scores", *ends(0, 1))))
careful.wrong("its precision is 'bf16'")(Decoder("bf16", blocks=4))
careful.wrong("should be bf16: ['scores']")(Decoder(blocks=4, in_bf16=ends(0, 3)))
careful.wrong("should be FP8: ['1.down'")(Decoder(blocks=4, in_bf16=("scores", *ends(0, 1, 3))))
careful.wrong("should be bf16: ['3.down'")(Decoder(blocks=4, in_bf16=("scores", *ends(0))))


@chapter.puzzle(lambda: chapter.alarm)
def alarm(answer):
    return chapter.check_alarm(answer)


@alarm.right
def above_the_median(amaxes):
    for step in range(60, len(amaxes)):
        if amaxes[step] > 8 * np.median(amaxes[step - 60 : step - 20]):
            return step


@alarm.right
def three_in_a_row(amaxes):
    high = [n for n in range(60, len(amaxes)) if amaxes[n] > 3 * max(amaxes[n - 60 : n - 30])]
    return next((n for n in high if {n + 1, n + 2} <= set(high)), None)


@alarm.right
def by_its_logarithm(amaxes):
    bits = np.log2(amaxes)
    grown = bits[60:] - np.maximum.accumulate(bits)[30:-30]
    return int(np.argmax(grown > 2)) + 60 if np.any(grown > 2) else None


@alarm.wrong("healthy series")
def twice_the_last(amaxes):
    return next((n for n in range(31, len(amaxes)) if amaxes[n] > 1.2 * amaxes[n - 1]), None)


@alarm.wrong("healthy series")
def a_fixed_bound(amaxes):
    return next((n for n in range(40, len(amaxes)) if amaxes[n] > 20), None)


@alarm.wrong("not yet: it rang at step 399")
def at_the_end(amaxes):
    return len(amaxes) - 1 if max(amaxes) > 1000 else None


@alarm.wrong("not yet: it rang at step None")
def never(amaxes):
    return None


@alarm.wrong("not yet: ")
def a_word(amaxes):
    return "now"


@alarm.wrong("not yet: IndexError")
def beyond_the_end(amaxes):
    return amaxes[len(amaxes)]
