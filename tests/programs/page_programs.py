"""The programs on the rules' pages, each compiled once."""

import functools

from fp8lens import Inspection
from fp8lens.rules.page import Program, explain
from helpers.rule_index import compiled

#: A page's program, compiled: once for all tests.
seen = functools.cache(compiled)


def losing(name: str) -> Inspection | None:
    """The program that breaks a rule; None where its page has none."""
    return _made(explain(name).loses)


def keeping(name: str) -> Inspection | None:
    """The same program fixed; None where its page has none."""
    return _made(explain(name).keeps)


def _made(program: Program | None) -> Inspection | None:
    return seen(program) if program else None
