"""Make TextWorld games in several processes: python recipes/smollm2-textworld/make_games.py --processes 8

Writes FOLDER/train/NUMBER.z8 and FOLDER/held_out/NUMBER.z8, each with the .json file that TextWorld reads beside it.
Games that are there already are kept, so that a stopped command can be started again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

MAX_DRAWS = 100
"""A world may have no quest of the requested length: then the next seed is taken."""
SEEDS = {"train": 0, "held_out": 1 << 30}
"""The first seed of each split; a game takes MAX_DRAWS seeds at most."""


@dataclass(frozen=True)
class Game:
    """One game to make."""

    file: Path
    seed: int
    rooms: int
    objects: int
    quest_length: int


def make_game(game: Game) -> Path:
    """Compile the game outside the folder, then move it there: the folder never has an unfinished game."""
    import textworld
    from textworld.generator.chaining import QuestGenerationError

    folder = game.file.parents[1]
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        for seed in range(game.seed, game.seed + MAX_DRAWS):
            options = textworld.GameOptions()
            options.seeds, options.nb_rooms, options.nb_objects = seed, game.rooms, game.objects
            options.quest_length, options.path = game.quest_length, str(Path(scratch, game.file.name))
            try:
                made = Path(textworld.make(options)[0])
            except QuestGenerationError:
                continue
            os.replace(made.with_suffix(".json"), game.file.with_suffix(".json"))
            os.replace(made, game.file)
            return game.file
    raise ValueError(f"no game in {MAX_DRAWS} draws: give more --objects, or a shorter --quest-length")


def missing_games(args: argparse.Namespace) -> list[Game]:
    counts = {"train": args.train, "held_out": args.held_out}
    games = [
        Game(args.folder.resolve() / split / f"{number}.z8", SEEDS[split] + number * MAX_DRAWS,
             args.rooms, args.objects, args.quest_length)
        for split, count in counts.items() for number in range(count)
    ]  # fmt: skip
    return [game for game in games if not game.file.exists()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--train", type=int, default=300, help="number of training games")
    parser.add_argument("--held-out", type=int, default=100, help="number of held-out games")
    parser.add_argument("--rooms", type=int, default=4)
    parser.add_argument("--objects", type=int, default=6)
    parser.add_argument("--quest-length", type=int, default=4, help="commands of the shortest solution")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if find_spec("textworld") is None:
        parser.error("TextWorld is missing. Write: pip install 'arborl[textworld]'")
    games = missing_games(args)
    for split in SEEDS:
        (args.folder / split).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end, too
    with ProcessPoolExecutor(args.processes) as pool:
        made = [pool.submit(make_game, game) for game in games]
        try:
            for number, one in enumerate(as_completed(made), start=1):
                one.result()
                sys.stderr.write(f"\r{number} of {len(games)} games")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    sys.stderr.write(f"\r{args.folder}: made {len(games)} games\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
