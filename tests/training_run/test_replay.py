"""A step runs again from the files of its run, with equal numbers."""

import arborl
from arborl.training_run.replay import StepReplayer

SMALL = {
    "rollout.tasks_per_step": 2, "rollout.group_size": 3, "evaluation.tasks": 0, "track.tensorboard": False,
    "env.args.size": 3, "env.args.max_steps": 4, "track.timeline": 0, "track.gifs": 0, "model.device": "cpu",
    "algorithm.skip_zero_variance": False, "trainer.save_every": 1, "trainer.keep": 10,
}  # fmt: skip


def replay(folder, step, **more):
    with StepReplayer(folder, step, **more) as replayer:
        return replayer.replay()


def test_grpo(tmp_path):
    run = arborl.run(**SMALL, output_dir=tmp_path / "run", steps=3)
    for step in (1, 2, 3):
        result = replay(run.folder, step)
        assert result.differences == [] and result.start == step - 1
        assert result.weights.different == []
        assert result.compared > 20
