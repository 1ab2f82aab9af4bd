"""`python -m cluster` is `baton`, for a checkout that is not installed."""

from __future__ import annotations

import sys

from cluster.cli import main

sys.exit(main())
