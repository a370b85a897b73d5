"""The data that "Read my dump" needs: its example, as fp8lens reads it. `dump.mjs` shows it."""

import json
import zipfile
from pathlib import Path
from typing import Any

from fp8lens.dumps import choose
from helpers.explorers.reader import Reader

EXAMPLE = Path(__file__).with_name("example.zip")

#: Makes a dump that says why FP8 was lost, too.
COMMAND = 'XLA_FLAGS="--xla_dump_to=dumps --xla_dump_hlo_pass_re=gemm-rewriter" python train.py'

#: By the model's keys. They are kept in the page's address.
#: `program` is the name of one that the site has, which "What a model becomes" leads to.
STATE = {"view": "matmuls", "at": "", "find": "", "program": ""}


def example() -> str:
    """The text of the example's compiled program."""
    with zipfile.ZipFile(EXAMPLE) as archive:
        choice = choose({one.filename: one.file_size for one in archive.infolist()})
        assert choice is not None
        return archive.read(choice.name).decode("utf-8")


def data() -> dict[str, Any]:
    """The command, and the example's summary, which stands on the page until a dump is read."""
    summary = Reader().read_zip(EXAMPLE.name, EXAMPLE.read_bytes())
    return {"command": COMMAND, "example": json.loads(summary)}
