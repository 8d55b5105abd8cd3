"""Reliable message bus: twins, relays that federate, peers and clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsg.lazily import public

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "dmsg.rmb.client": "Reply RmbClient",
        "dmsg.rmb.session.handlers": "HandlerError Request",
        "dmsg.rmb.relay.server": "RmbRelay",
        "dmsg.rmb.relay.settings": "RelaySettings",
        "dmsg.rmb.peer.service": "RmbPeer",
        "dmsg.rmb.peer.settings": "PeerSettings",
        "dmsg.rmb.registry.service": "RegistryService RegistrySettings open_registry",
        "dmsg.rmb.twins.secrets": "TwinSecret read_secret write_secret",
        "dmsg.rmb.twins.twin": "Twin",
        "dmsg.rmb.errors": (
            "CallTimeout CipherError Drop EnvelopeError IdentityError NotTheOwner QueueUnavailable "
            "RegistryConflict RegistryRefused RegistryUnavailable RemoteError RmbError SignatureInvalid "
            "TokenError TwinNotFound TwinOffline"
        ),
    },
)

if TYPE_CHECKING:
    from dmsg.rmb.client import Reply as Reply, RmbClient as RmbClient
    from dmsg.rmb.errors import (
        CallTimeout as CallTimeout,
        CipherError as CipherError,
        Drop as Drop,
        EnvelopeError as EnvelopeError,
        IdentityError as IdentityError,
        NotTheOwner as NotTheOwner,
        QueueUnavailable as QueueUnavailable,
        RegistryConflict as RegistryConflict,
        RegistryRefused as RegistryRefused,
        RegistryUnavailable as RegistryUnavailable,
        RemoteError as RemoteError,
        RmbError as RmbError,
        SignatureInvalid as SignatureInvalid,
        TokenError as TokenError,
        TwinNotFound as TwinNotFound,
        TwinOffline as TwinOffline,
    )
    from dmsg.rmb.peer.service import RmbPeer as RmbPeer
    from dmsg.rmb.peer.settings import PeerSettings as PeerSettings
    from dmsg.rmb.registry.service import (
        RegistryService as RegistryService,
        RegistrySettings as RegistrySettings,
        open_registry as open_registry,
    )
    from dmsg.rmb.relay.server import RmbRelay as RmbRelay
    from dmsg.rmb.relay.settings import RelaySettings as RelaySettings
    from dmsg.rmb.session.handlers import HandlerError as HandlerError, Request as Request
    from dmsg.rmb.twins.secrets import (
        TwinSecret as TwinSecret,
        read_secret as read_secret,
        write_secret as write_secret,
    )
    from dmsg.rmb.twins.twin import Twin as Twin
