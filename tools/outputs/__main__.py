"""`python -m tools.outputs check` and `refresh`."""

import sys

from tools.outputs import main

sys.exit(main())
