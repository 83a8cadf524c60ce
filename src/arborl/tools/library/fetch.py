"""Web pages of an allow-list of hosts.

Neither the model nor a page is trusted. A host name is resolved once; the address must be public and is the one that is
contacted (no DNS rebinding). Responses are decompressed and decoded within bounds, in a thread.
"""

from __future__ import annotations

import functools
import html
import ipaddress
import re
import socket
import ssl
import string
import zlib
from collections.abc import Iterator, Sequence

import httpx

from arborl.tools.core.background_threads import run_in_thread
from arborl.tools.core.tool import Tool

MAX_REDIRECTS = 5
DEFAULT_PORTS = {"http": 80, "https": 443}
LOWER = {ord(letter): letter.lower() for letter in string.ascii_uppercase}
TAG = re.compile(r"<(!--|[!?]?/?[a-z][a-z0-9]*)")
HIDDEN = frozenset(["script", "style", "head", "noscript", "template"])
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
BLOCKS = frozenset({"br"} | {f"{end}{tag}" for end in ("", "/") for tag in ("p", "div", "li", "tr", "pre", *HEADINGS)})
ENCODINGS = {"": None, "identity": None, "gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 0}
"""Content encodings -> zlib window; `deflate` exists with and without a header."""
CHARSETS = frozenset(
    ["utf-8", "us-ascii", "utf-16", "utf-16le", "utf-16be", "utf-32", "koi8-r", "koi8-u", "macintosh", "tis-620"]
    + [f"iso-8859-{part}" for part in (*range(1, 12), *range(13, 17))]
    + [f"windows-125{page}" for page in range(9)]
    + ["shift_jis", "euc-jp", "iso-2022-jp", "euc-kr", "gb2312", "gbk", "gb18030", "big5"]
)
"""Charsets of web pages that decode fast; some of Python's others take minutes for a page."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""Public IPv6 addresses; site-local addresses (`fec0::1`) are outside."""
NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("3fff::/20", "2001:db8::/32", "192.88.99.0/24", "192.0.0.0/24")))
"""Documentation, former 6to4 relays and protocol assignments; some versions of `ipaddress` miss them."""
READABLE = re.compile(r"text/|application/(json|xml|xhtml)|application/[\w.-]+\+(json|xml)")


class Fetch(Tool):
    """Reads web pages of an allow-list; redirects must stay in the list.

    Example:
        tool = Fetch(allow=["docs.python.org", "*.wikipedia.org"])
        tool = Fetch(allow=["localhost:8000"], allow_private=True)

    Args:
        allow: hosts, `*.host` for all subdomains, with `:port` for other than the default port.
        max_bytes: maximum bytes of a page, compressed and decompressed.
        timeout: seconds per call, redirects included.
        max_tokens: maximum tokens of a result.
        allow_private: whether listed hosts may have private addresses.
    """

    def __init__(
        self,
        allow: Sequence[str],
        max_bytes: int = 500_000,
        timeout: float = 10.0,
        max_tokens: int = 1024,
        allow_private: bool = False,
    ):
        if isinstance(allow, str) or not allow:
            raise ValueError("allow: give a list of hosts, such as [docs.python.org]")
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}: give at least 1")
        self.allow, self.max_bytes = tuple(host.lower() for host in allow), max_bytes
        self.allow_private = allow_private
        super().__init__(self.fetch, timeout=timeout, max_tokens=max_tokens, max_chars=50_000)

    async def fetch(self, url: str) -> str:
        """Read a web page.

        Args:
            url: its whole address, with http or https.
        """
        address = self.check_allowed(url)
        # `trust_env=False`: no proxy and no credentials of this machine.
        async with httpx.AsyncClient(trust_env=False, timeout=self.timeout, verify=tls_context()) as client:
            for _ in range(MAX_REDIRECTS + 1):
                response = await self._send(client, address)
                try:
                    if not response.has_redirect_location:
                        return await self._read(response)
                    address = self.check_allowed(address.join(response.headers["location"]))
                finally:
                    await response.aclose()
        raise ValueError(f"more than {MAX_REDIRECTS} redirects")

    async def _send(self, client: httpx.AsyncClient, address: httpx.URL) -> httpx.Response:
        headers = {"accept": "text/*, application/json", "accept-encoding": "gzip, deflate"}
        headers["host"] = address.netloc.decode("ascii")
        failed: httpx.ConnectError | None = None
        for found in await self._addresses(address):
            request = client.build_request(
                "GET", address.copy_with(host=found), headers=headers, extensions={"sni_hostname": address.host}
            )
            try:
                return await client.send(request, stream=True)
            except httpx.ConnectError as error:
                failed = error
        raise ValueError(f"{address.host} cannot be reached: {failed}")

    async def _addresses(self, address: httpx.URL) -> list[str]:
        port = address.port or DEFAULT_PORTS[address.scheme]
        host = address.raw_host.decode("ascii").rstrip(".")
        try:
            found = await run_in_thread(functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            raise ValueError(f"{host} has no address: {error}") from error
        # IPv4 first, for machines without IPv6.
        each = sorted({str(entry[4][0]): entry[0] for entry in found}.items(), key=lambda pair: pair[1])
        usable = [found for found, _ in each if self.allow_private or is_public(found)]
        if not usable:
            raise ValueError(f"{host} has only private addresses; allow_private=True permits them.")
        return usable[:3]

    def check_allowed(self, url: str | httpx.URL) -> httpx.URL:
        address = httpx.URL(url)
        if address.scheme not in DEFAULT_PORTS or not address.host:
            raise ValueError(f"{str(url)[:100]!r} is not a URL. Write http:// or https:// and a host.")
        default_port = DEFAULT_PORTS[address.scheme]
        host, port = address.host.lower().rstrip("."), address.port or default_port
        if address.userinfo or not any(_matches(entry, host, port, default_port) for entry in self.allow):
            raise ValueError(f"{host}:{port} is not allowed. Allowed: {', '.join(self.allow)}.")
        return address

    async def _read(self, response: httpx.Response) -> str:
        if response.status_code >= 400:
            raise ValueError(f"the server answered {response.status_code} {response.reason_phrase}")
        kind = response.headers.get("content-type", "text/plain")
        if not READABLE.match(kind):
            raise ValueError(f"the page is {kind.partition(';')[0]}, not text")
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in ENCODINGS:
            raise ValueError(f"the page has the unsupported encoding {encoding[:50]!r}")
        body = bytearray()
        async for part in response.aiter_raw(65_536):
            body += part
            if len(body) > self.max_bytes:
                break
        charset = (response.charset_encoding or "utf-8").lower()
        return str(await run_in_thread(functools.partial(self._text, bytes(body), encoding, charset, "html" in kind)))

    def _text(self, body: bytes, encoding: str, charset: str, is_html: bool) -> str:
        """Text of the page, in time linear in `max_bytes`: a thread cannot be stopped."""
        is_complete = len(body) <= self.max_bytes
        body = decompress(body, ENCODINGS[encoding], self.max_bytes + 1)
        text = body[: self.max_bytes].decode(charset if charset in CHARSETS else "utf-8", errors="replace")
        if is_html:
            text = html_to_text(text)
        is_complete = is_complete and len(body) <= self.max_bytes
        return text if is_complete else f"{text}\n[only the first {self.max_bytes:,} bytes were read]"


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Cached: loading the certificate authorities is slow."""
    return httpx.create_ssl_context(trust_env=False)


def is_public(address: str) -> bool:
    """Whether the address, and an IPv4 address embedded in IPv6, is public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        inner = [ip.sixtofour, *(ip.teredo or ())]
        if ip not in GLOBAL_UNICAST or any(other is not None and not is_public(str(other)) for other in inner):
            return False
    listed = any(ip in network for network in NOT_PUBLIC if network.version == ip.version)
    return ip.is_global and not (listed or ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def decompress(body: bytes, window: int | None, max_bytes: int) -> bytes:
    """At most `max_bytes` decompressed bytes; truncated data gives a prefix."""
    if window is None:
        return body[:max_bytes]
    windows = (window,) if window else (zlib.MAX_WBITS, -zlib.MAX_WBITS)
    for one in windows:
        try:
            return zlib.decompressobj(one).decompress(body, max_bytes)
        except zlib.error as error:
            failure = error
    raise ValueError(f"the page is damaged: {failure}")


def _matches(entry: str, host: str, port: int, default_port: int) -> bool:
    name, _, number = entry.partition(":")
    if str(port) != (number or str(default_port)):
        return False
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def html_to_text(page: str) -> str:
    lines = (" ".join(line.split()) for line in html.unescape("".join(_visible_text(page))).split("\n"))
    return "\n".join(line for line in lines if line)


def _visible_text(page: str) -> Iterator[str]:
    """Text between tags, without hidden elements and without the rest after an unclosed tag."""
    lower, position = page.translate(LOWER), 0  # `str.lower` may change the length
    while (opening := page.find("<", position)) >= 0:
        yield page[position:opening]
        tag = TAG.match(lower, opening)
        if tag is None:  # not a tag
            yield "<"
            position = opening + 1
            continue
        name = tag[1]
        until = "-->" if name == "!--" else f"</{name}" if name in HIDDEN else ">"
        end = lower.find(until, tag.end() if name == "!--" else opening + 1)
        if end < 0:
            return
        if name in BLOCKS:
            yield "\n"
        position = end if name in HIDDEN else end + len(until)
    yield page[position:]
