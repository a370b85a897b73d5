"""What the commands of *.txt beside this are asked about."""

import jax
import jax.numpy as jnp

from fp8lens import mesh

LARGEST = 448
S = jax.ShapeDtypeStruct


def scaled(x, w, x_scale, w_scale):
    """FP8 in one kernel, beside a clamp and a conversion."""
    d = (x.astype(jnp.float32) * x_scale) @ (w.astype(jnp.float32) * w_scale).T
    return jnp.clip(d, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)


def bare(x, w):
    """FP8 as it comes."""
    return jnp.dot(x, w.T, preferred_element_type=jnp.float32)


def plain(x, w):
    """In the type of its arguments."""
    return x @ w


def layer(params, x):
    """With a pytree."""
    return scaled(x, params["w"], params["x_scale"], params["w_scale"])


def layer_args():
    """The arguments of `layer`."""
    scale = S((), jnp.float32)
    params = {"w": S((256, 128), jnp.float8_e4m3fn), "x_scale": scale, "w_scale": scale}
    return params, S((64, 128), jnp.float8_e4m3fn)


def quantized(x, w):
    """Of bf16 and float32."""
    return bare(x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn))


def unquantized(x, w):
    """What may be meant for bf16, and is not."""
    return x @ w.T


def opaque(x, w):
    """A kernel of a library stands beside the matmul."""
    return bare(x, w), jnp.linalg.cholesky(jnp.eye(64) * x[0, 0].astype(jnp.float32))


def nothing(x):
    """No matmul."""
    return x + 1


def gathered(x, w):
    """The weight is gathered in bf16, and quantized after that."""
    w = jax.lax.with_sharding_constraint(w, jax.P())
    return bare(x, jnp.clip(w.astype(jnp.float32), -LARGEST, LARGEST).astype(jnp.float8_e4m3fn))


def on_mesh():
    """Arguments on the mesh of --mesh."""
    x = S((512, 128), jnp.float8_e4m3fn, sharding=jax.P("data"))
    return x, S((256, 128), jnp.bfloat16, sharding=jax.P(("data", "model")))


def _on(name, devices, dtype):
    sharding = jax.sharding.NamedSharding(mesh("H100", {name: devices}), jax.P(name))
    return S((512, 128), dtype, sharding=sharding)


def on_their_own():
    """Arguments that bring their mesh."""
    return _on("data", 8, jnp.float8_e4m3fn), _on("data", 8, jnp.bfloat16)


def on_two():
    """Arguments of two meshes."""
    return _on("data", 8, jnp.float8_e4m3fn), _on("data", 4, jnp.bfloat16)


def arrays():
    """Arrays, and one that is to be put on the devices of --mesh."""
    return jax.device_put(jnp.ones((512, 128)), jax.P("data")), jnp.ones((256, 128))


def real():
    """Arrays, of which each device has all."""
    return jnp.ones((512, 128), jnp.float8_e4m3fn), jnp.ones((256, 128), jnp.bfloat16)


def no_tuple():
    """No arguments."""
    return [1]


def broken():
    """It fails."""
    raise RuntimeError("out of cheese\nand crackers")


def stops(x):
    """It ends Python."""
    raise SystemExit(0)


def calls_back(x):
    """JAX asks for a GPU."""
    jax.debug.print("{}", x[0, 0])
    return x @ x


def widened(x, w, scale):
    """Converted to float32 in front of scale, clamp and conversion."""
    d = jnp.dot(x, w.T, preferred_element_type=jnp.bfloat16).astype(jnp.float32)
    return jnp.clip(d * scale, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)


def chosen(x, w, which):
    """A row of x by the matrix that is chosen for it, which XLA multiplies in one kernel."""
    return jnp.einsum("tk,tnk->tn", x.astype(jnp.bfloat16), w[which].astype(jnp.bfloat16))


def widens(x, w):
    """A weight in fewer bits."""
    return x @ w.astype(x.dtype)


class Model:
    """No function."""
