"""The context-managing agent, played through the real rollout: a scripted engine, seedling's template and tokens.

One test is named after each defect of the original pipeline that could come back.
"""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest

from arborl.agents.chat_agents import ChatAgent
from arborl.agents.context.managed_conversation import stateset_context
from arborl.agents.context.statelm import DEFAULT_TOOLS, TOOLSET, StateLM
from arborl.algorithms.recipe import Recipe
from arborl.chat import FileTokenizer, HermesParser, Renderer, Template
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.data.generated.document_problems import make_document_problem
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.games.documents_env import Documents
from arborl.envs.games.question import Question
from arborl.errors import ConfigError
from arborl.models.model_files import SEEDLING_DIR
from arborl.registry import call_checked
from arborl.rewards.answers import MultipleChoice, ShortAnswer
from arborl.rewards.reward import Rewards
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.rollout.token_trees import build_token_trees
from arborl.tools.library.document_index import DocumentIndex
from arborl.types import Group, Message, Sampling, StopReason, Task
from arborl.view.curve import lengths as context_lengths

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "templates"
SMALL = {"toolset": ["searchEngine", "readChunk", "note", "deleteContext", "checkBudget", "finish"], "form": "brief"}
READER = {"toolset": ["readChunk", "finish"]}
READING = {"chunk_size": 60, "built": True, "results": 3, "fragments": 0}


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


READ = call("readChunk", chunk_id=0)
DONE = call("finish", answer="Oslo")


@pytest.fixture(scope="module")
def renderer():
    return Renderer.from_folder(SEEDLING_DIR)


def with_template(name):
    tokenizer = FileTokenizer(SEEDLING_DIR)
    template = Template((TEMPLATES / f"{name}.jinja").read_text(), None, "<|im_end|>")
    return Renderer(tokenizer, template, HermesParser(), (tokenizer.token_id("<|im_end|>"),))


def rollout_of(renderer, scripts, agent, env, tokens=96, window=1024):
    """Each episode follows a script; the scripts take turns."""
    spoken: dict[str, int] = {}
    flat = [text for script in scripts for text in script]
    starts = np.cumsum([0, *map(len, scripts)])

    def choose(prompt, session):
        spoken[session] = spoken.get(session, -1) + 1
        script = int(session.rpartition("#")[2]) % len(scripts)
        return int(starts[script]) + min(spoken[session], len(scripts[script]) - 1)

    replies = [[*renderer.tokenizer.encode(text), renderer.stop[0]] for text in flat]
    engine = ScriptedEngine(replies, choose)
    return Rollout(
        engine,
        renderer,
        EpisodeFactories(agent, env),
        Sampling(tokens),
        EpisodeLimits(max_context=window),
        concurrency=8,
    )


def play(renderer, *scripts, env=None, window=1024, tokens=96, task=None, **args):
    """One episode a script."""
    settings = {**SMALL, "reading": READING, **args}
    make_env = env or (lambda task: Documents(tokens=400, distractors=4))
    rollout = rollout_of(renderer, scripts, lambda task: StateLM(**settings), make_env, tokens, window)
    (group,) = asyncio.run(rollout.collect([task or Task("t", seed=1)], seed=0, group_size=len(scripts)))
    for episode in group.episodes:
        assert episode.failure is None, episode.failure.traceback
    return group


def prompts(renderer, episode):
    return [renderer.tokenizer.decode(call.prompt) for call in episode.calls]


def window_for(renderer, reads, **args):
    """A window in which so many chunks can be read, and not one more."""
    (episode,) = play(renderer, [READ] * 4 + [DONE], window=4000, **args).episodes
    lengths = [len(made.prompt) for made in episode.calls]
    return lengths[reads] + 96 + (lengths[reads + 1] - lengths[reads]) // 2


def responses(text):
    return [part.partition("</tool_response>")[0] for part in text.split("<tool_response>")[1:]]


def test_an_edited_episode_gives_the_expected_tree_and_trains_every_token_once(renderer):
    script = [READ, call("deleteContext", msg_id=2), READ, DONE]
    (episode,) = play(renderer, script).episodes
    _one, two, three, four = episode.calls
    whole = [(*c.prompt, *c.completion.tokens) for c in episode.calls]
    assert two.prompt[: len(whole[0])] == whole[0]  # the conversation grows
    assert three.prompt[: len(whole[0])] == whole[0]  # the deletion changed what came after the first call
    assert three.prompt[: len(whole[1])] != whole[1]
    assert four.prompt[: len(whole[2])] == whole[2]
    forest = build_token_trees([Group(episode.task, [episode])])
    shared = next(i for i, (a, b) in enumerate(zip(whole[1], whole[3], strict=False)) if a != b)
    assert len(forest.trees[0]) == len(whole[1]) + len(whole[3]) - shared
    assert forest.terms.token.tolist() == [t for c in episode.calls for t in c.completion.tokens]
    assert len(set(zip(forest.terms.position.tolist(), forest.terms.call.tolist(), strict=True))) == len(forest.terms)


def test_the_prompt_shrinks_where_something_was_deleted_and_never_passes_the_window(renderer):
    script = [READ, call("deleteContext", msg_id=2), call("readChunk", chunk_id=1), DONE]
    window = window_for(renderer, 1)
    (episode,) = play(renderer, script, tidy=True, window=window).episodes
    lengths = context_lengths(episode)
    assert lengths[2] < lengths[1]
    assert max(lengths) <= window
    assert episode.metrics["context/peak"] == max(lengths)
    assert episode.metrics["context/deleted"] == 1


def test_answers_end_the_episode_by_finish_or_words(renderer):
    (episode,) = play(renderer, [READ, DONE]).episodes
    assert episode.stop == StopReason.DONE
    assert episode.answer == "Oslo"
    assert episode.metrics["context/finished"] == 1.0
    assert len(episode.calls) == 2
    (episode,) = play(renderer, ["I think it is Oslo."]).episodes
    assert episode.answer == "I think it is Oslo."
    assert episode.metrics["context/finished"] == 0.0


def test_limits_end_episodes_and_must_fit_the_run(renderer):
    (episode,) = play(renderer, [READ], max_assistant_turns=3).episodes
    assert episode.stop == StopReason.MAX_TURNS
    assert len(episode.calls) == 3
    (episode,) = play(renderer, [READ], window=window_for(renderer, 2)).episodes
    assert episode.stop == StopReason.CONTEXT_FULL
    assert episode.metrics["context/exceeded"] == 1.0
    assert len(episode.calls) == 3
    for args, words in (
        ({"max_model_len": 5000}, "sampling.max_context=1024"),
        ({"single_turn_max_tokens": 10}, "Write sampling.max_tokens=10"),
    ):
        rollout = rollout_of(renderer, [[DONE]], lambda t, a=args: StateLM(**a), lambda t: Documents(tokens=300))
        (group,) = asyncio.run(rollout.collect([Task("t")], seed=0, group_size=1))
        assert words in group.episodes[0].failure.message


def test_an_answer_before_the_minimum_of_turns_is_counted_and_penalised(renderer):
    group = play(renderer, [DONE], min_assistant_turns=2)
    asyncio.run(Rewards([("choice", ShortAnswer(too_few_turns=-0.75), 1.0)], 5).score([group]))
    assert group.episodes[0].reward == -0.75


def test_deletions_that_cannot_be_are_errors_to_the_model_and_lose_nothing(renderer):
    tries = [call("deleteContext", msg_id=number) for number in (2, 2, 0, 99)]
    (episode,) = play(renderer, [READ, *tries, DONE], window=4000).episodes
    before, after = prompts(renderer, episode)[2], prompts(renderer, episode)[-1]
    assert after.startswith(before)  # what was refused changed nothing of what is shown
    assert [text.partition(" (")[0] for text in responses(after)[2:]] == [
        "#6 error: message 2 is already deleted",
        "#8 error: message 0 is the question; system and user messages cannot be deleted",
        "#10 error: there is no message 99; the latest is 9",
    ]


def test_calls_beyond_the_limit_of_one_message_are_answered_with_that(renderer):
    (episode,) = play(renderer, [READ * 3, DONE], max_calls=2, tokens=200).episodes
    answers = responses(prompts(renderer, episode)[1])
    assert len(answers) == 3
    assert answers[2].startswith("#4 error: not run: a message may contain 2 calls")
    assert episode.metrics["tool/too_many"] == 1.0


@pytest.mark.parametrize("form", ["json", "brief"])
def test_training_evaluation_and_serving_show_the_same(renderer, form):
    """What was recorded is the full render of the view: a server that keeps the same history shows the same text."""
    script = [READ, call("note", key="a", summary="b") + call("deleteContext", msg_id=2), READ, DONE]
    kept = []

    class Serving(StateLM):
        async def run(self, task, env, model):
            chat = model.chat

            async def watched(messages, tools=(), **options):
                kept.append(renderer.text(messages, tools))
                return await chat(messages, tools, **options)

            model.chat = watched
            await super().run(task, env, model)

    settings = {**SMALL, "form": form, "reading": READING}
    rollout = rollout_of(
        renderer, [script], lambda t: Serving(**settings), lambda t: Documents(tokens=400), window=4000
    )
    (group,) = asyncio.run(rollout.collect([Task("t", seed=1)], seed=0, group_size=1))
    assert prompts(renderer, group.episodes[0]) == kept
    rollout.sampling = Sampling(96, temperature=0.0)  # as an evaluation does
    (again,) = asyncio.run(rollout.collect([Task("t", seed=1)], seed=7, group_size=1))
    assert prompts(renderer, again.episodes[0])[0] == kept[0]


def test_seedling_plays_it_untrained(seedling):
    from arborl.engines.local import LocalEngine

    model, renderer = seedling
    engine = LocalEngine(model, 1024, max_requests=4)
    episode_factories = EpisodeFactories(
        lambda t: StateLM(**SMALL, reading=READING, max_assistant_turns=3), lambda t: Documents(tokens=400)
    )
    rollout = Rollout(
        engine,
        renderer,
        episode_factories,
        Sampling(24, stop=renderer.stop),
        EpisodeLimits(max_context=1024),
        concurrency=4,
    )
    (group,) = asyncio.run(rollout.collect([Task("t", seed=3)], seed=0, group_size=4))
    assert [episode.failure for episode in group.episodes] == [None] * 4
    asyncio.run(Rewards([("short_answer", ShortAnswer(), 1.0)], 5).score([group]))
    assert all(-1 <= episode.reward <= 1 for episode in group.episodes)


def test_without_context_management_a_long_read_overflows(renderer):
    window = window_for(renderer, 2, **READER)
    (episode,) = play(renderer, [READ], policy="none", window=window, **READER).episodes
    assert episode.stop == StopReason.CONTEXT_FULL
    assert "#2" not in prompts(renderer, episode)[1]  # numbers are for those who can delete


@pytest.mark.parametrize("args", [{"policy": "truncate", "compress_at": 0.9}, {"policy": "window", "window": 2}])
def test_a_window_and_truncation_go_on_where_nothing_is_managed(renderer, args):
    size = window_for(renderer, 2, **READER)
    settings = {**READER, "form": "brief", "reading": READING, "max_assistant_turns": 9}
    rollout = rollout_of(
        renderer, [[READ]], lambda t: StateLM(**settings, **args), lambda t: Documents(tokens=400), window=size
    )
    (group,) = asyncio.run(rollout.collect([Task("t", seed=1)], seed=0, group_size=1))
    assert group.episodes[0].stop == StopReason.MAX_TURNS
    assert max(context_lengths(group.episodes[0])) <= size


@pytest.mark.parametrize("trained", [True, False])
def test_a_summary_is_written_by_the_model_and_trained_if_requested(renderer, trained):
    script = [READ, READ, "Chunk 0 says nothing.", READ, DONE]
    settings = {"policy": "summary", "compress_at": 0.5, "window": 2 * window_for(renderer, 1, **READER), **READER}
    (episode,) = play(renderer, script, train_summaries=trained, **settings).episodes
    assert episode.metrics["context/folded"] == 1
    assert episode.answer == "Oslo"
    (written,) = [c for c in episode.calls if "nothing." in renderer.tokenizer.decode(c.completion.tokens)]
    assert written.trained == trained
    terms = build_token_trees([Group(episode.task, [episode])]).terms
    number = episode.calls.index(written)
    assert np.any(terms.call == number) == trained
    assert len(terms) == sum(len(c.completion.tokens) for c in episode.calls if c.trained)
    assert set(terms.call.tolist()) == {i for i, c in enumerate(episode.calls) if c.trained}
    assert "[Previous Summary]: Chunk 0 says nothing." in prompts(renderer, episode)[-1]


def test_the_summarize_tool_folds_what_came_before(renderer):
    script = [READ, call("summarize", summary="Nothing in 0."), DONE]
    (episode,) = play(renderer, script, toolset=["readChunk", "summarize", "finish"]).episodes
    last = prompts(renderer, episode)[-1]
    assert "[Previous Summary]: Nothing in 0." in last
    assert "<tool_response>" not in last


def test_the_original_tools_are_the_usual_ones_and_foreign_settings_become_policies():
    assert len(DEFAULT_TOOLS) == 11
    assert set(TOOLSET) - set(DEFAULT_TOOLS) == {"mergeNotes", "getContextStats", "summarize"}
    assert stateset_context(False) == {"policy": "none"}
    for strategy in ("summary", "truncate", "sliding_window"):
        section = stateset_context(True, 0.4, strategy)
        assert 0.4 in section["args"].values()
        StateLM(policy=section["policy"], **section["args"])
    with pytest.raises(ValueError, match="compression_strategy='zip'"):
        stateset_context(True, 0.4, "zip")


def test_trajectories_are_written_for_people(renderer, tmp_path):
    script = [READ, call("deleteContext", msg_id=2), DONE]
    play(renderer, script, dump_trajectories_enabled=True, dump_trajectories_dir=str(tmp_path))
    (file,) = tmp_path.glob("*.json")
    row = json.loads(file.read_text())
    assert row["had_delete_operation"]
    assert row["deleted_msg_ids"] == [2]
    assert row["assistant_turns"] == 3
    assert [r["is_snapshot"] for r in row["rows"]] == [False, True, False]
    assert row["messages"][0]["role"] == "system"


def test_defect_1_numbers_and_notes_are_visible_before_any_deletion(renderer):
    script = [READ, call("note", key="a", summary="b"), DONE]
    (episode,) = play(renderer, script).episodes
    first, second, third = prompts(renderer, episode)
    assert "Notes: none" in first
    assert responses(second)[0].startswith("#2 ")
    assert "Notes: a: b" in third


@pytest.mark.parametrize("limit", ["turns", "context"])
def test_defect_2_and_3_a_penalty_reaches_every_branch_also_where_thoughts_are_stripped(limit):
    renderer = with_template("thinking")
    think = f"<think>hm</think>{READ}"
    limits = {"max_assistant_turns": 5} if limit == "turns" else {"window": window_for(renderer, 2)}
    group = play(renderer, [think], [READ, call("deleteContext", msg_id=2), READ], **limits)
    requests = []

    class Counting(MultipleChoice):
        async def judge(self, episode):
            requests.append(episode.id)
            return 0.0

    asyncio.run(Rewards([("choice", Counting(exceeded=-1.0), 1.0)], 5).score([group]))
    assert [episode.reward for episode in group.episodes] == [-1.0, -1.0]
    assert not requests  # nothing to judge: the episode as a whole is penalised
    terms = Recipe(AlgorithmConfig(name="reinforce")).credit([group], build_token_trees([group]).terms)
    assert len(np.unique(terms.call)) == sum(len(e.calls) for e in group.episodes) > 2
    assert np.all(terms.advantage == -1.0)


def test_defect_4_and_10_an_episode_has_one_vote_and_one_weight_however_many_branches(renderer):
    many = [READ, call("deleteContext", msg_id=2)] * 1 + [READ, call("deleteContext", msg_id=6), DONE]
    group = play(renderer, many, [DONE], [DONE], [READ, DONE])
    for episode, reward in zip(group.episodes, (1.0, 0.0, 0.0, 0.0), strict=True):
        episode.rewards = {"r": reward}
    algorithm = Recipe(AlgorithmConfig(name="grpo", aggregation="episode", std="none"))
    terms = algorithm.credit([group], build_token_trees([group]).terms)
    by_episode = [np.unique(terms.advantage[terms.episode == e]).round(9).tolist() for e in range(4)]
    assert by_episode == [[0.75], [-0.25], [-0.25], [-0.25]]
    weights = np.bincount(terms.episode, terms.weight)
    assert np.allclose(weights, 0.25)


def test_defect_5_nothing_is_discarded_or_cut(renderer):
    group = play(renderer, [READ, call("deleteContext", msg_id=2), READ, DONE])
    forest = build_token_trees([group])
    (tree,) = forest.trees
    for number, made in enumerate(group.episodes[0].calls):
        rows = np.flatnonzero(forest.terms.call == number)
        context = []
        at = int(forest.terms.position[rows[0]])
        for k in range(at + 1):  # what the first sampled token saw: its whole prompt
            if k <= at < tree.end[k]:
                context.append(int(tree.tokens[k]))
        assert tuple(context) == made.prompt


def test_defect_6_without_a_document_the_tools_say_so_and_the_episode_goes_on(renderer):
    task = Task("t", messages=(Message("user", "Where?"),), fields={"answer": "Oslo"})
    (episode,) = play(renderer, [READ, DONE], env=lambda t: Question(), task=task).episodes
    assert responses(prompts(renderer, episode)[1])[0].startswith("#2 error: no document is attached")
    assert episode.answer == "Oslo"


def test_defect_7_other_agents_play_in_the_same_run(renderer):
    def agent(task):
        return StateLM(**SMALL, reading=READING) if task.agent == "statelm" else ChatAgent()

    rollout = rollout_of(renderer, [[READ, DONE]], agent, lambda t: Documents(tokens=300))
    tasks = [Task("a", seed=1, agent="statelm"), Task("b", seed=2, agent="chat")]
    groups = asyncio.run(rollout.collect(tasks, seed=0, group_size=1))
    assert [g.episodes[0].failure for g in groups] == [None, None]
    assert [len(g.episodes[0].calls) for g in groups] == [2, 1]


def test_defect_8_tools_leave_the_event_loop_free_and_need_no_server(renderer):
    text = make_document_problem(3, tokens=200_000).document
    began = time.perf_counter()
    DocumentIndex(text, 50, 0, renderer.tokenizer)
    blocked = time.perf_counter() - began
    beats = []

    async def beat():
        while True:
            beats.append(time.perf_counter())
            await asyncio.sleep(0.002)

    async def main():
        heart = asyncio.create_task(beat())
        settings = {**SMALL, "toolset": ["buildIndex", "searchEngine", "finish"], "reading": {"fragments": 0}}
        script = [call("buildIndex", chunk_size=50), call("searchEngine", keyword="fox"), DONE]
        rollout = rollout_of(renderer, [script], lambda t: StateLM(**settings), lambda t: Documents())
        task = Task("t", messages=(Message("user", "Where?"),), fields={"document_content": text, "answer": "Oslo"})
        (group,) = await rollout.collect([task], seed=0, group_size=1)
        heart.cancel()
        return group.episodes[0]

    episode = asyncio.run(main())
    assert "chunks" in responses(prompts(renderer, episode)[2])[1]
    assert max(np.diff(beats)) < blocked / 2


def test_defect_9_a_batch_of_which_nothing_is_left_is_an_empty_forest(renderer):
    group = play(renderer, [DONE])
    group.episodes[0].calls.clear()
    assert len(build_token_trees([group]).terms) == 0
    assert len(build_token_trees([]).terms) == 0


@pytest.mark.parametrize("over", [0, 1])
def test_defect_11_the_budget_reported_is_the_budget_kept(renderer, over):
    """A document that fills the reported budget exactly is read; one token more ends the episode."""
    toolset = ["checkBudget", "loadDocument", "finish"]

    def run(document):
        task = Task("t", messages=(Message("user", "Where?"),), fields={"document_content": document})
        (episode,) = play(renderer, [call("checkBudget"), call("loadDocument"), DONE], env=lambda t: Documents(),
                          task=task, toolset=toolset, show_budget=False).episodes  # fmt: skip
        return episode

    short = run("a")
    reported = int(responses(prompts(renderer, short)[1])[0].split(" tokens")[0].split()[-1])
    tail = len(renderer.tokenizer.encode("\n<|im_start|>assistant\n"))
    assert reported == 1024 - 96 - len(short.calls[0].prompt) - len(short.calls[0].completion.tokens) - tail
    used = len(short.calls[2].prompt)
    fits = 1024 - 96 - used  # tokens that may still be added to the document of one token
    episode = run("a" + "\n" * (fits + over))
    assert episode.stop == (StopReason.CONTEXT_FULL if over else StopReason.DONE)
    if not over:
        assert len(episode.calls[2].prompt) == 1024 - 96


def test_defect_12_answers_may_contain_any_word_and_every_call_is_looked_at(renderer):
    answer = 'The assistant of Mira <tool_call>{"name": "finish"}'
    group = play(renderer, [READ + call("finish", answer=answer)], tokens=200)
    group.episodes[0].task = Task("t", fields={"answer": answer})
    asyncio.run(Rewards([("short_answer", ShortAnswer(), 1.0)], 5).score([group]))
    assert group.episodes[0].answer == answer
    assert group.episodes[0].reward == 1.0


@pytest.mark.parametrize("name", ["chatml_hermes", "thinking", "seedling"])
def test_defect_13_every_prompt_is_the_full_render_of_its_template(renderer, name):
    chosen = renderer if name == "seedling" else with_template(name)
    seen = []

    class Watched(StateLM):
        async def run(self, task, env, model):
            chat = model.chat

            async def watched(messages, tools=(), **options):
                seen.append(chosen.text(messages, tools))
                return await chat(messages, tools, **options)

            model.chat = watched
            await super().run(task, env, model)

    script = [f"<think>a</think>{READ}", call("deleteContext", msg_id=2), f"<think>b</think>{READ}", DONE]
    rollout = rollout_of(chosen, [script], lambda t: Watched(**SMALL, reading=READING), lambda t: Documents(tokens=300))
    (group,) = asyncio.run(rollout.collect([Task("t", seed=1)], seed=0, group_size=1))
    assert prompts(chosen, group.episodes[0]) == seen
    assert len(seen) == 4


def test_defect_14_every_call_of_a_turn_is_run_and_answered_under_its_own_id(renderer):
    both = call("readChunk", chunk_id=0) + call("readChunk", chunk_id=1)
    (episode,) = play(renderer, [both, call("deleteContext", msg_id=3), DONE]).episodes
    first = responses(prompts(renderer, episode)[1])
    assert [text.split(":")[0] for text in first] == ["#2 0", "#3 1"]
    after = responses(prompts(renderer, episode)[2])
    assert after[0].startswith("#2 0:")
    assert after[1].startswith("#3 Content has been deleted")
    assert len(after) == 3  # both reads and the deletion: none is unanswered


def test_defect_15_settings_no_one_reads_are_refused():
    for args, words in (
        ({"context_length_penalty": 1}, "unknown argument"),
        ({"reading": {"chunks": 5}}, "agent.args.reading.chunks"),
        ({"toolset": ["readChunks"]}, "Did you mean 'readChunk'"),
        ({"policy": "fold"}, "policy='fold'"),
        ({"policy": "none", "toolset": ["deleteContext"]}, "policy=none"),
    ):
        with pytest.raises(ConfigError, match=words):
            call_checked(StateLM, args, "agent.args")
