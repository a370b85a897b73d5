"""HLO in a notebook, as "Read my dump" shows it: folded by computation, each name a link."""

import hashlib
from typing import Any

from fp8lens.hlo.parse import HloModule
from fp8lens.hlo.text import format_hlo_module
from fp8lens.inspection import inspect
from helpers.explorers.reader import listing_html


class Listing:
    """A module, which shows as HTML that needs no script, and prints as text."""

    def __init__(self, module: HloModule):
        self.module = module

    def __str__(self) -> str:
        return format_hlo_module(self.module)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        # A notebook may show several, whose instructions share names.
        digest = hashlib.sha256(self.module.text.encode("utf-8", "replace")).hexdigest()
        return listing_html(self.module, prefix=f"hlo-{digest[:8]}")


def show_hlo(x: Any, *args: Any, **options: Any) -> Listing:
    """The optimized HLO of what `inspect` takes: a function with its arguments, a program that was
    compiled before, HLO text or its file. Raises what `inspect` raises.
    """
    return Listing(inspect(x, *args, **options).module)
