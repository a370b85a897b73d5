"""What the small model reads: the first part of Shakespeare's plays, which are in the public
domain, in the order in which A. Karpathy's char-rnn has them. A token is a letter's ASCII code.
"""

import functools
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("shakespeare.txt")
DESCRIPTION = f"{FILE.name}, {FILE.stat().st_size} letters"
UNSEEN = 40_000  # the last letters, which no step trains on


@functools.cache
def letters() -> np.ndarray:
    """The whole text, u8[letters]."""
    return np.frombuffer(FILE.read_bytes(), np.uint8)


def batch(random: np.random.Generator, texts: int, length: int) -> np.ndarray:
    """i32[texts, length + 1], from random places of the part to train on."""
    seen = letters()[:-UNSEEN]
    starts = random.integers(0, len(seen) - length, texts)
    return seen[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def unseen(texts: int, length: int) -> np.ndarray:
    """i32[texts, length + 1], evenly over the part that no step trains on: the same each time."""
    rest = letters()[-UNSEEN:]
    starts = np.linspace(0, len(rest) - length - 1, texts).astype(int)
    return rest[starts[:, None] + np.arange(length + 1)].astype(np.int32)
