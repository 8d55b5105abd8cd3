"""First steps of every peer and client: finds its twin in the registry, and registers the twin's relays and key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from random import Random

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.net.retry import retry_delay
from dmsg.rmb.envelope.cipher import Encryption
from dmsg.rmb.errors import RegistryConflict, RegistryRefused, RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.twins.identity import Signer
from dmsg.rmb.twins.twin import MAX_RELAYS, Twin, relay_of_websocket

_log = Logger()


async def find_twin(registry: TwinRegistry, signer: Signer) -> Twin:
    """Return the twin whose account is the signer's public key.

    :raises TwinNotFound: no twin has this account.
    """
    try:
        number = await registry.id_by_account(signer.account)
    except TwinNotFound:
        raise TwinNotFound("no twin found on this network with given key") from None
    return await registry.get(number)


def relay_text(urls: Sequence[str]) -> str:
    """Return the text by which the registry names these relays.

    :raises ValueError: one of the texts is not the URL of a relay, or there are too many.
    """
    if len(urls) > MAX_RELAYS:
        raise ValueError(f"the number of relays should not exceed {MAX_RELAYS}")
    return "_".join(sorted({relay_of_websocket(url) for url in urls}))


async def publish(
    registry: TwinRegistry,
    signer: Signer,
    twin: Twin,
    urls: Sequence[str],
    encryption: Encryption | None,
    *,
    strict: bool | None,
    keep: bool = False,
) -> Twin:
    """Register the relays of a twin and its encryption key, unless the registry has them already.

    :param strict: whether to mark the twin as strict; None leaves the mark as it is.
    :param keep: whether to keep other relays of the twin if all of ``urls`` are registered already.
    :raises RmbError: the registry refuses the entry.
    """
    relay = relay_text(urls)
    if keep and twin.relay and set(relay.split("_")) <= twin.relays:
        relay = twin.relay
    pk = None if encryption is None else encryption.pk
    wanted = replace(twin, relay=relay, pk=pk, strict=(twin.strict if strict is None else strict) and pk is not None)
    if (wanted.relays, wanted.pk, wanted.strict) == (twin.relays, twin.pk, twin.strict):
        return twin
    for _ in range(3):
        statement = replace(wanted, counter=twin.counter + 1).sign(signer)
        try:
            updated = await registry.put(statement)
        except RegistryConflict:  # Another program of this twin has changed the entry meanwhile.
            twin = await registry.get(twin.id)
            continue
        _log.info("the registry now has {relay} as the relay of twin {id}", id=updated.id, relay=updated.relay)
        return updated
    raise RegistryRefused(
        "another program kept changing this twin at the same time: run only one program that sets it up"
    )


async def retry_registry(
    reactor: IReactorTime,
    random: Random,
    ask: Callable[[], Awaitable[Twin]],
    *,
    until: float | None = None,
    now: Callable[[], float] = lambda: 0.0,
) -> Twin:
    """Query the registry. While it is unavailable, retry with backoff.

    :param until: time at which retrying ends, by the clock ``now``; None retries without end.
    :raises RegistryUnavailable: the registry was still unavailable at that time.
    """
    failures = 0
    while True:
        try:
            return await ask()
        except RegistryUnavailable as error:
            failures += 1
            if failures == 1:
                _log.warn("the registry cannot be queried now: {error}", error=str(error))
            delay = retry_delay(failures, random)
            if until is not None and now() + delay >= until:
                raise
            await deferLater(reactor, delay)
