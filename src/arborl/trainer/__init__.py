"""The trainer: sample, score, credit, learn, publish; again.

Knows the stages and their order, and nothing inside them.

In reading order:

    trainer.py    The training loop
    look.py       Before credit: what can be learned from, and what the models say about it
    thread.py     The learner's thread: while it computes, the event loop belongs to others
    evaluate.py   How well a policy plays tasks it is never trained on
    given_evaluation.py  How well it does on given rows it is never trained on
    intervals.py  How sure a mean over held-out tasks is: 95 % intervals
    standings.py  Policies side by side: pass@k, bootstrap intervals, paired tests
    hooks.py      What happens after a step, one small object each
    keep_terms.py  After a step: which sampled tokens moved the weights, and how
    profile.py    Torch's own trace of two steps
    summary.py    A step's groups as numbers
    diagnosis.py  Steps in which nothing is learned
    trends.py     What goes wrong with a run over its steps
    trend_rules.py  The questions about a run's course, one small function each
    course.py     A run so far, metric by metric
    failing.py    Ends a run that cannot work
    probe.py      Proof, once a run, that the engine samples from the weights the learner has changed
"""
