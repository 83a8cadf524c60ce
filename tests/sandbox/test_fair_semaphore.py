import asyncio
import threading
import time

from arborl.sandbox.fair_semaphore import FairSemaphore


def test_slots_go_to_who_waited_longest():
    slots, order = FairSemaphore(1), []

    async def one(number: int) -> None:
        await slots.acquire()
        order.append(number)
        await asyncio.sleep(0)
        slots.release()

    async def play() -> None:
        await asyncio.gather(*(one(number) for number in range(10)))

    asyncio.run(play())
    assert order == list(range(10))


def test_a_slot_granted_to_a_cancelled_waiter_is_not_lost():
    slots = FairSemaphore(1)

    async def play() -> list[bool]:
        await slots.acquire()
        waiting = [asyncio.ensure_future(slots.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # before it is given
        slots.release()
        waiting[1].cancel()  # after
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        await asyncio.wait([waiting[2]], timeout=20)
        got = [task.done() and not task.cancelled() for task in waiting]
        slots.release()
        await asyncio.wait([again := asyncio.ensure_future(slots.acquire())], timeout=20)
        return [*got, again.done()]

    assert asyncio.run(play()) == [False, False, True, True]


def test_threads_and_event_loops_share_them():
    slots, now, most = FairSemaphore(3), [], []

    def work() -> None:
        now.append(1)
        most.append(len(now))
        time.sleep(0.005)
        now.pop()

    def thread() -> None:
        for _ in range(10):
            with slots:
                work()

    async def task() -> None:
        for _ in range(10):
            await slots.acquire()
            await asyncio.to_thread(work)
            slots.release()

    async def many() -> None:
        await asyncio.gather(*(task() for _ in range(4)))

    targets = [*[thread] * 4, lambda: asyncio.run(many())]
    threads = [threading.Thread(target=target) for target in targets]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert max(most) <= 3
    assert len(most) == 80
