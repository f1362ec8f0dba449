"""Pictures behind http(s) addresses: fetched only from the hosts that ``--fetch-from`` names.

A request must not make this machine talk to its own network. So a host's name is resolved here, every address it has
must be a public one, and the connection goes to that very address: a second answer of the name server changes nothing.
A redirect is followed to a named host alone.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable

import httpx

from tessera_gateway.errors import ApiError

REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")  # all that was ever given out; Python calls unused ranges global too
CARRY_IPV4 = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32"))  # 6to4 and Teredo, within it
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "tessera-gateway"}


async def resolve(host: str, port: int) -> list[str]:
    """By the system's name service. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's: not private, not this machine's, of no other special use."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inside = parsed not in GLOBAL_IPV6 or any(parsed in network for network in CARRY_IPV4)
        return parsed.is_global and not inside
    return parsed.is_global and not parsed.is_multicast


class Fetcher:
    """Fetches pictures from ``hosts``, each ``name`` (ports 80 and 443) or ``name:port``.

    Args:
        max_bytes: of all pictures of a request together.
        seconds: for all pictures of a request together.
    """

    def __init__(self, hosts: Iterable[str], max_bytes: int, seconds: float = 15.0) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes, self._seconds = max_bytes, seconds
        self._tls = ssl.create_default_context() if self._hosts else None

    async def fetch(self, urls: Iterable[tuple[str, str]]) -> dict[str, bytes]:
        """The bytes behind each URL, given with the path of its field. Raises ApiError that names the field."""
        pictures: dict[str, bytes] = {}
        try:
            return await asyncio.wait_for(self._fetch(urls, pictures), self._seconds)
        except asyncio.TimeoutError:
            words = f"the pictures could not be fetched within {self._seconds:g} s"
            raise ApiError(400, words, "messages", "picture_timeout") from None

    async def _fetch(self, urls: Iterable[tuple[str, str]], pictures: dict[str, bytes]) -> dict[str, bytes]:
        for url, field in urls:
            if url not in pictures:
                left = self._max_bytes - sum(map(len, pictures.values()))
                try:
                    pictures[url] = await self._get(url, left)
                except _Refused as refused:
                    raise ApiError(400, f"{field}: {refused}", field, "picture_refused") from None
                except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
                    words = f"{field}: cannot fetch {url!r:.200}: {error or type(error).__name__}"
                    raise ApiError(400, words, field, "picture_not_fetched") from None
        return pictures

    async def _get(self, url: str, left: int) -> bytes:
        target = httpx.URL(url)
        for _ in range(REDIRECTS + 1):
            pinned, headers = await self._pinned(target)
            # No connection is kept: the next picture's host may be another one at the same address.
            limits = httpx.Limits(max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(verify=self._tls or True, trust_env=False, limits=limits)
            async with httpx.AsyncClient(transport=transport, timeout=self._seconds, trust_env=False) as client:
                extensions = {"sni_hostname": target.host}
                async with client.stream("GET", pinned, headers=headers, extensions=extensions) as response:
                    if response.has_redirect_location:
                        target = target.join(response.headers["location"])
                        continue
                    if response.status_code != 200:
                        raise _Refused(f"{target.host} answers {response.status_code} for the picture")
                    return await self._read(response, left)
        raise _Refused(f"more than {REDIRECTS} redirects")

    async def _pinned(self, target: httpx.URL) -> tuple[httpx.URL, dict[str, str]]:
        """The address to connect to in place of the name, and the headers that still name it."""
        host, port = target.host.lower(), target.port or PORTS.get(target.scheme)
        if target.scheme not in PORTS or not host or target.userinfo:
            raise _Refused("a picture is a data: URL, or http(s)://host/path without a user's name")
        usual = port == PORTS[target.scheme]
        if f"{host}:{port}" not in self._hosts and not (usual and host in self._hosts):
            raise _Refused(f"pictures are not fetched from {host}:{port}; send a data: URL (--fetch-from names hosts)")
        found = await resolve(host, port or 0)
        if not found or not all(map(is_public, found)):
            raise _Refused(f"{host} has an address that is not public")
        headers = HEADERS | {"Host": target.netloc.decode("ascii")}
        return target.copy_with(host=found[0]), headers

    async def _read(self, response: httpx.Response, left: int) -> bytes:
        picture = bytearray()
        async for part in response.aiter_raw():
            picture += part
            if len(picture) > left:
                raise _Refused(f"the request's pictures are larger than {self._max_bytes >> 20} MiB together")
        return bytes(picture)


class _Refused(Exception):
    """Why a picture is not fetched."""
