"""Network interfaces, the one that ranks will talk over, and whether the host name leads to it."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..world.rendezvous import within
from .finding import Finding

TOPIC = "network"
RESOLVE = 5.0  # seconds for a name
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_UP = 0x1  # IFF_UP


@dataclass(frozen=True)
class Interface:
    """``up`` is None where the system does not tell it in a way known here."""

    name: str
    address: str | None
    up: bool | None

    @property
    def usable(self) -> bool:
        """As far as is known. Where states can be told, an interface without an address carries nothing."""
        return self.up is None or (self.up and self.address is not None)

    @property
    def loopback(self) -> bool:
        return is_loopback(self.address) if self.address else self.name in ("lo", "lo0")

    def __str__(self) -> str:
        state = "" if self.up is None else ", up" if self.up else ", down"
        return f"{self.name} ({self.address or 'no address'}{state})"


def interfaces() -> list[Interface]:
    try:
        names = [name for _, name in socket.if_nameindex()]
    except (OSError, AttributeError):
        return []
    return [Interface(name, _ipv4(name) or _ipv6(name), _up(name)) for name in names]


def _ipv4(name: str) -> str | None:
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _ipv6(name: str) -> str | None:
    with suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if row[-1] == name), None)
    return None


def _up(name: str) -> bool | None:
    try:
        return bool(int(Path(f"/sys/class/net/{name}/flags").read_text(), 16) & _UP)
    except (OSError, ValueError):
        return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def resolve(host: str) -> str | None:
    """The host's first address; None where there is none, or no answer in time."""
    try:
        answers = within(RESOLVE, lambda: socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP))
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return None
    return str(answers[0][4][0])


def examine_network(found: Sequence[Interface], env: Mapping[str, str], host: str) -> list[Finding]:
    address = resolve(host)
    return [
        _list(found),
        _host_name(host, address),
        *_gloo(found, env, address),
        *_nccl(found, env),
    ]


def gloo_names(env: Mapping[str, str]) -> list[str]:
    """As gloo reads its variable: exact names between commas, nothing trimmed."""
    setting = env.get("GLOO_SOCKET_IFNAME", "")
    return setting.split(",") if setting else []


def gloo_loopback(found: Sequence[Interface], env: Mapping[str, str], host: str) -> bool:
    """Would gloo talk over loopback, where no other machine hears it?"""
    if names := gloo_names(env):
        return any(one.loopback for one in found if one.name in names)
    address = resolve(host)
    return address is None or is_loopback(address)


def _list(found: Sequence[Interface]) -> Finding:
    if not found:
        return Finding(TOPIC, "interfaces", "ok", "this system does not list them")
    if not any(one.usable for one in found):
        remedy = "bring one up with an address, such as: ip link set lo up"
        return Finding(TOPIC, "interfaces", "problem", f"none is up: {_all(found)}", remedy)
    return Finding(TOPIC, "interfaces", "ok", _all(found))


def _all(found: Sequence[Interface]) -> str:
    return ", ".join(map(str, found)) or "unknown"


def _host_name(host: str, address: str | None) -> Finding:
    if address is None:
        remedy = f"add a line with this machine's address and {host} to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Finding(TOPIC, "host name", "warning", f"{host} has no address: gloo falls back to loopback", remedy)
    return Finding(TOPIC, "host name", "ok", f"{host} is {address}")


def _gloo(found: Sequence[Interface], env: Mapping[str, str], address: str | None) -> list[Finding]:
    names = gloo_names(env)
    if not names:
        return [Finding(TOPIC, "gloo interface", "ok", _gloo_choice(found, address))]
    by_name = {one.name: one for one in found}
    return [_named("gloo interface", "GLOO_SOCKET_IFNAME", name, by_name) for name in names]


def _gloo_choice(found: Sequence[Interface], address: str | None) -> str:
    """Without a setting gloo binds to the address that the host name has."""
    if address is None or is_loopback(address):
        outer = next((one.name for one in found if one.usable and not one.loopback), "the one they share")
        return f"loopback, as of the host name: fit for this machine; for several, export GLOO_SOCKET_IFNAME={outer}"
    name = next((one.name for one in found if one.address == address), "an interface")
    return f"{name} ({address}), as of the host name"


def _named(name: str, variable: str, interface: str, by_name: Mapping[str, Interface]) -> Finding:
    """A setting that names one interface exactly. An empty list of interfaces is one that could not be had."""
    one = by_name.get(interface)
    setting = f"{variable} names {interface!r}"
    if not by_name or (one is not None and one.usable):
        return Finding(TOPIC, name, "ok", f"{one or interface}, as {variable} says")
    what = "which is not there" if one is None else "which is down" if not one.up else "which has no address"
    return Finding(
        TOPIC, name, "problem", f"{setting}, {what}; there are {_all(list(by_name.values()))}", _set(variable, by_name)
    )


def _set(variable: str, by_name: Mapping[str, Interface]) -> str:
    usable = [one.name for one in by_name.values() if one.usable]
    choice = f"export {variable}={' or '.join(usable)}" if usable else "bring an interface up"
    return f"{choice}, or unset {variable}"


def _nccl(found: Sequence[Interface], env: Mapping[str, str]) -> list[Finding]:
    """NCCL takes beginnings of names between commas; '=' before the list makes them whole names, '^' excludes them."""
    setting = env.get("NCCL_SOCKET_IFNAME", "")
    if not setting or not found:
        return []
    usable = [one for one in found if one.usable and _matches(one.name, setting)]
    if usable:
        return [Finding(TOPIC, "nccl interface", "ok", f"{_all(usable)}, as NCCL_SOCKET_IFNAME={setting} says")]
    text = f"NCCL_SOCKET_IFNAME={setting} leaves no interface that is up; there are {_all(found)}"
    remedy = _set("NCCL_SOCKET_IFNAME", {one.name: one for one in found})
    return [Finding(TOPIC, "nccl interface", "problem", text, remedy)]


def _matches(name: str, setting: str) -> bool:
    exclude = setting.startswith("^")
    exact = setting[exclude:].startswith("=")
    words = setting[exclude + exact :].split(",")
    hit = any(name == word if exact else name.startswith(word) for word in words)
    return hit is not exclude
