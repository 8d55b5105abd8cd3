"""The tests of dmsg; run by trial."""

import os
import signal
import sys

from hypothesis import HealthCheck, settings

from dmsg.base.interpreter import begin_process
from tests.durations import measure_worker
from tests.forking import install

# With Python's own thresholds, collections of garbage would take an eighth of the time of the tests.
begin_process()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In the background of a script, a run ignores SIGINT. Programs that tests start would inherit that, and Ctrl-C
    # would not end them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "workertrial" in sys.argv[0]:
    # Trial's workers are measured, but not the programs that tests start: measuring those, too, would cost half as
    # much again as all tests together.
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    measure_worker()

# `make long WHICH=fuzz` asks for many more examples.  Derandomised runs of CI would never find anything new.
settings.register_profile(
    "dmsg",
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "50")),
    deadline=None,
    print_blob=True,
    # This check goes by a clock: a draw of a microsecond took 56 seconds on a busy machine.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("dmsg")

# Commands that tests run must not work through the agent of the user who runs the tests.
os.environ["DMSG_AGENT"] = "off"
install()
