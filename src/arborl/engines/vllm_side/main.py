"""The process of `engine=vllm`: vLLM's `AsyncLLM`, asked through a socket. The other side is `vllm.py`.

Started as `python main.py FD`, by an interpreter that has vLLM and need not have arborl. A message is its length in
four bytes and JSON; the first says how to make the engine, and the answer to it that it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
from typing import Any

ADAPTER = "arborl"


class Side:
    """Answers requests as they come: {"id", "do", …} in, {"id", …} out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.engine: Any = None
        self.lora: Any = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        while True:
            try:
                size = struct.unpack("!I", await self.reader.readexactly(4))[0]
                asked = json.loads(await self.reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return  # who asked is gone
            task = asyncio.create_task(self.answer(asked))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def answer(self, asked: dict[str, Any]) -> None:
        number = asked.pop("id")
        try:
            told = await getattr(self, asked.pop("do"))(number, **asked)
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:2000]}"}
            if self.engine is not None and self.engine.errored:
                told["dead"] = True
        if told is not None:
            self.tell({"id": number, "done": True, **told})

    def tell(self, message: dict[str, Any]) -> None:
        packed = json.dumps(message).encode()
        with contextlib.suppress(ConnectionError):
            self.writer.write(struct.pack("!I", len(packed)) + packed)

    # ------------------------------------------------------------------------------------------ what can be asked

    async def start(self, number: int, args: dict[str, Any]) -> dict[str, Any]:
        from vllm import __version__
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        known = AsyncEngineArgs(**args)
        self.engine = AsyncLLM.from_engine_args(known)
        return {"vllm": __version__}

    async def generate(self, number: int, prompt: list[int], sampling: dict[str, Any], stream: bool) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        how = SamplingParams(**sampling, logprobs=0, ignore_eos=True, detokenize=False, output_kind=kind)
        asked = {"prompt_token_ids": prompt}
        last = None
        async for output in self.engine.generate(asked, how, str(number), lora_request=self.lora):
            last = output.outputs[0]
            if stream and output.finished is False:
                self.tell({"id": number, **_sampled(last)})
        assert last is not None
        spans = [[span.version, span.start, span.end] for span in last.weight_versions or ()]
        return {**_sampled(last), "finish": last.finish_reason, "spans": spans}

    async def abort(self, number: int, which: int) -> None:
        """Its own answer comes at once, with what has been sampled."""
        await self.engine.abort(str(which))

    async def load(
        self,
        number: int,
        version: str,
        path: str | None = None,
        table: list[list[Any]] | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Requests wait meanwhile, and go on after it with what they have; what was read is read again."""
        engine = self.engine
        await engine.pause_generation(mode="keep", clear_cache=False)
        try:
            if path is not None:
                await engine.collective_rpc("arborl_take", args=(path, table))
            if adapter is not None:
                from vllm.lora.request import LoRARequest

                await engine.add_lora(LoRARequest(ADAPTER, 1, adapter, load_inplace=True))
                self.lora = LoRARequest(ADAPTER, 1, adapter)
            for _ in range(200):  # refused for as long as a step is under way
                if await engine.reset_prefix_cache(reset_running_requests=True):
                    break
                await asyncio.sleep(0.01)
            else:
                raise RuntimeError("the prefix cache could not be emptied")
            await engine.update_weight_version(version)
        finally:
            await engine.resume_generation()
        return {"version": await engine.get_weight_version()}

    async def sleep(self, number: int) -> dict[str, Any]:
        await self.engine.sleep(level=1)
        return {}

    async def wake(self, number: int) -> dict[str, Any]:
        await self.engine.wake_up()
        return {}


def _sampled(output: Any) -> dict[str, Any]:
    tokens = list(output.token_ids)
    scores = output.logprobs or [{}] * len(tokens)
    return {"tokens": tokens, "logprobs": [each[token].logprob for token, each in zip(tokens, scores, strict=True)]}


async def main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    side = Side(reader, writer)
    try:
        await side.serve()
    finally:
        if side.engine is not None:
            side.engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
    os._exit(0)  # threads of the library's would keep it
