"""Serve: a trained model behind OpenAI's API, trained agents behind sessions, and the API for programs in training.
It never trains.

In reading order:

    source.py     What the API is made over: messages or token ids in, tokens out as they are sampled
    speaker.py    A model at work as a `Source`
    text.py       From tokens to text while they come: no half characters, nothing behind a stop text
    choices.py    One choice of an answer while it is written, and the tool calls it ends with
    schemas.py    What a request may say, field by field
    parsing.py    From the bytes of a request to a checked object, within bounds and outside the event loop
    reading.py    From a request's body to what is asked of a source
    memory.py     What the model wrote, word for word, for when a client sends it back
    chat.py       `/v1/chat/completions` and `/v1/completions`
    responses.py  `/v1/responses`
    sessions.py   A trained agent in use, with a person for an environment
    agents.py     `/v1/agents`
    recorded.py   The model of one episode as a `Source`
    episodes.py   Episodes that programs of others play, behind HTTP
    programs.py   How a program of others is set to work on one task
    endpoint.py   Agent `endpoint`
    keys.py       API keys and how often each may be used
    door.py       What a request meets first
    problems.py   What a client is told when there is no answer
    app.py        The server as an application: routes, their door, health and numbers
    reload.py     Following a run that is being trained
    run.py        The application behind a socket, until a signal asks to stop
    opened.py     From a path or a name to what is served
"""
