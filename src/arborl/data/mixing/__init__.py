"""Several sources in one batch: exact shares, every row once before any comes again, the same after a restart.

In reading order:

    mixture.py      Several sources in every batch, in exact shares
    streams.py      A source of a mixture: an endless stream of tasks, by their place in it
    schedule.py     How many rows of each source a batch holds: whole numbers whose sums keep to the ratios for ever
    order.py        In which order rows come: a new one every pass, and every row once before any comes again
    composition.py  What a mixture would give, without training: `arborl data mix`
"""
