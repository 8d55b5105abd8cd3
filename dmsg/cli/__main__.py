"""Entry point of ``python -m dmsg.cli``, which is the ``dmsg`` program."""

import sys

from dmsg.cli.entry import entry

if __name__ == "__main__":
    sys.argv[0] = "dmsg"  # Help texts and errors show this name.
    entry()
