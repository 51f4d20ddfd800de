"""`python -m elastic` is the `elastic` command."""

import sys

from elastic.cli.app import main

sys.exit(main())
