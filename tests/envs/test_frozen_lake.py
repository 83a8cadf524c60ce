import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.envs.games.frozen_lake import (
    MOVES,
    FrozenLake,
    best_moves,
    distances,
    draw_map,
    goal_probabilities,
    parse_move,
    safest_move,
)
from arborl.types import Message, Task

seeds = st.integers(0, 2**63 - 1)
sizes = st.integers(3, 8)
splits = st.sampled_from(["train", "held_out"])


def task(seed, split="train"):
    return Task("t", seed=seed, fields={"split": split})


async def play(env, chosen_task, seed, choose):
    """Everything received in one episode, and the steps."""
    opening = await env.reset(chosen_task, seed)
    steps = []
    while not steps or not steps[-1].over:
        steps.append(await env.step(Message("assistant", choose(env))))
    return opening, steps


@given(seeds, sizes, splits, st.floats(0.5, 1.0), st.integers(3, 14))
def test_every_map_can_be_solved_within_the_limit(seed, size, split, frozen, within):
    grid, player = draw_map(seed, split, size, frozen, within)
    assert grid[player[0]][player[1]] == "_"
    assert 1 <= distances(grid)[player] <= within
    assert "".join(grid).count("G") == 1
    assert len(grid) == size
    assert {len(row) for row in grid} == {size}


@given(seeds, sizes, splits)
def test_the_oracle_takes_the_shortest_way(seed, size, split):
    env = FrozenLake(size=size, max_steps=14)
    _, steps = asyncio.run(play(env, task(seed, split), 0, lambda env: env.oracle()))
    grid, player = draw_map(seed, split, size, 0.8, 14)
    assert len(steps) == distances(grid)[player]
    assert steps[-1].terminated
    assert sum(step.reward for step in steps) == 1.0
    assert env.metrics() == {"success": 1.0, "valid": 1.0, "effective": 1.0}


@given(seeds, st.text(max_size=40).filter(lambda text: parse_move(text) is None))
def test_text_that_is_no_move_leaves_the_player_and_costs_the_penalty(seed, text):
    async def one():
        env = FrozenLake(format_penalty=-0.25)
        opening = await env.reset(task(seed), 0)
        return env, opening, await env.step(Message("assistant", text))

    env, opening, step = asyncio.run(one())
    assert step.reward == -0.25
    assert step.observation.state_key == opening.state_key
    assert step.observation.messages[0].content == f"{FrozenLake.invalid}\n{opening.messages[1].content}"
    assert step.info == {"valid": 0.0, "effective": 0.0}
    assert env.metrics() == {"success": 0.0, "valid": 0.0, "effective": 0.0}
    assert not step.terminated


def test_slipping_goes_to_either_side_and_never_backwards():
    async def landings():
        env, found = FrozenLake(size=5, frozen=1.0, slippery=True), set()
        for seed in range(60):
            await env.reset(task(1), seed)
            env.player = (2, 2)
            await env.step(Message("assistant", "<answer>Up</answer>"))
            found.add(env.player)
        return found

    assert asyncio.run(landings()) == {(1, 2), (2, 1), (2, 3)}


@given(seeds, sizes)
def test_best_moves_are_those_that_come_one_nearer(seed, size):
    grid, _ = draw_map(seed, "train", size, 0.8, 12)
    far = distances(grid)
    for (row, column), here in far.items():
        nearer = [name for name, (d, r) in MOVES.items() if far.get((row + d, column + r)) == here - 1]
        assert best_moves(grid, (row, column)) == nearer
        assert bool(nearer) == (here > 0)


def test_moves_are_read_whatever_their_case_and_padding():
    assert parse_move("I go <answer> right\n</answer>") == "Right"
    assert parse_move("<answer>Right</answer><answer>Left</answer>") == "Right"
    assert parse_move("<answer>Sideways</answer>") is None
    assert parse_move("Right") is None


def test_an_unknown_split_and_a_lake_without_maps_are_errors_not_hangs():
    with pytest.raises(ValueError, match="split='test'"):
        draw_map(0, "test", 4, 0.8, 10)
    with pytest.raises(ValueError, match="no map of split 'held_out'"):
        draw_map(0, "held_out", 2, 1.0, 10)  # all ice, two by two: four grids, none of them held out


def test_cells_may_be_shown_apart_and_the_state_is_named_as_ever():
    plain, apart = FrozenLake(), FrozenLake(spaced=True)
    for action in ("", "<answer>Up</answer>", "Hm."):
        seen = []
        for lake in (plain, apart):
            task = Task("t", seed=3)
            step = asyncio.run(lake.step(Message("assistant", action)) if action else lake.reset(task, 0))
            seen.append(step.observation if action else step)
        assert seen[0].state_key == seen[1].state_key
        assert seen[0].messages[-1].content.splitlines()[-4:] == [
            row.replace(" ", "") for row in seen[1].messages[-1].content.splitlines()[-4:]
        ]
        assert all(row[1::2] == "   " for row in seen[1].messages[-1].content.splitlines()[-4:])


@given(seeds, st.integers(21, 40), st.integers(2, 12))
@settings(max_examples=10)
def test_a_lake_may_be_of_any_size_and_its_goal_is_within_the_limit(seed, size, within):
    grid, player = draw_map(seed, "train", size, 0.8, within)
    assert len(grid) == size
    assert 1 <= distances(grid)[player] <= within


def chance_by_walking(grid, player, steps):
    """The chance of the goal under the best play on slippery ice, one outcome at a time."""
    row, column = player
    if grid[row][column] in "GO" or steps == 0:
        return float(grid[row][column] == "G")
    names, size = list(MOVES), len(grid)

    def landing(name):
        down, right = MOVES[name]
        return min(max(row + down, 0), size - 1), min(max(column + right, 0), size - 1)

    return max(
        sum(chance_by_walking(grid, landing(names[(i + turn) % 4]), steps - 1) for turn in (-1, 0, 1)) / 3
        for i in range(4)
    )


@given(seeds, st.integers(1, 5))
@settings(max_examples=20)
def test_the_best_play_on_slippery_ice_is_known(seed, steps):
    grid, player = draw_map(seed, "train", 3, 0.8, 10)
    assert goal_probabilities(grid, steps)[-1][player] == pytest.approx(chance_by_walking(grid, player, steps))


def test_on_slippery_ice_the_oracle_prefers_the_safe_move_and_beats_the_shortest_path():
    assert safest_move(("__G", "_OO", "___"), (0, 1), 9, 9) in ("Right", "Up")
    assert safest_move(("O_G", "OOO", "___"), (0, 1), 9, 9) == "Right"

    def success(shortest):
        won = 0
        for seed in range(150):
            env = FrozenLake(slippery=True, max_steps=40)
            asyncio.run(
                play(
                    env,
                    task(seed),
                    seed,
                    lambda env: f"<answer>{best_moves(env.grid, env.player)[0]}</answer>" if shortest else env.oracle(),
                )
            )
            won += env.metrics()["success"]
        return won / 150

    assert success(shortest=False) > success(shortest=True) + 0.1


def test_training_never_draws_a_held_out_map():
    train = {draw_map(seed, "train", 3, 0.8, 10) for seed in range(1500)}
    held_out = {draw_map(seed, "held_out", 3, 0.8, 10) for seed in range(300)}
    assert len(train) > 300
    assert len(held_out) > 50
    assert train.isdisjoint(held_out)


@given(seeds, sizes, splits)
def test_the_same_seed_gives_the_same_map_also_without_the_cache(seed, size, split):
    first = draw_map(seed, split, size, 0.8, 12)
    assert first == draw_map.__wrapped__(seed, split, size, 0.8, 12)


@given(seeds, seeds, sizes)
def test_all_attempts_of_a_task_begin_alike(seed, rng, size):
    env = FrozenLake(size=size, slippery=True)
    assert asyncio.run(env.reset(task(seed), rng)) == asyncio.run(env.reset(task(seed), rng + 1))


@given(seeds, sizes, st.booleans(), st.randoms(use_true_random=False))
def test_random_legal_moves_are_always_valid(seed, size, slippery, random):
    env = FrozenLake(size=size, slippery=slippery)
    _, steps = asyncio.run(play(env, task(seed), seed, lambda env: random.choice(env.actions())))
    metrics = env.metrics()
    assert metrics["valid"] == 1.0
    assert all(step.info["valid"] == 1.0 and step.reward in (0.0, 1.0) for step in steps)
    assert 0 <= metrics["effective"] <= 1
    assert metrics["success"] == sum(step.reward for step in steps)
    assert len(steps) <= env.max_steps
    assert not (steps[-1].terminated and steps[-1].truncated)
    last = env.render()
    assert steps[-1].terminated == ("X" in last or "√" in last)


@given(seeds, seeds, st.lists(st.sampled_from(list(MOVES)), min_size=10, max_size=10))
def test_a_slippery_episode_replays_from_its_seed(seed, rng, moves):
    def replay():
        left = iter(moves)
        env = FrozenLake(slippery=True)
        return asyncio.run(play(env, task(seed), rng, lambda env: f"<answer>{next(left)}</answer>"))

    assert replay() == replay()


def test_cells_may_have_other_characters_in_the_board_and_in_the_rules():
    usual, other = FrozenLake(), FrozenLake(symbols={"ice": ".", "hole": "#", "player": "A"})
    opening, shown = (asyncio.run(env.reset(task(3), 0)).messages for env in (usual, other))
    assert shown[1].content == opening[1].content.translate(str.maketrans("_OP", ".#A"))
    assert "from A to G. . is ice, # is a hole" in shown[0].content
    assert usual.rules != other.rules
    assert other.oracle() == usual.oracle()
    assert other.picture().tobytes() == usual.picture().tobytes()


@pytest.mark.parametrize(
    ("symbols", "says"),
    [
        ({"water": "w"}, "unknown water; give some of player, ice"),
        ({"ice": "O"}, "two cells look alike"),
        ({"ice": "__"}, "symbols.ice='__': give one visible character"),
        ({"ice": " "}, "one visible character"),
        ({"ice": 1}, "one visible character"),
    ],
)
def test_characters_that_no_board_can_have_are_errors(symbols, says):
    with pytest.raises(ValueError, match=says):
        FrozenLake(symbols=symbols)
