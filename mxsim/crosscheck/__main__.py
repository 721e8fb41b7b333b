"""``python -m mxsim.crosscheck [--device cuda] [--out DIR] [--formats NAME ...]``."""

import sys

from mxsim.crosscheck.main import main

sys.exit(main())
