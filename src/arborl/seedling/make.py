"""Train seedling from scratch: `python -m arborl.seedling.make [--out DIR] [--transcripts N] [--epochs N]`.

Writes transcripts of scripted players, trains a tokenizer on a part of them and a small Llama on the players' messages,
and saves model, tokenizer, chat template and a record of the run in Hugging Face format.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from arborl.chat.chat_template import Template
from arborl.models.model_files import SEEDLING_DIR
from arborl.seedling.transcript_base import PIECE, SPECIAL_STRINGS
from arborl.seedling.transcript_rows import WRITERS, write
from arborl.seeds import generator

VOCABULARY = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT = 4096
ROW = 1024
"""Tokens of a training row, which holds several transcripts."""
OTHER_WEIGHT = 0.1
"""Loss weight of tokens that the assistant did not write."""
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
ARCHITECTURE = {
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
}


def chat_template() -> Template:
    return Template(CHAT_TEMPLATE.read_text(), bos_token=None, eos_token="<|im_end|>")


def texts(seed: int, count: int) -> Iterator[tuple[str, int]]:
    """Rendered transcripts of the first `count` draws, each with its number of assistant messages without loss."""
    rng, template = generator(seed, "transcripts"), chat_template()
    for _ in range(count):
        for transcript in write(rng):
            num_skipped = sum(message.role == "assistant" for message in transcript.messages[: transcript.train_from])
            yield template.render(transcript.messages, transcript.tools, generation=False), num_skipped


def train_tokenizer(seed: int, count: int) -> Tokenizer:
    """Byte-level BPE. Digits, capitals and signs are never merged, so a cell of a grid is always one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_STRINGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for text, _ in texts(seed, count)), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in SPECIAL_STRINGS])
    return tokenizer


def encode_share(job: tuple[str, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training rows of one worker process: token ids, mask of the assistant's tokens, positions."""
    path, seed, count = job
    tokenizer = Tokenizer.from_file(path)
    rows: list[tuple[list[int], list[bool], list[int]]] = [([], [], [])]
    for text, num_skipped in texts(seed, count):
        ids = tokenizer.encode(text).ids[:ROW]  # a long game is cut
        if len(rows[-1][0]) + len(ids) > ROW:
            rows.append(([], [], []))
        rows[-1][0].extend(ids)
        rows[-1][1].extend(assistant_mask(tokenizer, ids, num_skipped))
        rows[-1][2].extend(range(len(ids)))
    pad = tokenizer.encode("<|endoftext|>").ids[0]
    for ids, mask, positions in rows:
        missing = ROW - len(ids)
        ids.extend([pad] * missing)
        mask.extend([False] * missing)
        positions.extend(range(missing))
    return tuple(np.array(column, dtype=np.uint16) for column in zip(*rows, strict=True))  # type: ignore[return-value]


def assistant_mask(tokenizer: Tokenizer, ids: list[int], num_skipped: int = 0) -> list[bool]:
    """True for tokens of assistant messages, end of turn included, after the first `num_skipped` messages."""
    header = tokenizer.encode("<|im_start|>assistant\n").ids
    start, end = header[0], tokenizer.encode("<|im_end|>").ids[0]
    mask = [False] * len(ids)
    for i in range(len(ids) - len(header)):
        if ids[i] == start and ids[i : i + len(header)] == header:
            num_skipped -= 1
            if num_skipped >= 0:
                continue
            stop = ids.index(end, i) if end in ids[i:] else len(ids) - 1
            mask[i + len(header) : stop + 1] = [True] * (stop + 1 - i - len(header))
    return mask


def encode_all(tokenizer_path: Path, seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All transcripts as rows of `ROW` tokens, written by one process per core."""
    workers = os.cpu_count() or 1
    share = -(-count // (workers * 4))
    jobs = [(str(tokenizer_path), seed + 1 + i, share) for i in range(workers * 4)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        parts = pool.map(encode_share, jobs, chunksize=1)
    ids, mask, positions = (
        torch.from_numpy(np.concatenate(column).astype(np.int32)) for column in zip(*parts, strict=True)
    )
    return ids, mask.bool(), positions


def train(
    model: LlamaForCausalLM, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], epochs: int, batch: int, lr: float
) -> float:
    """Supervised training with a cosine schedule and a short warm-up. Returns the final loss on assistant tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    ids, mask, positions = (column.to(device) for column in rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    steps = epochs * (len(ids) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 100, 0.02 + 0.98 * (1 + math.cos(math.pi * s / steps)) / 2)
    )

    def token_losses(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        # restarting positions separate the transcripts of a row; this requires use_cache=False
        logits = model(tokens, position_ids=places, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")

    if device == "cuda":
        token_losses = torch.compile(token_losses)
    recent: list[float] = []
    for step in range(steps):
        drawn = torch.randint(len(ids), (batch,), device=device)
        tokens, target = ids[drawn].long(), mask[drawn][:, 1:]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses = token_losses(tokens, positions[drawn].long())
        weight = target + OTHER_WEIGHT * (~target & (tokens[:, 1:] != model.config.pad_token_id))
        ((losses * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == steps - 1:
            recent.append(float((losses.detach() * target).sum() / target.sum()))
            print(f"step {step:6d}/{steps}  loss on assistant tokens {recent[-1]:.4f}", flush=True)
    return recent[-1]


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path, record: dict[str, object]) -> None:
    """Write a Hugging Face folder; weights are stored in bfloat16."""
    model.to("cpu", torch.bfloat16).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train seedling from scratch.")
    parser.add_argument("--out", type=Path, default=SEEDLING_DIR)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use; default: train one")
    parser.add_argument("--transcripts", type=int, default=600_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128, help="rows of 1024 tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    began = time.perf_counter()
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        tokenizer = train_tokenizer(args.seed, min(args.transcripts, 20_000))
    tokenizer.save(str(args.out / "tokenizer.json"))
    rows = encode_all(args.out / "tokenizer.json", args.seed, args.transcripts)
    written = time.perf_counter() - began
    print(f"{args.transcripts:,} transcripts, {rows[0].numel():,} tokens, {written:.0f} s", flush=True)

    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        **ARCHITECTURE,
    )
    model = LlamaForCausalLM(config)
    began = time.perf_counter()
    loss = train(model, rows, args.epochs, args.batch, args.lr)
    record = {
        "command": "python -m arborl.seedling.make " + " ".join(sys.argv[1:] if argv is None else argv),
        "transcripts": args.transcripts,
        "shares": {name: share for name, (share, _) in WRITERS.items()},
        "tokens": rows[0].numel(),
        "epochs": args.epochs,
        "parameters": model.num_parameters(),
        "write_seconds": round(written),
        "train_seconds": round(time.perf_counter() - began),
        "final_loss": round(loss, 4),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": torch.__version__, "tokenizers": tokenizers.__version__},
    }
    save(model, tokenizer, args.out, record)
    print(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
