"""Wire between network namespaces: forwards IP packets with delay, limited rate, loss, reordering and interruptions.

:mod:`dmsg.testing.namespaces` runs this module as a separate process, as root. The network of each namespace is one TUN
device. The kernel's netem has the same features, but not every kernel has netem. This module needs only TUN, and its
random events come from a seed.

Orders are JSON lines on standard input, such as ``{"from": "10.77.0.1", "to": "10.77.0.2", "delay": 0.05, "rate":
125e6}``, with IPv4 or IPv6 addresses. The answer to each is a line ``ok``.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from ipaddress import ip_address
from random import Random
from typing import NamedTuple

MTU = 1500
READ_SIZE = 65536 + 64
"""Maximum number of bytes of one read from a TUN device. With segmentation offload (GSO), the kernel passes up to 64
KiB as one packet, with a header that says how to split the packet. Such a packet is lost, delayed or reordered as a
whole."""
VNET = 10
"""Size in bytes of the header for segmentation offload, ``virtio_net_hdr``, which precedes each packet."""
QUEUE = 32 * 1024 * 1024
"""Maximum number of bytes on one path that are delayed or waiting to be sent. Further packets are dropped."""
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUNSETOFFLOAD = 0x400454D0
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_CLONE_NEWNET = 0x40000000
_RST = 0x04
_ACK = 0x10
_SYN_FIN_RST_ACK = 0x17
_TCP = 6
_TCP_SIZE = 20
"""Size in bytes of a TCP header without options."""


def open_tun(namespace: str, device: str, address: str) -> int:
    """Create a TUN device in a namespace, activate it with its address, and return its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
            fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
            for command in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{address}/64", "dev", device, "nodad")
                if ":" in address
                else ("addr", "add", f"{address}/16", "dev", device),
                ("link", "set", device, "mtu", str(MTU), "txqueuelen", "10000", "up"),
            ):
                subprocess.run(["ip", *command], check=True)
        finally:
            libc.setns(home, _CLONE_NEWNET)
    finally:
        os.close(home)
        os.close(there)
    return tun


class Path:
    """Path in one direction between two addresses."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.rate = 0.0
        self.loss = 0.0
        self.reorder = 0.0
        self.cut = False
        self.port = 0
        """TCP port: only TCP packets to or from this port are forwarded. With 0, all packets are."""
        self.waiting = 0
        self._free_at = 0.0

    def arrival_time(self, now: float, size: int, random: Random) -> float | None:
        """Return the time at which a packet of this size arrives if it is sent now; None if the packet is lost."""
        if self.cut or self.waiting + size > QUEUE or (self.loss and random.random() < self.loss):
            return None
        start = max(now, self._free_at)
        self._free_at = start + (size / self.rate if self.rate else 0.0)
        late = self.delay if self.reorder and random.random() < self.reorder else 0.0
        return self._free_at + self.delay + late


class Wire:
    """Forwarder of packets between the TUN devices of network namespaces.

    :param tuns: descriptors of the TUN devices, by address.
    :param seed: seed of all random events.
    """

    def __init__(self, tuns: dict[str, int], seed: int) -> None:
        self._tuns = tuns
        self._random = Random(seed)
        self._paths: dict[tuple[bytes, bytes], Path] = {}
        self._by_address = {_pack(address): tun for address, tun in tuns.items()}
        self._waiting: list[tuple[float, int, bytes, Path]] = []
        self._count = 0
        self._reset_until: dict[bytes, float] = {}

    def path(self, source: bytes, target: bytes) -> Path:
        """Return the path from one address to another. Both addresses are packed."""
        return self._paths.setdefault((source, target), Path())

    def order(self, order: Mapping[str, str | float]) -> None:
        """Execute an order: change a path, or reset the connections of an address."""
        if "reset" in order:
            self._reset_until[_pack(str(order["reset"]))] = time.monotonic() + float(order.get("seconds", 0.5))
            return
        path = self.path(_pack(str(order["from"])), _pack(str(order["to"])))
        for name in ("delay", "rate", "loss", "reorder"):
            if name in order:
                setattr(path, name, float(order[name]))
        if "port" in order:
            path.port = int(order["port"])
        if "cut" in order:
            path.cut = bool(order["cut"])

    def run(self) -> None:
        """Forward packets and execute orders until standard input ends."""
        poll = select.epoll()
        poll.register(0, select.EPOLLIN)
        for tun in self._tuns.values():
            poll.register(tun, select.EPOLLIN)
        rest = b""
        while True:
            self._deliver()
            wait = -1.0 if not self._waiting else max(0.0, self._waiting[0][0] - time.monotonic())
            for descriptor, _ in poll.poll(wait):
                if descriptor:
                    self._forward(descriptor)
                    continue
                data = os.read(0, 65536)
                if not data:
                    return
                rest += data
                while b"\n" in rest:
                    line, rest = rest.split(b"\n", 1)
                    self.order(json.loads(line))
                    sys.stdout.write("ok\n")
                    sys.stdout.flush()

    def _forward(self, tun: int) -> None:
        for _ in range(64):
            try:
                data = os.read(tun, READ_SIZE)
            except BlockingIOError:
                return
            packet = data[VNET:]
            header = _Header.parse(packet)
            if header is None:
                continue
            source, target = header.source, header.target
            now = time.monotonic()
            if self._reset_until and self._is_reset(header, now):
                packet = _as_reset(packet, header)
                data = bytes(VNET) + packet
            path = self.path(source, target)
            if path.port and path.port not in header.ports:
                continue
            at = path.arrival_time(now, len(packet), self._random)
            if at is None:
                continue
            self._count += 1
            path.waiting += len(packet)
            heapq.heappush(self._waiting, (at, self._count, data, path))

    def _is_reset(self, header: _Header, now: float) -> bool:
        until = max(self._reset_until.get(header.source, 0.0), self._reset_until.get(header.target, 0.0))
        return now < until and header.flags & _SYN_FIN_RST_ACK == _ACK

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, data, path = heapq.heappop(self._waiting)
            path.waiting -= len(data) - VNET
            header = _Header.parse(data[VNET:])
            tun = None if header is None else self._by_address.get(header.target)
            if tun is not None:
                try:
                    os.write(tun, data)
                except OSError:
                    # The error is ignored, because packets may be lost: the namespace is being removed, or the device's
                    # queue is full.
                    continue


class _Header(NamedTuple):
    """Fields of the header of an IP packet.

    :ivar source: packed address.
    :ivar target: packed address.
    :ivar size: size in bytes of the IP header.
    :ivar ports: source and target port of TCP; empty for another protocol, and for fragments after the first one.
    :ivar flags: flags of TCP; 0 where ``ports`` is empty.
    """

    source: bytes
    target: bytes
    size: int
    ports: tuple[int, ...]
    flags: int

    @classmethod
    def parse(cls, packet: bytes) -> _Header | None:
        """Parse the header of a packet. Return None if it is not an IP packet."""
        if len(packet) >= 20 and packet[0] >> 4 == 4:
            source, target, size = packet[12:16], packet[16:20], (packet[0] & 15) * 4
            is_tcp = packet[9] == _TCP and not int.from_bytes(packet[6:8], "big") & 0x1FFF
        elif len(packet) >= 40 and packet[0] >> 4 == 6:
            source, target, size, is_tcp = packet[8:24], packet[24:40], 40, packet[6] == _TCP
        else:
            return None
        if not is_tcp or len(packet) < size + _TCP_SIZE:
            return cls(source, target, size, (), 0)
        return cls(source, target, size, struct.unpack_from(">HH", packet, size), packet[size + 13])


def _pack(address: str) -> bytes:
    return ip_address(address).packed


def _checksum(data: bytes) -> int:
    if len(data) % 2:
        data += b"\0"
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _as_reset(packet: bytes, header: _Header) -> bytes:
    """Return a TCP reset that seems to come from the sender of a TCP packet."""
    segment = bytearray(packet[header.size : header.size + _TCP_SIZE])
    segment[12] = _TCP_SIZE // 4 << 4
    segment[13] = _RST
    segment[16:18] = b"\0\0"
    is_ipv6 = len(header.source) == 16
    length = len(segment).to_bytes(4, "big")
    # In the pseudo-header, IPv4 and IPv6 write length and protocol with different widths, but the checksum is the same.
    pseudo = header.source + header.target + length + _TCP.to_bytes(4, "big")
    segment[16:18] = _checksum(pseudo + bytes(segment)).to_bytes(2, "big")
    if is_ipv6:
        ip = bytearray(packet[:40])
        ip[4:6] = length[2:]
    else:
        ip = bytearray(packet[:20])
        ip[0] = 0x45
        ip[2:4] = (20 + len(segment)).to_bytes(2, "big")
        ip[10:12] = b"\0\0"
        ip[10:12] = _checksum(bytes(ip)).to_bytes(2, "big")
    return bytes(ip + segment)


def main() -> None:
    """Run the wire for the arguments ``SEED NAMESPACE=ADDRESS...``. Print ``ready`` when all devices are up."""
    seed, *hosts = sys.argv[1:]
    tuns = {}
    for number, host in enumerate(hosts):
        namespace, _, address = host.partition("=")
        tuns[address] = open_tun(namespace, f"wire{number}", address)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    Wire(tuns, int(seed)).run()


if __name__ == "__main__":
    main()
