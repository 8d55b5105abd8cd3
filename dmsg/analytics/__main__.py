"""Entry point that runs the pipeline's command line, for ``spark-submit dmsg/analytics/__main__.py`` and ``python -m
dmsg.analytics``."""

from __future__ import annotations

import sys

from dmsg.analytics.main import main

if __name__ == "__main__":
    sys.exit(main())
