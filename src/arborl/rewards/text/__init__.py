"""Rewards that read conversations as turns. They need no model; a judge or a trained reward model may take their place.

In reading order:

    turns.py       What was said, as plain turns, and as exchanges
    base.py        What such a reward is: a class, or a function with `@reward_function`
    words.py       Words of any language, and what can be counted about them
    backing.py     A reward's own measure, a judge with its rubric, or a trained reward model
    general.py     Helpful, brief, engaged
    safety.py      Whether something was said that must not be
    task.py        The right answer, the goal
    similarity.py  Against saying the same again
    domains.py     Customer service, technical support, sales
    composite.py   Rewards made of rewards: a weighted sum, the least, a product
"""
