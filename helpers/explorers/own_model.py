"""What "Check my model" begins with, and the types that it knows. `model.mjs` writes the command,
the test and the dump's command for a function.
"""

from collections.abc import Mapping
from typing import Any

from fp8lens.targets import TARGETS
from helpers.explorers.dump import COMMAND

#: Of HLO's types, as `fp8lens --shapes` takes them, the names in jax.numpy.
TYPES = {
    "bf16": "bfloat16",
    "f32": "float32",
    "f16": "float16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "s32": "int32",
    "s8": "int8",
    "pred": "bool_",
}
#: Who may run the matmuls, as `fp8lens --gemm` has it.
LIBRARIES = {
    "cublaslt": "cuBLASLt",
    "triton": "Triton",
    "auto": "XLA's default, untimed",
    "both": "both, compared",
}
_CODE = """\
def layer(x, w, x_scale, w_scale):
    x = x.astype(jnp.float32) * x_scale
    w = w.astype(jnp.float32) * w_scale
    return jax.nn.relu(x @ w.T).astype(jnp.bfloat16)
"""

#: By the model's keys, which `model.mjs` describes. They are kept in the page's address.
STATE: Mapping[str, Any] = {
    "code": _CODE,
    "asked": "",
    "shapes": {
        "x": "f8e4m3fn[64,256]",
        "w": "f8e4m3fn[128,256]",
        "x_scale": "f32[]",
        "w_scale": "f32[]",
    },
    "chip": "H100",
    "gemm": "cublaslt",
    "backward": False,
}


def data() -> dict[str, Any]:
    """What the explorer needs besides."""
    return {"types": TYPES, "libraries": LIBRARIES, "chips": [*TARGETS], "command": COMMAND}
