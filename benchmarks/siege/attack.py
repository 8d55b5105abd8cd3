"""``python -m benchmarks.siege.attack SCENE NAME SECONDS WORD...``: one enemy."""

import sys

from benchmarks.siege.scene import ready
from benchmarks.siege.scenes import SCENES

if __name__ == "__main__":
    scene, name, seconds, *words = sys.argv[1:]
    if name not in SCENES[scene].prepared:
        ready()
    SCENES[scene].attacks[name](float(seconds), *words)
