"""Files and names in docs/architecture.md exist, and its list of files is current."""

import re
from importlib import import_module
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.docs import file_list

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def there() -> set[str]:
    """Return the files to list: all but generated ones and those that only mark a package."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / "dmsg").rglob("*.py") if file_list.is_listed(path)}


class ArchitectureTests(SynchronousTestCase):
    """The page lists the files of the tree, and names only files that exist."""

    def test_the_list_of_files_is_current(self) -> None:
        self.assertTrue(file_list.with_list(PAGE) == PAGE, "say: python -m tests.docs.file_list")

    def test_every_file_has_a_line_with_a_description(self) -> None:
        lines = [line for line in PAGE.splitlines() if re.match(r" {2,10}\w+\.py  *\S", line)]
        self.assertEqual(len(lines), len(there()))

    def test_a_description_is_the_first_sentence_without_markup(self) -> None:
        path = Path(self.mktemp())
        path.write_text('"""Rules for ``twistd``, see :mod:`dmsg.net`,\nfor 2.5 s.  No I/O.\n\nMore."""\n')
        self.assertEqual(file_list.description(path), "Rules for twistd, see dmsg.net, for 2.5 s")

    def test_files_that_are_named_are_there(self) -> None:
        text = PAGE.partition("## Every file")[0] + PAGE.partition("## Every file")[2].partition("```\n")[2]
        named = re.findall(r"[\w/]+/\w+\.py", text)
        self.assertGreater(len(named), 30)
        tops = (ROOT, ROOT / "dmsg", ROOT / "dmsg" / "v2019", ROOT / "dmsg" / "messaging")
        self.assertEqual([name for name in named if not any((top / name).exists() for top in tops)], [])

    def test_names_in_drawings_are_there(self) -> None:
        """``Class.method`` in a drawing exists in some module."""
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
