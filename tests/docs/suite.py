"""``trial tests.docs.suite``: each page of the documentation, followed by a person."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tests.docs.blocks import Page, all_pages
from tests.docs.fixtures import set_up
from tests.docs.needs import CLONE, lacking
from tests.docs.person import Person, Unexpected


@contextlib.contextmanager
def clone_for(page: Page) -> Iterator[None]:
    """Pages that only use the clone do so together; one that installs something into it has it alone.

    Two pips at once write one another's files, and what runs meanwhile finds half of them.
    """
    if CLONE is None:
        yield
        return
    installs = any(block.language == "console" and "pip install" in block.text for block in page.blocks)
    with open(Path(CLONE) / ".git" / "docs.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if installs else fcntl.LOCK_SH)
        yield


class PageTests(SynchronousTestCase):
    """One test for each page; its blocks from the first to the last."""

    def follow(self, page: Page) -> None:
        """:raises SkipTest: some blocks could not be run here; all others were."""
        passed_over: dict[str, list[str]] = {}
        runnable = [block for block in page.blocks if lacking(block.needs) is None]
        for block in page.blocks:
            if why := lacking(block.needs):
                passed_over.setdefault(why, []).append(str(block.line))
        if runnable:
            self.enterContext(clone_for(page))
            person = Person(page, Path(self.mktemp()).absolute())
            self.addCleanup(person.leave)
            set_up(person, page.fixtures)
            for block in runnable:
                try:
                    if block.file_name:
                        person.write(block)
                    elif block.language == "python":
                        person.run_python(block)
                    elif block.language == "console":
                        for command in block.commands:
                            person.type(command, block.needs)
                except Unexpected as error:
                    others = "\n".join(f"--- {one.text}\n{one.said[-1500:]}" for one in person.running[-8:])
                    self.fail(f"{page.name}:{block.line}: {error}\n{others}")
        if passed_over:
            raise SkipTest("; ".join(f"{why} (line {', '.join(lines)})" for why, lines in passed_over.items()))


def _add(page: Page) -> None:
    def test(self: PageTests) -> None:
        self.follow(page)

    test.__doc__ = f"{page.name}, as it stands."
    setattr(PageTests, "test_" + page.name.removesuffix(".md").replace("/", "_").replace("-", "_"), test)


for _page in all_pages():
    _add(_page)
