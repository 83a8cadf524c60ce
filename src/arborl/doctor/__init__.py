"""The doctor: is this machine ready, is this model rendered and trained rightly, and why does this run not learn?

Looks and says what to do; changes nothing. The half that reads run folders needs no torch. Rules about metrics are the
trainer's own (`trainer/diagnosis.py`, `trainer/trends.py`), which tells them while a run goes on.

In reading order:

    finding.py        What was looked at, how it stands, what to do, and where to see it
    installation.py   Is this machine ready to train
    template.py       Is the model shown what it should be, and read as it writes
    model.py          A model and a configuration, looked at before a run
    first_step.py     One small step, played and learned from: do engine, learner and rewards agree
    run.py            What is wrong with a run, from its folder alone
    run_files.py      A run folder, as the rules ask for it
    episode_rules.py  What only episodes show
"""

from arborl.doctor.finding import Evidence, Finding
from arborl.doctor.run import examine_run

__all__ = ["Evidence", "Finding", "examine_run"]
