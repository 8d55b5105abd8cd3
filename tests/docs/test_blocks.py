"""Checks of the blocks that need not run them; :mod:`tests.docs.suite` runs them."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any, cast

import click
from twisted.plugin import getPlugins
from twisted.python import usage
from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.main import main
from tests.docs.blocks import ROOT, Block, Page, all_pages, read_page
from tests.docs.needs import NEEDS

FIXTURES = {"network", "bus"}


def blocks() -> list[tuple[Page, Block]]:
    return [(page, block) for page in all_pages() for block in page.blocks]


def simple_commands(text: str) -> list[list[str]]:
    """Return the words of each command in a line of shell."""
    text = text.replace("\\\n", " ")
    text = re.sub(r"\$\([^()]*(\([^()]*\)[^()]*)*\)", "SUBSTITUTED", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if word in ("|", "||", "&&", ";", "&", ">", "<"):
            commands.append([])
        else:
            commands[-1].append(word)
    while_set = re.compile(r"^[A-Z_]+=")
    return [
        [word for position, word in enumerate(one) if position or not while_set.match(word)] for one in commands if one
    ]


class BlockTests(SynchronousTestCase):
    """Tests of marks, and of the names of commands, options and extras."""

    def test_documentation_has_command_blocks(self) -> None:
        self.assertGreater(len(blocks()), 40)

    def test_marks_are_known(self) -> None:
        """A block that is not run has a reason that the tests know."""
        for page, block in blocks():
            self.assertEqual(set(block.needs) - set(NEEDS), set(), f"{page.name}:{block.line}")

    def test_blocks_marked_for_bare_clones_run_there(self) -> None:
        """A block whose mark says that .ci/run runs it is run there."""
        ci = (ROOT / ".ci" / "run").read_text()
        asked = [command.text for _, block in blocks() if "bare-clone" in block.needs for command in block.commands]
        self.assertGreater(len(asked), 3)
        for text in asked:
            target = text.split()[1]
            self.assertRegex(ci, rf"(?m)^ +(for target in|bare) [^#]*(?<![\w-]){re.escape(target)}(?![\w-])")

    def test_an_unknown_fence_is_no_way_round(self) -> None:
        """Shell and Python blocks are called console and python; under another name no test would run them."""
        for page in all_pages():
            found = set(re.findall(r"^```(\w+)$", page.path.read_text(), re.MULTILINE))
            self.assertEqual(
                found - {"console", "python", "toml", "ini", "text", "json", "yaml", "sql"}, set(), page.name
            )

    def test_python_and_toml_are_whole(self) -> None:
        for page, block in blocks():
            if block.language == "python":
                tree = ast.parse(block.text, f"{page.name}:{block.line}")
                self.assertTrue(any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body))
            elif block.language == "toml":
                tomllib.loads(block.text)

    def test_documented_commands_exist(self) -> None:
        for page, block in blocks():
            if block.language == "console":
                self.assertTrue(block.commands, f"{page.name}:{block.line}")
                for command in block.commands:
                    for words in simple_commands(command.text):
                        self.check(words, f"{page.name}:{block.line}: {command.text}")

    def check(self, words: list[str], where: str) -> None:
        name, arguments = words[0], words[1:]
        if name == "dmsg":
            self.check_dmsg(arguments, where)
        elif name == "twistd":
            self.check_twistd(arguments, where)
        elif name == "make":
            self.assertRegex((ROOT / "Makefile").read_text(), rf"(?m)^{re.escape(arguments[0])}:", where)
        elif name.endswith("pip"):
            self.check_pip(arguments, where)

    def check_dmsg(self, words: list[str], where: str) -> None:
        command: click.Command = main
        context = click.Context(main)
        while isinstance(command, click.Group) and not (command.invoke_without_command and not words):
            while words[0].startswith("-"):
                words = words[1:]
            found = command.get_command(context, words[0])
            self.assertIsNotNone(found, where)
            assert found is not None
            command, words = found, words[1:]
            context = click.Context(command, parent=context)
        known = {
            "--help",
            *(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)),
        }
        for word in words:
            if re.match(r"--?[A-Za-z]", word):
                name = word.partition("=")[0] if word.startswith("--") else word[:2]
                self.assertIn(name, known, where)

    def check_twistd(self, words: list[str], where: str) -> None:
        while words and words[0].startswith("-"):
            words = words[1:]
        plugins = {one.tapname: one for one in cast(Any, getPlugins)(_service_maker())}
        self.assertIn(words[0], plugins, where)
        options: usage.Options = plugins[words[0]].options()
        known = {"--" + name for name in (*options.longOpt,)}
        for word in words[1:]:
            if word.startswith("--"):
                name = word[2:].partition("=")[0]
                self.assertTrue({f"--{name}", f"--{name}="} & known, f"{where}: {word}")

    def check_pip(self, words: list[str], where: str) -> None:
        """Check that pip installs this package, with extras that setup.cfg has."""
        self.assertEqual(words[0], "install", where)
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        extras = set(setup["options.extras_require"])
        for word in words[1:]:
            if not word.startswith("-"):
                if word in ("redis",):
                    continue  # These pages belong to other projects, for services of their own.
                # A clone, or the wheel of a release, each perhaps with extras.
                match = re.fullmatch(r"(?:\.|dmsg-\*\.whl)(?:\[([a-z,-]+)\])?", word)
                self.assertIsNotNone(match, where)
                assert match is not None
                self.assertEqual(set((match[1] or "").split(",")) - extras - {""}, set(), where)


class ExtraTests(SynchronousTestCase):
    """The pip of Python 3.11's venv knows an extra only by the exact name that the metadata write."""

    def test_documented_extras_match_the_metadata(self) -> None:
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        for extra in setup["options.extras_require"]:
            self.assertRegex(extra, r"^[a-z0-9]+(-[a-z0-9]+)*$")

    def test_all_that_are_asked_for_exist(self) -> None:
        """Every extra that the Makefile, tox, the documentation or the code asks for exists."""
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        extras = set(setup["options.extras_require"])
        paths = [ROOT / "Makefile", ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "dmsg").rglob("*.py")]
        for path in [*paths, *(ROOT / "tests").rglob("*.py")]:
            if "_build" in path.parts:
                continue
            for names in re.findall(r"""['"`](?:dmsg|\.)\[([a-zA-Z_,-]+)\]""", path.read_text()):
                self.assertEqual(set(names.split(",")) - extras, set(), path)
        tox = configparser.ConfigParser()
        tox.read(ROOT / "tox.ini")
        for section in tox.sections():
            asked = {name.strip() for name in tox[section].get("extras", "").split(",")} - {""}
            self.assertEqual(asked - extras, set(), section)


def _limit_names(text: str) -> Iterator[tuple[str, str]]:
    """Yield module and constant of each limit; a short name is of the module named before it."""
    for line in text.splitlines():
        module = ""
        for name in re.findall(r"`([a-z0-9_.]*[A-Z_]{2,})`", line.rpartition(" | ")[2]):
            before, _, constant = name.rpartition(".")
            module = before or module
            yield module, constant


class LimitTests(SynchronousTestCase):
    """docs/limits.md names constants that exist in the code."""

    def test_every_name_is_there(self) -> None:
        text = (ROOT / "docs/limits.md").read_text()
        names = list(_limit_names(text))
        self.assertGreater(len(names), 400)
        for module, constant in names:
            # The module is read and not imported, because some modules need Spark.
            source = (ROOT / "dmsg" / module.replace(".", "/")).with_suffix(".py")
            name = f"{module}.{constant}"
            self.assertRegex(source.read_text(), rf"(?m)^([A-Z_]+, )*{constant}\b.* =", name)

    def test_every_module_is_there(self) -> None:
        text = (ROOT / "docs/limits.md").read_text()
        for name in re.findall(r"`((?:[a-z0-9_]+\.)+[a-z0-9_]+)`", text):
            path = ROOT / "dmsg" / name.replace(".", "/")
            self.assertTrue(path.is_dir() or path.with_suffix(".py").is_file(), name)


class CodeTests(SynchronousTestCase):
    """docs/protocol/codes.md explains the codes in the names of tests."""

    def test_each_example_is_listed_and_included(self) -> None:
        page = (ROOT / "docs/protocol/codes.md").read_text()
        listed = {}
        for part in page.split("\n## ")[1:]:
            (directory,) = re.findall(r"^[^\n]*\(`tests/(\w+)`\)", part)
            listed[directory] = re.findall(r"(?m)^\| ([A-Z]\d+) \|", part)
        for directory, codes in listed.items():
            self.assertEqual(len(codes), len(set(codes)), directory)
            shown = set()
            for path in (ROOT / "tests" / directory).rglob("test_*.py"):
                for name in re.findall(r"def test_((?:[A-Z]\d+_)+)", path.read_text()):
                    shown |= set(name.strip("_").split("_"))
            self.assertEqual(shown, set(codes), directory)


class ReadingTests(SynchronousTestCase):
    """Tests of the parser of blocks."""

    def read(self, text: str) -> Page:
        from pathlib import Path

        path = Path(self.mktemp()).absolute()
        path.write_text(text)
        return read_page(path)

    def test_commands_and_their_output(self) -> None:
        page = self.read(
            "<!-- needs: java -->\n```console\n$ one \\\n    two\nout\nbob$ three\n```\n\n```console\n$ x\n```\n"
        )
        first, second = page.blocks
        commands = [(one.terminal, one.text, one.output) for one in first.commands]
        self.assertEqual(commands, [("", "one \\\n    two", ["out"]), ("bob", "three", [])])
        self.assertEqual((first.needs, second.needs), (("java",), ()))

    def test_file_blocks_are_read(self) -> None:
        (block,) = self.read("```python\n# echo.py\nimport x\n```\n").blocks
        self.assertEqual(block.file_name, "echo.py")

    def test_a_block_without_an_end(self) -> None:
        self.assertRaises(ValueError, self.read, "```python\nimport x\n")


def _service_maker() -> type:
    from twisted.application.service import IServiceMaker

    return IServiceMaker
