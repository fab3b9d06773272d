"""`python -m boundby`: the command `boundby`."""

import sys

from boundby.cli import main

sys.exit(main())
