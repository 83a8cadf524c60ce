"""ROLL's environments: tags, what each stands for, and how groups are divided among them."""

from __future__ import annotations

import re

from arborl.config.part_config import HISTORY
from arborl.convert.draft import Draft, as_number, names
from arborl.convert.roll import roll_env_tags as env_tags
from arborl.convert.roll.roll_env_tags import EnvTag
from arborl.errors import did_you_mean

NAME = re.compile(r"[\w -]+")
MANAGERS = {
    "TrajEnvManager": "chat", "StepEnvManager": "step", "StepConcatEnvManager": "step",
    "AgentNativeStepEnvManager": "chat",
}  # fmt: skip
RUNNERS = {"GEMRunner": "chat"}
PROMPTS = {
    "agent_system_template": "system", "agent_template": "template", "env_config.action_pattern": "pattern",
}  # fmt: skip
PLACES = {
    "env": "env.name", "args": "env.args", "rows": "", "agent": "agent.name", "agent_args": "agent.args",
    "tool_args": "agent.tool_args", "max_steps": "rollout.max_turns", "max_tokens": "sampling.max_tokens",
    "system": "agent.system", "instruction": "env.prompt.instruction", "template": "env.prompt.observation",
    "pattern": "env.prompt.action_pattern",
}  # fmt: skip
"""What is kept of a tag, below `data.sources.TAG`, or of the run if there is one tag."""


def environments(draft: Draft) -> list[EnvTag]:
    """The tags that are trained on; those of validation are read too. Their settings are written."""
    train, val = (names(draft.source.get(f"{at}_env_manager.tags")) for at in ("train", "val"))
    if not train:
        draft.refuse("train_env_manager.tags", None, "names no environment. Write tags: [NAME], and custom_envs.NAME.")
        return []
    known = {key.split(".")[0] for key in draft.below("custom_envs.")}
    found = {name: _tag(draft, name, known) for name in dict.fromkeys([*train, *val])}
    for name in sorted(known - set(found)):
        unused = [key for key in draft.source if key.startswith(f"custom_envs.{name}.")]
        draft.skip_rest(unused, "not among the tags of training or validation")
    _definitions(draft)
    tags = [tag for tag in found.values() if tag is not None]
    if draft.problems:
        return []
    trained = [tag for tag in tags if tag.name in train]
    shared = all(tag.get("env") for tag in tags) and len({tag.who for tag in trained}) == 1
    _as_sources(draft, tags, train, _tasks_per_step(draft), shared)
    if shared:
        _workers(draft)
        _validation(draft, [tag.name for tag in tags], val)
    else:
        _drop_validation(draft)
    rest = [f"train_env_manager.{key}" for key in ("tags", "num_groups_partition", "max_env_num_per_worker")]
    why = "the shares are ratios of sources, and one alone has the whole batch; rows need no worker"
    draft.skip_rest(rest, why)
    return trained


def _definitions(draft: Draft) -> None:
    """Sections of environments that `custom_envs` may refer to, and that ROLL does not read by themselves."""
    parts = [key.split(".") for key in draft.source if key.endswith(".env_type")]
    heads = {part[0] for part in parts if len(part) == 3} - {"custom_envs"}
    defined = [key for key in draft.source if key.partition(".")[0] in heads]
    draft.skip_rest(defined, "definitions of environments; those of custom_envs are played")


def _tag(draft: Draft, name: str, known: set[str]) -> EnvTag | None:
    if not NAME.fullmatch(name):
        draft.refuse("tags", name, "is no name for a source here. Use letters, digits, - and _.")
        return None
    own = draft.below(f"custom_envs.{name}.")
    tag = EnvTag(draft, name, own)
    if not own:
        if (written := draft.source.get(f"custom_envs.{name}")) is not None:
            why = "leads nowhere. Give the file that defines it: one of its defaults, or one before this one."
            draft.refuse(f"custom_envs.{name}", written, why)
        else:
            near = did_you_mean(name, known)
            draft.refuse("tags", name, f"custom_envs has no such entry.{near} Define it, or take the tag out.")
        return None
    if not env_tags.fill(tag, draft.uses.get(str(own.get("env_type"))) or draft.uses.get(name)):
        return None
    _agent(tag)
    _limits(tag)
    _prompts(tag)
    for key in own:
        if tag.at + key in draft.accounted():
            continue
        if key in env_tags.UNREAD:
            tag.skip(key, env_tags.UNREAD[key])
        elif (key, own[key]) == ("env_config.render_mode", "text"):
            tag.skip(key, "boards are text")
        else:
            tag.lose(key, "no counterpart in this environment")
    return tag


def _prompts(tag: EnvTag) -> None:
    native = str(tag.keys.get("env_manager_cls")).endswith("AgentNativeStepEnvManager")
    for key, what in PROMPTS.items():
        text = tag.keys.get(key)
        if text is None:
            if key in tag.keys:
                tag.skip(key, "null: not given")
        elif native and what != "pattern":
            tag.skip(key, "AgentNativeStepEnvManager does not read it")
        elif what == "template" and any(f"{{{name}}}" in str(text) for name in HISTORY):
            tag.lose(key, "puts the last turns into one text, {history}: they are messages here, and shown anyway")
        else:
            tag.set(key, what, text)


def _agent(tag: EnvTag) -> None:
    manager = str(tag.keys.get("env_manager_cls") or "TrajEnvManager").rpartition(".")[2]
    runner = str(tag.keys.get("agent_runner_cls") or "").rpartition(".")[2]
    uses = tag.draft.uses
    if runner and runner not in uses | RUNNERS:
        own = f"Write an agent (docs/agents.md) and say so: --use {runner}=package.module:Agent; or take the key out"
        tag.refuse("agent_runner_cls", f"a class of theirs. {own}, for env_manager_cls alone.")
        return
    ours = uses.get(runner) or RUNNERS.get(runner) or uses.get(manager) or MANAGERS.get(manager)
    if ours is None:
        own = f"Write one of your own (docs/agents.md) and say so: --use {manager}=package.module:Agent."
        if manager.startswith("VL"):
            tag.refuse("env_manager_cls", f"shows images, and models see text only here. {own}")
            return
        tag.refuse("env_manager_cls", f"no such agent here. Known: {', '.join(MANAGERS)}. {own}")
        return
    if tag.get("agent"):
        if "env_manager_cls" in tag.keys:
            tag.set("env_manager_cls", "agent", tag.get("agent"), "the tools decide the agent")
        return
    if runner:
        tag.set("agent_runner_cls", "agent", ours)
    if runner or "env_manager_cls" in tag.keys:
        tag.set("env_manager_cls", "agent", ours)
    else:
        tag.default("env_manager_cls", "TrajEnvManager", "agent", ours)
    if ours == "step":
        why = "steps beside the present one, all of them, as messages; there in one text, and not all of them"
        past = max(tag.whole("history_length") - 1, 0) if tag.keys.get("history_length") else 0
        tag.set("history_length", "agent_args.history_length", past, why)


def _limits(tag: EnvTag) -> None:
    """Turns, and tokens of a call, which `max_new_tokens` bounds as well."""
    if tag.keys.get("max_steps") is not None:
        tag.set("max_steps", "max_steps", tag.whole("max_steps"))
    if tag.keys.get("max_tokens_per_step") is not None:
        most, requested = int(tag.draft.settings["sampling.max_tokens"]), tag.whole("max_tokens_per_step")
        why = "" if requested <= most else "generating_args.max_new_tokens is less"
        tag.set("max_tokens_per_step", "max_tokens", min(requested, most), why)


def _tasks_per_step(draft: Draft) -> int:
    """Writes the tasks of a step and the episodes of each: the batch counts episodes there."""
    at, ours = "train_env_manager.", "rollout.tasks_per_step"
    size, slots = (draft.whole(at + key, usual, least=1) for key, usual in (("group_size", 1), ("num_env_groups", 128)))
    episodes = draft.whole("rollout_batch_size", slots * size, least=1)
    if episodes % size:
        fits = size * max(episodes // size, 1)
        why = f"does not divide by train_env_manager.group_size={size}. Write {fits}."
        draft.refuse("rollout_batch_size", episodes, why)
        return 1
    tasks = episodes // size
    draft.settings |= {ours: tasks, "rollout.group_size": size}
    why = "" if slots == tasks else "tasks of a step, which follow from rollout_batch_size and group_size"
    draft.say("rollout_batch_size", episodes, ours, tasks)
    draft.say(f"{at}num_env_groups", slots, ours, tasks, why)
    draft.say(f"{at}group_size", size, "rollout.group_size", size)
    spare = draft.whole(f"{at}group_size_redundancy", 0)
    if spare:
        draft.set(f"{at}group_size_redundancy", spare, "rollout.redundancy", spare)
    at_once = slots * (size + spare)
    draft.default("all environments play at once", at_once, "rollout.concurrency", at_once)
    return tasks


def divided(draft: Draft, manager: str, count: int, tasks: int) -> list[int]:
    """Tasks of each tag: its groups, or in the same shares where there are more or fewer tasks than groups."""
    partition = draft.source.get(f"{manager}.num_groups_partition")
    given = partition if isinstance(partition, list) and len(partition) == count else [1] * count
    shares = [round(as_number(f"{manager}.num_groups_partition", part)) for part in given]
    total = sum(shares) or 1
    whole = [share * tasks // total for share in shares]
    by_rest = sorted(range(count), key=lambda i: -(shares[i] * tasks / total - whole[i]))
    for i in by_rest[: tasks - sum(whole)]:
        whole[i] += 1
    return whole


def _workers(draft: Draft) -> None:
    key = "train_env_manager.max_env_num_per_worker"
    most = draft.source.get(key)
    if isinstance(most, int) and most > 1:
        why = "of one process; leave it and rollout.workers out for the event loop, which is faster"
        draft.set(key, most, "rollout.envs_per_process", most, why)
        draft.settings["rollout.workers"] = "process"
    draft.skip_rest([key], "environments share nothing here, wherever they run: rollout.workers")


def _validation(draft: Draft, tags: list[str], val: list[str]) -> None:
    """Held-out tasks by tag. A group of validation is a task, played as often as the batch asks for."""
    at = "val_env_manager."
    size, slots = draft.whole(f"{at}group_size", 1), draft.whole(f"{at}num_env_groups", 128)
    batch = draft.whole("val_batch_size", slots * size)
    if not val:
        draft.default("val_env_manager.tags", None, "evaluation.tasks", 0)
        return
    if batch < 0:
        draft.lose("val_batch_size", batch, "a whole data set cannot be evaluated: as many tasks as there are groups")
        batch = slots * size
    tasks = max(batch // size, len(val))
    parts = dict(zip(val, divided(draft, "val_env_manager", len(val), tasks), strict=True))
    by_tag = [f"{at}{key}" for key in ("tags", "num_groups_partition")]
    for tag in tags if len(tags) > 1 else ():
        path = f"data.sources.{tag}.evaluation_tasks"
        draft.settings[path] = parts.get(tag, 0)
        for key in by_tag:
            if tag in parts and key in draft.source:
                draft.set(key, draft.source[key], path, parts[tag])
    if f"{at}group_size" in draft.source:
        draft.set(f"{at}group_size", size, "evaluation.group_size", size)
    for key in ("val_batch_size", f"{at}num_env_groups", *by_tag):
        if key in draft.source and key not in draft.accounted():
            draft.set(key, draft.source[key], "evaluation.tasks", tasks)
    draft.settings["evaluation.tasks"] = tasks


def _as_sources(draft: Draft, tags: list[EnvTag], train: list[str], tasks: int, shared: bool) -> None:
    """Each tag is a source of its own; one alone is the run itself.

    Args:
        tasks: of a step.
        shared: whether one agent plays all tags; it is the run's.
    """
    parts = dict(zip(train, divided(draft, "train_env_manager", len(train), tasks), strict=True))
    alone = len(tags) == 1
    for tag in sorted(tags, key=lambda tag: tag.name not in train):
        base = "" if alone else f"data.sources.{tag.name}"
        for what in tag.everything:
            head, _, rest = what.partition(".")
            place, above = PLACES[head], base
            if shared and head in ("agent", "agent_args"):
                if tag.name not in train:
                    draft.undo(tag.kept(what), "the agent is that of the tags that are trained on")
                    continue
                above = ""
            if head == "system" and tag.get("env"):  # an environment's own message, without fields
                draft.settings[tag.kept(what)] = str(tag.get(what)).replace("{", "{{").replace("}", "}}")
                place = "env.prompt.system"
            if alone and head == "rows" and rest not in ("rewards", "tools"):
                place = "data"
            draft.move(tag.kept(what), ".".join(filter(None, (above, place, rest))))
        if not alone:
            draft.settings[f"{base}.ratio"] = parts.get(tag.name, 0) / sum(parts.values())
    key = "train_env_manager.num_groups_partition"
    for name in train if not alone else ():
        path = f"data.sources.{name}.ratio"
        draft.set("train_env_manager.tags", name, path, draft.settings[path])
        if key in draft.source:
            draft.set(key, draft.source[key], path, draft.settings[path])


def _drop_validation(draft: Draft) -> None:
    """Of rows, or of agents that differ."""
    played = draft.whole("val_batch_size", 0)
    if played > 0:
        draft.set("val_batch_size", played, "evaluation.tasks", played, "held out, of all sources together")
    held = "held-out tasks are those of the same sources, evaluation.tasks of them"
    for key in ("tags", "num_groups_partition", "num_env_groups", "group_size"):
        if f"val_env_manager.{key}" in draft.source:
            draft.lose(f"val_env_manager.{key}", draft.source[f"val_env_manager.{key}"], held)
