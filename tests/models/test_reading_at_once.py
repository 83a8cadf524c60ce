"""Models may be read in several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from arborl.models.model_loading import load_model, resolve


def test_models_that_are_read_at_once_are_whole_and_so_are_later_ones():
    folder = resolve("seedling")
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(lambda _: load_model(folder, device="cpu"), range(12)))
    for model in (*models, load_model(folder, device="cpu")):
        assert model.lm_head.weight is model.get_input_embeddings().weight
