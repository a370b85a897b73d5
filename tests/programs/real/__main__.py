"""Writes the answers anew: of the programs named, or of all."""

import sys

from tests.programs.real import NAMES, answer, stored

for name in sys.argv[1:] or NAMES:
    stored(name).write_text(answer(name), encoding="utf-8")
