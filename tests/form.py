"""The form of what is recorded, by notebooks/results/schema.json."""

import functools
import json
from typing import Any

import jsonschema

from tools.recorders.data import RESULTS

RECORDS = sorted({path.stem for path in RESULTS.glob("*.json")} - {"schema"})


@functools.cache
def _validator(name: str | None) -> jsonschema.Draft202012Validator:
    schema = json.loads((RESULTS / "schema.json").read_text())
    if name:
        schema = {"$defs": schema["$defs"], "$ref": f"#/$defs/{name}.json"}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def problems(data: Any, name: str | None = None) -> list[str]:
    """Where some data has not the form of the record of this name, or without one of a line of a
    GPU's run.
    """
    errors = _validator(name).iter_errors(data)
    return [f"{error.json_path}: {error.message[:200]}" for error in errors]
