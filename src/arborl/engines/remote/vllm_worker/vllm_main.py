"""The process of `engine=vllm`: serves vLLM's `AsyncLLM` through a socket. `vllm_process.py` is the other side.

Started as `python vllm_main.py FD` by an interpreter that has vLLM and need not have arborl. A message is its length in
four bytes and JSON. The first request makes the engine.
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


class VllmWorker:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.engine: Any = None
        self.lora: Any = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        while True:
            try:
                size = struct.unpack("!I", await self.reader.readexactly(4))[0]
                request = json.loads(await self.reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return  # the other side is gone
            task = asyncio.create_task(self.answer(request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def answer(self, request: dict[str, Any]) -> None:
        number = request.pop("id")
        try:
            response = await getattr(self, request.pop("method"))(number, **request)
        except Exception as error:
            response = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:2000]}"}
            if self.engine is not None and self.engine.errored:
                response["dead"] = True
        if response is not None:
            self.send({"id": number, "done": True, **response})

    def send(self, message: dict[str, Any]) -> None:
        packed = json.dumps(message).encode()
        with contextlib.suppress(ConnectionError):
            self.writer.write(struct.pack("!I", len(packed)) + packed)

    # ------------------------------------------------------------------------------------------ methods of requests

    async def start(self, number: int, args: dict[str, Any]) -> dict[str, Any]:
        from vllm import __version__
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        return {"vllm": __version__}

    async def reads_gpu(self, number: int, gpu: str, handles: list[list[Any]], values: list[float]) -> dict[str, Any]:
        """Whether all processes of the engine can read tensors that the learner has on its GPU."""
        return {"reads": all(await self.engine.collective_rpc("arborl_reads_gpu", args=(gpu, handles, values)))}

    async def generate(self, number: int, prompt: list[int], sampling: dict[str, Any], stream: bool) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**sampling, logprobs=0, ignore_eos=True, detokenize=False, output_kind=kind)
        inputs = {"prompt_token_ids": prompt}
        last = None
        async for output in self.engine.generate(inputs, params, str(number), lora_request=self.lora):
            last = output.outputs[0]
            if stream and output.finished is False:
                self.send({"id": number, **_sampled(last)})
        assert last is not None
        spans = [[span.version, span.start, span.end] for span in last.weight_versions or ()]
        return {**_sampled(last), "finish": last.finish_reason, "spans": spans}

    async def abort(self, number: int, which: int) -> None:
        """End request `which`; its response comes at once, with the tokens sampled so far."""
        await self.engine.abort(str(which))

    async def load(
        self,
        number: int,
        version: str,
        path: str | None = None,
        table: list[list[Any]] | None = None,
        gpu: str | None = None,
        handles: list[list[Any]] | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Load weights. Requests pause, keep their tokens and continue; prefixes are computed again."""
        engine = self.engine
        await engine.pause_generation(mode="keep", clear_cache=False)
        try:
            if path is not None:
                await engine.collective_rpc("arborl_load_shared", args=(path, table))
            if handles is not None:
                await engine.collective_rpc("arborl_load_handles", args=(gpu, handles))
            if adapter is not None:
                from vllm.lora.request import LoRARequest

                await engine.add_lora(LoRARequest(ADAPTER, 1, adapter, load_inplace=True))
                self.lora = LoRARequest(ADAPTER, 1, adapter)
            for _ in range(200):  # refused while a step runs
                if await engine.reset_prefix_cache(reset_running_requests=True):
                    break
                await asyncio.sleep(0.01)
            else:
                raise RuntimeError("the prefix cache could not be cleared")
            await engine.update_weight_version(version)
        finally:
            await engine.resume_generation()
        return {"version": await engine.get_weight_version()}

    async def sleep(self, number: int) -> dict[str, Any]:
        await self.engine.sleep(level=1)
        return {}

    async def wake_up(self, number: int) -> dict[str, Any]:
        await self.engine.wake_up()
        return {}


def _sampled(output: Any) -> dict[str, Any]:
    tokens = list(output.token_ids)
    logprobs = output.logprobs or [{}] * len(tokens)
    return {"tokens": tokens, "logprobs": [each[token].logprob for token, each in zip(tokens, logprobs, strict=True)]}


async def main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    worker = VllmWorker(reader, writer)
    try:
        await worker.serve()
    finally:
        if worker.engine is not None:
            worker.engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
    os._exit(0)  # library threads would keep the process alive
