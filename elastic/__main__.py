"""`python -m elastic` is the `elastic` command."""

import sys

from elastic.cli import main

sys.exit(main())
