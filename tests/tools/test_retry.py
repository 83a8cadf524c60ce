"""Waits between attempts, and attempts until a result is accepted."""

import asyncio

import pytest

from arborl.retry import backoff_waits, retry, retry_sync


def test_waits_double_up_to_the_longest_and_vary_by_the_jitter():
    assert list(backoff_waits(4, 0.5, longest=2.0)) == [0.5, 1.0, 2.0, 2.0]
    assert all(0.5 <= wait <= 1.5 for wait in backoff_waits(100, 1.0, 1.0, jitter=0.5))
    assert next(backoff_waits(None, 0.5)) == 0.5


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(("retries", "outcome", "calls"), [(3, "done", 3), (1, "busy", 2), (0, OSError, 1)])
def test_a_call_is_repeated_until_it_succeeds_or_no_attempt_is_left(is_async, retries, outcome, calls):
    results = iter([OSError("no"), "busy", "done"])
    made = []

    def call():
        made.append(result := next(results))
        if isinstance(result, Exception):
            raise result
        return result

    async def call_async():
        return call()

    def run():
        how = (backoff_waits(retries, 0.0), lambda result: result == "busy", (OSError,))
        return asyncio.run(retry(call_async, *how)) if is_async else retry_sync(call, *how)

    if isinstance(outcome, str):
        assert run() == outcome
    else:
        with pytest.raises(outcome):
            run()
    assert len(made) == calls
