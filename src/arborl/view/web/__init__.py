"""The viewer: a local web application for finished and running runs. It writes only an index, and the tags of runs.

app.py             The HTTP application and its server
folders.py         Run folders: list, state, differences of configurations, metrics
series.py          Metrics as series for charts, and means over seeds
run_list.py        Rows of the list of runs, and their filter
run_page.py        One run: facts, settings with defaults, findings, log, replays
tags.py            Tags and note of a run: reading and writing `tags.json`
index.py           The SQLite index of a run's episodes
episode.py         One episode as JSON
episode_turns.py   An episode as a conversation: each message, tool call and result once
group.py           The token tree of a group, and where two episodes diverge
gradient.py        The tokens with the largest gradient in a step
token_text.py      Token ids as text
episode_search.py  Queries of the episode index
"""

from arborl.view.web.folders import RunFolders

__all__ = ["RunFolders"]
