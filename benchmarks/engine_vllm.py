"""The vLLM side of `engine.py --beside vllm`: the same requests on vLLM's own `AsyncLLM`.

Runs in the interpreter that has vLLM and does not import arborl. Reads one JSON object from standard input (`VllmWork`
of engine.py) and writes one to the file descriptor of its argument: the version of vLLM, and the seconds of each run.
All conversations of a run are concurrent; each sends its next request when a reply is complete. Prefix caching is on,
and the cache is empty at the start of a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


async def converse(engine: Any, run: dict[str, Any], number: int, name: str) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    context = list(run["prompts"][number])
    for turn, length in enumerate(run["sampled"][number]):
        params = SamplingParams(
            temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async for output in engine.generate({"prompt_token_ids": context}, params, f"{name}-{number}-{turn}"):
            reply = list(output.outputs[0].token_ids)
        if len(reply) != length:
            raise RuntimeError(f"vLLM sampled {len(reply)} of {length} tokens")
        context += [*reply, *run["observed"][number][turn]]


async def measure(work: dict[str, Any]) -> dict[str, Any]:
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**work["args"]))
    seconds = []
    for name, run in enumerate(work["runs"]):
        await engine.reset_prefix_cache()
        began = time.perf_counter()
        await asyncio.gather(*(converse(engine, run, number, str(name)) for number in range(len(run["prompts"]))))
        seconds.append(time.perf_counter() - began)
    engine.shutdown()
    return {"vllm": __version__, "seconds": seconds}


if __name__ == "__main__":
    result = asyncio.run(measure(json.load(sys.stdin)))
    with os.fdopen(int(sys.argv[1]), "w") as output:
        json.dump(result, output)
