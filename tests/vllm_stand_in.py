"""A stand-in for the package vLLM, for tests of the process of `engine=vllm`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from arborl.engines.remote.weight_sync import base_weights

STAND_IN = {
    "__init__.py": """
        __version__ = "0.0"

        class SamplingParams:
            def __init__(self, **how):
                self.__dict__.update(how)
    """,
    "sampling_params.py": """
        class RequestOutputKind:
            DELTA, FINAL_ONLY = 1, 2
    """,
    "engine/arg_utils.py": """
        class AsyncEngineArgs:
            def __init__(self, model, dtype, logprobs_mode, worker_extension_cls, **more):
                assert logprobs_mode == "processed_logprobs"
                if more.get("max_num_seqs") == 13:
                    raise ValueError("Model architectures ['SeedlingForCausalLM'] are not supported for now.")
    """,
    "v1/engine/async_llm.py": """
        import asyncio, json, os, sys
        from multiprocessing.shared_memory import SharedMemory
        from arborl_vllm import Extension

        class Thing:
            def __init__(self, **what):
                self.__dict__.update(what)

        class Worker(Extension):
            def _arborl_reload(self, weights_iterator):
                sums = {name: [tensor.device.type, float(tensor.double().sum())] for name, tensor in weights_iterator}
                with open(os.environ["STAND_IN_WEIGHTS"], "w") as file:
                    json.dump(sums, file)

        class AsyncLLM:
            errored = False

            @classmethod
            def from_engine_args(cls, args):
                self = cls()
                self.version, self.aborted, self.worker = "default", set(), Worker()
                self.shared = SharedMemory(f"stand-in-{os.getpid()}", create=True, size=64)
                return self

            async def generate(self, prompt, how, name, lora_request=None):
                if prompt["prompt_token_ids"] == [9]:
                    print("RuntimeError: out of everything", flush=True)
                    sys.stdout.flush()
                    os._exit(3)
                tokens, count = [], how.max_tokens
                while len(tokens) < count and name not in self.aborted:
                    tokens.append(5)
                    await asyncio.sleep(0.01 if count > 50 else 0)
                scores = [{5: Thing(logprob=-0.5)} for _ in tokens]
                why = "abort" if name in self.aborted else "length"
                spans = [Thing(version=self.version, start=0, end=len(tokens))]
                output = Thing(token_ids=tokens, logprobs=scores, finish_reason=why, weight_versions=spans)
                yield Thing(outputs=[output], finished=True)

            async def abort(self, name):
                self.aborted.add(name)

            async def pause_generation(self, **how): pass
            async def resume_generation(self): pass
            async def collective_rpc(self, name, args): return [getattr(self.worker, name)(*args)]
            async def reset_prefix_cache(self, **how): return True

            async def update_weight_version(self, version):
                self.version = version

            async def get_weight_version(self):
                return self.version

            def shutdown(self): pass
    """,
}


@contextmanager
def stand_in_for_vllm(root: Path) -> Iterator[Path]:
    """Yields the file in which the stand-in writes name, device and sum of every tensor that it loads."""
    for name, text in STAND_IN.items():
        file = root / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root))
        patch.setenv("STAND_IN_WEIGHTS", str(root / "weights.json"))
        yield root / "weights.json"


def check_weights(file: Path, model, device: str):
    """The stand-in has loaded the weights of this model, from this device."""
    loaded, expected = json.loads(file.read_text()), base_weights(model.state_dict())
    assert loaded.keys() == expected.keys()
    for name, (where, total) in loaded.items():
        assert where == device
        assert total == pytest.approx(float(expected[name].double().sum()), rel=1e-9, abs=1e-9)
