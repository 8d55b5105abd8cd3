"""``python -m dmsg.cli`` is the ``dmsg`` program."""

from dmsg.cli.entry import entry

if __name__ == "__main__":
    entry()
