"""The picture of a program: what is in a box is what the compiled program does in that kernel."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from fp8lens import inspect
from fp8lens.hlo.dataflow import Flow
from fp8lens.matmul import attribution
from fp8lens.matmul.kernels import launches
from helpers.figures import fusion, placing
from helpers.figures import program as drawing
from helpers.figures.fusion import plot_fusion
from helpers.figures.layers import arrange, crossings
from helpers.figures.plots import contrast
from tests.helpers.test_layers import fewest_crossings
from tests.programs.random_programs import (
    ENDS,
    OPERANDS,
    TAKEN,
    Layer,
    argument,
    bf16,
    f32,
    program,
)
from tests.weekly import NIGHTLY

e4m3, MAX = jnp.float8_e4m3fn, 448.0
A8, A16 = jax.ShapeDtypeStruct((4096, 4096), e4m3), jax.ShapeDtypeStruct((4096, 4096), bf16)
SCALE, ROWS, BIAS = (
    jax.ShapeDtypeStruct(*of) for of in (((), f32), ((4096,), f32), ((4096,), bf16))
)
FRONT = ["convert to f32", "mul a_scale", "convert to f32", "mul b_scale", "dot_general"]
END = ["mul d_scale", "clip -448, 448", "convert to f8e4m3fn"]


def product(a, b, a_scale, b_scale, dtype=f32):
    a = a.astype(dtype) * a_scale.astype(dtype)
    b = b.astype(dtype) * b_scale.astype(dtype)
    return jax.lax.dot(a, b.T)


def quantized(d, d_scale, bound=MAX):
    return jnp.clip(d * d_scale.astype(d.dtype), -bound, bound).astype(e4m3)


def scaled_matmul(a, b, a_scale, b_scale, d_scale):
    return quantized(product(a, b, a_scale, b_scale), d_scale)


def unclamped(a, b, a_scale, b_scale, d_scale):
    return (product(a, b, a_scale, b_scale) * d_scale).astype(e4m3)


def other_bounds(a, b, a_scale, b_scale, d_scale):
    return quantized(product(a, b, a_scale, b_scale), d_scale, 447)


def per_row(a, b, a_scales, b_scale):
    return product(a, b, a_scales[:, None], b_scale).astype(bf16)


def relu(a, b, a_scale, b_scale, d_scale):
    return quantized(jax.nn.relu(product(a, b, a_scale, b_scale)), d_scale)


def silu(a, b, a_scale, b_scale, d_scale):
    return quantized(jax.nn.silu(product(a, b, a_scale, b_scale)), d_scale)


def gelu(a, b, a_scale, b_scale):
    return jax.nn.gelu(product(a, b, a_scale, b_scale, bf16))


def everything(a, b, a_scale, b_scale, d_scale, bias):
    d = jax.nn.gelu(product(a, b, a_scale, b_scale) + bias.astype(f32))
    return quantized(d, d_scale), jnp.max(jnp.abs(d))


def stored_the_other_way(a, b, a_scale, b_scale):
    return product(a, b.T, a_scale, b_scale).astype(f32)


def two_layers(a, b, c, a_scale, b_scale, d_scale, c_scale):
    return product(scaled_matmul(a, b, a_scale, b_scale, d_scale), c, d_scale, c_scale)


def quantized_here(a, b, a_scale, b_scale):
    return product(quantized(a, a_scale), b, a_scale, b_scale)


def made_twice(a, b, a_scale, b_scale, d_scale):
    d = product(a, b, a_scale, b_scale) * d_scale
    return jnp.clip(d, -MAX, MAX).astype(e4m3), jnp.max(jnp.abs(d))


def in_a_loop(a, b, a_scale, b_scale, d_scale):
    return jax.lax.fori_loop(0, 3, lambda _, h: scaled_matmul(h, b, a_scale, b_scale, d_scale), a)


CALL = "one call: __cublas$lt$matmul$f8"
FIVE = (A8, A8, SCALE, SCALE, SCALE)
PROGRAMS = {  # what each box holds
    scaled_matmul: (FIVE, [(CALL, "epilogue DEFAULT, 50.3 MB", FRONT + END)]),
    unclamped: (
        FIVE,
        [
            (CALL, "epilogue DEFAULT, 101 MB", FRONT),
            ("a kernel of XLA's: 83.9 MB", ["mul d_scale", "convert to f8e4m3fn"]),
        ],
    ),
    other_bounds: (
        FIVE,
        [
            (CALL, "epilogue DEFAULT, 101 MB", FRONT),
            (
                "a kernel of XLA's: 83.9 MB",
                ["mul d_scale", "clip -447, 447", "convert to f8e4m3fn"],
            ),
        ],
    ),
    per_row: (
        (A8, A8, ROWS, SCALE),
        [
            ("a kernel of XLA's: 83.9 MB", ["convert to f32", "mul a_scales[4096]"]),
            ("a kernel of XLA's: 83.9 MB", ["convert to f32", "mul b_scale"]),
            (
                "one call: __cublas$lt$matmul",
                "multiplies tf32, epilogue DEFAULT, 201 MB",
                ["dot_general"],
            ),
            ("a kernel of XLA's: 101 MB", ["convert to bf16"]),
        ],
    ),
    relu: (FIVE, [(CALL, "epilogue RELU, 50.3 MB", [*FRONT, "relu", *END])]),
    silu: (
        FIVE,
        [(CALL, "epilogue DEFAULT, 101 MB", FRONT), ("a kernel of XLA's: 83.9 MB", ["silu", *END])],
    ),
    gelu: (
        FIVE[:4],
        [
            (
                CALL,
                "epilogue GELU, 67.1 MB",
                [part.replace("f32", "bf16") for part in FRONT] + ["gelu"],
            )
        ],
    ),
    everything: (
        (*FIVE, BIAS),
        [
            (
                CALL,
                "epilogue BIAS_GELU, amax, 50.3 MB",
                [*FRONT, "add bias[4096]", "gelu", *END, "abs", "reduce_max"],
            )
        ],
    ),
    stored_the_other_way: (
        FIVE[:4],
        [("a kernel of XLA's: 33.6 MB", ["transpose"]), (CALL, "epilogue DEFAULT, 101 MB", FRONT)],
    ),
    two_layers: (
        (A8, A8, A8, *[SCALE] * 4),
        [
            (CALL, "epilogue DEFAULT, 50.3 MB", FRONT + END),
            (
                CALL,
                "epilogue DEFAULT, 101 MB",
                ["convert to f32", "mul d_scale", "convert to f32", "mul c_scale", "dot_general"],
            ),
        ],
    ),
    quantized_here: (
        (A16, A8, SCALE, SCALE),
        [
            ("a kernel of XLA's: 50.3 MB", ["mul a_scale", *END[1:]]),
            (CALL, "epilogue DEFAULT, 101 MB", FRONT),
        ],
    ),
    made_twice: (
        FIVE,
        [
            (CALL, "epilogue DEFAULT, 101 MB", FRONT),
            ("a kernel of XLA's: 67.1 MB", ["mul d_scale", "abs", "reduce_max"]),
            ("a kernel of XLA's: 16.4 kB", ["reduce_max"]),
            (CALL, "epilogue DEFAULT, 50.3 MB", FRONT + END),
        ],
    ),
}
seen = functools.cache(lambda fn: inspect(fn, *PROGRAMS[fn][0]))
drawn = functools.cache(lambda fn: drawing.program_graph(seen(fn)))


def held(graph: drawing.Graph) -> list[tuple]:
    return [
        (*box.caption, [node.label for node in graph.nodes if node.box is box])
        for box in graph.boxes
    ]


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_boxes_hold_what_became_one_kernel(fn):
    assert (
        sorted(map(str, held(drawn(fn)))) == sorted(map(str, PROGRAMS[fn][1]))
        and not drawn(fn).lost
    )
    bytes_in_captions = re.findall(
        r"[\d.]+ [kM]?B", " ".join(" ".join(box.caption) for box in drawn(fn).boxes)
    )
    assert len(bytes_in_captions) == len(seen(fn).ledger)


def test_triton_does_it_in_one_kernel_by_another_type():
    (box,) = held(drawing.program_graph(inspect(unclamped, *FIVE, gemm="triton")))
    assert box == (
        "a kernel of Triton's",
        "multiplies tf32, epilogue multiply, 50.3 MB",
        [*FRONT, "mul d_scale", "convert to f8e4m3fn"],
    )


def test_parameters_results_and_what_goes_through_memory():
    graph = drawn(unclamped)
    ends = [
        (node.label, node.detail) for node in graph.nodes if node.kind in ("parameter", "result")
    ]
    assert ends == [
        ("a", "f8e4m3fn[4096,4096]"),
        ("b", "f8e4m3fn[4096,4096]"),
        ("result", "f8e4m3fn[4096,4096]"),
    ]
    call, kernel = graph.boxes
    assert fusion._through_memory(call, kernel) == "f32, 67.1 MB"
    labels = [(a.label, b.label) for a, b in graph.edges]
    assert ("a", "convert to f32") in labels and ("dot_general", "mul d_scale") in labels
    assert ("convert to f8e4m3fn", "result") in labels


def test_boxes_that_read_each_other_are_wrong_and_go():
    boxes = [drawing.Box(None, (name,), "C0") for name in ("first", "second", "third")]
    a, b, c = (drawing.Node("", "operation", box) for box in boxes)
    again, between = drawing.Node("", "operation", boxes[0]), drawing.Node("", "operation")
    edges = [(a, b), (b, between), (between, again), (a, again), (again, c)]
    graph = drawing.Graph([a, b, between, again, c], dict.fromkeys(edges), boxes)
    drawing.dissolve(graph)
    assert [node.box for node in graph.nodes] == [None, None, None, None, boxes[2]]


# What is drawn is what runs -----------------------------------------------------------------------


def differences(graph: drawing.Graph, inspection) -> list[str]:
    """Boxes that read other boxes than their kernels read other kernels."""
    flow, wrong = Flow(inspection.module, launches), []
    for box in graph.boxes:
        makers = flow.of(frozenset().union(*flow.inputs[box.kernel]))
        reads = {maker.instruction.name for maker in makers if maker.instruction}
        drawn = {
            a.box.kernel.name for a, b in graph.edges if b.box is box and a.box and a.box is not box
        }
        wrong += [f"{box.kernel.name} reads {reads}, drawn {drawn}"] * (reads != drawn)
    return wrong


LAYERS = [
    *((operands, "", "") for operands in OPERANDS),
    *(("scaled", taken, "E4M3") for taken in TAKEN),
    *(("scaled", "", end) for end in ENDS),
]
# Parameters beside a kernel of several rows; kernels of one and of two rows side by side.
BESIDE = [("guarded scalar", "", ""), ("scale per row", "", "")]
SOME = LAYERS if NIGHTLY else [*LAYERS[::6], *BESIDE]


@pytest.mark.parametrize("parts", SOME, ids=" ".join)
def test_layers_are_drawn_as_they_run(parts):
    dtype = next(
        dt
        for dt in (bf16, f32)
        if all(
            dt in kinds[part].dtypes
            for kinds, part in zip((OPERANDS, TAKEN, ENDS), parts, strict=True)
        )
    )
    layer = Layer(*parts, dtype, m=64, n=128, k=256)
    given = (argument(layer, name) for name in layer.takes)
    inspection = inspect(lambda *given: layer(dict(zip(layer.takes, given, strict=True))), *given)
    graph = drawing.program_graph(inspection)
    assert not graph.lost and not differences(graph, inspection)
    assert_nothing_overlaps(graph)


@pytest.mark.parametrize("seed", range(60 if NIGHTLY else 8))
def test_random_programs_are_drawn_as_they_run(seed):
    asked = program(seed)
    inspection = inspect(asked.fn, *asked.args, **asked.options)
    try:
        graph = drawing.program_graph(inspection)
    except ValueError as error:
        assert "plot_fusion draws" in str(error)
        return
    if not graph.lost:
        assert not differences(graph, inspection)
    assert_nothing_overlaps(graph)


def assert_nothing_overlaps(graph: drawing.Graph) -> None:
    """Nor does an edge lead upwards, or through what it has no part in."""
    place, ways, boxes = placing.layout(graph)
    areas = {}
    for node, (x, y, w) in place.items():
        tall = placing.height_of(node)
        areas[node] = (x - w / 2, y - tall / 2, x + w / 2, y + tall / 2)
    for some in (areas, boxes):
        for a, b in itertools.combinations(some.values(), 2):
            assert apart(a, b)
    for node, area in areas.items():
        for box, around in boxes.items():
            assert lies_in(area, around) if node.box is box else apart(area, around), node.label
    for (a, b), way in ways.items():
        line = [(place[a][0], areas[a][3]), *way, (place[b][0], areas[b][1])]
        for (x0, y0), (x1, y1) in itertools.pairwise(line):
            assert y0 <= y1, (a.label, b.label)
            passed = (min(x0, x1), y0 + 1e-6, max(x0, x1), y1 - 1e-6)
            for node, area in areas.items():
                assert node in (a, b) or apart(area, passed), (a.label, b.label, node.label)
            for box, around in boxes.items():
                assert box in (a.box, b.box) or apart(around, passed), (a.label, b.label)


def apart(a: tuple, b: tuple) -> bool:
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def lies_in(area: tuple, around: tuple) -> bool:
    starts = around[0] <= area[0] and around[1] <= area[1]
    return starts and area[2] <= around[2] and area[3] <= around[3]


def test_an_edge_is_straight_beside_a_box_that_it_passes():
    """A wide kernel of three rows makes a scalar; what reads it, and `a`, is below both."""
    wide, narrow = (drawing.Box(None, (caption,), "C0") for caption in ("a kernel " * 8, "call"))
    a, *rows, last, result = (
        drawing.Node(label, kind, box)
        for label, kind, box in [
            ("a", "parameter", None),
            *((label, "operation", wide) for label in ("eq", "select", "exp")),
            ("mul", "operation", narrow),
            ("result", "result", None),
        ]
    )
    edges = [*itertools.pairwise([*rows, last, result]), (a, last), (a, result)]
    graph = drawing.Graph([a, *rows, last, result], dict.fromkeys(edges), [wide, narrow])
    assert_nothing_overlaps(graph)


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_nothing_overlaps_and_no_order_has_fewer_crossings(fn):
    assert_nothing_overlaps(drawn(fn))
    bands, _, chains = placing.make_layers(drawn(fn))
    steps = [step for chain in chains.values() for step in itertools.pairwise(chain)]
    wide = {place: 1.0 for band in bands for column in band for place in column.places}
    arrange(bands, steps, wide)
    assert crossings(bands, steps) == fewest_crossings(bands, steps)


# The picture --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn", [scaled_matmul, everything, two_layers, per_row], ids=lambda fn: fn.__name__
)
def test_picture_is_small_says_what_it_shows_and_is_the_same_twice(fn):
    figure, again = plot_fusion(seen(fn)), plot_fusion(fn, *PROGRAMS[fn][0])
    svg = figure.svg()
    assert svg == again.svg() and len(svg) < 30_000 and figure.get_figwidth() < 6.2
    for box in drawn(fn).boxes:
        assert ", ".join(box.caption) in figure.alt
    words = re.sub("<[^>]*>", "\n", svg)
    for node in drawn(fn).nodes:
        assert (
            node.label in words and node.label in figure.alt or node.kind in ("parameter", "result")
        )
    assert "$lt$matmul" in words, "no mathematics"


def test_what_multiplies_stands_out_and_can_be_read():
    for fn, ink in ((scaled_matmul, "white"), (per_row, "black")):
        (text,) = (t for t in plot_fusion(seen(fn)).axes[0].texts if t.get_text() == "dot_general")
        (box,) = (node.box for node in drawn(fn).nodes if node.kind == "dot")
        assert text.get_color() == ink and contrast(ink, box.colour) >= 4.5


def test_what_is_not_attributed_is_said_to_be(monkeypatch):
    monkeypatch.setattr(attribution, "accounts_for", lambda *_: False)
    graph = drawing.program_graph(seen(relu))
    assert {"relu", *END} <= {node.label for node in graph.lost}
    figure = plot_fusion(seen(relu))
    assert "not attributed to a kernel: " in figure.alt
    assert [t.get_text() for t in figure.axes[0].texts][-1] == "dashed: not attributed to a kernel"
    assert any(patch.get_linestyle() == "--" for patch in figure.axes[0].patches)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda: (seen(relu).hlo,), TypeError, r"inspect\(fn, \*args\)"),
        (lambda: (jnp.add, SCALE, SCALE), ValueError, "give it a function with a dot"),
        (lambda: (in_a_loop, *FIVE), ValueError, "inspect the loop's body"),
        (
            lambda: (
                lambda x, *ws: functools.reduce(lambda h, w: jnp.sin(h @ w), ws, x),
                *[A16] * 30,
            ),
            ValueError,
            "up to 40 nodes.*inspect a part of it",
        ),
    ],
)
def test_errors_name_the_fix(given, error, message):
    with pytest.raises(error, match=message):
        plot_fusion(*given())


@pytest.mark.parametrize(
    "move",
    [
        lambda a: a[::2],
        lambda a: jnp.pad(a, ((0, 96), (0, 0))),
        lambda a: a.reshape(64, 64, 4096).swapaxes(0, 1).reshape(4096, 4096),
    ],
)
def test_what_xla_moves_in_a_kernel_of_its_own_is_not_drawn_in_the_call(move):
    def moved(a, b, a_scale, b_scale):
        return jax.lax.dot(move(a.astype(f32) * a_scale), (b.astype(f32) * b_scale).T)

    graph = drawing.program_graph(inspect(moved, A8, A8, SCALE, SCALE))
    lost = [node.label for node in graph.lost]
    assert lost[:2] == ["convert to f32", "mul a_scale"] and len(lost) > 2
    assert [
        node.label for node in graph.nodes if node.box and node.kind in ("operation", "dot")
    ] == ["convert to f32", "mul b_scale", "dot_general"]
