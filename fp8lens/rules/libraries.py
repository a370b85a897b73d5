"""Fixes in the terms of the library that wrote a matmul: tests/fp8lens/test_libraries.py applies
each there.
"""

import re

from fp8lens.hlo.parse import Instruction

_QWIX_PTQ, _QWIX_QT, _AQT = "qwix/_src/providers/ptq.py", "qwix/_src/providers/qt.py", "aqt/jax/v2/"
_KERAS, _FLAX, _NNX, _FP8_OPS = (
    "keras/src/layers/core/",
    "flax/(linen|nnx/nn)/linear.py",
    "flax/nnx/nn/linear.py",
    "flax/linen/fp8_ops.py",
)
_FIXED = (
    'act_calibration_method="fixed,-8,8" and weight_calibration_method="fixed,-1,1", with such'
    " ranges as fit: then XLA knows the scales"
)
_TENSOR = 'calib_shared_axes = "per_tensor" of cfg.fwd.dg_quantizer.lhs and .rhs'

# Files that a matmul's call stack goes through, rules of fp8lens.rules, the library, and what to
# change there.
LIBRARIES: tuple[tuple[str, str, str, str], ...] = (
    (
        _QWIX_PTQ,
        "not-quantized",
        "qwix",
        "act_qtype=jnp.float8_e4m3fn in the rule, beside weight_qtype",
    ),
    (_QWIX_PTQ, "array-of-scales", "qwix", "no tile_size in the rule, or one of 128 or more"),
    (_QWIX_PTQ, "vector-scale", "qwix", _FIXED),
    (
        _QWIX_PTQ,
        "operand-layout",
        "qwix",
        'nn.Einsum((N, K), "...k,nk->...n") as the layer: its kernel is [N, K]',
    ),
    (
        _QWIX_QT,
        "not-quantized|both-e5m2",
        "qwix",
        (
            "act_qtype=jnp.float8_e4m3fn and bwd_qtype=jnp.float8_e5m2 in the rule, and with a"
            ' tile_size additional_qt_config={"dlhs_residual_qtype": jnp.float8_e4m3fn,'
            ' "drhs_residual_qtype": jnp.float8_e4m3fn}'
        ),
    ),
    (_QWIX_QT, "vector-scale", "qwix", "disable_channelwise_axes=True in the rule"),
    (_QWIX_QT, "scale-too-many", "qwix", _FIXED),
    ("qwix/_src/core/dot.py", "vector-scale", "qwix", "qwix.quantize without channelwise_axes"),
    (
        _AQT,
        "not-quantized|both-e5m2",
        "AQT",
        'config.set_bits(cfg, "e4m3", "e4m3", "e5m2", "e4m3", "e5m2", "e4m3")',
    ),
    (
        _AQT,
        "another-type",
        "AQT",
        "config.set_accumulator_dtype(cfg, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)",
    ),
    (_AQT, "vector-scale", "AQT", _TENSOR),
    (
        _AQT,
        "scale-too-many",
        "AQT",
        "config.set_constant_calibration(cfg, bound), a bound that fits",
    ),
    (
        _KERAS,
        "operand-layout",
        "Keras",
        'EinsumDense("...k,nk->...n", ...), whose kernel is [N, K]',
    ),
    (
        _KERAS,
        "prepared-bias",
        "Keras",
        'dtype="bfloat16" of the layer, not "mixed_bfloat16"; or use_bias=False',
    ),
    (_KERAS, "divided-by-scale", "Keras", "no setting; each layer divides by its scale"),
    (
        _FP8_OPS,
        "operand-layout",
        "Flax",
        'fp8_ops.Fp8Einsum()("...k,nk->...n", x, kernel), the kernel as [N, K]',
    ),
    (
        _FP8_OPS,
        "product-of-scales",
        "Flax",
        "no setting; Fp8DirectDotGeneralOp and Fp8Einsum multiply the scales",
    ),
    (
        _FLAX,
        "prepared-bias|bias-in-f32",
        "Flax",
        "use_bias=False, or param_dtype=jnp.bfloat16 of the layer, its kernel's too",
    ),
    (
        _NNX,
        "operand-layout",
        "Flax",
        (
            "no setting; nnx.Linear and nnx.LinearGeneral store [K, N]. Leave the transpose: it "
            "reads and writes one byte for each element. In training the forward and the backward "
            "matmul contract different dimensions of an array, so one of the two needs it in any "
            "layout"
        ),
    ),
)


def fix_there(rule: str, i: Instruction) -> str:
    """What fixes a rule in the library whose code wrote an instruction; empty where nothing is
    known to.
    """
    known = [row for row in LIBRARIES if rule in row[1].split("|")]
    files = "\n".join(file.replace("\\", "/") for file, _ in i.frames) if known else ""
    return next(
        (f". In {library}: {fix}" for path, _, library, fix in known if re.search(path, files)),
        "",
    )
