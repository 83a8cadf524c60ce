"""Serving: a trained model behind OpenAI's API, agent sessions, and the API for external programs in training.

In reading order:

    model_backend.py      Protocol between routes and model; errors; cache of sampled replies
    engine_backend.py     The model of an engine
    choices.py            One choice as a stream of text and tool calls
    schemas.py            Request bodies as pydantic models
    parsing.py            From bytes to a generation request, within bounds, in worker threads
    middleware.py         API keys, rate and size limits, concurrency, request log, error responses
    openai_routes.py      `/v1/chat/completions`, `/v1/completions` and `/v1/responses`
    sessions.py           Sessions with a trained agent
    session_routes.py     `/v1/agents`
    episode_server.py     Training episodes of external programs over HTTP
    python_template.py    Script: imports the packages of a Python command once and forks for each episode
    warm_start.py         Commands in forks of such a process
    external_programs.py  Programs as processes, functions or HTTP services
    endpoint_agent.py     Agent `endpoint`
    api_server.py         The application of `arborl serve`, health, metrics, and its uvicorn server
    served_model.py       Load what is served; follow the checkpoints of a run
"""
