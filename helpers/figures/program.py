"""The graph that `plot_fusion` draws: a program's operations, and the kernels that do them.

It is the program that XLA's gemm rewriter was given: the reader's operations, by the names that JAX
gave them. `fp8lens.matmul.attribution` says which kernels do them. What it does not know is in no
box.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from fp8lens.hlo.dataflow import Flow
from fp8lens.hlo.ops import DOTS
from fp8lens.hlo.parse import HloModule, Instruction, parse_hlo_module
from fp8lens.hlo.text import size
from fp8lens.inspection import Inspection
from fp8lens.matmul.attribution import VIEWS, Where, attribute, given_to_rewriter
from fp8lens.matmul.kernels import launches
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.roles import clamp_bounds
from fp8lens.matmul.rows import GemmRow
from fp8lens.matmul.unfused import inside
from helpers.figures.operations import grouped, is_passed, sources
from helpers.figures.palette import PALETTE

MOST = 40  # nodes that a picture can hold
OPERATIONS_OF_A_NODE = 10  # at most: a function such as gelu is ten operations, and one node

_UNDRAWN = frozenset("parameter constant tuple iota".split())
_ARITHMETIC = ("multiply", "divide", "add", "subtract")


@dataclasses.dataclass(eq=False)
class Box:
    """What became one call or kernel. `reads` has the boxes, and the numbers of parameters, that it
    reads, and which elements of their results.
    """

    kernel: Instruction
    caption: tuple[str, ...]
    colour: str
    reads: dict[Any, set[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Node:
    """`kind`: "parameter", "result", "dot", "operation", or "added", which is XLA's own. `box` is
    None where it is not known which kernel does it, and for parameters and results. `parts` are the
    instructions that it stands for, `reads` the scalars and vectors in its label.
    """

    label: str
    kind: str
    box: Box | None = None
    detail: str = ""
    parts: tuple[Instruction, ...] = ()
    reads: tuple[Instruction, ...] = ()


@dataclasses.dataclass
class Graph:
    """Nodes, in the program's order; edges between them, without values; boxes."""

    nodes: list[Node]
    edges: dict[tuple[Node, Node], None]
    boxes: list[Box]

    @property
    def lost(self) -> list[Node]:
        """What is not attributed to a kernel."""
        return [n for n in self.nodes if n.box is None and n.kind in ("operation", "dot")]


def given_program(inspection: Inspection) -> HloModule:
    """The program that XLA's gemm rewriter was given."""
    return parse_hlo_module(given_to_rewriter(inspection._stages).text)


def kernels_of(inspection: Inspection, given: HloModule) -> Where:
    """Which kernels do the operations of `given_program`."""
    made = parse_hlo_module(inspection._stages[-1].text)
    return attribute(given, made, inspection.module, inspection.report.rows)


def program_graph(inspection: Inspection) -> Graph:
    """The graph of an inspected program.

    Raises ValueError for a program without a matmul, with a matmul in a loop or branch, or with
    more than MOST nodes.
    """
    given = given_program(inspection)
    _check(given)
    where = kernels_of(inspection, given)
    flow = Flow(inspection.module, launches)
    builder = _Builder(given, where, _boxes(inspection, flow))
    builder.add_parameters()
    builder.add_operations()
    builder.add_edges()
    builder.add_results()
    graph = builder.graph
    _add_kernels(graph, flow, builder.parameter_numbers())
    dissolve(graph)
    _check_size(len(graph.nodes))
    return graph


def _check(given: HloModule) -> None:
    inner = [i for i in given if i.opcode in DOTS and i.computation is not given.entry]
    if inner:
        raise ValueError(
            "plot_fusion draws a program without loops and branches, and "
            f"{inner[0].name} is in one: inspect the loop's body, a function of its own."
        )
    if not any(i.opcode in DOTS for i in given.entry):
        raise ValueError(
            "plot_fusion draws what became of a matmul, and this program has none: "
            "give it a function with a dot."
        )


def _check_size(nodes: float) -> None:
    if nodes > MOST:
        raise ValueError(
            f"plot_fusion draws up to {MOST} nodes, and this program has more: "
            "inspect a part of it, a function of its own."
        )


# Boxes --------------------------------------------------------------------------------------------


def _boxes(inspection: Inspection, flow: Flow) -> dict[Instruction, Box]:
    """For each kernel its box."""
    row_of = {row.instruction: row for row in reversed(inspection.report.rows)}
    box_of: dict[Instruction, Box] = {}
    for line in inspection.ledger:
        kernel = line.kernel.instruction
        box_of[kernel] = _box(line, row_of.get(kernel))
    for kernel, inputs in flow.inputs.items():
        for producer in flow.of(frozenset().union(*inputs)):
            read: Any = producer.element
            if producer.instruction in box_of:
                read = box_of[producer.instruction]
            box_of[kernel].reads.setdefault(read, set()).add(producer.element)
    return box_of


def _box(line: Line, row: GemmRow | None) -> Box:
    """A kernel's box; `row` is the matmul that it is."""
    kernel, moved = line.kernel.instruction, size(line.nbytes)
    if row is None:
        return Box(kernel, (f"a kernel of XLA's: {moved}",), PALETTE[4])
    if kernel.custom_call_target:
        title = f"one call: {kernel.custom_call_target}"
    elif row.library == "triton":
        title = "a kernel of Triton's"
    else:
        title = "a kernel of XLA's"
    details = [f"epilogue {row.epilogue}"]
    if not row.is_fp8:
        details.insert(0, f"multiplies {row.math_dtype}")
    if row.amax:
        details.append("amax")
    details.append(moved)
    return Box(kernel, (title, ", ".join(details)), PALETTE[0 if row.is_fp8 else 1])


# Nodes and edges ----------------------------------------------------------------------------------


class _Builder:
    """The program's own nodes and edges, added in the order of its methods."""

    def __init__(self, given: HloModule, where: Where, box_of: dict[Instruction, Box]):
        self.graph = Graph([], {}, list(box_of.values()))
        self._entry, self._where, self._box_of = given.entry, where, box_of
        # For an instruction its nodes: one for each kernel that does it.
        self._nodes_of: dict[Instruction, list[Node]] = {}

    def add_parameters(self) -> None:
        """A node for each parameter; scalars and vectors are named where they are read."""
        for parameter in self._entry.parameters:
            if len(parameter.shape.dims) > 1:
                node = Node(_name(parameter), "parameter", detail=parameter.shape.brief)
                self._nodes_of[parameter] = [node]
                self.graph.nodes.append(node)

    def parameter_numbers(self) -> dict[Node, int]:
        """The numbers of the parameters that have nodes."""
        found = {}
        for instruction, nodes in self._nodes_of.items():
            if instruction.parameter_number is not None:
                found[nodes[0]] = instruction.parameter_number
        return found

    def add_operations(self) -> None:
        """A node for each operation and each kernel that does it."""
        shown = [i for i in self._entry if not is_passed(i) and i.opcode not in _UNDRAWN]
        _check_size(len(shown) / OPERATIONS_OF_A_NODE)
        for name, group in grouped(shown, self._where):
            read = dict.fromkeys(
                j for i in group for j in sources(i) if j.opcode in ("parameter", "constant")
            )
            label = self._label(name, group, read)
            kind = "dot" if group[0].opcode in DOTS else "operation"
            kernels = self._where.get(group[0], ())
            boxes: list[Box | None] = [self._box_of[kernel] for kernel in kernels]
            for box in boxes or [None]:
                node = Node(label, kind, box, parts=tuple(group), reads=tuple(read))
                self.graph.nodes.append(node)
                for i in group:
                    self._nodes_of.setdefault(i, []).append(node)

    def _label(self, name: str, group: list[Instruction], read: Iterable[Instruction]) -> str:
        """A node's name, the scalars and vectors that it reads, and a clip's bounds."""
        is_arithmetic = len(group) == 1 and group[0].opcode in _ARITHMETIC
        operands = []
        for i in read:
            if i not in self._nodes_of and (i.opcode == "parameter" or is_arithmetic):
                operands.append(_name(i))
        if name == "clip":
            for i in group:
                operands += map(_number, clamp_bounds(i))
        if name == "convert":
            name = f"convert to {group[-1].shape.dtype}"
        return f"{name} {', '.join(operands)}".strip()

    def add_edges(self) -> None:
        """Edges from what each operation reads."""
        for node in self.graph.nodes:
            for some in self._read_by(node):
                nearest = _nearest(some, node)
                if nearest:
                    self.graph.edges[nearest, node] = None

    def _read_by(self, node: Node) -> list[list[Node]]:
        """The values that a node reads, each with all of its nodes."""
        if node.box and node.parts:
            # A reduction may be done by two kernels, one after the other.
            steps = [n for n in self._nodes_of[node.parts[0]] if n.box in node.box.reads]
            if steps:
                return [steps]
        return [self._nodes_of.get(j, []) for i in node.parts for j in sources(i)]

    def add_results(self) -> None:
        """A node for each result that has a node to come from."""
        root = self._entry.root
        returned = [root]
        if root.opcode == "tuple":
            returned = [self._entry[name] for name in root.operands]
        for i in returned:
            for source in sources(i) if is_passed(i) else [i]:
                if source in self._nodes_of:
                    result = Node("result", "result", detail=i.shape.brief)
                    self.graph.nodes.append(result)
                    self.graph.edges[self._nodes_of[source][-1], result] = None


def _nearest(some: list[Node], reader: Node) -> Node | None:
    """Of the nodes of one value, each in another kernel, the one that is read."""
    if reader in some or not some:
        return None
    near = [n for n in some if n.box is reader.box]
    if not near and reader.box:
        near = [n for n in some if n.box in reader.box.reads]
    return (near or some)[0]


def _name(i: Instruction) -> str:
    """A parameter's name, with the length of a vector; a constant's number."""
    if i.opcode == "constant":
        return _number(i.literal or "")
    op_name = i.metadata.op_name if i.metadata else None
    length = f"[{i.shape.dims[0]}]" if len(i.shape.dims) == 1 else ""
    return (op_name or i.name) + length


def _number(literal: str) -> str:
    return f"{float(literal):g}" if re.fullmatch(r"[-+]?[.\d]+(e[-+]?\d+)?", literal) else literal


# XLA's own kernels --------------------------------------------------------------------------------


def _add_kernels(graph: Graph, flow: Flow, parameters: dict[Node, int]) -> None:
    """Kernels that do nothing the program asked for, on the way of what they work on. `parameters`
    are the numbers of the parameters' nodes.
    """
    drawn = {node.box for node in graph.nodes}
    results = [node for node in graph.nodes if node.kind == "result"]
    added = [box for box in graph.boxes if box not in drawn]
    reads = {box: set(box.reads) for box in graph.boxes}
    for box in added:  # through others of their kind
        for other in [other for other in reads[box] if other in added]:
            reads[box] |= reads[other]
    for box in reversed(added):
        work = [i.opcode for i in inside(box.kernel) if i.opcode not in VIEWS | _UNDRAWN]
        node = Node(", ".join(dict.fromkeys(work)) or "copy", "added", box)
        readers = {other for other in graph.boxes if box in other.reads}
        returned = _returned(results, flow, box)
        for a, b in list(graph.edges):
            starts = parameters.get(a) in reads[box] or a.box in reads[box]
            if starts and (b.box in readers or b in returned):
                del graph.edges[a, b]
                graph.edges[a, node] = graph.edges[node, b] = None
        for other in graph.nodes:
            numbers = {i.parameter_number for i in other.reads if i.opcode == "parameter"}
            if other.box in readers and numbers & reads[box]:
                graph.edges[node, other] = None
        graph.nodes.insert(0, node)


def _returned(results: list[Node], flow: Flow, box: Box) -> list[Node]:
    """The program's results that a box's kernel writes."""
    found = []
    # A result that is read from no node has none: the lists may differ in length.
    for result, producers in zip(results, flow.results, strict=False):
        if any(producer.instruction is box.kernel for producer in flow.of(producers)):
            found.append(result)
    return found


def dissolve(graph: Graph) -> None:
    """Take nodes out of boxes that cannot be right: no kernel reads what is made of its results."""
    readers: dict[Any, set] = collections.defaultdict(set)
    for a, b in graph.edges:
        if a.box is None or a.box is not b.box:
            readers[a.box or a].add(b.box or b)
    wrong = set()
    for box in graph.boxes:
        reached: set = set()
        todo: list[Any] = [box]
        while todo:
            some = readers[todo.pop()] - reached
            reached |= some
            todo += some
        if box in reached:
            wrong.add(box)
    for node in graph.nodes:
        if node.box in wrong:
            node.box = None
