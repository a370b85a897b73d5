"""No regular expression of fp8lens takes more than linear time because of how it is written.

Two forms are refused, wherever a pattern stands:

- A loop inside a loop, where both may give characters back: `(\\s*\\{[^}]*\\}\\s*)*` tries every
  way to share the spaces, which are exponentially many. One of both has to be possessive (`*+`),
  and the alternatives of a loop may not begin alike.
- A search (not a match at a place) whose loop can fail after it has run, and that may begin again
  inside what the loop has read: `\\)+$` reads n brackets from each of n places. What stands before
  the loop has to be something that the loop does not read.

This is a check of the form alone. It does not see two loops in a row that read the same characters,
nor what Python does between two searches: tests/tools/test_fuzz.py measures those.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from re import _compiler, _constants, _parser

import pytest

import fp8lens
from fp8lens.rules import libraries

SEARCHES = {"search", "findall", "finditer", "sub", "subn", "split"}
METHODS = SEARCHES | {"compile", "match", "fullmatch"}
ALPHABET = frozenset(map(chr, range(256)))
WORD = frozenset(c for c in ALPHABET if re.match(r"\w", c))
GIVES_BACK = {_constants.MAX_REPEAT, _constants.MIN_REPEAT}
READ: dict[str, frozenset[str]] = {}  # by `characters`, of an item for one character
REPEATS = GIVES_BACK | {_constants.POSSESSIVE_REPEAT}
# Patterns that are no literals: (module, expression) to those that come there.
NO_LITERALS = {
    ("fp8lens.hlo.diff", "pattern"): [],  # the reader's own, of HloDiff.around
    ("fp8lens.rules.libraries", "path"): [path for path, *_ in libraries.LIBRARIES],
}


class Refused(Exception):
    """A pattern that may take longer than linear time."""


# What a part of a pattern reads ---------------------------------------------------------------


def parts(op, argument) -> list:
    """The sequences inside an item of a parsed pattern."""
    if op in REPEATS:
        return [argument[2]]
    if op is _constants.BRANCH:
        return argument[1]
    if op is _constants.SUBPATTERN:
        return [argument[3]]
    if op is _constants.ATOMIC_GROUP:
        return [argument]
    return []


def characters(op, argument, state) -> frozenset[str]:
    """Every character that an item may read, asked of `re` itself."""
    if inner := parts(op, argument):
        return frozenset().union(*(characters(*item, state) for part in inner for item in part))
    if op in (_constants.AT, _constants.ASSERT, _constants.ASSERT_NOT):
        return frozenset()
    if op is _constants.GROUPREF:
        return ALPHABET
    key = f"{op} {argument} {state.flags}"
    if key not in READ:
        one = _compiler.compile(_parser.SubPattern(state, [(op, argument)]), state.flags)
        READ[key] = frozenset(filter(one.fullmatch, ALPHABET))
    return READ[key]


def is_loop(op, argument) -> bool:
    return op in REPEATS and argument[1] is _constants.MAXREPEAT


def may_fail(op, argument) -> bool:
    """Whether an item may refuse a text, so that what is before it is tried again."""
    if op in REPEATS:
        return argument[0] > 0
    if op is _constants.BRANCH:
        return all(any(may_fail(*item) for item in part) for part in argument[1])
    if inner := parts(op, argument):
        return any(may_fail(*item) for item in inner[0])
    return True


# The two forms --------------------------------------------------------------------------------


def refuse_nested_loops(sequence, state, inside: bool = False) -> None:
    """`inside`: a loop around it may try its parts again in another way."""
    for op, argument in sequence:
        gives_back = is_loop(op, argument) and op in GIVES_BACK
        if inside and gives_back:
            raise Refused("a loop inside a loop, and both give characters back")
        if inside and op is _constants.BRANCH:
            begins = [characters(*part[0], state) for part in argument[1] if part]
            if sum(map(len, begins)) > len(frozenset().union(*begins)):
                raise Refused("alternatives of a loop that begin alike")
        keeps = op in (_constants.POSSESSIVE_REPEAT, _constants.ATOMIC_GROUP)
        for part in parts(op, argument):
            refuse_nested_loops(part, state, not keeps and (inside or gives_back))


def stands_before(op, argument, following, state) -> frozenset[str] | None:
    """Of an item that a match needs: what it reads, or what it wants before the place; or None."""
    if op is _constants.AT:
        if argument is _constants.AT_BEGINNING and state.flags & re.M:
            return frozenset("\n")
        if argument in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
            return frozenset()  # one place alone
        word_next = following and characters(*following[0], state) <= WORD
        return ALPHABET - WORD if argument is _constants.AT_BOUNDARY and word_next else None
    if op in (_constants.ASSERT, _constants.ASSERT_NOT):
        direction, inner = argument
        if direction > 0:
            return None
        read = frozenset().union(*(characters(*item, state) for item in inner))
        return read if op is _constants.ASSERT else ALPHABET - read
    return characters(op, argument, state) if may_fail(op, argument) else None


def refuse_searches_again(sequence, state, before: tuple = (), more: bool = False) -> tuple:
    """`before`: of each item before it, what that reads; `more`: something after it may fail."""
    for at, (op, argument) in enumerate(sequence):
        fails = more or any(may_fail(*item) for item in sequence[at + 1 :])
        read = characters(op, argument, state)
        if is_loop(op, argument) and fails and not any(map(read.isdisjoint, before)):
            raise Refused("a search that may begin again inside what its loop has read")
        for part in parts(op, argument):
            after = refuse_searches_again(part, state, before, fails)
        if op in (_constants.SUBPATTERN, _constants.ATOMIC_GROUP):
            before = after
        elif (own := stands_before(op, argument, sequence[at + 1 :], state)) is not None:
            before = (*before, own)
    return before


def refuse(pattern: str | bytes, flags: int = 0, searched: bool = True) -> None:
    """Refused says what is wrong with a pattern; `searched`: it is not only tried at one place."""
    text = pattern.decode("latin1") if isinstance(pattern, bytes) else pattern
    tree = _parser.parse(text, flags)
    refuse_nested_loops(tree, tree.state)
    if searched:
        refuse_searches_again(tree, tree.state)


# Every pattern of a package -------------------------------------------------------------------


def calls_of_re(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("re"), attr=name)) if name in METHODS:
                yield node


def evaluated(node: ast.expr, module):
    code = compile(ast.Expression(node), module.__name__, "eval")
    return eval(code, dict(vars(module)))


def flags_of(call: ast.Call, module) -> int:
    place = list(inspect.signature(getattr(re, call.func.attr)).parameters).index("flags")
    given = [word.value for word in call.keywords if word.arg == "flags"] or call.args[place:]
    return int(evaluated(given[0], module)) if given else 0


def patterns(package) -> Iterator[tuple[str, str | bytes, int, bool]]:
    """(where it stands, pattern, flags, whether it is searched for) of all calls of `re`."""
    names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    sources = {module: open(module.__file__, encoding="utf-8").read() for module in modules}
    everything = "\n".join(sources.values())
    for module, source in sources.items():
        tree = ast.parse(source)
        assigned = {
            node.value: node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for call in calls_of_re(tree):
            where = f"{module.__name__}:{call.lineno}"
            searched = call.func.attr in SEARCHES
            if call.func.attr == "compile":
                name = assigned.get(call)
                used = re.findall(rf"\b{name}\.(\w+)", everything)
                searched = name is None or not used or bool(SEARCHES & {*used})
            key = (module.__name__, ast.unparse(call.args[0]))
            found = NO_LITERALS.get(key)
            if found is None:
                found = [evaluated(call.args[0], module)]
            for pattern in found:
                yield where, pattern, flags_of(call, module), searched


def test_every_pattern_of_the_package_takes_linear_time():
    found = list(patterns(fp8lens))
    assert len(found) > 80
    refused = []
    for where, pattern, flags, searched in found:
        try:
            refuse(pattern, flags, searched)
        except Refused as reason:
            refused.append(f"{where}: {reason}: {pattern!r}")
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\{(\s*\{[\d,\s]*\}\s*,?)*\s*\}|",  # of replica groups: 295 bytes took three seconds
        r"(?:a+)+b",
        r"(?:ab|[ab]b)*c",
        r"(?:(?:x*)y?)*z",
        r"^(?:(?>(?:a*b)*)a*)*$",
    ],
)
def test_a_loop_in_a_loop_is_refused(pattern):
    with pytest.raises(Refused, match="of a loop|inside a loop"):
        refuse(pattern, searched=False)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[.\d]+$",  # of a kernel's name
        r"^(?:\w++\()++|\)+$",  # of a layer's name
        r"(\w+)=(\d+)",
        r"a[^b]*+b",
        r"(?s)/\*.*?\*/",
        r'"(?:[^"\\]|\\.)*+"',
        r"(?m)^\s+x",
        r"(?<=a)[ab]+c",
        r"(?:x(?:\w+)y)",
        r"\b[\w.]+=",
    ],
)
def test_a_search_that_may_begin_again_is_refused(pattern):
    refuse(pattern, searched=False)  # at one place it is tried once
    with pytest.raises(Refused, match="begin again"):
        refuse(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d+",
        r"(?<!\w)(\w++)=",
        r"\b\w+=",
        r"^\s+x",
        r"(?m)^ +x",
        r"\([^()]*\)",
        r"(?<= )[a-z]+(?=\()",
        r'"(?:[^"\\]|\\.)*+"?',
        rb"\\(?:([0-7]{3})|(.))",
    ],
)
def test_what_is_linear_passes(pattern):
    refuse(pattern)
