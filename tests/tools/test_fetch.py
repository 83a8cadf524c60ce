import asyncio
import codecs
import contextlib
import gzip
import socket
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from arborl.tools.library.fetch import CHARSETS, Fetch, html_to_text, is_public


def stacked(times: int) -> bytes:
    body = b"0" * 50_000_000
    for _ in range(times):
        body = gzip.compress(body, 1)
    return body


PAGES = {
    "/plain": (200, {"content-type": "text/plain"}, b"hello"),
    "/page": (
        200,
        {"content-type": "text/html; charset=utf-8"},
        "<head><title>t</title></head><script>x()</script><h1>Größe</h1><p>a &lt; b</p>".encode(),
    ),
    "/long": (200, {"content-type": "text/plain"}, b"x" * 50_000),
    "/bomb": (200, {"content-type": "text/plain", "content-encoding": "gzip"}, gzip.compress(b"0" * 30_000_000)),
    "/picture": (200, {"content-type": "image/png"}, b"\x89PNG"),
    "/lost": (404, {}, b""),
    "/on": (302, {"location": "/plain"}, b""),
    "/round": (302, {"location": "/round"}, b""),
    "/deflate": (200, {"content-type": "text/plain", "content-encoding": "deflate"}, zlib.compress(b"hello")),
    "/raw": (200, {"content-type": "text/plain", "content-encoding": "deflate"}, zlib.compress(b"hello", wbits=-15)),
    "/damaged": (200, {"content-type": "text/plain", "content-encoding": "gzip"}, b"hello"),
    "/stacked": (200, {"content-type": "text/plain", "content-encoding": "gzip, gzip"}, stacked(2)),
    "/empty": (
        200,
        {"content-type": "text/plain", "content-encoding": "deflate"},
        zlib.compress(b"", wbits=-15)[:0] + b"\x00\x00\x00\xff\xff" * 100_000,
    ),
    "/japanese": (200, {"content-type": "text/plain; charset=Shift_JIS"}, "日本語".encode("shift_jis")),
    "/unknown": (200, {"content-type": "text/plain; charset=klingon"}, "Größe".encode()),
    "/punycode": (200, {"content-type": "text/plain; charset=punycode"}, b"-" + b"a" * 120_000),
    "/secret": (200, {"content-type": "text/plain"}, b"secret"),
}


class Handler(BaseHTTPRequestHandler):
    requested: list[str] = []
    hosts: list[str] = []

    def do_GET(self):
        Handler.requested.append(f"{self.server.server_port}{self.path}")
        Handler.hosts.append(self.headers["host"])
        if self.path == "/slow":
            time.sleep(60)
        if self.path == "/out":
            status, headers, body = 302, {"location": f"http://127.0.0.1:{self.server.other}/secret"}, b""
        else:
            status, headers, body = PAGES.get(self.path, PAGES["/lost"])
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def servers():
    pair = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    pair[0].other = pair[1].server_port
    for server in pair:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [server.server_port for server in pair]
    for server in pair:
        server.shutdown()


def ask(tool, url):
    return asyncio.run(tool.run({"url": url}))


def test_a_listed_page_is_read_as_text(servers):
    tool = Fetch([f"127.0.0.1:{servers[0]}"], allow_private=True)
    base = f"http://127.0.0.1:{servers[0]}"
    assert ask(tool, f"{base}/plain").content == "hello"
    assert ask(tool, f"{base}/page").content == "Größe\na < b"
    assert ask(tool, f"{base}/on").content == "hello"


def test_no_redirect_leads_out_of_the_list(servers):
    Handler.requested.clear()
    tool = Fetch([f"127.0.0.1:{servers[0]}"], allow_private=True)
    result = ask(tool, f"http://127.0.0.1:{servers[0]}/out")
    assert (result.kind, "is not allowed" in result.content) == ("exception", True)
    assert Handler.requested == [f"{servers[0]}/out"]  # the other server was never requested
    assert "redirects" in ask(tool, f"http://127.0.0.1:{servers[0]}/round").content


def test_size_and_time_are_limited(servers):
    base = f"http://127.0.0.1:{servers[0]}"
    tool = Fetch([f"127.0.0.1:{servers[0]}"], max_bytes=100, allow_private=True)
    for page in ("long", "bomb"):
        content = ask(tool, f"{base}/{page}").content
        assert content.endswith("[only the first 100 bytes were read]")
        assert len(content) < 200
    start = time.perf_counter()
    result = ask(Fetch([f"127.0.0.1:{servers[0]}"], timeout=0.3, allow_private=True), f"{base}/slow")
    assert result.kind == "timeout" or "Timeout" in result.content
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    ("page", "received"),
    [
        ("deflate", "hello"),
        ("raw", "hello"),
        ("damaged", "damaged"),
        ("stacked", "unsupported encoding 'gzip, gzip'"),
        ("empty", "only the first 1,000 bytes"),
        ("japanese", "日本語"),
        ("unknown", "Größe"),
    ],
)
def test_what_pages_are_packed_and_written_in(servers, page, received):
    tool = Fetch([f"127.0.0.1:{servers[0]}"], max_bytes=1000, allow_private=True)
    assert received in ask(tool, f"http://127.0.0.1:{servers[0]}/{page}").content


def test_no_page_holds_the_loop(servers):
    tool = Fetch([f"127.0.0.1:{servers[0]}"], allow_private=True)
    longest = 0.0

    async def play():
        nonlocal longest
        asking = asyncio.gather(
            *(tool.run({"url": f"http://127.0.0.1:{servers[0]}/{page}"}) for page in ("punycode", "bomb", "stacked"))
        )
        while not asking.done():
            start = time.thread_time()
            await asyncio.sleep(0.005)
            longest = max(longest, time.thread_time() - start)
        return await asking

    assert asyncio.run(play())[0].content.startswith("-aaaa")
    assert longest < 0.5  # of this thread's own work


def test_every_known_charset_is_one_and_takes_its_bytes_once():
    noise = bytes(range(256)) * 2000
    for name in CHARSETS:
        start = time.thread_time()
        codecs.decode(noise, name, "replace")
        assert time.thread_time() - start < 1, name


def test_a_listed_name_of_this_machine_needs_leave(servers):
    Handler.requested.clear()
    for host in ("localhost", "127.0.0.1", "0.0.0.0"):
        result = ask(Fetch([f"{host}:{servers[0]}"]), f"http://{host}:{servers[0]}/secret")
        assert not result.ok
        assert "allow_private" in result.content
    assert Handler.requested == []


def answering(monkeypatch, *addresses):
    """Names have these addresses, one after another; the questions."""
    requested, left = [], list(addresses)

    def getaddrinfo(host, port, *args, **more):
        requested.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (left.pop(0) if len(left) > 1 else left[0], port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return requested


def test_the_request_goes_to_the_address_that_was_checked(servers, monkeypatch):
    requested = answering(monkeypatch, "127.0.0.1", "192.0.2.1")  # any caller asks again is led elsewhere
    Handler.hosts.clear()
    tool = Fetch([f"pages.test:{servers[0]}"], allow_private=True)
    assert ask(tool, f"http://pages.test:{servers[0]}/plain").content == "hello"
    assert requested == ["pages.test"]
    assert Handler.hosts == [f"pages.test:{servers[0]}"]


def test_a_name_that_comes_to_mean_this_machine_is_refused(servers, monkeypatch):
    Handler.requested.clear()
    answering(monkeypatch, "127.0.0.1")
    result = ask(Fetch([f"pages.test:{servers[0]}"]), f"http://pages.test:{servers[0]}/plain")
    assert "allow_private" in result.content
    assert Handler.requested == []


def test_a_redirect_to_a_name_of_this_machine_is_refused(servers, monkeypatch):
    port = servers[0]
    monkeypatch.setitem(PAGES, "/in", (302, {"location": f"http://inside.test:{port}/secret"}, b""))
    monkeypatch.setattr("arborl.tools.library.fetch.is_public", lambda address: address == "127.0.0.1")
    answering(monkeypatch, "127.0.0.1", "127.0.0.2")  # the first stands for a public one
    Handler.requested.clear()
    result = ask(Fetch([f"pages.test:{port}", f"inside.test:{port}"]), f"http://pages.test:{port}/in")
    assert "inside.test has only private addresses" in result.content
    assert Handler.requested == [f"{port}/in"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "2002:7f00:1::", "240.0.0.1", "fec0::1", "feff:ffff::1", "64:ff9b:1::1", "5f00::1",
        "3fff::1", "2001:db8::1", "192.88.99.1", "192.0.0.8", "::127.0.0.1", "::ffff:0:7f00:1", "2001:0:7f00:1::",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "151.101.0.223", "2606:4700:4700::1111", "64:ff9b::101:101"])
def test_addresses_that_are(address):
    assert is_public(address)


@pytest.mark.parametrize(("path", "received"), [("/picture", "image/png, not text"), ("/lost", "404")])
def test_a_response_that_is_no_text_page_is_reported(servers, path, received):
    result = ask(Fetch([f"127.0.0.1:{servers[0]}"], allow_private=True), f"http://127.0.0.1:{servers[0]}{path}")
    assert received in result.content
    assert not result.ok


ALLOWED = Fetch(["docs.python.org", "*.wikipedia.org", "localhost:8000"])


@pytest.mark.parametrize(
    "url",
    [
        "https://docs.python.org/3/",
        "http://DOCS.python.org./x",
        "https://en.wikipedia.org/wiki/A",
        "http://localhost:8000",
    ],
)
def test_listed_hosts_are_allowed(url):
    assert ALLOWED.check_allowed(url).host


@pytest.mark.parametrize(
    "url",
    [
        "https://evil.org/?docs.python.org",
        "https://docs.python.org.evil.org/",
        "https://docs.python.org@evil.org/",
        "https://user:pass@docs.python.org/",
        "https://docs.python.org:8443/",
        "http://localhost/",
        "https://wikipedia.org/",
        "https://evilwikipedia.org/",
        "file:///etc/passwd",
        "ftp://docs.python.org/",
        "docs.python.org",
        "http://[::1]/",
        "http://docs.python.org\\@evil.org/",
        "",
    ],
)
def test_nothing_else_is(url):
    result = ask(ALLOWED, url)
    assert not result.ok
    assert result.kind == "exception"


def test_a_list_is_needed():
    with pytest.raises(ValueError, match="give a list of hosts"):
        Fetch("docs.python.org")


def test_any_markup_becomes_words():
    assert html_to_text("<p>a<b>b</b><br>c</p><!-- <p>no --><style>x") == "ab\nc"
    assert html_to_text("1 < 2 <!doctype html><SCRIPT>if (a<b) c</Script >d &amp; <i class='x'>e</i") == "1 < 2 d & e"
    start = time.thread_time()
    for piece in ("<script", "<script>", "<!--", "<", "<p", "</", "<head></head>"):
        html_to_text(piece * 20_000)
    assert time.thread_time() - start < 3
