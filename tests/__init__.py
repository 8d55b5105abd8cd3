"""The tests of dmsg; run by trial."""

import os
import sys

from hypothesis import HealthCheck, settings

from tests.durations import measure_worker
from tests.forking import install

if "workertrial" in sys.argv[0]:
    # workers of trial are measured, the programs that tests start are not: that costs half as much again as all they do
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    measure_worker()

# `make long WHICH=fuzz` asks for many more; derandomised runs of CI would never find anything new
settings.register_profile(
    "dmsg",
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "50")),
    deadline=None,
    print_blob=True,
    # a clock decides it: a draw of a microsecond took 56 seconds on a machine that was busy with others
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("dmsg")

# commands that tests run are not to work through the agent of whoever runs the tests
os.environ["DMSG_AGENT"] = "off"
install()
