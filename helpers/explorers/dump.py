"""The data that "Read my dump" needs: its example, as fp8lens reads it. `dump.mjs` shows it."""

import json
from pathlib import Path
from typing import Any

from helpers.explorers.reader import Reader

EXAMPLE = Path(__file__).with_name("example.txt")

#: By the model's keys. They are kept in the page's address.
STATE = {"view": "matmuls", "at": "", "find": ""}


def data() -> dict[str, Any]:
    """The example's summary, which stands on the page until a dump is read."""
    return {"example": json.loads(Reader().read(EXAMPLE.name, EXAMPLE.read_bytes()))}
