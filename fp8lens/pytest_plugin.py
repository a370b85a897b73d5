"""What pytest takes for `fp8lens.assert_no_worse`: an option that renews its records."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: "pytest.Parser") -> None:
    """Add --fp8lens-update."""
    parser.getgroup("fp8lens").addoption(
        "--fp8lens-update",
        action="store_true",
        help="assert_no_worse writes what programs cost now into its records",
    )


def pytest_configure(config: "pytest.Config") -> None:
    """Tell `assert_no_worse`, in this process and in those of pytest-xdist."""
    if config.getoption("--fp8lens-update"):
        os.environ["FP8LENS_UPDATE"] = "1"
