import asyncio
import contextlib
import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from arborl.tools.library.fetch import Fetch, as_plain

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
    "/secret": (200, {"content-type": "text/plain"}, b"secret"),
}


class Handler(BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self):
        Handler.asked.append(f"{self.server.server_port}{self.path}")
        if self.path == "/slow":
            time.sleep(3)
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
    tool = Fetch([f"127.0.0.1:{servers[0]}"])
    base = f"http://127.0.0.1:{servers[0]}"
    assert ask(tool, f"{base}/plain").content == "hello"
    assert ask(tool, f"{base}/page").content == "Größe\na < b"
    assert ask(tool, f"{base}/on").content == "hello"


def test_no_redirect_leads_out_of_the_list(servers):
    Handler.asked.clear()
    tool = Fetch([f"127.0.0.1:{servers[0]}"])
    result = ask(tool, f"http://127.0.0.1:{servers[0]}/out")
    assert (result.kind, "is not allowed" in result.content) == ("exception", True)
    assert Handler.asked == [f"{servers[0]}/out"]  # the other server was never asked
    assert "redirects" in ask(tool, f"http://127.0.0.1:{servers[0]}/round").content


def test_size_and_time_are_limited(servers):
    base = f"http://127.0.0.1:{servers[0]}"
    tool = Fetch([f"127.0.0.1:{servers[0]}"], max_bytes=100)
    for page in ("long", "bomb"):
        content = ask(tool, f"{base}/{page}").content
        assert content.endswith("[only the first 100 bytes were read]")
        assert len(content) < 200
    start = time.perf_counter()
    result = ask(Fetch([f"127.0.0.1:{servers[0]}"], timeout=0.3), f"{base}/slow")
    assert result.kind == "timeout" or "Timeout" in result.content
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(("path", "said"), [("/picture", "image/png, not text"), ("/lost", "404")])
def test_what_is_no_page_is_said_to_be_none(servers, path, said):
    result = ask(Fetch([f"127.0.0.1:{servers[0]}"]), f"http://127.0.0.1:{servers[0]}{path}")
    assert said in result.content
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
    assert ALLOWED.allowed(url).host


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
    assert as_plain("<p>a<b>b</b><br>c</p><!-- <p>no --><style>x") == "ab\nc"
    assert as_plain("1 < 2 <!doctype html><SCRIPT>if (a<b) c</Script >d &amp; <i class='x'>e</i") == "1 < 2 d & e"
    start = time.perf_counter()
    for piece in ("<script", "<script>", "<!--", "<", "<p", "</", "<head></head>"):
        as_plain(piece * 20_000)
    assert time.perf_counter() - start < 3
