"""Public names that programs may import."""

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules, walk_packages
from typing import get_type_hints

from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.server_choice import ServerChoice, ServerChoiceOptions

PACKAGES = (
    "dmsg",
    "dmsg.agent",
    "dmsg.aio",
    "dmsg.apps.codes",
    "dmsg.blocking",
    "dmsg.v2019",
    "dmsg.messaging",
    "dmsg.rmb",
    "dmsg.testing",
)
ROOT = Path(__file__).parents[1]


def typed(package: str) -> set[str]:
    """The names that a checker of types sees."""
    path = import_module(package).__file__
    assert path is not None
    found = set()
    for node in ast.parse(Path(path).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for one in node.body:
                assert isinstance(one, ast.ImportFrom)
                found |= {alias.asname for alias in one.names if alias.asname == alias.name}
    return {name for name in found if name}


class PublicTests(SynchronousTestCase):
    """``dmsg``, ``dmsg.v2019``, ``dmsg.messaging``, ``dmsg.rmb``, ``dmsg.testing``."""

    def test_names_are_there_and_typed(self) -> None:
        for package in PACKAGES:
            module = import_module(package)
            self.assertEqual(set(module.__all__), typed(package), package)
            below = {one.name for one in iter_modules(module.__path__)}
            self.assertEqual(set(module.__all__) & below, set(), "an import of the module would hide the name")
            for name in module.__all__:
                self.assertTrue(inspect.getdoc(getattr(module, name)), f"{package}.{name} says nothing")

    def test_keywords_match_the_settings(self) -> None:
        """The keywords that a type checker accepts are the settings that exist."""
        self.assertEqual(get_type_hints(ServerChoice), get_type_hints(ServerChoiceOptions))

    def test_a_name_that_is_not_there(self) -> None:
        with self.assertRaisesRegex(AttributeError, "module 'dmsg' has no attribute 'Transport'"):
            import_module("dmsg").Transport  # noqa: B018

    def test_public_names_are_documented(self) -> None:
        shown = re.findall(r"^\.\. auto\w+:: (\S+)$", (ROOT / "docs" / "api.rst").read_text(), re.MULTILINE)
        names = [f"{package}.{name}" for package in PACKAGES for name in import_module(package).__all__]
        self.assertEqual(sorted(shown), sorted(names))

    def test_the_import_loads_no_other_modules(self) -> None:
        """Workers of Spark import it, and every start of the command."""
        code = f"import sys, {', '.join(PACKAGES)}; print(sorted(set(sys.modules) & set(sys.argv[1:])))"
        unwanted = ["twisted", "coincurve", "klein", "treq", "cryptography", "dmsg.errors", "dmsg.keys"]
        out = subprocess.run([sys.executable, "-c", code, *unwanted], check=True, capture_output=True, text=True)
        self.assertEqual(out.stdout, "[]\n")

    def test_a_server_imports_no_pages_and_no_client(self) -> None:
        """Only ``--metrics`` and ``--telemetry-to`` need them; they take a quarter of the time of a start."""
        code = "import sys, dmsg.tap.server; print(sorted(set(sys.modules) & set(sys.argv[1:])))"
        unwanted = ["klein", "werkzeug", "twisted.web.template", "dmsg.pages.site", "dmsg.v2019.client"]
        out = subprocess.run([sys.executable, "-c", code, *unwanted], check=True, capture_output=True, text=True)
        self.assertEqual(out.stdout, "[]\n")

    def test_documents_use_public_names(self) -> None:
        """Programs in the documentation import nothing that may move."""
        private = []
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
            if "_build" in path.parts:
                continue
            for line in path.read_text().splitlines():
                words = line.split()
                if (
                    len(words) > 1
                    and words[0] == "from"
                    and words[1].split(".")[0] == "dmsg"
                    and words[1] not in PACKAGES
                ):
                    private.append(f"{path.name}: {line}")
        self.assertEqual(private, [])


EXTRAS = "txredisapi autobahn google.protobuf nacl base58 mnemonic xxhash redis pyspark deltalake pyarrow py4j".split()
"""Modules that only extras install."""


class BareTests(SynchronousTestCase):
    """``pip install dmsg`` and nothing else."""

    def test_entities_and_commands_need_no_extra(self) -> None:
        """All modules are imported except those of the bus and of the pipeline."""
        names = [one.name for one in walk_packages([str(ROOT / "dmsg")], "dmsg.")]
        rest = [
            one
            for one in names
            if not re.match(r"dmsg\.(rmb|analytics|tap\.rmb_\w+|cli\.(bus|pipeline|demos)|testing\.bus_\w+)\b", one)
        ]
        self.assertGreater(len(rest), 200)
        code = (
            "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split()))\n"
            "for name in sys.argv[2:]: __import__(name)"
        )
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, " ".join(EXTRAS), *rest]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))

    def test_manual_and_completion_need_no_extra(self) -> None:
        """Without the packages of the bus, the help of other commands works, and the bus says what it needs."""
        pages = self.mktemp()
        completing = {"_DMSG_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
        for arguments, environment, text in (
            (["man", "--write", pages], {}, f"pages in {pages}"),
            (["man"], {}, "Call twins over the reliable message bus"),
            (["man", "rmb"], {}, "more packages are needed"),
            ([], {**completing, "COMP_WORDS": "dmsg "}, "plain,send"),
            ([], {**completing, "COMP_WORDS": "dmsg r"}, "plain,rmb"),
            ([], {**completing, "COMP_WORDS": "dmsg rmb ", "COMP_CWORD": "2"}, ""),
        ):
            status, out, err = self.run_without_extras(arguments, environment)
            self.assertEqual(err, "", arguments)
            self.assertIn(text, out)
        self.assertIn("dmsg-twin.1", os.listdir(pages))
        for arguments in (
            ["rmb"],
            ["rmb", "--help"],
            ["twin", "create", "x"],
            ["man", "rmb", "call"],
            ["config", "set", "rmb.call.x", "1"],
        ):
            status, out, err = self.run_without_extras(arguments, {})
            self.assertEqual((status, out, err.count("\n")), (1, "", 1), arguments)
            self.assertIn("more packages are needed", err)

    def run_without_extras(self, arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
        """Run a command in a process that cannot import the packages of extras; return its status and output."""
        code = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\nfrom dmsg.cli.entry import entry; entry()"
        home = self.mktemp()
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HOME": home, "XDG_CONFIG_HOME": home, **environment},
        )
        return ran.returncode, ran.stdout, ran.stderr
