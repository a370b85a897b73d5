"""`python -m tools.outputs check` and `refresh`."""

import sys

from tools.outputs.commands import main

sys.exit(main())
