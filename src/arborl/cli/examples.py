"""Examples under each verb's `--help`, and what the exit codes mean."""

from __future__ import annotations

import typer

EXIT_CODES = """Exit codes: 0 done; 1 it ran and did not succeed (a run that was stopped, nothing could be measured, a
check failed); 2 what was asked for cannot be done, with one line a mistake on standard error; 130 Ctrl-C.
"""
EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "arborl train                                  # the demo",
        "arborl train run.yaml trainer.steps=50        # a file, and settings on top of it",
        "arborl train run.yaml --print                 # what would run; nothing is started",
        "arborl train --resume latest                  # go on after Ctrl-C or a crash",
    ),
    "evaluate": (
        "arborl evaluate runs/frozen-lake-001                  # its last checkpoint, on held-out tasks",
        "arborl evaluate runs/a runs/b seedling --attempts 4   # side by side: pass@k, paired tests",
        "arborl evaluate seedling --env sokoban --episodes 50 --temperature 0 --temperature 0.7",
        "arborl evaluate runs/a --input prompts.json --output out.jsonl",
        'arborl evaluate runs/a --message "What is 2 + 3?"',
        "arborl evaluate runs/a --model openai:NAME --base-url http://127.0.0.1:8000/v1 --json",
    ),
    "rollout": (
        "arborl rollout --env frozen_lake              # one episode, turn by turn",
        "arborl rollout run.yaml --held-out --task 3 --ids",
    ),
    "view": (
        "arborl view                                   # runs/, in a browser",
        "arborl view runs/frozen-lake-001 --port 7007 --no-browser",
    ),
    "report": ("arborl report runs/frozen-lake-001 --out lake.html",),
    "compare": ("arborl compare runs/seed-1 runs/seed-2 runs/seed-3 --out seeds.html",),
    "doctor": (
        "arborl doctor",
        "arborl doctor --model Qwen/Qwen2.5-0.5B-Instruct --config run.yaml",
        "arborl doctor runs/frozen-lake-001 --json      # what is wrong with it, and which episodes show it",
    ),
    "convert": ("arborl convert verl train.sh --out run.yaml",),
    "init": (
        "arborl init                                   # config.yaml: the demo, commented",
        "arborl init --path run.yaml --preset tools    # or lake, questions, sft; or an algorithm: gspo, ppo, …",
        "arborl init env maze                          # maze.py and test_maze.py, whose tests pass",
    ),
    "export": (
        "arborl export runs/frozen-lake-001 --out my-model",
        "arborl export runs/a/checkpoints/step-000020 --out my-model --dtype bfloat16 --json",
    ),
    "plan": (
        "arborl plan run.yaml                          # 1 to 4,096 H200: memory, step time, who waits",
        "arborl plan run.yaml --from runs/a --gpus 8   # with the lengths and latencies of an earlier run",
        "arborl plan model.name=7b model.dtype=bfloat16 --gpus 8 --gpu h100 --reply-tokens 500,4000",
    ),
    "cluster setup": ("arborl cluster setup --config cluster.yaml",),
    "cluster status": ("arborl cluster status --json",),
    "cluster logs": (
        "arborl cluster logs                           # the last lines of all hosts",
        "arborl cluster logs gpu2 --file 'worker-*.err' --lines 100",
        "arborl cluster logs --job arborl-1a2b3c4d --follow",
    ),
    "cluster submit": (
        "arborl cluster submit run.yaml placement=ray placement.engines=8    # a run, whose file travels",
        "arborl cluster submit --working-dir . -- python my_training.py      # any command",
    ),
    "cluster restart": (
        "arborl cluster restart                        # all that are down",
        "arborl cluster restart gpu2                   # this one, whatever it does",
    ),
    "cluster cleanup": ("arborl cluster cleanup",),
    "version": ("arborl version --json",),
    "data make": ("arborl data make arithmetic --out data",),
    "data prepare": ("arborl data prepare longbench-v2 --input data.json --out data",),
    "data inspect": ("arborl data inspect train.json",),
    "data mix": ("arborl data mix run.yaml --batches 1000",),
    "env list": ("arborl env list --json",),
    "env play": ("arborl env play sokoban",),
    "env check": ("arborl env check my_package:Maze",),
    "tools list": ("arborl tools list --json",),
    "tools show": ("arborl tools show calculator",),
    "tools serve": ("arborl tools serve --tools calculator,python",),
}
"""By verb."""


def add_examples(app: typer.Typer, before: str = "") -> None:
    """Put its examples under every verb, of groups too."""
    for command in app.registered_commands:
        called = command.name or getattr(command.callback, "__name__", "")
        if lines := EXAMPLES.get(f"{before}{called}"):
            command.epilog = "\n".join(["Examples:" if len(lines) > 1 else "Example:", "", "\b", *lines])
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{before}{group.name or group.typer_instance.info.name} ")
