"""Remote engines: sampling from a copy of the weights in other processes.

    replicas.py         Replicas of one engine: routing by session, failover, recovery with the newest weights
    weight_sync.py      What is sent at an update, also as files, and the probe that verifies it
    http_engine.py      `HttpEngine`: running vLLM, SGLang or chat servers
    http_servers.py     The HTTP interfaces of vLLM, SGLang and OpenAI-compatible chat servers
    vllm_engine.py      `VllmEngine`: vLLM in a process of its own
    vllm_process.py     Starts the vLLM process and exchanges messages with it
    padded_heads.py     The same model with larger attention heads, for kernels that lack its head size

`vllm_worker/` runs inside the vLLM process and imports vLLM but not arborl.
"""
