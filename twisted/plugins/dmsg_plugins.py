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

dmsg_server = ServiceMaker("dmsg server", "dmsg.tap.server", "A relay of the dmsg network", "dmsg-server")
dmsg_discovery = ServiceMaker(
    "dmsg discovery", "dmsg.tap.discovery", "The directory of a dmsg network", "dmsg-discovery"
)
dmsg_messaging_server = ServiceMaker(
    "dmsg messaging server",
    "dmsg.tap.messaging",
    "A relay of the Messaging System, the protocol before dmsg",
    "dmsg-messaging-server",
)
dmsg_collector = ServiceMaker(
    "dmsg collector", "dmsg.tap.collector", "Receives event files from servers and discoveries", "dmsg-collector"
)
rmb_relay = ServiceMaker("rmb relay", "dmsg.tap.rmb_relay", "A relay of the reliable message bus", "rmb-relay")
rmb_registry = ServiceMaker(
    "rmb registry", "dmsg.tap.rmb_registry", "The registry of twins of a message bus", "rmb-registry"
)
rmb_peer = ServiceMaker(
    "rmb peer", "dmsg.tap.rmb_peer", "The gateway between a twin's programs and its relays", "rmb-peer"
)


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
