"""``trial tests.docs.suite``: a simulated reader follows each page of the documentation."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tests.docs.blocks import Page, all_pages
from tests.docs.fixtures import set_up
from tests.docs.needs import lacking
from tests.docs.person import Person, Unexpected


class PageTests(SynchronousTestCase):
    """One test for each page. A test runs the blocks of its page from the first to the last."""

    def follow(self, page: Page) -> None:
        """Follow a page.

        :raises SkipTest: some blocks could not be run here; all others were.
        """
        passed_over: dict[str, list[str]] = {}
        runnable = [block for block in page.blocks if lacking(block.needs) is None]
        for block in page.blocks:
            if why := lacking(block.needs):
                passed_over.setdefault(why, []).append(str(block.line))
        if runnable:
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
