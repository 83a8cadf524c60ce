import asyncio

import pytest

from arborl.errors import ConfigError
from arborl.tools.remote.http_connections import ConnectionBroken, HttpConnections


def talk(replies: list[bytes], requests: int, close_after_each: bool = False):
    """`requests` requests to a server that says these replies; what each gave, and how many connections were made."""

    async def run():
        connections, waiting = 0, list(replies)

        async def serve(reader, writer):
            nonlocal connections
            connections += 1
            try:
                while waiting:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
                    await reader.readexactly(length)
                    writer.write(waiting.pop(0))
                    await writer.drain()
                    if close_after_each:
                        break
            except asyncio.IncompleteReadError:
                pass
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        http, received = HttpConnections(f"http://127.0.0.1:{port}/base"), []
        for _ in range(requests):
            try:
                received.append(await asyncio.wait_for(http.request("POST", "/x", b"{}"), 40))
            except ConnectionBroken as error:
                received.append(error)
            await asyncio.sleep(0.01)
        http.close()
        server.close()
        return received, connections

    return asyncio.run(run())


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Y: Z\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n"


def test_connections_are_kept_and_replaced():
    received, connections = talk([PLAIN, CHUNKED, b"HTTP/1.1 204 No Content\r\n\r\n", PLAIN], 4)
    assert [reply.body for reply in received] == [b"hi", b"abc0123456789", b"", b"hi"]
    assert [reply.status for reply in received] == [200, 200, 204, 200]
    assert received[0].headers["x-y"] == "Z"
    assert connections == 1
    received, connections = talk([PLAIN, PLAIN, PLAIN], 3, close_after_each=True)
    assert [reply.body for reply in received] == [b"hi"] * 3
    assert connections == 3
    received, connections = talk([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall", PLAIN], 2, close_after_each=True)
    assert [reply.body for reply in received] == [b"all", b"hi"]
    assert connections == 2


@pytest.mark.parametrize(
    "reply",
    [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", b"HTTP/1.1 200", b"\x00" * 200_000],
)
def test_what_is_no_reply_is_broken(reply):
    received, _ = talk([reply], 1, close_after_each=True)
    assert isinstance(received[0], ConnectionBroken)


def test_a_port_without_a_server_raises_connection_broken():
    async def run():
        await HttpConnections("http://127.0.0.1:1").request("GET", "/")

    with pytest.raises(ConnectionBroken, match=r"cannot connect to 127\.0\.0\.1:1"):
        asyncio.run(run())


@pytest.mark.parametrize("url", ["127.0.0.1:30003", "ftp://x", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="write http://HOST:PORT"):
        HttpConnections(url)
