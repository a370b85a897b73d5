"""What "Read my dump" shows of its example before any script runs."""


def answer() -> str:
    """The example's report, as HTML."""
    return "<p>An example.</p>"
