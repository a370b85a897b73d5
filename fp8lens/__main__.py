"""`python -m fp8lens`: the command line."""

import sys

from fp8lens.cli import main

sys.exit(main())
