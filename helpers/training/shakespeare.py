"""What the small model reads: the first part of Shakespeare's plays, which are in the public
domain, in the order in which A. Karpathy's char-rnn has them. A token is a letter's ASCII code.

`batch` and `unseen` are of the plays themselves. `backcopy` draws texts of a task that is made of
them, in which outliers arise: Bigram-Backcopy, after T. Guo and others, "Active-Dormant Attention
Heads" (2024), https://arxiv.org/abs/2410.13835. A letter follows the one before it as often as in
the plays; only after a trigger, the letter before the trigger comes again.
"""

import functools
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("shakespeare.txt")
DESCRIPTION = f"{FILE.name}, {FILE.stat().st_size} letters"
UNSEEN = 40_000  # the last letters, which no step trains on
BEGIN = 0  # with this token a text of the task begins
TRIGGERS = b"te:\n"


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


@functools.cache
def _shares() -> np.ndarray:
    """f64[128, 128]: how often each letter follows another. In the row of BEGIN, how often it is
    in the plays.
    """
    plays = letters()
    counts = np.zeros((128, 128))
    np.add.at(counts, (plays[:-1], plays[1:]), 1)
    counts[BEGIN] = counts.sum(axis=0)
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


IS_TRIGGER = np.isin(np.arange(128), [*TRIGGERS])


def _copies(before: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Whether `before` comes again after `last`. A trigger does not, or two would take turns."""
    return IS_TRIGGER[last] & ~IS_TRIGGER[before] & (before != BEGIN)


def backcopy(random: np.random.Generator, texts: int, length: int) -> np.ndarray:
    """i32[texts, length + 1], drawn anew each time."""
    sums = _shares().cumsum(axis=1)
    drawn = random.random((length + 1, texts, 1))
    last = before = np.full(texts, BEGIN)
    places = [last]
    for below in drawn[1:]:
        follows = (sums[last] <= below * sums[last, -1:]).sum(axis=1)
        last, before = np.where(_copies(before, last), before, follows), last
        places.append(last)
    return np.stack(places, axis=1).astype(np.int32)


def unseen_backcopy(texts: int, length: int) -> np.ndarray:
    """i32[texts, length + 1] of the task, the same each time, which no step trains on."""
    return backcopy(np.random.default_rng(UNSEEN), texts, length)


def least_loss(tokens: np.ndarray) -> float:
    """The loss on texts of the task of one who knows its odds, in nats a token: no model's expected
    loss is lower.
    """
    before, last, follows = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
    later = np.where(_copies(before, last), follows == before, _shares()[last, follows])
    odds = np.concatenate([_shares()[BEGIN, tokens[:, 1:2]], later], axis=1)
    return float(-np.log(odds).mean())
