"""Who this twin is, and that the registry says so: at the start of every peer and client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from twisted.logger import Logger

from dmsg.rmb.cipher import Encryption
from dmsg.rmb.errors import RegistryRefused, TwinNotFound
from dmsg.rmb.identity import Signer
from dmsg.rmb.twin import MAX_RELAYS, Twin, relay_of_websocket

_log = Logger()


async def find_twin(registry: Any, signer: Signer) -> Twin:
    """The twin of a key.

    :raises TwinNotFound: it has none.
    """
    try:
        number = await registry.id_by_account(signer.account)
    except TwinNotFound:
        raise TwinNotFound("no twin found on this network with given key") from None
    twin: Twin = await registry.get(number)
    return twin


def relay_text(urls: Sequence[str]) -> str:
    """What the registry says of these relays.

    :raises ValueError: one is no URL, or there are too many.
    """
    if len(urls) > MAX_RELAYS:
        raise ValueError(f"the number of relays should not exceed {MAX_RELAYS}")
    return "_".join(sorted({relay_of_websocket(url) for url in urls}))


async def publish(
    registry: Any, signer: Signer, twin: Twin, urls: Sequence[str], encryption: Encryption | None, *, strict: bool
) -> Twin:
    """Let the registry say through which relays, and with which key, the twin is reached.

    :raises RmbError: the registry does not take it.
    """
    wanted = replace(
        twin,
        relay=relay_text(urls),
        pk=None if encryption is None else encryption.pk,
        strict=strict and bool(encryption),
    )
    if (wanted.relays, wanted.pk, wanted.strict) == (twin.relays, twin.pk, twin.strict):
        return twin
    for _ in range(3):
        statement = replace(wanted, counter=twin.counter + 1).sign(signer)
        try:
            updated: Twin = await registry.put(statement)
        except RegistryRefused as error:
            # another program of the same twin was faster
            if "counter" not in str(error):
                raise
            twin = await registry.get(twin.id)
            continue
        _log.info("twin {id} is reached through {relay}", id=updated.id, relay=updated.relay)
        return updated
    raise RegistryRefused("another program changes this twin all the time")
