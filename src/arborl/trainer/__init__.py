"""The training loop: collect, score, credit, update, publish.

trainer.py             Trainer: the training loop; LearnerThread: updates run here while the event loop goes on
training_batch.py      Token trees and terms of a step, with what the models compute for them
step_metrics.py        Metrics of a step's episodes and of its batch
system_usage.py        Use of CPU, memory and GPU in a step
hooks.py               Hooks after a step: checkpoints, episodes, evaluation, loss terms, profile
evaluation.py          Evaluator: success and reward on held-out tasks, with 95 % intervals
offline_evaluation.py  OfflineEvaluator: loss and accuracy on held-out demonstrations and preferences
policy_comparison.py   Comparison of policies: pass@k, bootstrap intervals, paired tests
weight_probe.py        Checks once per run that the engine samples with the updated weights
"""
