import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.envs.games.rooms import Rooms
from arborl.envs.games.rooms_map import BACK, TREASURE, RoomsState, draw_rooms_map, legal_commands, shortest_solution
from arborl.types import Message, Task

seeds = st.integers(0, 2**63 - 1)


def everything_in_reach(house):
    """Rooms one gets to by walking about and picking up every key, over and over: no search, just growth."""
    rooms, keys = {0}, set()
    while True:
        keys_now = keys | {thing for room in rooms for thing in house.items[room] if thing.endswith("key")}
        rooms_now = rooms | {
            there for room in rooms for _, there, door in house.links[room] if door is None or f"{door} key" in keys_now
        }
        if (rooms_now, keys_now) == (rooms, keys):
            return rooms
        rooms, keys = rooms_now, keys_now


@given(seeds, st.integers(2, 14), st.integers(0, 6), st.sampled_from(["train", "held_out"]))
@settings(max_examples=40)
def test_every_house_can_be_solved_and_every_room_be_reached(seed, rooms, doors, split):
    doors = min(doors, rooms - 1)
    house = draw_rooms_map(seed, split, rooms, doors, 120)
    assert everything_in_reach(house) == set(range(rooms))
    assert sum(there.count(TREASURE) for there in house.items) == 1
    assert len({door for links in house.links for _, _, door in links if door}) == doors
    way = shortest_solution(house, RoomsState())
    place = RoomsState()
    for command in way:
        place = legal_commands(house, place)[command]
    assert place.done


@given(seeds)
@settings(max_examples=25)
def test_ways_lead_back_and_rooms_lie_where_they_lead(seed):
    house = draw_rooms_map(seed, "train", 10, 3, 120)
    for room, links in enumerate(house.links):
        for way, there, door in links:
            assert (BACK[way], room, door) in house.links[there]
    assert len(set(house.cells)) == len(set(house.names)) == 10


def play(commands, **arguments):
    async def run():
        env = Rooms(**arguments)
        await env.reset(Task("t", seed=5), 0)
        return env, [await env.step(Message("assistant", command)) for command in commands]

    return asyncio.run(run())


def test_a_locked_door_wants_its_key_and_only_a_door_that_is_there_can_be_unlocked():
    async def try_all():
        env = Rooms(rooms=8, doors=3, max_steps=100)
        await env.reset(Task("t", seed=11), 0)
        refused = 0
        while not env.state.done:
            links = env.map.links[env.state.room]
            for way, _, door in links:
                if door and door not in env.state.unlocked:
                    before = env.state
                    assert (await env.step(Message("assistant", f"<answer>go {way}</answer>"))).info["valid"] == 0.0
                    assert env.state == before
                    refused += 1
            await env.step(Message("assistant", env.oracle()))
        return refused

    assert asyncio.run(try_all()) > 0


def test_only_the_treasure_has_a_reward_unless_settings_reward_keys_and_steps():
    env, _ = play([])
    way = shortest_solution(env.map, RoomsState())
    env, steps = play(way)
    assert [step.reward for step in steps] == [0.0] * (len(way) - 1) + [1.0]
    assert steps[-1].terminated
    assert env.metrics()["success"] == 1.0
    keys = sum(command.endswith("key") for command in way)
    env, steps = play(way, step_reward=-0.01, key_reward=0.25)
    assert sum(step.reward for step in steps) == pytest.approx(1.0 + 0.25 * keys - 0.01 * len(way))
    assert keys > 0


def test_commands_are_read_with_and_without_the_tag_whatever_their_case_and_spacing():
    env, _ = play([])
    command = shortest_solution(env.map, RoomsState())[0]
    for text in (
        command,
        f"<answer>{command}</answer>",
        f"I think <answer> {command.upper()} </answer>",
        f"  {command} ",
    ):
        _, (step,) = play([text])
        assert step.info["valid"] == 1.0
    for text in (f"please {command}", "<answer></answer>", "take treasure", "unlock up"):
        _, (step,) = play([text])
        assert step.info["valid"] == 0.0
        assert step.reward == -0.01


def test_looking_is_valid_and_changes_nothing():
    _, (step,) = play(["look"])
    assert step.info == {"valid": 1.0, "effective": 0.0}


def test_a_house_that_is_too_far_for_its_limit_is_an_error_and_not_a_hang():
    with pytest.raises(ValueError, match="no map of split 'train'"):
        draw_rooms_map(0, "train", 12, 6, 3)
