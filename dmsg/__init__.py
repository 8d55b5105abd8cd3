"""dmsg connects two programs that know only each other's public key.

This package exports the names that all protocol families share: keys, errors, streams and their endpoints, discovery,
admission, events. It also exports :class:`Client`, the client of today's network (:class:`dmsg.v2019.Client`). The
names of each protocol family are in :mod:`dmsg.v2019`, :mod:`dmsg.messaging` and :mod:`dmsg.rmb`. :mod:`dmsg.testing`
has a lab for tests. All other modules are private and may change.
"""

from __future__ import annotations

from dmsg.lazily import public

# Type checkers know this name without ``typing``, whose import would take half the time until the ``dmsg`` program
# can handle Ctrl-C.
TYPE_CHECKING = False

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "dmsg.keys": "PubKey SecKey Signature load_or_create_key read_key_file write_key_file",
        "dmsg.errors": (
            "CloseReason ConnectFailed ConnectTimeout DiscoveryError DmsgError DmsgTimeout DropReason "
            "EncryptionUnavailable EntryError EntryNotFound HandshakeError KeyFileError KeyFormatError "
            "LocalProtocolError PingUnavailable RemoteProtocolError SendBufferFull SignatureError "
            "TransportClosed TransportRefused WrongDiscovery"
        ),
        "dmsg.net.reactor": "use_monotonic_clock",
        "dmsg.net.streams.address": "DmsgAddress StreamLost StreamTimeout",
        "dmsg.net.streams.stream": "StreamTransport",
        "dmsg.net.streams.endpoints": "DmsgClientEndpoint DmsgServerEndpoint",
        "dmsg.apps.http_directory": "file_site",
        "dmsg.clients.http": "DmsgEndpointFactory",
        "dmsg.clients.address_book": "AddressBook UnknownName",
        "dmsg.clients.server_choice": "ServerChoice",
        "dmsg.servers.settings": "ServerSettings",
        "dmsg.discovery.entries.entry": "ClientMeta Entry ServerMeta",
        "dmsg.discovery.entries.dialects": "Dialect",
        "dmsg.discovery.lookup.lookup": "Lookup",
        "dmsg.discovery.lookup.lookups": "Lookups",
        "dmsg.discovery.service.service": "Discovery",
        "dmsg.discovery.service.settings": "DiscoverySettings",
        "dmsg.servers.admission": "Admission Hook KeyList ListError read_keys",
        "dmsg.base.memory": "Memory",
        "dmsg.telemetry.settings": "TelemetrySettings",
        "dmsg.collector.service": "Collector CollectorSettings",
        "dmsg.collector.sender": "SpoolSender",
        "dmsg.v2019.client": "Client",
    },
)

if TYPE_CHECKING:
    from dmsg.apps.http_directory import file_site as file_site
    from dmsg.base.memory import Memory as Memory
    from dmsg.clients.address_book import AddressBook as AddressBook, UnknownName as UnknownName
    from dmsg.clients.http import DmsgEndpointFactory as DmsgEndpointFactory
    from dmsg.clients.server_choice import ServerChoice as ServerChoice
    from dmsg.collector.sender import SpoolSender as SpoolSender
    from dmsg.collector.service import Collector as Collector, CollectorSettings as CollectorSettings
    from dmsg.discovery.entries.dialects import Dialect as Dialect
    from dmsg.discovery.entries.entry import ClientMeta as ClientMeta, Entry as Entry, ServerMeta as ServerMeta
    from dmsg.discovery.lookup.lookup import Lookup as Lookup
    from dmsg.discovery.lookup.lookups import Lookups as Lookups
    from dmsg.discovery.service.service import Discovery as Discovery
    from dmsg.discovery.service.settings import DiscoverySettings as DiscoverySettings
    from dmsg.errors import (
        CloseReason as CloseReason,
        ConnectFailed as ConnectFailed,
        ConnectTimeout as ConnectTimeout,
        DiscoveryError as DiscoveryError,
        DmsgError as DmsgError,
        DmsgTimeout as DmsgTimeout,
        DropReason as DropReason,
        EncryptionUnavailable as EncryptionUnavailable,
        EntryError as EntryError,
        EntryNotFound as EntryNotFound,
        HandshakeError as HandshakeError,
        KeyFileError as KeyFileError,
        KeyFormatError as KeyFormatError,
        LocalProtocolError as LocalProtocolError,
        PingUnavailable as PingUnavailable,
        RemoteProtocolError as RemoteProtocolError,
        SendBufferFull as SendBufferFull,
        SignatureError as SignatureError,
        TransportClosed as TransportClosed,
        TransportRefused as TransportRefused,
        WrongDiscovery as WrongDiscovery,
    )
    from dmsg.keys import (
        PubKey as PubKey,
        SecKey as SecKey,
        Signature as Signature,
        load_or_create_key as load_or_create_key,
        read_key_file as read_key_file,
        write_key_file as write_key_file,
    )
    from dmsg.net.reactor import use_monotonic_clock as use_monotonic_clock
    from dmsg.net.streams.address import (
        DmsgAddress as DmsgAddress,
        StreamLost as StreamLost,
        StreamTimeout as StreamTimeout,
    )
    from dmsg.net.streams.endpoints import (
        DmsgClientEndpoint as DmsgClientEndpoint,
        DmsgServerEndpoint as DmsgServerEndpoint,
    )
    from dmsg.net.streams.stream import StreamTransport as StreamTransport
    from dmsg.servers.admission import (
        Admission as Admission,
        Hook as Hook,
        KeyList as KeyList,
        ListError as ListError,
        read_keys as read_keys,
    )
    from dmsg.servers.settings import ServerSettings as ServerSettings
    from dmsg.telemetry.settings import TelemetrySettings as TelemetrySettings
    from dmsg.v2019.client import Client as Client
