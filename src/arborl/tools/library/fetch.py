"""HTTP for a model: pages of listed hosts, so much of them, so long, and nowhere else."""

from __future__ import annotations

import functools
import html
import re
import string
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
READABLE = re.compile(r"text/|application/(json|xml|xhtml)|application/[\w.-]+\+(json|xml)")


class Fetch(Tool):
    """A tool that reads web pages, from an allow-list only. A redirect must stay in the list too.

    Example:
        tool = Fetch(allow=["docs.python.org", "*.wikipedia.org", "localhost:8000"])

    Args:
        allow: hosts, `*.host` for every host below one, each with `:port` where the port is not the usual one.
        max_bytes: what is read of a page.
        timeout: seconds for all of it, redirects included.
        max_tokens: length of an answer.
    """

    def __init__(self, allow: Sequence[str], max_bytes: int = 500_000, timeout: float = 10.0, max_tokens: int = 1024):
        if isinstance(allow, str) or not allow:
            raise ValueError("allow: give a list of hosts, such as [docs.python.org]")
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}: give at least 1")
        self.allow, self.max_bytes = tuple(host.lower() for host in allow), max_bytes
        super().__init__(self.fetch, timeout=timeout, max_tokens=max_tokens, max_chars=50_000)

    async def fetch(self, url: str) -> str:
        """Read a web page.

        Args:
            url: its whole address, with http or https.
        """
        address = self.allowed(url)
        # `trust_env=False`: neither a proxy nor credentials of the host's are for the model to use.
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=self.timeout) as client:
            for _ in range(MOST_REDIRECTS + 1):
                async with client.stream("GET", address, headers={"accept": "text/*, application/json"}) as response:
                    if not response.has_redirect_location:
                        return await self._read(response)
                    address = self.allowed(address.join(response.headers["location"]))
        raise ValueError(f"more than {MOST_REDIRECTS} redirects")

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
        body = bytearray()
        async for part in response.aiter_bytes(65_536):  # after decompression: a small file may unpack to a large one
            body += part
            if len(body) > self.max_bytes:
                break
        text = bytes(body[: self.max_bytes]).decode(response.encoding or "utf-8", errors="replace")
        if "html" in kind:
            text = await in_thread(functools.partial(as_plain, text))
        whole = len(body) <= self.max_bytes
        return text if whole else f"{text}\n[only the first {self.max_bytes:,} bytes were read]"


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
