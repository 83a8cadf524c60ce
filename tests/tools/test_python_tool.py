import asyncio

from arborl.sandbox import SandboxLimits, SandboxPool
from arborl.tools import TOOLS, Toolbox, ToolContext, tool
from arborl.tools.library.python import PythonSession, python, python_once
from arborl.types import ToolCall


def test_calls_run_in_order_and_only_the_episode_keeps_variables():
    assert isinstance(python, TOOLS["python"])
    assert list(python.spec.parameters["properties"]) == ["code"]
    assert "Variables last from call to call" in python.spec.description

    async def play() -> list[str]:
        box = Toolbox([python])
        async with ToolContext() as context:
            calls = [ToolCall(str(n), "python", {"code": code}) for n, code in enumerate(("x = 1", "x += 1", "x"))]
            return [result.content for result in await box.run(calls, context)]

    assert asyncio.run(play())[-1] == "2"

    async def play() -> list[str]:
        async with ToolContext() as context:
            return [(await python_once.run({"code": code}, context)).content for code in ("x = 1", "x")]

    assert asyncio.run(play())[1].endswith("NameError: name 'x' is not defined")


def test_variables_last_an_episode_and_no_longer():
    async def play() -> list[str]:
        async with ToolContext() as first, ToolContext() as second:
            received = [
                await python.run({"code": "x = 6"}, first),
                await python.run({"code": "print('hi')\nx * 7"}, first),
                await python.run({"code": "x"}, second),
            ]
        async with ToolContext() as third:
            received.append(await python.run({"code": "x"}, third))
        assert all(result.ok for result in received)
        return [result.content for result in received]

    assert asyncio.run(play())[:2] == ["(no output)", "hi\n42"]
    for content in asyncio.run(play())[2:]:
        assert content.endswith("NameError: name 'x' is not defined")


def test_an_exceeded_limit_is_reported_and_the_next_call_starts_a_new_process():
    pool = SandboxPool(SandboxLimits(wall_seconds=0.5), spare=0)

    async def play() -> list:
        session = PythonSession(pool)
        received = [await session.run(code) for code in ("x = 1", "while True: pass", "x", "'fresh'")]
        await session.close()
        return received

    _, endless, after, fresh = asyncio.run(play())
    assert endless.stopped == "wall"
    assert "NameError" in after.error
    assert fresh.value == "'fresh'"
    pool.close()


def test_the_interpreter_is_given_back_at_the_end_of_the_episode():
    pool = SandboxPool(SandboxLimits(), size=1, spare=0)

    async def play() -> None:
        for number in range(3):
            session = PythonSession(pool)
            assert (await asyncio.wait_for(session.run(f"{number} + 1"), 40)).value == str(number + 1)
            await session.close()
            await session.close()

    asyncio.run(play())
    pool.close()


def test_a_tool_call_that_times_out_ends_its_code():
    session = PythonSession(SandboxPool(SandboxLimits(wall_seconds=60), size=1, spare=0))

    @tool(timeout=0.3)
    async def slow() -> str:
        """Sleep."""
        return (await session.run("import time; time.sleep(60)")).output

    async def play() -> str:
        result = await slow.run({})
        assert result.kind == "timeout"
        found = await session.run("'back'")
        await session.close()
        return found.value

    assert asyncio.run(play()) == "'back'"
