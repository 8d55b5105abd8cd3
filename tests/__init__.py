"""The tests of dmsg; run by trial."""

import os

from hypothesis import settings

# `make fuzz` asks for many more; derandomised runs of CI would never find anything new
settings.register_profile(
    "dmsg", max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "80")), deadline=None, print_blob=True
)
settings.load_profile("dmsg")
