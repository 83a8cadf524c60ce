import asyncio
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.envs.games.sokoban import Sokoban
from arborl.envs.games.sokoban_levels import (
    MOVES,
    BoardState,
    Level,
    SolverLimitExceeded,
    apply_move,
    draw_level,
    format_board,
    parse_board,
    read_levels,
    solve,
    split_levels,
)
from arborl.types import Message, Task

seeds = st.integers(0, 2**63 - 1)

BOXOBAN = """; 0
##########
#  #######
#    # ###
# $  #.  #
#      $ #
#  @ .   #
##########
; 1
#####
#@$.#
#####
"""


def plain_search(text):
    """Length of a shortest solution by trying single moves on the text itself; None where there is none."""
    rows = [list(row) for row in text.splitlines()]
    walls = {(r, c) for r, row in enumerate(rows) for c, s in enumerate(row) if s == "#"}
    goals = frozenset((r, c) for r, row in enumerate(rows) for c, s in enumerate(row) if s in "O√S")
    boxes = frozenset((r, c) for r, row in enumerate(rows) for c, s in enumerate(row) if s in "X√")
    player = next((r, c) for r, row in enumerate(rows) for c, s in enumerate(row) if s in "PS")
    far = {(player, boxes): 0}
    queue = deque(far)
    while queue:
        (r, c), now = here = queue.popleft()
        if now == goals:
            return far[here]
        for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            there, beyond = (r + down, c + right), (r + 2 * down, c + 2 * right)
            if there in walls or (there in now and (beyond in walls or beyond in now)):
                continue
            after = (there, (now - {there}) | {beyond} if there in now else now)
            if after not in far:
                far[after] = far[here] + 1
                queue.append(after)
    return None


def played(level, state, moves):
    for name in moves:
        state = apply_move(level, state, name)
    return state


@given(seeds, st.integers(5, 7), st.integers(1, 2), st.sampled_from(["train", "held_out"]))
@settings(max_examples=40)
def test_every_level_is_solvable_and_the_solver_agrees_with_a_search_over_single_moves(seed, size, boxes, split):
    level, state = draw_level(seed, split, size, boxes, 0.1, 8, 40)
    solution = solve(level, state)
    assert 1 <= len(solution) <= 40
    assert played(level, state, solution).solved(level)
    assert len(solution) == plain_search(format_board(level, state))
    assert len(level.targets) == len(state.boxes) == boxes
    assert not level.targets & state.boxes


@given(seeds, st.lists(st.sampled_from(list(MOVES)), max_size=25))
@settings(max_examples=40)
def test_whether_a_state_can_still_be_solved_is_known_wherever_play_has_led(seed, moves):
    level, state = draw_level(seed, "train", 6, 1, 0.1, 5, 12)
    state = played(level, state, moves)
    solution, length = solve(level, state), plain_search(format_board(level, state))
    assert (solution is None) == (length is None)
    assert solution is None or len(solution) == length


@given(seeds, st.booleans())
@settings(max_examples=25)
def test_a_board_reads_back_as_it_was_written(seed, large):
    size, boxes = (10, 2) if large else (6, 1)
    level, state = draw_level(seed, "train", size, boxes, 0.1, 5, 60)
    assert parse_board(format_board(level, state)) == (level, state)


def rewards_of(text, *moves, **arguments):
    """Rewards of these moves on a level of our own."""

    async def play():
        env = Sokoban(**arguments)
        await env.reset(Task("t", seed=0), 0)
        env.level, env.state = parse_board(text)
        return env, [await env.step(Message("assistant", f"<answer>{name}</answer>")) for name in moves]

    env, steps = asyncio.run(play())
    return env, steps, [round(step.reward, 9) for step in steps]


def test_rewards_are_a_tenth_off_a_step_one_for_a_box_on_or_off_its_target_and_ten_at_the_end():
    corridor = "########\n#PXOXO_#\n########"
    _, steps, rewards = rewards_of(corridor, "Right", "Left", "Nonsense")
    assert rewards == [0.9, -0.1, -0.2]
    assert steps[-1].observation.messages[0].content.startswith(Sokoban.invalid)
    assert not any(step.terminated for step in steps)
    env, steps, rewards = rewards_of("#######\n#PX√O_#\n#######", "Right")
    assert rewards == [-0.1]  # two boxes in a row cannot be pushed
    assert steps[0].info == {"valid": 1.0, "effective": 0.0, "boxes_home": 1.0}
    env, steps, rewards = rewards_of("#######\n#P√_O_#\n#__X__#\n#_____#\n#######", "Right")
    assert rewards == [-1.1]
    env, steps, rewards = rewards_of("#####\n#PXO#\n#####", "Right")
    assert rewards == [10.9]
    assert steps[0].terminated
    assert env.metrics() == {"success": 1.0, "boxes_home": 1.0, "valid": 1.0, "effective": 1.0}


def test_a_stuck_box_does_not_end_the_episode_but_the_step_limit_does():
    env, steps, _ = rewards_of("######\n#_XP_#\n#O___#\n#____#\n#____#\n######", "Left", "Up", "Up", max_steps=3)
    assert [step.over for step in steps] == [False, False, True]
    assert steps[-1].truncated
    assert not steps[-1].terminated
    assert env.metrics()["success"] == 0.0
    assert env.oracle() in env.actions()  # a lost player still moves


def test_a_level_without_a_solution_has_none_and_a_search_cut_short_says_so():
    level, state = parse_board("######\n#XP_O#\n#____#\n######")
    assert solve(level, state) is None
    level, state = draw_level(3, "train", 10, 2, 0.15, 16, 50)
    with pytest.raises(SolverLimitExceeded, match="within 1 pushes"):
        solve(level, state, 1)


def test_a_board_without_border_is_the_inside_of_the_one_with():
    async def boards():
        shown = []
        for border in (False, True):
            env = Sokoban(border=border)
            shown.append((await env.reset(Task("t", seed=5), 0)).messages[1].content)
        return shown

    inside, whole = asyncio.run(boards())
    assert inside.splitlines() == [row[1:-1] for row in whole.splitlines()[1:-1]]
    assert len(inside.splitlines()) == 4


def test_boxoban_files_and_folders_of_them_are_played(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "000.txt").write_text(BOXOBAN)
    (tmp_path / "train" / "001.txt").write_text(
        "\n\n".join(split_levels(BOXOBAN.replace("@", " ", 1).replace("  #.", "@ #.")))
    )
    found = read_levels(str(tmp_path))
    assert sum(map(len, found.values())) == 4
    split = "train" if found["train"] else "held_out"

    async def play():
        env = Sokoban(levels=str(tmp_path), max_steps=80)
        await env.reset(Task("t", seed=1, fields={"split": split}), 0)
        while not (await env.step(Message("assistant", env.oracle()))).over:
            pass
        return env.metrics()["success"]

    assert asyncio.run(play()) == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#####\n#@$ #\n#####", "1 boxes and 0 targets"),
        ("#####\n# $.#\n#####", "0 players"),
        ("#####\n#@$.?\n#####", "'\\?' in row 2"),
        ("#####\n @$.#\n#####", "the border has a gap"),
    ],
)
def test_a_level_that_cannot_be_played_is_refused_with_its_place(text, says, tmp_path):
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(ValueError, match=rf"bad.txt, level 1: .*{says}"):
        read_levels(str(tmp_path / "bad.txt"))
    with pytest.raises(ValueError, match="no level files"):
        read_levels(str(tmp_path / "none.txt"))


def test_too_many_boxes_for_the_level_size_raise_an_error():
    with pytest.raises(ValueError, match="no level of split 'train'"):
        draw_level(0, "train", 5, 6, 0.1, 5, 12)


@given(seeds)
@settings(max_examples=15)
def test_large_levels_with_two_boxes_are_solved_too(seed):
    level, state = draw_level(seed, "train", 10, 2, 0.15, 16, 50)
    assert played(level, state, solve(level, state)).solved(level)


@given(seeds, st.lists(st.sampled_from(list(MOVES)), max_size=30))
@settings(max_examples=40)
def test_moves_keep_the_number_of_boxes_and_never_enter_a_wall(seed, moves):
    level, state = draw_level(seed, "train", 8, 2, 0.15, 8, 60)
    after = played(level, state, moves)
    assert len(after.boxes) == 2
    assert after.player not in level.walls | after.boxes
    assert not after.boxes & level.walls


def test_a_level_is_what_it_says():
    level, state = parse_board("#####\n#@$.#\n#####")
    assert level == Level(3, 5, level.walls, frozenset({8}))
    assert state == BoardState(6, frozenset({7}))
    assert len(level.walls) == 12


def test_cells_may_have_other_characters_and_the_game_is_the_same():
    signs = dict(zip(("wall", "floor", "target", "box", "player"), "W.GBA", strict=True))
    usual, other = Sokoban(border=True), Sokoban(border=True, symbols=signs)
    opening, shown = (asyncio.run(env.reset(Task("t", seed=5), 0)).messages for env in (usual, other))
    assert shown[1].content == opening[1].content.translate(str.maketrans("#_OXP", "W.GBA"))
    assert "every box B onto a target G. A is you, W wall" in shown[0].content
    assert other.oracle() == usual.oracle()
    assert other.picture().tobytes() == usual.picture().tobytes()
