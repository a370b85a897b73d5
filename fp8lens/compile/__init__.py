"""Compile for chips that are not here: the one folder that imports JAX."""

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"compiling needs JAX ({error}): pip install 'path/to/the/checkout[jax]'"
    ) from error
