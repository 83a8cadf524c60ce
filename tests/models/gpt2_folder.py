"""A folder shaped as GPT-2's own: byte-level tokens, one control token that only `config.json` names, no chat template.

Its weights are random, or, after a short warm-up on transcripts of FrozenLake, those of a model that knows the format
and plays badly, so that there is something to learn.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

from arborl.chat import Renderer
from arborl.envs.games.frozen_lake import FrozenLake, best_moves
from arborl.seedling.game_transcripts import play_game
from arborl.seedling.transcript_base import PIECE, Transcript, pick
from arborl.seeds import generator
from arborl.types import Message

END, VOCABULARY, RATE = "<|endoftext|>", 600, 1e-3


def lake(rng, size: int, skilled: float = 0.4) -> Transcript:
    """A game in which every move is a good one that often, and else any."""
    env = FrozenLake(size=size, max_steps=3)

    def say() -> str:
        good = best_moves(env.grid, env.player)
        moves = good if good and rng.random() < skilled else ("Up", "Down", "Left", "Right")
        return f"<answer>{pick(rng, moves)}</answer>"

    return play_game(env, say, rng)


def tokenizer_of(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )  # fmt: skip
    return made


def make(folder: Path, steps: int = 0, size: int = 2, width: int = 64, layers: int = 2, seed: int = 0) -> Path:
    """Write the folder; with `steps`, after so many of imitation of 32 games each."""
    torch.manual_seed(seed)
    rng = generator(seed, "games")
    texts = [message.content for _ in range(40) for message in lake(rng, size).messages]
    tokenizer_of([*texts, "System:\n\nUser:\n\nAssistant:\n"]).save(str(folder / "tokenizer.json"))
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=4, n_positions=1024, bos_token_id=0, eos_token_id=0,
        initializer_range=0.1,  # so small a model attends to nothing in particular from GPT-2's own 0.02
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    if steps:
        warm_up(model, Renderer.from_folder(folder), steps, size, rng)
        model.save_pretrained(folder)
    return folder


def warm_up(model: GPT2LMHeadModel, renderer: Renderer, steps: int, size: int, rng) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(steps):
        rows = [example(renderer, lake(rng, size)) for _ in range(32)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in rows])
        own = torch.tensor([[*own, *[0.0] * (longest - len(own))] for _, own in rows])
        logits = model(ids, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (losses * own[:, 1:]).sum() / own.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20)
        optimizer.step()


def example(renderer: Renderer, transcript: Transcript, longest: int = 512) -> tuple[list[int], list[float]]:
    """Ids of a game, and the weight of each: 1 for replies of the player and their end token, else 0."""
    ids: list[int] = []
    own: list[float] = []
    shown: list[Message] = []
    for message in transcript.messages:
        if message.role == "assistant":
            prompt = renderer.encode(renderer.render(shown))
            reply = [*renderer.encode(renderer.escape_reply(message.content)), renderer.stop[0]]
            own += [0.0] * (len(prompt) - len(ids)) + [1.0] * len(reply)
            ids = [*prompt, *reply]
        shown.append(message)
    return ids[:longest], own[:longest]
