"""``python -m benchmarks.siege.attack SCENE NAME SECONDS WORD...``: one enemy."""

import sys

from benchmarks.siege.scenes import SCENES

if __name__ == "__main__":
    scene, name, seconds, *words = sys.argv[1:]
    SCENES[scene].attacks[name](float(seconds), *words)
