"""Sphinx."""

from importlib import import_module
from importlib.metadata import version as _version
from typing import Any

project = "dmsg"
author = "The dmsg developers"
copyright = "2026, the dmsg developers"
release = version = _version("dmsg")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generated"]
# Quotes and ellipses only: an option such as ``--allow`` in a plain sentence must keep its two hyphens.
smartquotes_action = "qe"
html_theme = "furo"
html_title = "dmsg"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
# Lists of contents name sections, not each class and function: the theme copies all of them for every page, also for
# the pages of source code, which would take four fifths of the time.
toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
nitpicky = True
# ``type`` in an annotation is the builtin; some classes have attributes of that name
suppress_warnings = ["ref.python"]
# their documentation is elsewhere, and building ours needs no network
_FOREIGN = """
    OpenSSL asyncio bytes coincurve collections contextlib cryptography datetime decimal deltalake enum google io
    ipaddress klein logging os pathlib prometheus_client pyarrow pyspark random re socket sqlite3 subprocess threading
    treq twisted txredisapi typing weakref werkzeug zope
"""
nitpick_ignore_regex = [
    ("py:.*", rf"({'|'.join(_FOREIGN.split())})\..*"),
    # as Sphinx prints interfaces and parts of types that it cannot read
    ("py:class", r".*(<|\[|>).*"),
    ("py:class", r"dmsg\.rmb\.envelope\.envelope_pb2\..*"),
    ("py:class", r".*\._\w+"),
    # variables of types
    ("py:(class|obj)", r"dmsg\..*\.(_?[A-Z]\w*_(co|contra)|[A-Z]|\w*[a-z]T(_co|_contra)?)"),
    (
        "py:class",
        r"I(ListeningPort|ReactorTime|Connector)|Reactor|Random|(_blake2\.)?blake2b|array|Deferred|ClientFactory|P",
    ),
    ("py:class", r"ConnectionHandler|RedisFactory|KeySource|TwistedClient|(dmsg\.blocking\.streams\.)?StreamProtocol"),
    # modules that have no page
    ("py:class", r"dmsg\.(agent\.service|servers\.(relays|registration)|collector\.status_page)\b.*"),
    ("py:class", r"dmsg\.(analytics\.parquet|discovery\.checks\.overrides)\b.*"),
    ("py:(exc|class)", r"CannotListenError|IPv4Address|IPv6Address|Handler|HTTPClient"),
]


def _write_transitions() -> None:
    """The state table of the documentation is the one that the code uses."""
    from pathlib import Path

    from dmsg.messaging.core.state import TRANSITIONS as OF_CHANNELS
    from dmsg.v2019.core.state import TRANSITIONS as OF_TRANSPORTS

    directory = Path(__file__).parent / "_generated"
    directory.mkdir(exist_ok=True)
    for name, transitions in (("transitions", OF_TRANSPORTS), ("channel-transitions", OF_CHANNELS)):
        lines = ["| state | input | next |", "|---|---|---|"]
        for (state, what), following in transitions.items():
            lines.append(f"| {state.name if state else '-'} | {what.name} | {following.name} |")
        (directory / f"{name}.md").write_text("\n".join(lines) + "\n")


def _write_tables() -> None:
    """The pipeline's tables are listed as the code has them."""
    from pathlib import Path

    from dmsg.analytics.schemas import GOLD, SILVER

    for layer, tables in (("gold", GOLD), ("silver", SILVER)):
        lines = []
        for table in tables.values():
            lines += [f"`{table.name}`", f": {table.text}", ""]
            lines += ["  " + ", ".join(f"`{field.name}`" for field in table.schema.fields), ""]
        (Path(__file__).parent / "_generated" / f"{layer}.md").write_text("\n".join(lines) + "\n")


_write_transitions()
_write_tables()


_PUBLIC = ("dmsg", "dmsg.v2019", "dmsg.messaging", "dmsg.rmb", "dmsg.testing")


def _documented(target: str, place: str) -> str | None:
    """Return the place at which a name is documented: public names where programs import them, other names where they
    are defined.

    :param place: the module whose text has the name.
    """
    first, _, rest = target.partition(".")
    found = None if first == "dmsg" else vars(import_module(place)).get(first) if place else None
    if hasattr(found, "__name__") and getattr(found, "__module__", "").startswith("dmsg."):
        target = f"{found.__module__}.{found.__name__}" + (f".{rest}" if rest else "")
    for module in _PUBLIC:
        for name in import_module(module).__all__:
            defined = f"{getattr(getattr(import_module(module), name), '__module__', module)}.{name}"
            if target == defined or target.startswith(defined + "."):
                return module + "." + name + target.removeprefix(defined)
    return target if found is not None else None


def _public_target(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A reference to where something is defined, or by its bare name, leads to where it is documented."""
    target = _documented(node.get("reftarget", ""), node.get("py:module") or "")
    if target is None:
        return None
    domain = env.domains["py"]
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, content)


def _add_options(app: Any, what: str, name: str, one: Any, options: Any, lines: list[str]) -> None:
    """The fields of a settings class that are options are described by their rows."""
    from dataclasses import is_dataclass

    from dmsg.base.options import rows_of

    if what != "class" or not is_dataclass(one):
        return
    for row in rows_of(one):
        unit = {"MiB": " In bytes.", "GiB": " In bytes.", "days": " In seconds."}.get(getattr(row.kind, "unit", ""), "")
        lines += [f":ivar {row.field}: ``--{row.name}``: {row.help}.{unit}"]


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("missing-reference", _public_target)
    app.connect("autodoc-process-docstring", _add_options)
