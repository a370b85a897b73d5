"""One scaled FP8 matmul in Triton and in PyTorch: what `make stacks` runs in an environment of its
own, which has neither JAX nor this project's packages.
"""
