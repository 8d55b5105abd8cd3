"""What docs/architecture.md says of files and names is so."""

import re
from importlib import import_module
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def listed() -> set[str]:
    """The files of the page's listing."""
    text = PAGE.partition("## Every file")[2].partition("```text\n")[2].partition("```")[0]
    found, rooms = set(), list[str]()
    for line in text.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        rooms[depth:] = [name]
        if not name.endswith("/"):
            found.add("".join(rooms))
    return found


def there() -> set[str]:
    """The files that are there; what is generated and what only marks a package is not listed."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "dmsg").rglob("*.py")
        if not path.name.startswith("__") and path.name != "envelope_pb2.py"
    }


class ArchitectureTests(SynchronousTestCase):
    """One line for each file, and no line for what is gone."""

    def test_every_file_has_its_line(self) -> None:
        self.assertEqual(listed(), there())

    def test_files_that_are_named_are_there(self) -> None:
        text = PAGE.partition("## Every file")[0] + PAGE.partition("## Every file")[2].partition("```\n")[2]
        named = re.findall(r"[\w/]+/\w+\.py", text)
        self.assertGreater(len(named), 30)
        tops = (ROOT, ROOT / "dmsg", ROOT / "dmsg" / "v2019", ROOT / "dmsg" / "messaging")
        self.assertEqual([name for name in named if not any((top / name).exists() for top in tops)], [])

    def test_names_in_drawings_are_there(self) -> None:
        """``Class.method`` of any module."""
        classes: dict[str, list[type]] = {}
        for file in there():
            if "analytics" not in file and "cli/demos" not in file and "strings" not in file:
                module = import_module(file.removesuffix(".py").replace("/", "."))
                for name, one in vars(module).items():
                    if isinstance(one, type):
                        classes.setdefault(name, []).append(one)
        pairs = set(re.findall(r"\b([A-Z]\w+)\.([a-z_]\w+)\b", PAGE))
        self.assertGreater(len(pairs), 10)
        unknown = [
            (owner, name)
            for owner, name in sorted(pairs)
            if owner in classes and not any(hasattr(one, name) for one in classes[owner])
        ]
        self.assertEqual(unknown, [])
