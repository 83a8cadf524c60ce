"""Sending the weights of a learner on a GPU to an engine in another process on the same GPU.

    python benchmarks/weight_transfer.py --model 0.5b
    python benchmarks/weight_transfer.py --model 4b

The receiver stands in for vLLM: it imports the functions of vLLM's worker (`vllm_worker/arborl_vllm.py`) and copies
every tensor into tensors of its own on the GPU. `shared` sends the weights through shared host memory, `ipc` sends CUDA
IPC handles. Best of `--repeats` after one update of each kind; the sums of all tensors are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmark_models import SHAPES, random_model

import arborl.engines.remote
from arborl.engines.remote.vllm_engine import SharedWeights
from arborl.engines.remote.weight_sync import base_weights, cuda_handles

RECEIVER = """
import json, sys, time
import torch
from arborl_vllm import open_handles, shared_tensors

copies = {}
for line in sys.stdin:
    request = json.loads(line)
    began = time.perf_counter()
    kind = request.pop("kind")
    for name, tensor in open_handles(**request) if kind == "ipc" else shared_tensors(**request):
        if name not in copies:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
        copies[name].copy_(tensor)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    total = sum(float(one.double().sum()) for one in copies.values())
    print(json.dumps({"seconds": seconds, "total": total}), flush=True)
"""


class Receiver:
    def __init__(self) -> None:
        folder = Path(arborl.engines.remote.__file__ or "").parent / "vllm_worker"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{RECEIVER}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def receive(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def send(kind: str, receiver: Receiver, tensors: dict[str, torch.Tensor], memory: SharedWeights) -> tuple[float, float]:
    """Seconds from the first copy to the answer without the receiver's checksum, and the checksum."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    if kind == "ipc":
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        request = {"kind": kind, "uuid": uuid, "handles": cuda_handles(tensors)}
    else:
        request = {"kind": kind, "table": memory.write(tensors), "path": str(memory.path)}
    prepared = time.perf_counter() - began
    answer = receiver.receive(request)
    return prepared + answer["seconds"], answer["total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    tensors = base_weights(random_model(args.model, "cuda", torch.bfloat16).state_dict())
    size = sum(one.nbytes for one in tensors.values())
    receiver, memory, row = Receiver(), SharedWeights(), {"model": args.model, "gb": size / 1e9}
    expected = sum(float(one.double().sum()) for one in tensors.values())
    for kind in ("shared", "ipc"):
        times = []
        for _ in range(args.repeats + 1):
            seconds, total = send(kind, receiver, tensors, memory)
            if abs(total - expected) > 1e-6 * max(1.0, abs(expected)):
                raise SystemExit(f"{kind}: the receiver has other weights: {total} instead of {expected}")
            times.append(seconds)
        row |= {f"{kind}_first_s": times[0], f"{kind}_s": min(times[1:]), f"{kind}_gb_s": size / 1e9 / min(times[1:])}
    row |= {"ratio": row["shared_s"] / row["ipc_s"]}
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    print(json.dumps(rounded | about))


if __name__ == "__main__":
    main()
