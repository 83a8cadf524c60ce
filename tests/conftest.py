"""Small real things shared by tests: tiny models, a scripted episode maker, the embedded model."""

from __future__ import annotations

import asyncio
import base64
import gc
import inspect
import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell; tests interrupt processes
    signal.signal(signal.SIGINT, signal.default_int_handler)

from importlib.util import find_spec

if find_spec("triton") is not None:  # without a GPU its kernels are interpreted, which must be known before its import
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

DOT = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAG7buVgAAAABJRU5ErkJggg==")
"""A picture of one point."""
PAINTED = (
    "tests/view/",
    "tests/browser/",
    "tests/benchmarks/test_compare_algorithms.py::test_tables_and_figure",
    "tests/tune/test_study.py::test_the_settings_as_they_are_come_first_and_are_compared_with",
)
"""Tests that are about pictures."""
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("arbor", max_examples=40, deadline=None, derandomize=True, suppress_health_check=QUIET)
settings.register_profile("thorough", max_examples=400, deadline=None, suppress_health_check=QUIET)
settings.load_profile("arbor")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Tests may be coroutines; each has its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or pyfuncitem.get_closest_marker("anyio"):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True, scope="session")
def no_files_at_home(tmp_path_factory):
    """Runs with parts of their own are signed with a key of the user's; that of tests is a passing one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="module")
def memory_is_given_back():
    """A finished run is a circle of objects that Python finds late: two hundred runs would be gigabytes."""
    before = resident()
    yield
    if resident() > before + 300_000_000:
        gc.collect()


def resident() -> int:
    """Bytes of memory this process holds; 0 where the system does not say so in this way."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0


@pytest.fixture(autouse=True, scope="session")
def pictures_are_not_painted():
    """Every run ends with pictures, and painting them takes longer than most of these runs. They are drawn all the
    same, and painted where a test is about pictures, and in other processes."""
    from matplotlib.figure import Figure

    paint = Figure.savefig

    def savefig(self, out, **more):
        if os.environ["PYTEST_CURRENT_TEST"].startswith(PAINTED):
            return paint(self, out, **more)
        return out.write(DOT) if hasattr(out, "write") else Path(out).write_bytes(DOT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield


@pytest.fixture(scope="session")
def tiny_llama():
    """Two layers, grouped heads, float64: for equalities to the last digits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from arborl.models.attention import ATTENTION_NAME

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).double().eval()
    for parent in [*model.model.layers, model.model]:  # the library's norm rounds to float32 on its way
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, torch.nn.RMSNorm(32, eps=child.variance_epsilon, dtype=torch.float64))
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.fixture(scope="session")
def seedling():
    """The embedded model and its renderer."""
    from arborl.chat import Renderer
    from arborl.models.model_loading import load_model, resolve

    folder = resolve("seedling")
    return load_model(folder, device="cpu"), Renderer.from_folder(folder)


@pytest.fixture(scope="session")
def vllm_python():
    """The interpreter of an environment that has vLLM."""
    if "ARBORL_VLLM_PYTHON" not in os.environ:
        pytest.skip("needs vLLM, which has an environment of its own: `make test-vllm` makes it and runs this")
    return os.environ["ARBORL_VLLM_PYTHON"]
