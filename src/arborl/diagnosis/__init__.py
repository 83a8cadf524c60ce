"""Diagnosis of a run: rules about metrics and episodes, used by the trainer during a run and by `arborl doctor` later.

Works without torch.

    finding.py         Finding: one checked item with its state, advice and evidence
    metric_history.py  MetricHistory: the metrics of a run as series over steps
    step_rules.py      Rules about the metrics of one step: why it learned nothing
    trend_rules.py     Rules about the metrics of several steps
    alarms.py          The rules on which a run can act
    run_monitor.py     Warnings during a run; stops a run in which nearly every episode fails
    run_files.py       RunFiles: reads the files of a run folder
    folder_diagnosis.py  examine_run: the findings of a run folder
    episode_rules.py   Rules about the stored episodes of a run folder

The summary and advice of every rule are in `rules.toml`.
"""

from arborl.diagnosis.finding import Evidence, Finding
from arborl.diagnosis.folder_diagnosis import examine_run

__all__ = ["Evidence", "Finding", "examine_run"]
