"""Answers to the puzzle of chapter 18."""

import ml_dtypes
import numpy as np

from helpers.numerics.microscaling import BLOCK_FORMATS, Blocks, to_blocks
from tests.course.answers import Chapter

chapter = Chapter("18_beyond_hopper")
ONE = np.float32(1)


@chapter.puzzle(lambda: chapter.repair)
def repair(answer):
    return chapter.check_repair(answer)


def wide(codes, scales):
    return codes.astype(np.float32) * np.repeat(scales, 32, axis=1)


def rounded_up(scales):
    return np.exp2(np.ceil(np.log2(scales)))


def codes_follow(codes, scales):
    """The codes times what the rounding of their scale has made of them."""
    new = rounded_up(scales)
    changed = codes.astype(np.float32) * np.repeat(scales / new, 32, axis=1)
    return Blocks(changed.astype(codes.dtype), new.astype(ml_dtypes.float8_e8m0fnu), ONE)


repair.right(codes_follow)
repair.wrong("powers of two")(lambda codes, scales: Blocks(codes, scales, ONE))
repair.wrong("not yet: 5")(lambda codes, scales: Blocks(codes, rounded_up(scales), ONE))
repair.wrong("codes are E4M3")(
    lambda codes, scales: to_blocks(wide(codes, scales), BLOCK_FORMATS["MXFP8, E5M2"])
)
