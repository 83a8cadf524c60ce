"""Servers as tests need them: the wire of vLLM, SGLang or a chat server, and an engine with weights of its own behind.

A killed one refuses connections; a restarted one has the weights it began with, at the same address.
"""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import threading
import time
from pathlib import Path

import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from arborl.engines.local import LocalEngine
from arborl.types import Sampling


class FakeServer:
    """One server in a thread.

    Args:
        model: what it serves; copied.
        kind: `vllm`, `vllm completions` (no token endpoints), `vllm closed` (takes no weights), `sglang`, `chat`.
        renderer: whose tokenizer it has.
        deaf: it acknowledges weights and does not take them.
        ends: end tokens of the model, which SGLang stops at besides those of a request.
    """

    def __init__(self, model, kind="vllm", renderer=None, context=256, deaf=False, name="policy", ends=()):
        self.start_model, self.kind, self.renderer, self.context = model, kind, renderer, context
        self.deaf, self.start_name, self.ends = deaf, name, ends
        self.is_incremental = self.is_starting = False
        """Of SGLang: streamed events have new tokens only; it is not yet ready."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log: list[tuple[str, str]] = []
        """Paths of requests, each with the label of the weights at that time."""
        self.sessions: list[list[int]] = []
        self.gate: threading.Event | None = None
        """While it is there and not set, requests for tokens wait."""
        self.fails = 0
        """So many requests for tokens are answered with 503."""
        self.start()

    def start(self):
        self.model = copy.deepcopy(self.start_model)
        self.engine = LocalEngine(self.model, max_context=self.context, max_requests=8, kv_tokens=8 * self.context)
        self.label, self.name = "default", self.start_name
        config = uvicorn.Config(self.app(), port=self.port, log_level="critical", timeout_graceful_shutdown=0)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def kill(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

    restart = start

    def labels_of(self, path):
        return [label for what, label in self.log if what == path]

    def app(self):
        routes = [Route("/v1/models", self.models)]
        if self.kind.startswith("vllm"):
            routes += [
                Route("/version", self.version),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
            ]
        if self.kind == "vllm":
            routes += [Route("/inference/v1/generate", self.generate, methods=["POST"])]
        if self.kind in ("vllm", "vllm completions"):
            routes += [Route("/weight_info", self.weight_info)]
            for path in ("/pause", "/resume", "/reset_prefix_cache", "/collective_rpc", "/update_weight_version"):
                routes.append(Route(path, getattr(self, path[1:]), methods=["POST"]))
        if self.kind == "sglang":
            routes += [
                Route("/model_info", self.model_info),
                Route("/health", self.health),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/generate", self.sglang, methods=["POST"]),
                Route("/update_weights_from_disk", self.from_disk, methods=["POST"]),
            ]
        if self.kind == "chat":
            routes += [Route("/v1/chat/completions", self.chat, methods=["POST"])]
        return Starlette(routes=routes)

    async def models(self, request):
        return JSONResponse({"data": [{"id": self.name, "max_model_len": self.context}]})

    async def version(self, request):
        return JSONResponse({"version": "0.32.0"})

    async def weight_info(self, request):
        return JSONResponse({"weight_version": self.label})

    async def model_info(self, request):
        about = {"model_path": self.name, "is_generation": True, "preferred_sampling_params": None}
        return JSONResponse(about | ({} if self.label is None else {"weight_version": self.label}))

    async def health(self, request):
        return Response(status_code=503 if self.is_starting else 200)

    async def tokenize(self, request):
        body = await request.json()
        return JSONResponse({"tokens": list(self.renderer.tokenizer.encode(body["prompt"])) if self.renderer else []})

    async def pause(self, request):
        self.log.append(("/pause", self.label))
        return JSONResponse({})

    async def resume(self, request):
        self.log.append(("/resume", self.label))
        return JSONResponse({})

    async def reset_prefix_cache(self, request):
        return JSONResponse({"success": True})

    async def collective_rpc(self, request):
        body = await request.json()
        if body["method"] != "reload_weights":
            return JSONResponse({"error": {"message": "no such method"}}, 500)
        return await self.take(body["kwargs"]["weights_path"])

    async def take(self, folder):
        self.log.append(("update", self.label))
        weights = load_file(Path(folder) / "model.safetensors")
        if not self.deaf:
            own = self.model.state_dict()
            if any(own[name].shape != tensor.shape for name, tensor in weights.items()):
                return JSONResponse({"error": {"message": "size mismatch"}}, 500)
            await self.engine.load({name: tensor.to(own[name].dtype) for name, tensor in weights.items()}, 0)
        return JSONResponse({"results": [None]})

    async def update_weight_version(self, request):
        self.label = (await request.json())["new_version"]
        return JSONResponse({})

    async def from_disk(self, request):
        body = await request.json()
        taken = await self.take(body["model_path"])
        if taken.status_code != 200:
            return JSONResponse({"success": False, "message": "size mismatch", "num_paused_requests": 0}, 400)
        self.name, self.label = body["model_path"], body["weight_version"]  # SGLang renames its model
        return JSONResponse({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def sampled(self, path, prompt, how):
        self.log.append((path, self.label))
        self.sessions.append(prompt)
        if self.fails:
            self.fails -= 1
            return None
        while self.gate is not None and not self.gate.is_set():
            await asyncio.sleep(0.005)
        names = ("max_tokens", "temperature", "seed", "top_p", "min_p")
        sampling = Sampling(
            **{name: how[name] for name in names}, top_k=max(how["top_k"], 0), stop=tuple(how["stop_token_ids"])
        )
        return await self.engine.generate(prompt, sampling, session="")

    async def generate(self, request):
        body = await request.json()
        if "token_ids" not in body:
            return JSONResponse({"error": {"message": "token_ids: field required"}}, 400)
        done = await self.sampled("tokens", body["token_ids"], body["sampling_params"])
        if done is None:
            return Response("try later", 503)

        def choice(begin, end, last):
            content = [{"logprob": logprob} for logprob in done.logprobs[begin:end]]
            spans = [{"version": self.label, "start": 0, "end": end}] if last else None
            return {
                "token_ids": done.tokens[begin:end], "logprobs": {"content": content}, "weight_versions": spans,
                "finish_reason": done.finish.value if last else None,
            }  # fmt: skip

        return self.reply(choice, len(done.tokens), body["stream"])

    async def completions(self, request):
        body = await request.json()
        done = await self.sampled("tokens", body["prompt"], body)
        if done is None:
            return Response("try later", 503)

        def choice(begin, end, last):
            scores = {"token_logprobs": done.logprobs[begin:end]}
            finish = done.finish.value if last else None
            return {"token_ids": done.tokens[begin:end], "logprobs": scores, "finish_reason": finish}

        return self.reply(choice, len(done.tokens), body["stream"])

    def reply(self, choice, count, stream):
        if not stream:
            return JSONResponse({"choices": [choice(0, count, True)]})
        events = (json.dumps({"choices": [choice(i, i + 1, i + 1 == count)]}) for i in range(count))
        return StreamingResponse((f"data: {event}\n\n" for event in events), media_type="text/event-stream")

    async def sglang(self, request):
        """`/generate` as SGLang answers it; with `ignore_eos` no token stops, not even those of the request."""
        body = await request.json()
        if "input_ids" not in body:
            return JSONResponse({"error": {"message": "Either text or input_ids should be provided."}}, 400)
        given = body["sampling_params"]
        stops = [] if given.get("ignore_eos") else [*given["stop_token_ids"], *self.ends]
        how = {**given, "max_tokens": given["max_new_tokens"], "seed": given["sampling_seed"], "stop_token_ids": stops}
        done = await self.sampled("tokens", body["input_ids"], how)
        if done is None:
            return JSONResponse({"error": {"message": "The server is overloaded."}}, 503)
        pairs = [[logprob, token, None] for token, logprob in zip(done.tokens, done.logprobs, strict=True)]

        def event(begin, end):
            reason = {"type": "stop", "matched": done.tokens[-1]}
            reason = reason if done.finish.value == "stop" else {"type": "length", "length": len(pairs)}
            meta = {
                "id": "e5f3", "finish_reason": reason if end == len(pairs) else None, "prompt_tokens": 3,
                "weight_version": self.label, "input_token_logprobs": [], "output_token_logprobs": pairs[begin:end],
                "output_token_logprobs_length": end, "completion_tokens": end, "cached_tokens": 0, "e2e_latency": 0.01,
            }  # fmt: skip
            return {"text": "…", "output_ids": list(done.tokens[begin:end]), "meta_info": meta}

        if not body["stream"]:
            return JSONResponse(event(0, len(pairs)))
        events = (event(end - 1 if self.is_incremental else 0, end) for end in range(1, len(pairs) + 1))
        lines = [*(f"data: {json.dumps(one)}\n\n" for one in events), "data: [DONE]\n\n"]
        return StreamingResponse(iter(lines), media_type="text/event-stream")

    async def chat(self, request):
        body = await request.json()
        self.log.append(("chat", json.dumps(body)))
        message = {"role": "assistant", "content": "<answer>Right</answer>"}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}]})
