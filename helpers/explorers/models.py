"""What "What a model becomes" begins with, and the rows that it shows: those of the census."""

import re


def program_name(row: str) -> str:
    """The name of the program of a row, such as "flax-nnx-chapter-10-block-training"."""
    way, model, of, *_ = row.split(" | ")
    return re.sub(r"[^a-z0-9]+", "-", f"{way} {model} {of}".lower())
