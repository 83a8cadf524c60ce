"""HTTP for a model: pages of listed hosts, so much of them, so long, and nowhere else.

Neither the model nor a page is trusted. A host's address is looked up once, must be a public one, and is the one that
is asked; what comes back is unpacked and decoded within its bounds, and beside the event loop.
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

from arborl.tools.threads import in_thread
from arborl.tools.tool import Tool

MOST_REDIRECTS = 5
USUAL_PORTS = {"http": 80, "https": 443}
LOWER = {ord(letter): letter.lower() for letter in string.ascii_uppercase}
TAG = re.compile(r"<(!--|[!?]?/?[a-z][a-z0-9]*)")
HIDDEN = frozenset(["script", "style", "head", "noscript", "template"])
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
BLOCKS = frozenset({"br"} | {f"{end}{tag}" for end in ("", "/") for tag in ("p", "div", "li", "tr", "pre", *HEADINGS)})
ENCODINGS = {"": None, "identity": None, "gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 0}
"""What a page may be packed with, once: the window of its unpacker; `deflate` is written with and without a header."""
CHARSETS = frozenset(
    ["utf-8", "us-ascii", "utf-16", "utf-16le", "utf-16be", "utf-32", "koi8-r", "koi8-u", "macintosh", "tis-620"]
    + [f"iso-8859-{part}" for part in (*range(1, 12), *range(13, 17))]
    + [f"windows-125{page}" for page in range(9)]
    + ["shift_jis", "euc-jp", "iso-2022-jp", "euc-kr", "gb2312", "gbk", "gb18030", "big5"]
)
"""Those of pages, all of them quick; Python knows others, of which some take minutes for a page."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that IPv6 has given out to hosts of the open net; site-local addresses (`fec0::1`) are elsewhere."""
NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("3fff::/20", "2001:db8::/32", "192.88.99.0/24", "192.0.0.0/24")))
"""Documentation, former 6to4 relays and protocol assignments, of which some releases of `ipaddress` do not know."""
READABLE = re.compile(r"text/|application/(json|xml|xhtml)|application/[\w.-]+\+(json|xml)")


class Fetch(Tool):
    """A tool that reads web pages, from an allow-list only. A redirect must stay in the list too.

    Example:
        tool = Fetch(allow=["docs.python.org", "*.wikipedia.org"])
        tool = Fetch(allow=["localhost:8000"], allow_private=True)

    Args:
        allow: hosts, `*.host` for every host below one, each with `:port` where the port is not the usual one.
        max_bytes: what is read of a page, packed and unpacked.
        timeout: seconds for all of it, redirects included.
        max_tokens: length of an answer.
        allow_private: whether a listed host may be this machine or one of its own network.
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
        address = self.allowed(url)
        # `trust_env=False`: neither a proxy nor credentials of the host's are for the model to use.
        async with httpx.AsyncClient(trust_env=False, timeout=self.timeout, verify=tls()) as client:
            for _ in range(MOST_REDIRECTS + 1):
                response = await self._ask(client, address)
                try:
                    if not response.has_redirect_location:
                        return await self._read(response)
                    address = self.allowed(address.join(response.headers["location"]))
                finally:
                    await response.aclose()
        raise ValueError(f"more than {MOST_REDIRECTS} redirects")

    async def _ask(self, client: httpx.AsyncClient, address: httpx.URL) -> httpx.Response:
        """The answer of one of the host's addresses. Those were checked, so they are asked, not the name again."""
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
        port = address.port or USUAL_PORTS[address.scheme]
        host = address.raw_host.decode("ascii").rstrip(".")
        try:
            found = await in_thread(functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            raise ValueError(f"{host} has no address: {error}") from error
        # IPv4 first: where a host has both, a machine without IPv6 would only wait.
        each = sorted({str(entry[4][0]): entry[0] for entry in found}.items(), key=lambda pair: pair[1])
        usable = [found for found, _ in each if self.allow_private or is_public(found)]
        if not usable:
            raise ValueError(f"{host} is this machine or one of its network, which only allow_private=True allows.")
        return usable[:3]

    def allowed(self, url: str | httpx.URL) -> httpx.URL:
        """The address, read once by what will also ask for it; refused when it is not of a listed host."""
        address = httpx.URL(url)
        if address.scheme not in USUAL_PORTS or not address.host:
            raise ValueError(f"{str(url)[:100]!r} is not an address. Write http:// or https:// and a host.")
        usual = USUAL_PORTS[address.scheme]
        host, port = address.host.lower().rstrip("."), address.port or usual
        if address.userinfo or not any(_covers(entry, host, port, usual) for entry in self.allow):
            raise ValueError(f"{host}:{port} is not allowed. Allowed: {', '.join(self.allow)}.")
        return address

    async def _read(self, response: httpx.Response) -> str:
        if response.status_code >= 400:
            raise ValueError(f"the server answered {response.status_code} {response.reason_phrase}")
        kind = response.headers.get("content-type", "text/plain")
        if not READABLE.match(kind):
            raise ValueError(f"the page is {kind.partition(';')[0]}, not text")
        packed = response.headers.get("content-encoding", "").strip().lower()
        if packed not in ENCODINGS:
            raise ValueError(f"the page is packed as {packed[:50]!r}, which is not read. Ask for another.")
        body = bytearray()
        async for part in response.aiter_raw(65_536):
            body += part
            if len(body) > self.max_bytes:
                break
        charset = (response.charset_encoding or "utf-8").lower()
        return str(await in_thread(functools.partial(self._text, bytes(body), packed, charset, "html" in kind)))

    def _text(self, body: bytes, packed: str, charset: str, is_html: bool) -> str:
        """What the page says; linear in `max_bytes` whatever the page is, since nobody can stop a thread."""
        whole = len(body) <= self.max_bytes
        body = unpacked(body, ENCODINGS[packed], self.max_bytes + 1)
        # As browsers do: what is not known is read as UTF-8.
        text = body[: self.max_bytes].decode(charset if charset in CHARSETS else "utf-8", errors="replace")
        if is_html:
            text = as_plain(text)
        whole = whole and len(body) <= self.max_bytes
        return text if whole else f"{text}\n[only the first {self.max_bytes:,} bytes were read]"


@functools.cache
def tls() -> ssl.SSLContext:
    """Reading the list of authorities takes longer than many a page."""
    return httpx.create_ssl_context(trust_env=False)


def is_public(address: str) -> bool:
    """Whether this is a host of the open net; one that is written inside another (IPv6 can) counts too."""
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


def unpacked(body: bytes, window: int | None, most: int) -> bytes:
    """At most so many bytes of what was packed; what is cut off or damaged ends where it does."""
    if window is None:
        return body[:most]
    windows = (window,) if window else (zlib.MAX_WBITS, -zlib.MAX_WBITS)
    for one in windows:
        try:
            return zlib.decompressobj(one).decompress(body, most)
        except zlib.error as error:
            failed = error
    raise ValueError(f"the page is damaged: {failed}")


def _covers(entry: str, host: str, port: int, usual: int) -> bool:
    name, _, number = entry.partition(":")
    if str(port) != (number or str(usual)):
        return False
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def as_plain(page: str) -> str:
    """The words of an HTML page, a line for each block. One pass: no page makes it slow."""
    lines = (" ".join(line.split()) for line in html.unescape("".join(_words(page))).split("\n"))
    return "\n".join(line for line in lines if line)


def _words(page: str) -> Iterator[str]:
    """The text between tags; what is not shown to people is left out, and so is what a tag left open swallows."""
    lower, at = page.translate(LOWER), 0  # `str.lower` may change the length
    while (opening := page.find("<", at)) >= 0:
        yield page[at:opening]
        tag = TAG.match(lower, opening)
        if tag is None:  # a sign, not a tag
            yield "<"
            at = opening + 1
            continue
        name = tag[1]
        until = "-->" if name == "!--" else f"</{name}" if name in HIDDEN else ">"
        end = lower.find(until, tag.end() if name == "!--" else opening + 1)
        if end < 0:
            return
        if name in BLOCKS:
            yield "\n"
        at = end if name in HIDDEN else end + len(until)
    yield page[at:]
