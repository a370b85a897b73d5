"""The rules that keep a matmul from being one FP8 call: each is a function, and a page beside it.

Read from XLA's source (commit 01631ca of github.com/openxla/xla) and held to what its compiler does
by tests/fp8lens/test_rules.py. On a page, a source without a file is a function of
xla/service/gpu/transforms/gemm_rewriter.cc.

A module has the rules that receive the same facts: `no_fp8_call`, `behind_operands`, `still_wide`,
`in_front`, `after_the_dot`, `conversion`, `amax`, `whole_call`, `opaque`, `wire`, and `listed` for
those that are asked for by name. `facts` has what they receive, `rule` what a rule is, and `find`
in which order they are tried.
"""
