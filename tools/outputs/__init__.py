"""The chapters' outputs: run, compared, rewritten.

`chapters` has the one list of chapters, `notebook` how a pair of files is written, `run` the one
way to execute it, `comparison` and `prose` what must hold of it, `commands` the command line.
"""
