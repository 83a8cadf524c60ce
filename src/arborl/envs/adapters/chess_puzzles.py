"""Chess puzzles, with the package `chess` and, for graded rewards, a UCI engine such as Stockfish."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from typing import Any

from arborl.envs.adapters.other_packages import MAX_DRAWS, MissingRequirementError, require_package
from arborl.envs.env import Observation, Step, format_answer, parse_answer, split_of, task_split
from arborl.envs.games.text_game import TextGame, require
from arborl.seeds import generator
from arborl.types import Message, Metrics, Task

RULES = (
    "Solve the chess puzzle: find the best moves for your side. Each turn, answer with one move, as "
    "<answer>e2e4</answer> or <answer>Nf3</answer>; with <answer>moves</answer> to see the legal moves; or with "
    "<answer>board</answer> to see the board again. A legal move that is not the solution ends the puzzle."
)
SOLVED_SHARE, PROGRESS = 0.6, 0.5
"""As AgentFly's dense reward: 0.6 for the solution, of which progress earns half, and the rest for good moves."""
CENTIPAWNS, MATE = 300.0, 10_000
"""Loss of a move whose quality is 0, and the value of a mate."""


@dataclass(eq=False)
class ChessPuzzle(TextGame):
    """A chess puzzle: a position, and the moves of its solution.

    A row has `fen` and `moves` (UCI, separated by spaces), as Lichess's puzzles and AgentFly's rows. Of several moves
    the first is the opponent's, which the environment plays; so are its answers. Without rows, a puzzle is a mate in
    one with king, queen and rook, made from the task's seed. In place of the last move, any mate solves the puzzle.
    """

    tagged = True
    rules, invalid = RULES, "That is no legal move."

    dense: bool = False
    """Whether an unsolved puzzle is rewarded for progress and for the quality of its moves, once, at the end."""
    engine: str = ""
    """A UCI engine that judges moves for `dense`, for example `stockfish`. Without one, moves of the solution have
    quality 1 and others 0."""
    engine_nodes: int = 20_000
    """Positions that the engine searches for a judgement; not a time, so that rewards are reproducible."""
    max_steps: int = 10
    """The episode is truncated after this many messages."""
    format_penalty: float = 0.0
    """Reward of a message that is neither a legal move nor a question."""

    def __post_init__(self) -> None:
        self.check_limits()
        require_package("chess", "chess")
        require(self.engine_nodes >= 1, f"engine_nodes={self.engine_nodes}: give at least 1")
        if self.engine and shutil.which(self.engine) is None:
            raise MissingRequirementError(f"engine={self.engine!r}: no such program. Install it, or leave engine out.")
        self.board: Any = None

    async def reset(self, task: Task, seed: int) -> Observation:
        chess = require_package("chess", "chess")
        fields = {str(name).lower(): value for name, value in task.fields.items()}
        if "fen" in fields:
            self.start, self.solution = str(fields["fen"]), tuple(str(fields.get("moves") or "").split())
        else:
            self.start, move = _mate_in_one(task.seed, task_split(task, "chess"))
            self.solution = (move,)
        try:
            self.board = chess.Board(self.start)
            self._check_solution(chess)
        except ValueError as error:
            raise ValueError(
                f"task {task.id}: fen={self.start!r}, moves={' '.join(self.solution)!r}: {error}"
            ) from error
        self.played = 0
        self.qualities: list[float] = []
        self.solved = self.failed = False
        if len(self.solution) > 1:
            self._push(self.solution[0])
        return self.opening(self.render())

    def _check_solution(self, chess: Any) -> None:
        """ValueError where a move of the solution is not legal."""
        require(bool(self.solution), "the puzzle has no moves")
        board = self.board.copy()
        for text in self.solution:
            move = chess.Move.from_uci(text)
            require(move in board.legal_moves, f"{text} is no legal move there")
            board.push(move)

    def _push(self, move: str) -> str:
        """Play a move of the solution; its name."""
        parsed = self.board.parse_uci(move)
        name = str(self.board.san(parsed))
        self.board.push(parsed)
        self.played += 1
        return name

    async def step(self, action: Message) -> Step:
        found = parse_answer(action.content)
        text = (action.content if found is None else found).strip()
        if text.lower() in ("moves", "board"):
            shown = self.render() if text.lower() == "board" else f"Legal moves: {', '.join(self._legal())}"
            return self._answer(True, False, shown)
        move = self._parse(text)
        if move is None:
            return self._answer(False, False, self.render())
        if self.dense:
            self.qualities.append(self._quality(move))
        is_last = self.played == len(self.solution) - 1
        if move.uci() == self.solution[self.played]:
            lines = [f"Correct: {self._push(move.uci())}"]
            if self.played < len(self.solution):
                lines.append(f"The opponent plays {self._push(self.solution[self.played])}.")
            self.solved = self.played >= len(self.solution)
        else:
            lines = [f"Played: {self.board.san(move)}"]
            self.board.push(move)
            self.solved = is_last and self.board.is_checkmate()
            self.failed = not self.solved
        lines.append("The puzzle is solved." if self.solved else "This is not the solution." if self.failed else "")
        return self._answer(True, True, "\n".join([*filter(None, lines), self.render()]))

    def _parse(self, text: str) -> Any:
        """A legal move in UCI or in algebraic notation; None otherwise."""
        for parse, form in ((self.board.parse_uci, text.lower()), (self.board.parse_san, text)):
            try:
                move = parse(form)
            except ValueError:
                continue
            if move in self.board.legal_moves:
                return move
        return None

    def _answer(self, valid: bool, effective: bool, text: str) -> Step:
        over = self.solved or self.failed
        reward = 0.0 if valid else self.format_penalty
        if over or self.steps + 1 >= self.max_steps:
            reward += self.final_reward()
        return self.next_step(valid, effective, reward, over, text)

    def final_reward(self) -> float:
        """1 for a solved puzzle, else 0; with `dense` as AgentFly's `chess_puzzle_reward`."""
        if not self.dense:
            return float(self.solved)
        own = max(len(self.solution) - 1, 1)
        done = 1.0 if self.solved else PROGRESS * max(self.played - 1, 0) / own
        quality = sum(self.qualities) / len(self.qualities) if self.qualities else 0.0
        return SOLVED_SHARE * done + (1 - SOLVED_SHARE) * quality

    def _quality(self, move: Any) -> float:
        """1 for the best move, less by what another one loses; without an engine, whether it is the solution's."""
        if not self.engine:
            return float(move.uci() == self.solution[self.played])
        best, own = _judge(self.engine, self.board, move, self.engine_nodes)
        return min(max(1.0 - (best - own) / CENTIPAWNS, 0.0), 1.0)

    def _legal(self) -> list[str]:
        return sorted(f"{move.uci()} ({self.board.san(move)})" for move in self.board.legal_moves)

    def metrics(self) -> Metrics:
        done = max(self.played - (len(self.solution) > 1), 0) / max(len(self.solution) - 1, 1)
        return {"success": float(self.solved), "progress": 1.0 if self.solved else min(done, 1.0), **self.shares()}

    def actions(self) -> list[str]:
        return [] if self.board is None else [format_answer(move.uci()) for move in self.board.legal_moves]

    def oracle(self) -> str | None:
        over = self.solved or self.failed
        return None if over else format_answer(self.solution[self.played])

    def render(self) -> str:
        """The board with its FEN, and whose turn it is."""
        side = "White" if self.board.turn else "Black"
        check = ", in check" if self.board.is_check() else ""
        return f"{self.board}\nFEN: {self.board.fen()}\nTurn: {side}{check}"


ENGINES: dict[str, Any] = {}
ENGINE_LOCK = threading.Lock()
"""The engines of this process, by program; one position at a time."""


def _judge(program: str, board: Any, move: Any, nodes: int) -> tuple[float, float]:
    """Centipawns of the best move and of this one, for the side to move. An engine that fails is replaced."""
    module = require_package("chess.engine", "chess")
    with ENGINE_LOCK:
        engine = ENGINES.pop(program, None) or module.SimpleEngine.popen_uci(program)
        try:
            limit = module.Limit(nodes=nodes)
            scores = [
                # `game`: the engine forgets what it knows, so a judgement does not depend on those before
                engine.analyse(board, limit, game=object(), root_moves=moves)["score"].pov(board.turn)
                for moves in (None, [move])
            ]
        except BaseException:
            engine.close()
            raise
        ENGINES[program] = engine
    best, own = (float(score.score(mate_score=MATE)) for score in scores)
    return max(best, own), own


def _mate_in_one(seed: int, split: str) -> tuple[str, str]:
    """A position of king, queen and rook against a king with a mate in one, and the move."""
    chess = require_package("chess", "chess")
    pieces = [chess.Piece.from_symbol(symbol) for symbol in "KQRk"]
    rng = generator(seed, "chess")
    for _ in range(100 * MAX_DRAWS):
        board = chess.Board(None)
        for square, piece in zip(rng.choice(64, size=len(pieces), replace=False), pieces, strict=True):
            board.set_piece_at(int(square), piece)
        if not board.is_valid() or split_of(board.fen()) != split:
            continue
        for move in board.legal_moves:
            board.push(move)
            mates = board.is_checkmate()
            board.pop()
            if mates:
                return board.fen(), move.uci()
    raise ValueError(f"chess: no puzzle of split {split!r} in {100 * MAX_DRAWS} draws")
