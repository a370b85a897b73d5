"""What Transformer Engine's layers for JAX become: `make engine` builds its environment for it.

Training steps are compiled for chips that are not there: TE's own layers by each of its recipes,
the GPT layer of helpers.models.gpt with TE's product in place of Flax's, and the census's models
with what MaxText's settings put into them. They go into notebooks/results/engine.json. Reference H
reads it.

TE asks the GPU what it can do when it is traced. Here it is told what the chip can do that the step
is compiled for, and it remembers the answer: so each chip has a process of its own. cuDNN, which
cannot be asked without a GPU, is taken to have a kernel for attention. It is not known how much
memory its kernels and TE's want for themselves, so that is not in the record.
"""

import collections
import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fp8lens import TARGETS, Inspection, inspect
from fp8lens.bill.rates import calibrated
from fp8lens.matmul.kernels import codes
from fp8lens.matmul.ledger import Line
from helpers.models import gpt
from tools.environments import with_transformer_engine
from tools.recorders import census
from tools.recorders.data import Record, first_line, measured_by

f32, bf16 = jnp.float32, jnp.bfloat16
# A program is compiled for the first chip of a generation; its times are computed for each.
GENERATIONS = {"H100": ("H100", "H200"), "B200": ("B200",)}
PER_TENSOR = ("DelayedScaling", "Float8CurrentScaling")
RECIPES = {"H100": PER_TENSOR, "B200": (*PER_TENSOR, "MXFP8BlockScaling", "NVFP4BlockScaling")}
# TE's own layers, by their classes, at the size of the GPT layer; and that layer itself.
LAYERS = (
    "DenseGeneral",
    "LayerNormMLP",
    "LayerNormMLP, no bias",
    "TransformerLayer",
    "TransformerLayer, no bias",
    "GPT layer",
)
# With NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION=1, which TE reads once, all sums are careful.
CAREFULLY = ", careful sums"
CAREFUL = f"TransformerLayer | DelayedScaling{CAREFULLY} | H100"
BATCH, LENGTH, WIDTH, HEADS = 4, 2048, 4096, 32
# What MaxText's `quantization` can be: put into the MLP and the block of the census. fp8_gpu works
# on MaxText's own modules alone.
OF_QWIX = ("fp8_full",)
TENSOR_SETTINGS = ("fp8", *OF_QWIX, "te_fp8_delayedscaling", "te_fp8_currentscaling")
SETTINGS = {
    "H100": ("bf16", *TENSOR_SETTINGS, "nanoo_fp8"),
    "B200": ("bf16", *TENSOR_SETTINGS, "te_mxfp8", "te_nvfp4", "te_nvfp4_no_rht"),
}
OF_MAXTEXT = "MaxText's product, "


def names(version: str) -> list[str]:
    """The rows: layer, recipe, chip."""
    found = []
    for chip in GENERATIONS:
        for layer in LAYERS:
            recipes = ("bf16", *RECIPES[chip])
            recipes += ("Flax, delayed",) if layer == "GPT layer" else ()
            found += [f"{layer} | {recipe} | {chip}" for recipe in recipes]
        for model in ("MLP", "block"):
            found += [f"{OF_MAXTEXT}{model} | {of} | {chip}" for of in SETTINGS[chip]]
    return [*found, CAREFUL]


def told(chip: str, carefully: bool) -> Any:
    """transformer_engine.jax, which takes the GPU to be this one, and may sum carefully."""
    import transformer_engine.jax as engine
    import transformer_engine_jax as asks

    major, minor = TARGETS[chip].compute_capability
    cudnn = asks.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    byte = ((1,), asks.DType.kByte)
    answers: dict[str, Any] = {
        "get_device_compute_capability": 10 * major + minor,
        "_get_high_precision_accumulation_from_env": carefully,
        "get_fused_attn_backend": (cudnn, ""),
        "get_fused_attn_fwd_workspace_sizes": byte,
        "get_fused_attn_bwd_workspace_sizes": byte,
    }
    for of in ("norm_fwd", "norm_bwd", "dbias_quantize", "dact_dbias_quantize"):
        answers[f"get_{of}_workspace_sizes"] = (byte,)
    # Some of its modules have such a function by a name of their own.
    modules = [m for name, m in sys.modules.items() if name.startswith("transformer_engine")]
    for name, answer in answers.items():
        for module in modules:
            if hasattr(module, name):
                setattr(module, name, lambda *asked, answer=answer: answer)
    return engine


def module_of(engine: Any, layer: str, recipe: Any) -> nn.Module:
    """A layer of Transformer Engine's, as the quickstart has it: f32 parameters, biases, nothing
    dropped out, nothing masked.
    """
    kind, _, without = layer.partition(", ")
    common = {"use_bias": not without, "dtype": f32}
    match kind:
        case "DenseGeneral":
            return engine.flax.DenseGeneral(features=4 * WIDTH, **common)
        case "LayerNormMLP":
            return engine.flax.LayerNormMLP(intermediate_dim=4 * WIDTH, epsilon=1e-5, **common)
        case "TransformerLayer":
            return engine.flax.TransformerLayer(
                hidden_size=WIDTH,
                mlp_hidden_size=4 * WIDTH,
                num_attention_heads=HEADS,
                layernorm_epsilon=1e-5,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="no_mask",
                enable_relative_embedding=False,
                **common,
            )
    product = engine.flax.make_dot_general_cls(recipe) if recipe else None
    return gpt.GPTLayer(WIDTH, HEADS, product=product)


def step_of(layer: str, recipe: str, chip: str) -> Inspection:
    """The compiled training step of one row: the gradients of the weights and of the input, and a
    step of gradient descent.
    """
    engine = told(chip, recipe.endswith(CAREFULLY))
    if layer.startswith(OF_MAXTEXT):
        with_qwix = recipe in OF_QWIX
        of = functools.partial(census.maxtext, quantization=recipe, with_qwix=with_qwix)
        make = census.linen if recipe == "bf16" else of
        fn, args, how = census.program(make, layer.removeprefix(OF_MAXTEXT), train=True)
        return inspect(fn, *args, target=chip, compiler_options=census.OPTIONS, **how)
    scaling = None
    name = recipe.removesuffix(CAREFULLY)
    if name in RECIPES[chip]:
        scaling = getattr(sys.modules["transformer_engine.common.recipe"], name)()
    if recipe == "Flax, delayed":
        module: Any = gpt.GPTLayer(WIDTH, HEADS, fp8=True)
    else:
        module = module_of(engine, layer, scaling)
    takes_it = layer.startswith(("LayerNormMLP", "TransformerLayer"))
    settings = {"deterministic": True} if takes_it else {}

    def apply(variables, x):
        # NVFP4's gradients are rounded at random
        y = module.apply(variables, x, rngs={"sr_rng": jax.random.key(1)}, **settings)
        return y[0] if isinstance(y, tuple) else y

    def step(variables, x, target):
        def loss(variables, x):
            return jnp.mean(jnp.square(apply(variables, x).astype(f32) - target))

        error, (gradient, of_x) = jax.value_and_grad(loss, (0, 1), allow_int=True)(variables, x)
        moved = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], gradient["params"])
        # of scales and histories the gradient is the new value
        return {**gradient, "params": moved}, of_x, error

    with engine.autocast(scaling is not None, scaling, engine.MeshResource()):
        x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), bf16)
        keys = {"params": jax.random.key(0), "sr_rng": jax.random.key(1)}
        variables = jax.eval_shape(lambda x: module.init(keys, x, **settings), x)
        target = jax.eval_shape(apply, variables, x)
        donated = jax.jit(step, donate_argnums=0)
        return inspect(donated, variables, x, target, target=chip, compiler_options=census.OPTIONS)


def row(name: str) -> dict[str, Any]:
    """What is recorded of a step."""
    layer, recipe, chip = name.split(" | ")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = step_of(layer, recipe, chip)
    except Exception as error:  # that it does not compile is a finding
        return {"error": first_line(error)[:300]}
    return facts(seen, GENERATIONS[chip])


def facts(seen: Inspection, chips: tuple[str, ...]) -> dict[str, Any]:
    """The numbers of a row. `types` are those of the matmuls; `careful` is how many of the FP8 ones
    are summed in f32 throughout; `engine` how many kernels are calls of TE's, each of which
    launches at least one; `classes` the ledger's, with their kernels and bytes; `transposes` how
    many kernels only move codes; `second` the bytes of codes that are written once more, in another
    layout; `seconds` by the roofline, and likely ones.
    """
    # NVFP4 makes its Hadamard matrix by a product of 16 x 16 integers.
    lines = [line for line in seen.ledger if line.kernel.math_dtype != "s32"]
    matmuls = [r for r in seen.report.rows if r.math_dtype != "s32"]
    types: collections.Counter[str] = collections.Counter()
    for r in matmuls:
        types[f"{r.lhs_dtype} x {r.rhs_dtype}"] += r.count or 1
    fp8 = [r for r in matmuls if r.is_fp8]
    seconds = {}
    for chip in chips:
        target = TARGETS[chip]
        least = sum(line.kernel.seconds(target) * line.runs for line in lines)
        likely = calibrated(lines, target)
        assert likely is not None, "a kernel has no rate"
        seconds[chip] = {"roofline": round(least, 7), "likely": round(likely.likely, 7)}
    classes: dict[str, list[int]] = {}
    for line in sorted(lines, key=lambda line: line.what):
        launches, moved = classes.get(line.what, (0, 0))
        classes[line.what] = [launches + line.runs, moved + line.nbytes]
    assert not seen.report.opaque and seen.memory is not None
    return {
        "matmuls": sum(types.values()),
        "fp8": sum(r.count or 1 for r in fp8),
        "types": dict(sorted(types.items())),
        "careful": sum(r.count or 1 for r in fp8 if r.precision == "HIGHEST"),
        "flops": sum(r.flops * (r.count or 1) for r in matmuls),
        "kernels": sum(line.runs for line in lines),
        "engine": sum(line.runs for line in lines if line.kernel.kind.startswith("te_")),
        "bytes": sum(line.nbytes for line in lines),
        "classes": classes,
        "transposes": sum(line.runs for line in lines if is_of_codes(line)),
        "second": sum(map(second_layouts, lines)),
        "peak": seen.memory.peak,
        "seconds": seconds,
    }


def is_of_codes(line: Line) -> bool:
    """Whether a kernel only moves codes."""
    return line.what == "move" and bool(codes(line.kernel.instruction))


def second_layouts(line: Line) -> int:
    """The bytes of codes that a kernel writes which are elsewhere in another layout."""
    written = codes(line.kernel.instruction)
    if line.what == "quantize":
        written = written[1:]
    elif not is_of_codes(line):
        written = []
    return line.runs * sum(shape.nbytes for shape in written)


def rows(chosen: Sequence[str]) -> dict[str, Any]:
    """These rows: those of a chip in this process, those of several each in one of its own."""
    chips = {name.split(" | ")[2] for name in chosen}
    if len(chips) == 1:
        return {name: row(name) for name in chosen}
    found: dict[str, Any] = {}
    for chip in sorted(chips):
        own = [name for name in chosen if name.endswith(chip)]
        found |= measured_by(jax.__version__, [sys.executable], RECORD.module, own)["rows"]
    return found


RECORD = Record(
    name="engine",
    module="tools.recorders.engine",
    about="What Transformer Engine's layers become, of the programs in tools/recorders/engine.py.",
    releases=(),
    names=names,
    rows=rows,
    libraries=("flax", "maxtext", "transformer-engine-jax", "nvidia-cublas", "nvidia-cudnn-cu13"),
    environment=lambda version: with_transformer_engine(),
)


if __name__ == "__main__":
    RECORD.main()
