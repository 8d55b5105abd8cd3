"""Plugins of dmsg for twistd and for endpoint strings.

Every run of twistd on a machine imports this file, so the file imports modules of dmsg only when a plugin is used.
"""

from __future__ import annotations

from typing import Any

from twisted.application.service import ServiceMaker
from twisted.internet.interfaces import (
    IStreamClientEndpoint,
    IStreamClientEndpointStringParserWithReactor,
    IStreamServerEndpoint,
    IStreamServerEndpointStringParser,
)
from twisted.plugin import IPlugin
from zope.interface import implementer


class _Entity(ServiceMaker):
    """Plugin of an entity. While its modules are imported, Ctrl-C ends the process at once. Otherwise Python would
    print a traceback, or an import that ignores errors would ignore Ctrl-C, and the entity would run.
    """

    @property
    def options(self) -> Any:
        from dmsg.cli.loading import loading

        with loading():
            return super().options

    @property
    def makeService(self) -> Any:
        from dmsg.cli.loading import loading

        make_service = super().makeService

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with loading():
                return make_service(*args, **kwargs)

        return guarded


dmsg_server = _Entity("dmsg server", "dmsg.tap.server", "A relay of the dmsg network", "dmsg-server")
dmsg_discovery = _Entity("dmsg discovery", "dmsg.tap.discovery", "The directory of a dmsg network", "dmsg-discovery")
dmsg_messaging_server = _Entity(
    "dmsg messaging server",
    "dmsg.tap.messaging",
    "A relay of the Messaging System, the protocol before dmsg",
    "dmsg-messaging-server",
)
dmsg_collector = _Entity(
    "dmsg collector", "dmsg.tap.collector", "Receives event files from servers and discoveries", "dmsg-collector"
)
rmb_relay = _Entity("rmb relay", "dmsg.tap.rmb_relay", "A relay of the reliable message bus", "rmb-relay")
rmb_registry = _Entity(
    "rmb registry", "dmsg.tap.rmb_registry", "The registry of twins of a message bus", "rmb-registry"
)
rmb_peer = _Entity("rmb peer", "dmsg.tap.rmb_peer", "The gateway between a twin's programs and its relays", "rmb-peer")


@implementer(IPlugin, IStreamClientEndpointStringParserWithReactor)
class _ClientParser:
    prefix = "dmsg"

    def parseStreamClient(self, reactor: Any, *args: Any, **kwargs: Any) -> IStreamClientEndpoint:
        """Return the endpoint for ``dmsg:<public key>[:discovery=URL][:key=FILE][:timeout=SECONDS]``."""
        from dmsg.v2019.strings import client_endpoint

        return client_endpoint(reactor, *args, **kwargs)


@implementer(IPlugin, IStreamServerEndpointStringParser)
class _ServerParser:
    prefix = "dmsg"

    def parseStreamServer(self, reactor: Any, *args: Any, **kwargs: Any) -> IStreamServerEndpoint:
        """Return the endpoint for ``dmsg:[discovery=URL][:key=FILE]``."""
        from dmsg.v2019.strings import server_endpoint

        return server_endpoint(reactor, *args, **kwargs)


@implementer(IPlugin, IStreamClientEndpointStringParserWithReactor)
class _MessagingClientParser:
    prefix = "dmsg-messaging"

    def parseStreamClient(self, reactor: Any, *args: Any, **kwargs: Any) -> IStreamClientEndpoint:
        """Return the endpoint for ``dmsg-messaging:<public
        key>[:discovery=URL][:key=FILE][:timeout=SECONDS][:profile=PROFILE]``.
        """
        from dmsg.messaging.strings import client_endpoint

        return client_endpoint(reactor, *args, **kwargs)


@implementer(IPlugin, IStreamServerEndpointStringParser)
class _MessagingServerParser:
    prefix = "dmsg-messaging"

    def parseStreamServer(self, reactor: Any, *args: Any, **kwargs: Any) -> IStreamServerEndpoint:
        """Return the endpoint for ``dmsg-messaging:[discovery=URL][:key=FILE][:profile=PROFILE]``."""
        from dmsg.messaging.strings import server_endpoint

        return server_endpoint(reactor, *args, **kwargs)


dmsg_client_parser = _ClientParser()
dmsg_server_parser = _ServerParser()
dmsg_messaging_client_parser = _MessagingClientParser()
dmsg_messaging_server_parser = _MessagingServerParser()
