"""The rules that keep a matmul from being one FP8 call, each a function with its texts.

Read from XLA's source (commit 01631ca of github.com/openxla/xla) and held to what its compiler does
and logs by tests/fp8lens/test_reasons.py. A source without a file is a function of
xla/service/gpu/transforms/gemm_rewriter.cc.

A family of rules is a module: `operand_types`, `scales`, `activations`, `bias`, `output`, `amax`,
`layout`, `extra_kernels`, `wire`. `facts` has what rules ask of a program, `rule` what a rule is,
and `find` in which order they are tried.
"""
